"""4-bit weights: the bytes transformers would write, made once."""

import runpy
import sys

from harness.commands import quantize
from harness.launched import Checked, Launched
from harness.rehearsal import tiny_model

import pytest
import torch
import trl
from conftest import ROOT, read
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM


def test_quantizing_writes_what_transformers_would(tmp_path, monkeypatch):
    """Weight by weight the same bytes, without ever holding the model."""
    monkeypatch.chdir(tmp_path)
    model = trl.ModelConfig(
        "meta-llama/Llama-3.1-70B",
        load_in_4bit=True,
        use_bnb_nested_quant=True,
        bnb_4bit_quant_storage="float32",
        dtype="bfloat16",
    )
    tiny_model.make(model.model_name_or_path, "main", tmp_path / "source")
    model.model_name_or_path = str(tmp_path / "source")
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


def test_quantizing_happens_once(launch, rehearse, workplace, monkeypatch, capsys):
    rehearse("llama31_70b_qlora", "2x3090_qlora")
    again = launch("--quantize", "--tiny", "llama31_70b_qlora")
    assert again.returncode == 0 and "The 4-bit weights of meta-llama/Llama-3.1-70B are in" in again.stdout
    folder = next((workplace / "outputs/tiny/.quantized").glob("*Llama-3.1-70B*nf4*/"))
    settings = read(folder, "config.json")["quantization_config"]
    assert settings["bnb_4bit_quant_storage"] == "float32" and settings["bnb_4bit_use_double_quant"]
    # A draft that a kill left behind is not taken for a finished one.
    draft = folder.with_name(f".{folder.name}.draft")
    folder.rename(draft)
    next(draft.glob("*.safetensors")).write_bytes(b"half")
    path = str(ROOT / "recipes/llama31_70b_qlora.py")
    launched = Launched(recipe=path, tiny=True, on_cpu=True, quantize=True, checking=True)
    for name, value in launched.to_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "argv", [path])
    with pytest.raises(Checked):
        runpy.run_path(path, run_name="__main__")
    assert "Quantizing" in capsys.readouterr().out
    assert load_file(next(folder.glob("*.safetensors"))) and not draft.exists()
