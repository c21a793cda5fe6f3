"""Every flag for the data and the model acts or is refused, in every recipe: what a recipe hands to its trainer tells."""

import dataclasses
import itertools
import json
import runpy
import sys

from harness.data import DataArguments
from harness.rehearsal import tiny_model

import pytest
import transformers
import trl
from conftest import RECIPES

ADAPTER, IN_4BIT = ["--use_peft", "true"], ["--use_peft", "true", "--load_in_4bit", "true"]
# A value for every flag, and what must be asked for before the flag means anything.
VALUES = {
    "dataset_config": "b",
    "dataset_train_split": "other",
    "dataset_test_split": "other",
    "ignore_bias_buffers": "true",
    "max_tokens": "12345",
    "max_samples": "7",
    "global_batch_size": "48",
    "max_eval_samples": "3",
    "profile": "true",
    "model_revision": "v2",
    "dtype": "float16",
    "attn_implementation": "eager",
    "lora_r": ("3", ADAPTER),
    "lora_alpha": ("5", ADAPTER),
    "lora_dropout": ("0.5", ADAPTER),
    "lora_target_modules": ("v_proj", ADAPTER),
    "lora_target_parameters": ("up_proj.weight", [*ADAPTER, "--lora_dropout", "0"]),
    "lora_modules_to_save": ("norm", ADAPTER),
    "lora_task_type": ("SEQ_CLS", ADAPTER),
    "use_rslora": ("true", ADAPTER),
    "use_dora": ("true", ADAPTER),
    "load_in_8bit": ("true", ADAPTER),
    "bnb_4bit_quant_type": ("fp4", IN_4BIT),
    "bnb_4bit_quant_storage": ("float16", IN_4BIT),
}
SWITCHES = {"dataset_streaming": [], "use_peft": [], "load_in_4bit": ADAPTER, "use_bnb_nested_quant": IN_4BIT}
OTHERS = ("dataset_name", "model_name_or_path")


REFUSED = {  # besides what every recipe refuses: a plain Trainer loads no quantized weights; 8 bits and 4 exclude each other
    "gpt2_xl_wikitext": ("load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage"),
    "llama31_70b_qlora": ("load_in_8bit",),
}


class Handed(Exception):
    """What a trainer was to be made of."""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Two models and two data sets, of which one has two configs."""
    place = tmp_path_factory.mktemp("places")
    for name in ("model", "other_model"):
        tiny_model.make("Qwen/Qwen2-0.5B-Instruct", "main", place / name)
    for name, config, split in itertools.product(("data", "other_data"), "ab", ("train", "test", "other")):
        words = f"{name} {config} {split} and more than fifty characters of what there is to say, row"
        turns = [{"role": "user", "content": words}, {"role": "assistant", "content": "So."}]
        rows = [{"text": f"{words} {row}", "messages": turns, "instruction": words, "output": f"{row}"} for row in range(30)]
        (place / name).mkdir(exist_ok=True)
        (place / name / f"{config}_{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files = {key: "".join(f"\n  - {{split: {s}, path: {key}_{s}.jsonl}}" for s in ("train", "test", "other")) for key in "ab"}
        card = "".join(f"- config_name: {key}\n  data_files:{files[key]}\n" for key in "ab")
        (place / name / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    return place


@pytest.fixture
def hand_over(monkeypatch, tmp_path, capsys):
    """Runs a recipe until it makes its trainer; returns what that is made of, or the line that refuses it."""
    loaded, runs = [], itertools.count()
    real = transformers.AutoModelForCausalLM.from_pretrained

    def trainer(**parts):
        raise Handed(parts)

    def from_pretrained(*arguments, **kwargs):
        loaded.append((arguments, kwargs))
        return real(*arguments, **kwargs)

    monkeypatch.setattr(trl, "SFTTrainer", trainer)
    monkeypatch.setattr(transformers, "Trainer", trainer)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.delenv("RECIPE_LAUNCH", raising=False)

    def call(recipe, flags):
        loaded.clear()
        monkeypatch.setattr(sys, "argv", [str(recipe), "--output_dir", str(tmp_path / str(next(runs))), *flags])
        try:
            runpy.run_path(str(recipe), run_name="__main__")
        except Handed as handed:
            (parts,) = handed.args
        except SystemExit as end:
            message = capsys.readouterr().err
            assert end.code == 2 and message.count("\n") == 1, message
            return message
        args, model = parts["args"], parts["model"]
        return {
            "model": model if isinstance(model, str) else sorted(name for name, _ in model.named_parameters()),
            "adapter": str(parts.get("peft_config") or getattr(model, "peft_config", None)),
            "quantized": str(parts.get("quantization_config")),
            "loaded": str(loaded),
            "args": {
                name: getattr(args, name, None)
                for name in ("max_steps", "gradient_accumulation_steps", "profile", "model_init_kwargs")
            },
            "train": (type(parts["train_dataset"]), list(parts["train_dataset"])),
            "eval": list(parts["eval_dataset"]),
        }

    return call


def test_no_flag_is_left_out():
    fields = {field.name for kind in (DataArguments, trl.ModelConfig) for field in dataclasses.fields(kind)}
    assert fields == {*VALUES, *SWITCHES, *OTHERS}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_flag_acts_or_is_refused(recipe, places, hand_over):
    common = ["--model_name_or_path", f"{places}/model", "--dataset_name", f"{places}/data", "--dataset_config", "a"]
    common += ["--use_cpu", "--bf16", "false", "--max_steps", "5"]
    plain, acted, idle = hand_over(recipe, common), [], []
    assert not isinstance(plain, str), plain
    befores = {(): plain}

    def try_flag(name, value, context=()):
        before = befores.setdefault(tuple(context), None) or hand_over(recipe, [*common, *context])
        befores[tuple(context)] = before
        flags = [*common, *context, f"--{name}", value]
        if name == "max_tokens":  # decides the same as max_steps
            del flags[flags.index("--max_steps") : flags.index("--max_steps") + 2]
        after = hand_over(recipe, flags)
        if not isinstance(after, str):
            (idle if after == before else acted).append(name)
        elif not any(word in after for word in (name, "load_in_4bit", "quantized", "8 bit and 4 bit")):
            idle.append(f"{name}: {after}")
        return after

    for name in OTHERS:
        try_flag(name, str(places / ("other_model" if "model" in name else "other_data")))
    for name, given in VALUES.items():
        value, context = given if isinstance(given, tuple) else (given, [])
        if context and not (recipe.stem.startswith("llama31")):
            assert isinstance(hand_over(recipe, [*common, f"--{name}", value]), str), f"--{name} means nothing here"
        try_flag(name, value, context)
    for name, context in SWITCHES.items():
        one, other = (try_flag(name, value, context) for value in ("true", "false"))
        assert one != other or "load_in_4bit" in one
        idle = [flag for flag in idle if flag != name]  # one of the two is the recipe's own
    assert not idle
    assert {*OTHERS, *VALUES} - {*acted} <= {"ignore_bias_buffers", "lora_task_type", *REFUSED.get(recipe.stem, ())}
