"""llama31_70b_qlora: conversations or texts, a 4-bit base model in host memory."""

from harness.data.reading import DataSettings
from harness.model import models
from harness.runs import Run

import torch
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
    models.set_loading_options(*arguments[-2:], Run("a.py", any_config=True, data=DataSettings(())))
    LlamaForCausalLM.from_pretrained("some/model", device_map=None)
    assert loaded == [{"": "cpu"}]
