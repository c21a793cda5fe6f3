"""4-bit weights: the same bytes that transformers would write, made once."""

import re

from harness.model import quantized
from planner.ledger import Ledger
from planner.quantized import quantize, quantized_bytes

import pytest
import torch
import trl
from runs import read, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def model_args(tmp_path):
    """The arguments for a Llama of two layers, in tmp_path/source, that is to be quantized."""
    model_args = trl.ModelConfig(
        "meta-llama/Llama-3.1-70B",
        load_in_4bit=True,
        use_bnb_nested_quant=True,
        bnb_4bit_quant_storage="float32",
        dtype="bfloat16",
    )
    tiny_model(model_args.model_name_or_path, tmp_path / "source")
    model_args.model_name_or_path = str(tmp_path / "source")
    return model_args


def test_quantized_weights_equal_those_of_transformers(model_args, tmp_path):
    """Every weight has the same bytes, although the whole model is never in memory."""
    quantized.quantize_files(model_args, tmp_path / "ours")
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "source",
        device_map={"": "cpu"},
        dtype="bfloat16",
        quantization_config=trl.get_quantization_config(model_args),
    ).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        # As bytes: packed weights can look like NaN, which is equal to nothing.
        assert torch.equal(*(weight.reshape(-1).view(torch.uint8) for weight in (ours[name], tensor))), name
    configs = [AutoConfig.from_pretrained(tmp_path / name).quantization_config for name in ("ours", "theirs")]
    assert configs[0] == configs[1]


def test_planned_size_is_that_of_the_written_weights(model_args, tmp_path):
    """Packed weights, their scales, embedding, head and norms. Not counted: tables of 16 and 256 numbers, headers."""
    quantized.quantize_files(model_args, tmp_path / "ours")
    written = load_file(tmp_path / "ours/model.safetensors")
    counted = {name: tensor.nbytes for name, tensor in written.items() if "quant_map" not in name and "quant_state" not in name}
    planned = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "source"), dtype=torch.bfloat16)
    quantize(planned.requires_grad_(False), trl.get_quantization_config(model_args), Ledger())
    assert quantized_bytes(planned) == sum(counted.values())
    assert any("absmax" in name for name in counted) and any("embed_tokens" in name for name in counted)


def test_interrupted_quantization_continues_with_the_next_file(model_args, tmp_path):
    ours, sharded = tmp_path / "ours", tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(tmp_path / "source").save_pretrained(sharded, max_shard_size="400KB")
    AutoTokenizer.from_pretrained(tmp_path / "source").save_pretrained(sharded)
    model_args.model_name_or_path = str(sharded)
    quantized.quantize_files(model_args, ours)
    first, *_, second = sorted(ours.glob("*.safetensors"))
    written, content = first.stat().st_mtime_ns, second.read_bytes()
    second.with_name(f"{second.name}.draft").write_bytes(content[:100])  # what remains after a kill
    second.unlink()
    quantized.quantize_files(model_args, ours)
    assert first.stat().st_mtime_ns == written and second.read_bytes() == content
    assert not list(ours.glob("*.draft"))
    AutoModelForCausalLM.from_pretrained(ours, device_map={"": "cpu"})


def test_model_is_quantized_once(fork_launch, rehearse, workdir):
    """The adapter that is trained on the 4-bit weights names the model that was quantized."""
    run = rehearse("llama31_70b_qlora", "2x3090_qlora")
    assert "/.made/" in read(run, "adapter_config.json")["base_model_name_or_path"]
    again = fork_launch("--prepare", "--tiny", "llama31_70b_qlora")
    assert again.returncode == 0 and re.search("The 4-bit weights of .*meta-llama--Llama-3.1-70B.* are in", again.stdout)
    assert "Quantizing" not in again.stdout
    folder = next((workdir / "outputs/tiny/.quantized").glob("*Llama-3.1-70B*nf4*/"))
    settings = read(folder, "config.json")["quantization_config"]
    assert settings["bnb_4bit_quant_storage"] == "float32" and settings["bnb_4bit_use_double_quant"]


def test_another_model_at_the_same_path_is_quantized_anew(model_args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    absolute = quantized.quantized_folder(model_args)
    model_args.model_name_or_path = "source"
    assert quantized.quantized_folder(model_args) == absolute
    save_file(load_file("source/model.safetensors"), "source/model.safetensors", {"format": "pt"})
    assert quantized.quantized_folder(model_args) != absolute
