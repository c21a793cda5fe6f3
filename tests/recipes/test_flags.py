"""Every flag for the dataset, and one of each part of the model, has an effect in every recipe, or the recipe refuses it."""

import dataclasses
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

ADAPTER, IN_4BIT = ["--use_peft", "true"], ["--use_peft", "true", "--load_in_4bit", "true"]
# A value for every flag; with other flags that it needs to have an effect.
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
    "column_map": '{"text": "instruction", "instruction": "text", "note": "system", "question": "answer", "answer": "question"}',
    "chat_template_kwargs": '{"style": "short"}',
    "text_rows": "line",
    "dataset_weights": "0.5",
    "model_revision": "v2",
    "dtype": "float16",
    "attn_implementation": "eager",
    "lora_r": ("3", ADAPTER),
    "bnb_4bit_quant_type": ("fp4", IN_4BIT),
}
SWITCHES = {
    "dataset_streaming": [],
    "split_conversations": [],
    "use_peft": [],
    "load_in_4bit": ADAPTER,
}
ARGUMENTS = ("max_steps", "gradient_accumulation_steps", "model_init_kwargs", "chat_template_kwargs")  # those that are compared
NAMES = ("dataset_name", "model_name_or_path")
# The files are JSON without images, and it is one dataset.
REFUSED_BY_ALL = ("ignore_bias_buffers", "text_rows", "dataset_weights", "max_pixels")
# The plain Trainer loads no quantized weights; texts are no conversations.
OF_CONVERSATIONS = ("split_conversations", "chat_template_kwargs")
REFUSED = {
    "gpt2_xl_wikitext": ("bnb_4bit_quant_type", *OF_CONVERSATIONS),
    "llama31_8b_lora": OF_CONVERSATIONS,
    "qwen2_fineweb_edu": OF_CONVERSATIONS,
    "qwen3_distill": ("max_tokens",),
    "qwen3_dpo": ("split_conversations",),
    "qwen3_grpo": ("max_tokens", "split_conversations"),
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
        turns = [{"role": "user", "content": words}, {"role": "assistant", "content": "Yes."}] * 2
        rows = [
            {"text": f"{words} {row}", "messages": turns, "instruction": words, "output": f"{row}", "note": words}
            | {"chosen": f"{row}", "rejected": "No.", "question": f"{words} {row}", "answer": f"{row}"}
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
        args, model = arguments["args"], arguments["model"]
        return {
            "model": model if isinstance(model, str) else sorted(name for name, _ in model.named_parameters()),
            "adapter": str(arguments.get("peft_config") or getattr(model, "peft_config", None)),
            "quantized": str(arguments.get("quantization_config")),
            "loaded": str(loaded),
            "args": {name: getattr(args, name, None) for name in ARGUMENTS},
            "run": dataclasses.replace(runs.started().run, lock=None, given=frozenset(), settings={}, data=None),
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
def test_every_flag_has_an_effect_or_is_refused(recipe, folders, arguments_of_trainer):
    recipe = ROOT / f"recipes/{recipe}.py"
    common = ["--model_name_or_path", f"{folders}/model", "--dataset_name", f"{folders}/data", "--dataset_config", "a"]
    common += ["--use_cpu", "--bf16", "false", "--max_steps", "5"]
    if recipe.stem == "qwen3_distill":
        common += ["--teacher_model_name_or_path", f"{folders}/teacher"]
    with_common = arguments_of_trainer(recipe, common)
    assert not isinstance(with_common, str), with_common
    results = {(): with_common}  # the flags that another one needs: the trainer's arguments
    effective, without_effect = [], []

    def try_flag(name, value, needed=()):
        if tuple(needed) not in results:
            results[tuple(needed)] = arguments_of_trainer(recipe, [*common, *needed])
        before = results[tuple(needed)]
        flags = [*common, *needed, f"--{name}", value]
        if name == "max_tokens":  # sets max_steps
            del flags[flags.index("--max_steps") : flags.index("--max_steps") + 2]
        after = arguments_of_trainer(recipe, flags)
        if not isinstance(after, str):
            (without_effect if after == before else effective).append(name)
        elif not any(word in after for word in (name, "load_in_4bit", "quantized")):
            without_effect.append(f"{name}: {after}")
        return after

    for name in NAMES:
        try_flag(name, str(folders / ("other_model" if "model" in name else "other_data")))
    for name, given in VALUES.items():
        value, needed = given if isinstance(given, tuple) else (given, [])
        try_flag(name, value, needed)
    for name, needed in SWITCHES.items():
        on, off = (try_flag(name, value, needed) for value in ("true", "false"))
        assert on != off or "load_in_4bit" in on
        without_effect = [flag for flag in without_effect if flag != name]  # one of the two values is the recipe's own
    assert not without_effect
    assert {*NAMES, *VALUES} - {*effective} <= {*REFUSED_BY_ALL, *REFUSED.get(recipe.stem, ())}
