"""Sharding changes where numbers lie, not what they are: the same losses, the same bytes, one gather a step."""

import json

from harness.nodes import signals
from harness.run import four_bit, session

import pytest
import torch
import yaml
from conftest import ROOT, losses, read
from transformers import AutoConfig, AutoTokenizer

RECIPE = "qwen2_fineweb_edu"


@pytest.fixture
def without_dropout(tmp_path, rehearse, workplace):
    """The stand-in of GPT-2 with its dropout off: ranks draw different random numbers than one process does."""
    rehearse("gpt2_xl_wikitext", "3xt4_shard_grad_op")
    source = next((workplace / "outputs/tiny/.stand-ins").glob("openai-community--gpt2-xl-*"))
    folder = tmp_path / "gpt2-without-dropout"
    config = AutoConfig.from_pretrained(source, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


SHORT = ["--max_steps", "5", "--logging_steps", "1", "--eval_strategy", "no"]
SHORT += ["--learning_rate", "3e-3", "--bf16", "false", "--fp16", "false"]


@pytest.mark.parametrize(
    ("recipe", "config", "processes", "flags"),
    [
        (RECIPE, "4gpu_full_shard", 4, ["--dataset_streaming", "false"]),
        ("llama31_8b_lora", "hybrid", 4, ["--lora_dropout", "0", "--dtype", "float32"]),
        ("gpt2_xl_wikitext", "3xt4_shard_grad_op", 3, []),
        ("qwen2_chat", "4gpu_shard_grad_op", 4, []),
        ("llama31_70b_qlora", "2x3090_qlora", 2, ["--lora_dropout", "0", "--dataset_streaming", "false"]),
    ],
)
def test_sharded_equals_unsharded(rehearse, build_trainer, without_dropout, two_by_two, recipe, config, processes, flags):
    """Several processes, sharded, and one, unsharded: the same global batches in float32 give the same losses."""
    if recipe == "gpt2_xl_wikitext":
        flags = [*flags, "--model_name_or_path", str(without_dropout)]
    config = two_by_two if config == "hybrid" else config
    flags = [*flags, "--global_batch_size", str(processes)]
    run = rehearse(recipe, config, *SHORT, *flags, "--per_device_train_batch_size", "1")
    assert read(run)["world_size"] == processes and read(run)["fsdp_enabled"]
    one = build_trainer(recipe, *SHORT, *flags, "--per_device_train_batch_size", str(processes), "--save_strategy", "no")
    one.train()
    unsharded = {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in one.state.log_history if "loss" in entry}
    assert len(unsharded) == 5 and unsharded.keys() == losses(run).keys()
    for step, (loss, grad_norm) in losses(run).items():
        in_4bit = "70b" in recipe  # computes in bf16
        assert loss == pytest.approx(unsharded[step][0], abs=1e-2 if in_4bit else 1e-4)
        assert grad_norm == pytest.approx(unsharded[step][1], rel=1e-1 if in_4bit else 1e-3)


def test_loss_is_float32_under_bf16(rehearse):
    """With the harness the loss is what float32 makes of the forward pass; without it, it is rounded to bf16."""
    script = ROOT / "tests/run/measure_loss.py"
    run = rehearse(script, "1x3090_offload", "--max_steps", "3", "--save_strategy", "no", "--eval_strategy", "no")
    with_harness, without = read(run, "differences.json")
    assert len(with_harness) == len(without) == 6
    assert max(with_harness) < 1e-4 and 5e-4 <= max(without) < 1


def test_a_run_that_is_not_what_its_config_says_stops(build_trainer, monkeypatch):
    """FSDP asked for and not started: `python recipe.py` where accelerate should have been."""
    trainer = build_trainer(RECIPE, "--max_steps", "1")
    launched = {"recipe": RECIPE, "config": str(ROOT / "accelerate_configs/4gpu_full_shard.yaml"), "processes": 4, "tiny": True}
    monkeypatch.setenv("RECIPE_LAUNCH", json.dumps(launched))
    monkeypatch.setattr(signals, "handle", lambda handler: None)
    with pytest.raises(RuntimeError, match="the config says FSDP on 4 processes, but this run is unsharded on 1"):
        session.train(trainer)
    assert trainer.state.global_step == 0


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
        four_bit.BytesCheck(model)
        if flips:
            model.layer.linear.weight.data.view(torch.uint8)[100] ^= 1
            with pytest.raises(RuntimeError, match="4-bit weights were changed"):
                model(torch.ones(1, 64))
        else:
            assert model(torch.ones(1, 64)).shape == (1, 64)


@pytest.fixture
def count(rehearse, two_by_two, tmp_path):
    """Trains two steps of four micro-batches on two replicas of two shards; returns the collectives and the run."""

    def call(name: str, **fsdp):
        settings = yaml.safe_load(two_by_two.read_text())
        settings["fsdp_config"] |= fsdp
        config = tmp_path / f"{name}.yaml"
        config.write_text(yaml.safe_dump(settings))
        flags = ["--max_steps", "2", "--gradient_accumulation_steps", "4", "--logging_steps", "1"]
        flags += ["--save_strategy", "no", "--eval_strategy", "no"]
        run = rehearse(ROOT / "tests/run/count_collectives.py", config, *flags)
        return read(run, "collectives.json"), run

    return call


def test_one_gather_or_whole_gradients_a_step(count):
    """However many micro-batches. In a hybrid config only gradients leave the node, once."""
    sharded, sharded_run = count("gradients stay sharded")
    usual, usual_run = count("usual", fsdp_reduce_each_batch=False)
    once, once_run = count(
        "once", fsdp_reduce_each_batch=False, fsdp_reshard_after_forward=False, fsdp_reshard_after_backward=False
    )
    assert losses(once_run) == losses(usual_run)
    for step, (loss, grad_norm) in losses(sharded_run).items():  # added up in another order
        assert (loss, grad_norm) == pytest.approx(losses(usual_run)[step], rel=1e-3)
    model = once["parameters"]

    def total(step, kind):
        return sum(size for name, _, size in step if name == kind)

    units = 3  # two layers, and what is around them
    for step in once["steps"]:
        gathers = [size for name, _, size in step if name == "all_gather_single"]
        assert len(gathers) == units and sum(gathers) == pytest.approx(model, rel=0.01)
    for step in usual["steps"] + sharded["steps"]:
        # Each of four micro-batches gathers every layer for the forward and again for the backward pass.
        assert total(step, "all_gather_single") > 4 * model
    for run, reductions in ((sharded, 4), (usual, 1), (once, 1)):
        for step in run["steps"]:
            assert total(step, "reduce_scatter_single") == pytest.approx(reductions * model, rel=0.01)
            for name, ranks, _ in step:
                if name != "all_reduce":
                    assert ranks == [0, 1], "weights of rank 0 are gathered inside its node"
            crossing = [size for name, ranks, size in step if name == "all_reduce" and ranks == [0, 2]]
            assert sum(crossing) == pytest.approx(model / 2, rel=0.01)  # the half of the gradients that rank 0 keeps
