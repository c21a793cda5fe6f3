"""Sharding changes where numbers lie, not what they are: the same losses, the same bytes, one gather a step."""

import json
import subprocess
import sys

from harness.run import sharding

import pytest
import torch
import yaml
from conftest import ROOT, losses, read
from transformers import AutoConfig, AutoTokenizer

RECIPE = "qwen2_fineweb_edu"


@pytest.fixture
def without_dropout(tmp_path, rehearse, workplace):
    """The stand-in of GPT-2 with its dropout off: ranks draw different random numbers than one process does."""
    rehearse("gpt2_xl_wikitext", "3xt4_full_shard")
    source = next((workplace / "outputs/tiny/.stand-ins").glob("openai-community--gpt2-xl-*"))
    folder = tmp_path / "gpt2-without-dropout"
    config = AutoConfig.from_pretrained(source, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


SHORT = ["--max_steps", "5", "--logging_steps", "1", "--gradient_accumulation_steps", "1", "--eval_strategy", "no"]


@pytest.mark.parametrize(
    ("recipe", "config", "processes", "flags"),
    [
        ("llama31_8b_lora", "hybrid", 4, ["--lora_dropout", "0", "--dtype", "float32"]),
        ("gpt2_xl_wikitext", "3xt4_full_shard", 3, []),
        ("qwen2_chat", "4gpu_shard_grad_op", 4, []),
        ("llama31_70b_qlora", "2x3090_qlora", 2, ["--lora_dropout", "0"]),
    ],
)
def test_sharded_equals_unsharded(
    rehearse, build_trainer, without_dropout, two_by_two, recipe, config, processes, flags, tmp_path
):
    """Several processes, sharded, and one, unsharded: the same global batches in float32 give the same losses."""
    if recipe == "gpt2_xl_wikitext":
        flags = [*flags, "--model_name_or_path", str(without_dropout)]
    config = two_by_two if config == "hybrid" else config
    run = rehearse(recipe, config, *SHORT, *flags, "--per_device_train_batch_size", "1", fresh=True)
    assert read(run)["world_size"] == processes and read(run)["fsdp_enabled"]
    one = build_trainer(recipe, *SHORT, *flags, "--per_device_train_batch_size", str(processes), "--save_strategy", "no")
    one.train()
    unsharded = {entry["step"]: entry["loss"] for entry in one.state.log_history if "loss" in entry}
    assert len(unsharded) == 5
    for step, (loss, _) in losses(run).items():
        assert loss == pytest.approx(unsharded[step], abs=1e-3 if "70b" not in recipe else 1e-2)  # 4-bit computes in bf16


def test_sharded_equals_unsharded_as_launched(rehearse):
    """Four processes and one, the same global batches, float32."""
    flags = ["--bf16", "false", "--dataset_streaming", "false", "--max_steps", "8", "--logging_steps", "1"]
    flags += ["--gradient_accumulation_steps", "1", "--eval_strategy", "no", "--learning_rate", "3e-3"]
    four = losses(rehearse(RECIPE, "4gpu_full_shard", *flags, "--per_device_train_batch_size", "1"))
    one = losses(rehearse(RECIPE, "1x3090", *flags, "--per_device_train_batch_size", "4"))
    assert len(one) == 8
    for step, (loss, grad_norm) in one.items():
        assert four[step][0] == pytest.approx(loss, abs=1e-3)
        assert four[step][1] == pytest.approx(grad_norm, rel=1e-2)


@pytest.mark.parametrize(("harness_precision", "low", "high"), [("on", 0, 1e-4), ("off", 5e-4, 1)])
def test_loss_is_float32_under_bf16(rehearse, environment, workplace, tmp_path, harness_precision, low, high):
    """With the harness the loss is what float32 makes of the forward pass; without it, it is rounded to bf16."""
    rehearse(RECIPE, "1x3090_offload")  # makes the stand-ins
    config = ROOT / "accelerate_configs/1x3090_offload.yaml"
    launched = {"recipe": RECIPE, "config": str(config), "processes": 1, "tiny": True, "on_cpu": True}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    command += [ROOT / "tests/run/measure_loss.py", ROOT / f"recipes/{RECIPE}.py", tmp_path / "differences.json"]
    command += ["--output_dir", tmp_path / "run", "--max_steps", "3", "--save_strategy", "no", "--eval_strategy", "no"]
    variables = {"RECIPE_LAUNCH": json.dumps(launched), "HARNESS_PRECISION": harness_precision}
    variables["PYTHONPATH"] = str(ROOT / "recipes")
    subprocess.run(command, check=True, cwd=workplace, env=environment | variables, capture_output=True)
    differences = json.loads((tmp_path / "differences.json").read_text())
    assert len(differences) == 6 and low <= max(differences) < high


def test_a_run_that_is_not_what_its_config_says_stops(rehearse, environment, workplace, tmp_path):
    """FSDP asked for and not started: `python recipe.py` where accelerate should have been."""
    rehearse(RECIPE, "1x3090")
    config = str(ROOT / "accelerate_configs/4gpu_full_shard.yaml")
    launched = json.dumps({"recipe": RECIPE, "config": config, "processes": 4, "tiny": True})
    variables = {"RECIPE_LAUNCH": launched, "PYTHONPATH": str(ROOT / "recipes")}
    command = [sys.executable, ROOT / f"recipes/{RECIPE}.py", "--use_cpu", "--output_dir", tmp_path / "run"]
    process = subprocess.run(command, cwd=workplace, env=environment | variables, capture_output=True, text=True)
    assert process.returncode != 0
    assert "the config says FSDP on 4 processes, but this run is unsharded on 1" in process.stderr


def test_changed_4bit_weights_stop_the_run():
    """One flipped bit between loading and the first forward pass."""
    from bitsandbytes.nn import Linear4bit

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = Linear4bit(64, 64, compute_dtype=torch.float32, quant_storage=torch.float32)

        def forward(self, x):
            return self.linear(x)

    class Model(torch.nn.Module):
        _no_split_modules = ("Layer",)

        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            return self.layer(x)

    for flips in (False, True):
        model = Model().to("cpu")
        sharding.BytesCheck(model)
        if flips:
            model.layer.linear.weight.data.view(torch.uint8)[100] ^= 1
            with pytest.raises(RuntimeError, match="4-bit weights were changed"):
                model(torch.ones(1, 64))
        else:
            assert model(torch.ones(1, 64)).shape == (1, 64)


@pytest.fixture
def count(rehearse, environment, workplace, two_by_two, tmp_path):
    """Trains two steps of four micro-batches on two replicas of two shards; returns the collectives and the run."""
    rehearse(RECIPE, "1x3090")  # makes the stand-ins

    def call(name: str, **fsdp):
        settings = yaml.safe_load(two_by_two.read_text())
        settings["fsdp_config"] |= fsdp
        config, out, run = tmp_path / f"{name}.yaml", tmp_path / f"{name}.json", tmp_path / name
        config.write_text(yaml.safe_dump(settings))
        run.mkdir()
        (run / "run.json").write_text(json.dumps({"recipe": RECIPE, "config": name, "model": "", "dataset": "", "tiny": True}))
        launched = {"recipe": RECIPE, "config": str(config), "processes": 4, "tiny": True, "on_cpu": True}
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--num_machines", "1"]
        command += ["--main_process_port", "0", ROOT / "tests/run/count_collectives.py", ROOT / f"recipes/{RECIPE}.py", out]
        command += ["--output_dir", run, "--max_steps", "2", "--gradient_accumulation_steps", "4", "--logging_steps", "1"]
        command += ["--save_strategy", "no", "--eval_strategy", "no"]
        variables = {"RECIPE_LAUNCH": json.dumps(launched), "PYTHONPATH": str(ROOT / "recipes")}
        process = subprocess.run(command, cwd=workplace, env=environment | variables, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return json.loads(out.read_text()), run

    return call


def test_one_gather_and_one_reduction_a_step(count):
    """However many micro-batches; the gradients are the same. In a hybrid config only gradients leave the node."""
    usual, usual_run = count("usual")
    once, once_run = count("once", fsdp_reshard_after_forward=False, fsdp_reshard_after_backward=False)
    assert losses(once_run) == losses(usual_run)
    model = once["parameters"]

    def total(step, kind):
        return sum(size for name, _, size in step if name == kind)

    units = 3  # two layers, and what is around them
    for step in once["steps"]:
        gathers = [size for name, _, size in step if name == "all_gather_single"]
        assert len(gathers) == units and sum(gathers) == pytest.approx(model, rel=0.01)
    for step in usual["steps"]:
        # Each of four micro-batches gathers every layer for the forward and again for the backward pass.
        assert total(step, "all_gather_single") > 4 * model
    for step in once["steps"] + usual["steps"]:
        assert total(step, "reduce_scatter_single") == pytest.approx(model, rel=0.01)
        for name, ranks, _ in step:
            if name != "all_reduce":
                assert ranks == [0, 1], "weights of rank 0 are gathered inside its node"
        crossing = [size for name, ranks, size in step if name == "all_reduce" and ranks == [0, 2]]
        assert sum(crossing) == pytest.approx(model / 2, rel=0.01)  # the half of the gradients that rank 0 keeps
