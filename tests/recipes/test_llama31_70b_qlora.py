"""llama31_70b_qlora: conversations or texts, a 4-bit base model in host memory, a float32 adapter that names the base."""

from harness.data.reading import DataSettings
from harness.model import loading
from harness.runs import Run

import pytest
import torch
from conftest import slow
from peft import AutoPeftModelForCausalLM
from runs import read
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from trained import texts_in_loss
from transformers import BitsAndBytesConfig, LlamaForCausalLM, PreTrainedModel
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from trl import ModelConfig, SFTConfig


def test_conversations_and_texts(build_trainer):
    """The loss is on the answers of a conversation and their end tokens, or on all tokens of a text."""
    chat = build_trainer("llama31_70b_qlora", "--load_in_4bit", "false")
    in_loss = ""
    for row, _ in zip(chat.train_dataset, range(50), strict=False):
        texts = "".join(texts_in_loss(chat, row))
        assert "### " not in texts
        in_loss += texts
    assert in_loss.count("<|end_of_text|>") > 50
    text = build_trainer("llama31_70b_qlora", "--load_in_4bit", "false", "--dataset_name", "Salesforce/wikitext")
    assert text.processing_class.chat_template is None
    row = next(iter(text.train_dataset))
    assert row["labels"] == row["input_ids"]
    lora = text.model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (16, 16, 0.05)


@slow
def test_only_the_adapter_is_saved(rehearse, workdir):
    """It names the model that was quantized and loads on it. Checkpoints have it and its moments in float32."""
    run = rehearse("llama31_70b_qlora", "2x3090_qlora")
    tiny_model = next((workdir / "outputs/tiny/.made").glob("meta-llama--Llama-3.1-70B-*"))
    assert read(run, "adapter_config.json")["base_model_name_or_path"] == str(tiny_model)
    assert not list(run.glob("model*.safetensors"))
    parameters = {
        name: sum(weight.numel() for weight in load_file(next(folder.glob("*.safetensors"))).values())
        for name, folder in (("adapter", run), ("base", tiny_model))
    }
    assert read(run)["trainable_params_b"] == pytest.approx(parameters["adapter"] / 1e9, abs=1e-6)
    assert read(run)["model_params_b"] == pytest.approx(sum(parameters.values()) / 1e9, abs=1e-6)  # unpacked
    parts = [FileSystemReader(run / "checkpoint-6" / name).read_metadata() for name in ("pytorch_model_fsdp_0", "optimizer_0")]
    saved, moments = (part.state_dict_metadata for part in parts)
    assert saved and all("lora_" in name for name in saved) and sum("exp_avg_sq" in name for name in moments) == len(saved)
    # bf16 would round away the decay of Adam's second moment, 0.1 % per step.
    tensors = [entry for entry in [*saved.values(), *moments.values()] if hasattr(entry, "properties")]
    assert {entry.properties.dtype for entry in tensors} == {torch.float32}
    model = AutoPeftModelForCausalLM.from_pretrained(run)
    assert sum(weight.abs().sum() for name, weight in model.named_parameters() if "lora_B" in name) > 0


def test_4bit_models_are_loaded_into_host_memory(monkeypatch):
    """Although there is a GPU, and SFTTrainer passes `device_map=None`, which transformers takes for the current GPU."""
    loaded = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert Bnb4BitHfQuantizer(BitsAndBytesConfig(load_in_4bit=True)).update_device_map(None) == {"": 0}

    def load(cls: type, name: str, **options: object) -> None:
        loaded.append(options["device_map"])

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(load))
    arguments = SFTConfig(use_cpu=True, bf16=False), ModelConfig(load_in_4bit=True)
    loading.set_loading_options(*arguments[-2:], Run("a.py", any_config=True, data=DataSettings(())))
    LlamaForCausalLM.from_pretrained("some/model", device_map=None)
    assert loaded == [{"": "cpu"}]
