"""The flags for the dataset, and one of each part of the model, have an effect in every recipe; it is listed which have none."""

import dataclasses
import functools
import itertools
import json
import runpy
import sys
import uuid

from harness import runs
from harness.start.arguments import ScriptArguments

import pytest
import transformers
import trl
from conftest import RECIPES, ROOT, at_night
from datasets.fingerprint import Hasher
from runs import tiny_model

ADAPTER = ["--use_peft", "true"]
NEEDED = {"lora_r": ADAPTER, "load_in_4bit": ADAPTER, "bnb_4bit_quant_type": [*ADAPTER, "--load_in_4bit", "true"]}
PAIRS = [("text", "instruction"), ("question", "answer"), ("chosen", "rejected")]
SWAPPED = {name: other for pair in PAIRS for name, other in (pair, pair[::-1])}
# A value for every flag: with it, the trainer's arguments are others than without the flag.
VALUES = {
    "dataset_config": "b",
    "dataset_train_split": "other",
    "dataset_test_split": "other",
    "ignore_bias_buffers": "true",
    "max_pixels": "250000",
    "max_tokens": "12345",
    "max_samples": "7",
    "global_batch_size": "48",
    "max_eval_samples": "3",
    "profile": "true",
    "column_map": json.dumps({"note": "system"} | SWAPPED),
    "chat_template_kwargs": '{"style": "short"}',
    "text_rows": "line",
    "dataset_weights": "0.5",
    "model_revision": "v2",
    "dtype": "float16",
    "attn_implementation": "eager",
    "lora_r": "3",
    "bnb_4bit_quant_type": "fp4",
}
SWITCHES = ("dataset_streaming", "split_conversations", "use_peft", "load_in_4bit")
NAMES = ("dataset_name", "model_name_or_path")
ARGUMENTS = ("max_steps", "gradient_accumulation_steps", "model_init_kwargs", "chat_template_kwargs")  # those that are compared
# The files are JSON without images, and it is one dataset.
WITHOUT_EFFECT = {"ignore_bias_buffers", "text_rows", "dataset_weights", "max_pixels"}
# In some recipes also these, or they are refused. `check_built_trainer` refuses 4-bit weights that a recipe does not load.
OF_RECIPES = {
    "gpt2_xl_wikitext": {"load_in_4bit", "bnb_4bit_quant_type", "split_conversations"},
    "llama31_8b_lora": {"split_conversations"},
    "qwen2_fineweb_edu": {"split_conversations"},
    "qwen3_distill": {"max_tokens", "dataset_streaming"},
    "qwen3_dpo": {"split_conversations"},
    "qwen3_grpo": {"max_tokens", "dataset_streaming", "split_conversations"},
}


