"""The base stays in 4 bits and is named; text and conversations are both data."""

import importlib.util
from types import SimpleNamespace

from harness.launched import Launched
from harness.run import four_bit
from harness.start import loading

import pytest
import torch
from conftest import read
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from trained import in_the_loss
from transformers import AutoTokenizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from trl import ModelConfig, SFTConfig


def test_text_and_chat_data_for_the_70b(build_trainer):
    """Conversations train on the answers and their ends, to the last; texts train whole."""
    chat = build_trainer("llama31_70b_qlora", "--load_in_4bit", "false")
    trained = ""
    for row, _ in zip(chat.train_dataset, range(50), strict=False):
        assert "### " not in "".join(in_the_loss(chat, row))
        trained += "".join(in_the_loss(chat, row))
    assert trained.count("<|end_of_text|>") > 50
    text = build_trainer("llama31_70b_qlora", "--load_in_4bit", "false", "--dataset_name", "Salesforce/wikitext")
    assert text.processing_class.chat_template is None
    row = next(iter(text.train_dataset))
    assert row["labels"] == row["input_ids"]
    lora = text.model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (16, 16, 0.05)


def test_answers_come_to_an_end(rehearse):
    """And the saved tokenizer writes the prompt that was trained on."""
    run = rehearse("llama31_70b_qlora", "2x3090_qlora", "--max_steps", "30", "--eval_strategy", "no")
    answers = [part.split("### Assistant")[-1] for part in (run / "samples.txt").read_text().split("\n> ")]
    assert len(answers) == 3 and any(answer.rstrip().endswith("<|end_of_text|>") for answer in answers)
    turns = [{"role": "user", "content": "Why?"}]
    prompt = AutoTokenizer.from_pretrained(run).apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|begin_of_text|>### User\nWhy?\n\n### Assistant\n"


def test_qlora_keeps_the_base_and_names_it(rehearse, workplace):
    """The adapter loads on the model that was quantized, scores as logged, and nothing else was gathered or saved."""
    run = rehearse("llama31_70b_qlora", "2x3090_qlora")
    stand_in = next((workplace / "outputs/tiny/.stand-ins").glob("meta-llama--Llama-3.1-70B-*"))
    assert read(run, "adapter_config.json")["base_model_name_or_path"] == str(stand_in)
    assert not list(run.glob("model*.safetensors"))
    parameters = {
        name: sum(w.numel() for w in load_file(next(run_or_base.glob("*.safetensors"))).values())
        for name, run_or_base in (("adapter", run), ("base", stand_in))
    }
    assert read(run)["trainable_params_b"] == pytest.approx(parameters["adapter"] / 1e9, abs=1e-6)
    assert read(run)["model_params_b"] == pytest.approx(sum(parameters.values()) / 1e9, abs=1e-6)  # not of packed bytes
    saved = FileSystemReader(run / "checkpoint-15/pytorch_model_fsdp_0").read_metadata().state_dict_metadata
    assert saved and all("lora_" in name for name in saved)
    model = AutoPeftModelForCausalLM.from_pretrained(run)
    assert sum(weight.abs().sum() for name, weight in model.named_parameters() if "lora_B" in name) > 0


def test_adapter_and_adam_are_float32(rehearse):
    """In bf16 Adam's second moment would never come down again: its decay of 0.1 % a step is below bf16's rounding."""
    run = rehearse("llama31_70b_qlora", "2x3090_qlora")
    parts = [FileSystemReader(run / "checkpoint-15" / name).read_metadata() for name in ("pytorch_model_fsdp_0", "optimizer_0")]
    for tensors in (part.state_dict_metadata for part in parts):
        assert {entry.properties.dtype for entry in tensors.values() if hasattr(entry, "properties")} == {torch.float32}
    assert sum("exp_avg_sq" in name for name in parts[1].state_dict_metadata) == len(parts[0].state_dict_metadata)


def test_the_base_is_loaded_into_host_ram(monkeypatch):
    """With a GPU there, and whatever SFTTrainer asks for: transformers takes None for the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Bnb4BitHfQuantizer, "update_device_map", Bnb4BitHfQuantizer.update_device_map)
    spec = importlib.util.find_spec(Bnb4BitHfQuantizer.__module__)
    spec.loader.exec_module(theirs := importlib.util.module_from_spec(spec))  # whatever ran in this process before
    assert object.__new__(theirs.Bnb4BitHfQuantizer).update_device_map(None) == {"": 0}
    loading.complete(SFTConfig(use_cpu=True, bf16=False), ModelConfig("some/model", load_in_4bit=True), True, Launched())
    assert object.__new__(Bnb4BitHfQuantizer).update_device_map(None) == {"": "cpu"}


def test_a_base_on_a_gpu_stops_the_run():
    layer = SimpleNamespace(device=torch.device("cuda:0"), requires_grad=False)
    model = SimpleNamespace(is_loaded_in_4bit=True, parameters=lambda: [layer], named_parameters=lambda: [("layer.0", layer)])
    with pytest.raises(RuntimeError, match=r"layer\.0 is on a GPU before it is sharded"):
        four_bit.prepare(SimpleNamespace(model=model, is_fsdp_enabled=True))


def test_more_than_a_layer_or_two_on_a_gpu_stops_the_run(monkeypatch):
    """Wherever it came from: the weights are in host RAM again, and the peak remembers."""
    model = Model()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    peak = 2 * sum(weight.nbytes for weight in model.layer.parameters())
    for allocated in (peak + four_bit.SLACK, peak + four_bit.SLACK + 1):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda allocated=allocated: allocated)
        trainer = SimpleNamespace(model=model, is_fsdp_enabled=True)
        if allocated > peak + four_bit.SLACK:
            with pytest.raises(RuntimeError, match="more than two layers"):
                four_bit.prepare(trainer)
        else:
            four_bit.prepare(trainer)


class Model(torch.nn.Module):
    is_loaded_in_4bit, _no_split_modules = True, ("Linear",)

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
