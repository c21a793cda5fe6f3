"""With the CPU's own kernels, a simulated step needs the memory of a real step on the CPU, to within 2 %."""

from harness.rehearsal import tiny

import pytest
import torch
import yaml
from conftest import ROOT, slow
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = slow  # a minute
LAYERS = 2
SIZES = {"vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": LAYERS, "num_attention_heads": 8}
FAMILIES = {
    "qwen2": LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": LLAMA,
    "gpt2": {"n_embd": 512, "n_layer": LAYERS, "n_head": 8, "n_positions": 1024},
}
CHECKPOINTED = "LoRA with checkpointing"
LORA = ["--use_peft", "--activation_checkpointing", "true"]
CASES = {  # family, config, flags
    "unsharded": ("qwen2", "1x3090", []),
    "sharded": ("gpt2", "4gpu_full_shard", []),
    CHECKPOINTED: ("llama", "1x3090", LORA),
    "8-bit Adam": ("qwen2", "1x3090", ["--optim", "adamw_8bit"]),
    "4-bit": ("llama", "1x3090", [*LORA, "--load_in_4bit", "--dtype", "bfloat16"]),
}


@pytest.fixture(scope="module")
def found(simulate, tmp_path_factory):
    """The simulated step and the peak of the real one, with random weights; and a step with offloaded activations."""
    folder, runs = tmp_path_factory.mktemp("mid-size"), {}
    for family, sizes in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **sizes), dtype=torch.float32)
        model.save_pretrained(folder / family)
        tiny.make_tokenizer(tiny.FAMILIES["openai-community/gpt2*"]).save_pretrained(folder / family)
    for case, (family, config, flags) in CASES.items():
        settings, path = yaml.safe_load((ROOT / f"accelerate_configs/{config}.yaml").read_text()), folder / f"{case}.yaml"
        if "fsdp_config" in settings:  # on two processes
            settings |= {"num_processes": 2, "fsdp_config": settings["fsdp_config"] | {"fsdp_cpu_ram_efficient_loading": False}}
        path.write_text(yaml.safe_dump(settings))
        runs[case] = (ROOT / "tests/planner/mid_size.py", path, ["--model_name_or_path", folder / family, *flags])
    recipe, config, flags = runs[CHECKPOINTED]
    activations = (recipe, config, [*flags, "--activation_checkpointing_kwargs", '{"offload": true}'], "cpu")
    both = [(*run, kind) for run in runs.values() for kind in ("cpu", "real")]
    *found, activations = simulate([*both, activations])
    cases = dict(zip(runs, zip(found[::2], found[1::2], strict=True), strict=True))
    return cases | {"offloaded activations": activations}


@pytest.mark.parametrize("case", CASES)
def test_simulated_peak_is_that_of_a_real_step(case, found):
    simulation, real = found[case]
    simulated = max(simulation["peaks"][moment]["bytes"] for moment in ("forward", "backward", "optimizer step"))
    print(f"{case}: {simulated:,} bytes simulated, {real:,} measured")
    assert simulated == pytest.approx(real, rel=0.02)


def test_offloaded_activations(found):
    """The inputs of all layers are in host memory after the forward pass; they are copied there and back."""
    (before, _), offloaded = found[CHECKPOINTED], found["offloaded activations"]
    inputs = LAYERS * before["tokens"] * 512 * 4  # bytes in float32
    assert offloaded["step"]["moved"] == {"activations": 2 * inputs * before["accumulation"]}
    assert offloaded["host_peaks"]["forward"]["by_holder"]["activations"] == inputs
    saved = {moment: before["peaks"][moment]["bytes"] - offloaded["peaks"][moment]["bytes"] for moment in ("forward", "backward")}
    assert saved["backward"] >= (1 - 1 / LAYERS) * inputs and saved["forward"] >= 0.5 * inputs, saved