class TrainerCalled(Exception):
    """The recipe makes its trainer; the argument is the keyword arguments."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The parent folder of three models and two datasets; each dataset has two configs with three splits."""
    parent = tmp_path_factory.mktemp("folders")
    for name in ("model", "other_model", "teacher"):
        tiny_model("Qwen/Qwen2-0.5B-Instruct", parent / name)
    for name, config, split in itertools.product(("data", "other_data"), "ab", ("train", "test", "other")):
        words = f"{name} {config} {split}, and more than fifty characters of the same words for every row, row"
        asked, said = {"role": "user", "content": words}, {"role": "assistant", "content": "Yes."}
        refused = said | {"content": "No."}
        rows = [
            {"text": f"{words} {row}", "messages": [asked, said] * 2, "instruction": words, "output": f"{row}", "note": words}
            | {"chosen": [asked, said], "rejected": [asked, refused], "question": f"{words} {row}", "answer": f"{row}"}
            for row in range(30)
        ]
        (parent / name).mkdir(exist_ok=True)
        (parent / name / f"{config}_{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files = {key: "".join(f"\n  - {{split: {s}, path: {key}_{s}.jsonl}}" for s in ("train", "test", "other")) for key in "ab"}
        card = "".join(f"- config_name: {key}\n  data_files:{files[key]}\n" for key in "ab")
        (parent / name / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    return parent


@pytest.fixture
def arguments_of_trainer(monkeypatch, tmp_path, capsys):
    """Runs a recipe until it makes its trainer; returns the trainer's arguments, or the error message that refuses a flag."""
    loaded, numbers = [], itertools.count()
    load_model = transformers.AutoModelForCausalLM.from_pretrained

    def trainer(self, **arguments):
        raise TrainerCalled(arguments)

    def from_pretrained(*arguments, **kwargs):
        loaded.append((arguments, kwargs))
        return load_model(*arguments, **kwargs)

    # Of a function in this process, datasets would pickle all of pytest.
    monkeypatch.setattr(Hasher, "hash", lambda *value: uuid.uuid4().hex)
    for kind in (transformers.Trainer, trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer, trl.DistillationTrainer):
        monkeypatch.setattr(kind, "__init__", trainer)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)

    def call(recipe, flags):
        loaded.clear()
        runs.set_started(None)
        monkeypatch.setattr(sys, "argv", [str(recipe), "--output_dir", str(tmp_path / str(next(numbers))), *flags])
        try:
            runpy.run_path(str(recipe), run_name="__main__")
        except TrainerCalled as called:
            (arguments,) = called.args
        except SystemExit as end:
            message = capsys.readouterr().err
            assert end.code == 2 and message.startswith("error: ") and message.count("\n") == 1, message
            return message
        args, model, run = arguments["args"], arguments["model"], runs.started().run
        return {
            "model": model if isinstance(model, str) else sorted(name for name, _ in model.named_parameters()),
            "adapter": str(arguments.get("peft_config") or getattr(model, "peft_config", None)),
            "quantized": str(arguments.get("quantization_config")),
            "loaded": str(loaded),
            "args": {name: getattr(args, name, None) for name in ARGUMENTS},
            "run": dataclasses.replace(run, lock=None, given=frozenset(), values=None, data=None),
            "prompt": (runs.started().uncut.prompt, run.data.template_arguments),
            "train": (type(arguments["train_dataset"]), list(arguments["train_dataset"])),
            "eval": list(arguments["eval_dataset"]),
        }

    yield call
    runs.set_started(None)


def test_all_flags_are_listed():
    assert {field.name for field in dataclasses.fields(ScriptArguments) if field.init} <= {*VALUES, *SWITCHES, *NAMES}


BY_DAY = "llama31_70b_qlora"
OF_OTHER_MODELS = ("qwen3_30b_a3b_lora", "qwen35_4b_lora", "qwen35_4b_images")  # as qwen3_8b_qlora, for models with such layers
OTHERS = [path.stem for path in RECIPES if path.stem not in (BY_DAY, *OF_OTHER_MODELS)]


@pytest.mark.parametrize("recipe", [BY_DAY, *at_night(*OTHERS)])
def test_every_flag_has_an_effect(recipe, folders, arguments_of_trainer):
    common = ["--model_name_or_path", f"{folders}/model", "--dataset_name", f"{folders}/data", "--dataset_config", "a"]
    common += ["--use_cpu", "--bf16", "false"]
    if recipe == "qwen3_distill":
        common += ["--teacher_model_name_or_path", f"{folders}/teacher"]

    @functools.cache
    def call(*flags):
        steps = [] if "--max_tokens" in flags else ["--max_steps", "5"]
        return arguments_of_trainer(ROOT / f"recipes/{recipe}.py", [*common, *steps, *flags])

    pairs = {name: ([f"--{name}", value], []) for name, value in VALUES.items()}
    pairs |= {name: ([f"--{name}", "true"], [f"--{name}", "false"]) for name in SWITCHES}
    pairs |= {name: ([f"--{name}", f"{folders}/other_{name.split('_')[0].replace('set', '')}"], []) for name in NAMES}
    without_effect = set()
    for name, values in pairs.items():
        one, other = (call(*NEEDED.get(name, []), *flags) for flags in values)
        assert not isinstance(other, str), other
        if one == other or isinstance(one, str):
            assert one == other or f"error: --{name}" in one, one
            without_effect.add(name)
    assert without_effect == WITHOUT_EFFECT | OF_RECIPES.get(recipe, set())
