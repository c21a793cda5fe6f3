"""Every pair of the README's table trains and leaves a model that loads plainly and scores as logged."""

import math

import pytest
import torch
from conftest import losses, read, readme_pairs
from safetensors.torch import load_file
from trained import held_out_loss, reload
from transformers import AutoConfig, AutoTokenizer

RECIPE = "qwen2_fineweb_edu"
BUILT = {}


@pytest.fixture
def built(build_trainer):
    """A recipe's trainer, for its held-out data and its tokenizer; built once."""

    def call(recipe):
        if recipe not in BUILT:
            BUILT[recipe] = build_trainer(recipe, "--load_in_4bit", "false")
        return BUILT[recipe]

    return call


@pytest.mark.parametrize(("recipe", "config", "processes", "sharded"), readme_pairs())
def test_pair_trains_and_leaves_a_model(rehearse, workplace, built, two_by_two, recipe, config, processes, sharded):
    """Every pair of the README's table with its processes; eight of them as two replicas of two shards."""
    if processes == 8:
        config, processes = two_by_two, 4
    run = rehearse(recipe, config)
    results = read(run)
    assert (results["fsdp_enabled"], results["world_size"], results["num_nodes"]) == (sharded, processes, 1)
    assert results["config"] == getattr(config, "stem", config) and results["tiny"] and results["resumed_from_step"] == 0
    logged = [loss for loss, _ in losses(run).values()]
    assert logged[0] - results["eval_loss"] > (0.3 if results["load_in_4bit"] else 0.5)
    assert results["final_loss"] == logged[-1]
    assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert results["model_params_b"] >= results["trainable_params_b"] > 0
    assert (results["model_params_b"] > results["trainable_params_b"]) == results["use_peft"]
    assert results["peak_host_gb"] > 0.3 * processes
    on_a_gpu = ("peak_gpu_gb", "peak_gpu_reserved_gb", "gpu_utilization", "gpu_memory_gb")
    assert [results[name] for name in on_a_gpu] == [0, 0, [], []]
    assert results["versions"]["torch"] == torch.__version__

    trainer = built(recipe)
    assert held_out_loss(reload(run, workplace), trainer.eval_dataset) == pytest.approx(results["eval_loss"], rel=0.01)
    if not results["use_peft"]:
        saved, original = read(run, "config.json"), AutoConfig.from_pretrained(trainer.model.config.name_or_path)
        assert saved["dtype"] == str(original.dtype).removeprefix("torch.") and saved["use_cache"]
    assert AutoTokenizer.from_pretrained(run).chat_template == trainer.processing_class.chat_template
    assert (run / "loss.png").stat().st_size > 5000
    assert (run / "samples.txt").read_text().count("> ") >= 3
    # Packed rows are nearly full (short conversations leave gaps); chat and code train on a part of them.
    rows = results["global_step"] * results["global_batch_size"]
    assert results["global_batch_size"] == processes * 2 * 2 and 0.7 * 128 * rows < results["tokens"] <= 128 * rows
    assert (0.9 if recipe in ("qwen2_fineweb_edu", "gpt2_xl_wikitext") else 0.1) < results["loss_tokens"] / results["tokens"] <= 1
    assert results["tokens_per_second"] / results["loss_tokens_per_second"] == pytest.approx(
        results["tokens"] / results["loss_tokens"], rel=0.01
    )


@pytest.mark.parametrize("quantized", [[], ["--load_in_4bit"]], ids=["lora", "qlora"])
def test_adapters(rehearse, workplace, built, quantized):
    """LoRA, and LoRA on 4-bit weights of the real bitsandbytes, sharded with offload; the adapter scores as logged."""
    flags = ["--use_peft", *quantized, "--max_steps", "10"]
    run = rehearse(RECIPE, "1x3090_offload", *flags)
    results = read(run)
    assert results["fsdp_enabled"] and results["trainable_params_b"] < results["model_params_b"]
    assert not (run / "model.safetensors").exists()
    assert all(".lora_" in name for name in load_file(run / "adapter_model.safetensors"))
    trainer = built(RECIPE)
    assert held_out_loss(reload(run, workplace), trainer.eval_dataset) == pytest.approx(results["eval_loss"], rel=0.01)
