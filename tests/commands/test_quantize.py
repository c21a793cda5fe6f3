"""4-bit weights: the bytes transformers would write, made once."""

from harness.commands import quantize
from harness.rehearsal import tiny_model

import pytest
import torch
import trl
from conftest import read
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture
def model(tmp_path):
    """A Llama of two layers, and how it is to be quantized."""
    model = trl.ModelConfig(
        "meta-llama/Llama-3.1-70B",
        load_in_4bit=True,
        use_bnb_nested_quant=True,
        bnb_4bit_quant_storage="float32",
        dtype="bfloat16",
    )
    tiny_model.make(model.model_name_or_path, "main", tmp_path / "source")
    model.model_name_or_path = str(tmp_path / "source")
    return model


def test_quantizing_writes_what_transformers_would(model, tmp_path):
    """Weight by weight the same bytes, without ever holding the model."""
    quantize._quantize(model, tmp_path / "ours")
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "source",
        device_map={"": "cpu"},
        dtype="bfloat16",
        quantization_config=trl.get_quantization_config(model),
    ).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        mine = ours[name].reshape(-1).view(torch.uint8)  # packed weights may look like NaN, which equals nothing
        assert ours[name].dtype == tensor.dtype and torch.equal(mine, tensor.reshape(-1).view(torch.uint8)), name
    configs = [AutoConfig.from_pretrained(tmp_path / name).quantization_config for name in ("ours", "theirs")]
    assert configs[0] == configs[1]


def test_quantizing_goes_on_with_the_next_file(model, tmp_path):
    whole, ours = tmp_path / "source/model.safetensors", tmp_path / "ours"
    weights = sorted(load_file(whole).items())
    for number, part in enumerate((weights[:5], weights[5:]), 1):
        save_file(dict(part), whole.with_name(f"model-{number}-of-2.safetensors"), {"format": "pt"})
    whole.unlink()
    quantize._quantize(model, ours)
    first, second = (ours / f"model-{number}-of-2.safetensors" for number in (1, 2))
    written, content = first.stat().st_mtime_ns, second.read_bytes()
    second.with_name(f"{second.name}.half").write_bytes(content[:100])  # what a kill leaves behind
    second.unlink()
    quantize._quantize(model, ours)
    assert first.stat().st_mtime_ns == written and second.read_bytes() == content
    assert not list(ours.glob("*.half"))
    AutoModelForCausalLM.from_pretrained(ours, device_map={"": "cpu"})


def test_quantizing_happens_once(starts, rehearse, workplace):
    rehearse("llama31_70b_qlora", "2x3090_qlora")
    again = starts("--prepare", "--tiny", "llama31_70b_qlora")
    assert again.returncode == 0 and "The 4-bit weights of meta-llama/Llama-3.1-70B are in" in again.stdout
    folder = next((workplace / "outputs/tiny/.quantized").glob("*Llama-3.1-70B*nf4*/"))
    settings = read(folder, "config.json")["quantization_config"]
    assert settings["bnb_4bit_quant_storage"] == "float32" and settings["bnb_4bit_use_double_quant"]
