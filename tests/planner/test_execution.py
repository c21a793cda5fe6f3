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
FAMILIES = {
    "qwen2": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": LAYERS, "num_attention_heads": 8},
    "llama": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": LAYERS, "num_attention_heads": 8},
    "gpt2": {"n_embd": 512, "n_layer": LAYERS, "n_head": 8, "n_positions": 1024},
}
FAMILIES["qwen2"] |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
CHECKPOINTED = "LoRA with checkpointing"
LORA = ["--use_peft", "--activation_checkpointing", "true"]
EIGHT_BIT = "8-bit Adam"
CASES = {  # family, config, processes, flags
    "unsharded": ("qwen2", "1x3090", 1, []),
    "sharded": ("gpt2", "4gpu_full_shard", 2, []),
    CHECKPOINTED: ("llama", "1x3090", 1, LORA),
    EIGHT_BIT: ("qwen2", "1x3090", 1, ["--optim", "adamw_8bit"]),
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
        tiny.make_tokenizer(tiny.FAMILIES["openai-community/gpt2*"]).save_pretrained(folder / family)
    for case, (family, config, processes, flags) in CASES.items():
        settings = yaml.safe_load((ROOT / f"accelerate_configs/{config}.yaml").read_text()) | {"num_processes": processes}
        settings["fsdp_config"] = settings.get("fsdp_config", {}) | {"fsdp_cpu_ram_efficient_loading": False}
        if processes == 1:
            del settings["fsdp_config"]
        path = folder / f"{case}.yaml"
        path.write_text(yaml.safe_dump(settings))
        runs[case] = (ROOT / "tests/planner/mid_size.py", path, ["--model_name_or_path", folder / family, *flags])
    return runs


@pytest.fixture(scope="module")
def found(simulate, runs, tmp_path_factory):
    """For every case, the simulated step and the peak of the real one; and steps with offloaded weights and activations."""
    recipe, _, flags = runs["unsharded"]
    keys = yaml.safe_load((ROOT / "accelerate_configs/1x3090_offload.yaml").read_text("utf-8"))
    keys["fsdp_config"]["fsdp_reduce_each_batch"] = True
    config = tmp_path_factory.mktemp("config") / "reduces_each_batch.yaml"
    config.write_text(yaml.safe_dump(keys), "utf-8")
    weights = (recipe, str(config), [*flags, "--gradient_accumulation_steps", "4"], "cuda")
    recipe, config, flags = runs[CHECKPOINTED]
    activations = (recipe, config, [*flags, "--activation_checkpointing_kwargs", '{"offload": true}'], "cpu")
    both = [(*run, kind) for run in runs.values() for kind in ("cpu", "real")]
    *found, weights, activations = simulate([*both, weights, activations])
    cases = dict(zip(runs, zip(found[::2], found[1::2], strict=True), strict=True))
    return cases | {"offloaded weights": weights, "offloaded activations": activations}


@pytest.mark.parametrize("case", CASES)
def test_simulated_peak_is_that_of_a_real_step(case, found):
    simulation, real = found[case]
    simulated = max(simulation["peaks"][moment]["bytes"] for moment in ("forward", "backward", "optimizer step"))
    print(f"{case}: {simulated:,} bytes simulated, {real:,} measured")
    assert simulated == pytest.approx(real, rel=0.02)


def test_offloaded_gradients_are_added_on_the_host(found):
    """With `fsdp_reduce_each_batch: true`, those of four micro-batches cross PCIe, and the last three are added."""
    offloaded = found["offloaded weights"]
    step, size = offloaded["step"]["moved"], 4 * offloaded["trained"]
    assert step["to_host"] == 4 * size and step["added_on_host"] == 3 * size


def test_offloaded_activations(found):
    """The inputs of all layers are in host memory after the forward pass; they are copied there and back."""
    (before, _), offloaded = found[CHECKPOINTED], found["offloaded activations"]
    inputs = LAYERS * before["tokens"] * 512 * 4  # bytes in float32
    assert offloaded["step"]["moved"] == {"activations": 2 * inputs * before["accumulation"]}
    assert offloaded["host_peaks"]["forward"]["by_holder"]["activations"] == inputs
    saved = {moment: before["peaks"][moment]["bytes"] - offloaded["peaks"][moment]["bytes"] for moment in ("forward", "backward")}
    assert saved["backward"] >= (1 - 1 / LAYERS) * inputs and saved["forward"] >= 0.5 * inputs, saved


def test_8bit_states(found):
    """One byte for each of two moments of a value, and a scale for 256; 4 bytes for those of the embeddings and small weights."""
    plain, eight_bit = (found[case][0] for case in ("unsharded", EIGHT_BIT))
    embeddings = 8192 * 512
    others = plain["parameters"] - embeddings
    assert plain["optimizer"] == 8 * plain["parameters"]
    assert eight_bit["optimizer"] == pytest.approx(8 * embeddings + (2 + 8 / 256) * others, rel=0.01)
