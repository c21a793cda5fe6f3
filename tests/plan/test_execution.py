"""What is simulated, with the CPU's own kernels, is what runs on the CPU: peaks of real allocations, at most 2 % apart."""

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
CASES = {
    "plain": ("qwen2", "1x3090", 1, []),
    "sharded": ("gpt2", "4gpu_full_shard", 2, []),
    "LoRA with checkpointing": ("llama", "1x3090", 1, LORA),
    "4-bit": ("llama", "1x3090", 1, [*LORA, "--load_in_4bit", "--dtype", "bfloat16"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Recipe, config and flags of every case; the models have random weights."""
    folder, runs = tmp_path_factory.mktemp("mid-size"), {}
    for family, sizes in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **sizes), dtype=torch.float32)
        model.save_pretrained(folder / family)
        tiny_model.make_tokenizer(tiny_model.FAMILIES["openai-community/gpt2*"]).save_pretrained(folder / family)
    for case, (family, config, processes, flags) in CASES.items():
        settings = yaml.safe_load((ROOT / f"accelerate_configs/{config}.yaml").read_text()) | {"num_processes": processes}
        settings["fsdp_config"] = settings.get("fsdp_config", {}) | {"fsdp_cpu_ram_efficient_loading": False}
        settings = settings if processes > 1 else {key: value for key, value in settings.items() if key != "fsdp_config"}
        path = folder / f"{case}.yaml"
        path.write_text(yaml.safe_dump(settings))
        runs[case] = (ROOT / "tests/plan/mid_size.py", path, ["--model_name_or_path", folder / family, *flags])
    return runs


@pytest.fixture(scope="module")
def peaks(drive, runs):
    """For every case the peak of the simulated step, and of the real one."""
    found = drive([(*run, how) for run in runs.values() for how in ("cpu", "real")])
    forecasts = [
        max(found["peaks"][moment]["bytes"] for moment in ("forward", "backward", "optimizer step")) for found in found[::2]
    ]
    return dict(zip(runs, zip(forecasts, found[1::2], strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_peak_is_that_of_a_real_step(case, peaks):
    forecast, measured = peaks[case]
    print(f"{case}: {forecast / 1e6:.1f} MB simulated, {measured / 1e6:.1f} MB measured")
    assert forecast == pytest.approx(measured, rel=0.02)
