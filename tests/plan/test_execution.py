"""With the CPU's own kernels, a simulated step needs the memory of a real step on the CPU, to within 2 %."""

from harness.plan.cards import copy_that_reduces_each_batch
from harness.rehearsal import tiny_model

import pytest
import torch
import yaml
from conftest import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
FAMILIES = {
    "qwen2": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8},
    "llama": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8},
    "gpt2": {"n_embd": 512, "n_layer": 4, "n_head": 8, "n_positions": 1024},
}
FAMILIES["qwen2"] |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
LORA = ["--use_peft", "--activation_checkpointing", "true"]
CASES = {  # family, config, processes, flags
    "unsharded": ("qwen2", "1x3090", 1, []),
    "sharded": ("gpt2", "4gpu_full_shard", 2, []),
    "LoRA with checkpointing": ("llama", "1x3090", 1, LORA),
    "4-bit": ("llama", "1x3090", 1, [*LORA, "--load_in_4bit", "--dtype", "bfloat16"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Recipe, config and flags of every case. The models have random weights."""
    folder, runs = tmp_path_factory.mktemp("mid-size"), {}
    for family, sizes in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **sizes), dtype=torch.float32)
        model.save_pretrained(folder / family)
        tiny_model.make_tokenizer(tiny_model.FAMILIES["openai-community/gpt2*"]).save_pretrained(folder / family)
    for case, (family, config, processes, flags) in CASES.items():
        settings = yaml.safe_load((ROOT / f"accelerate_configs/{config}.yaml").read_text()) | {"num_processes": processes}
        settings["fsdp_config"] = settings.get("fsdp_config", {}) | {"fsdp_cpu_ram_efficient_loading": False}
        if processes == 1:
            del settings["fsdp_config"]
        path = folder / f"{case}.yaml"
        path.write_text(yaml.safe_dump(settings))
        runs[case] = (ROOT / "tests/plan/mid_size.py", path, ["--model_name_or_path", folder / family, *flags])
    return runs


@pytest.fixture(scope="module")
def found(simulate, runs):
    """For every case, what was found about the simulated step, and the peak of the real one; and a step with offload."""
    recipe, _, flags = runs["unsharded"]
    config = copy_that_reduces_each_batch(str(ROOT / "accelerate_configs/1x3090_offload.yaml"))
    offloaded = (recipe, config, [*flags, "--gradient_accumulation_steps", "4"], "cuda")
    *found, last = simulate([*((*run, kind) for run in runs.values() for kind in ("cpu", "real")), offloaded])
    return dict(zip(runs, zip(found[::2], found[1::2], strict=True), strict=True)) | {"offloaded": last}


@pytest.mark.parametrize("case", CASES)
def test_simulated_peak_is_that_of_a_real_step(case, found):
    simulation, real = found[case]
    simulated = max(simulation["peaks"][moment]["bytes"] for moment in ("forward", "backward", "optimizer step"))
    print(f"{case}: {simulated:,} bytes simulated, {real:,} measured")
    assert simulated == pytest.approx(real, rel=0.02)


def test_offloaded_gradients_are_added_on_the_host(found):
    """With `fsdp_reduce_each_batch: true`, those of four micro-batches cross PCIe, and the last three are added."""
    step, size = found["offloaded"]["step"]["moved"], 4 * found["offloaded"]["trained"]
    assert step["to_host"] == 4 * size and step["added_on_host"] == 3 * size
