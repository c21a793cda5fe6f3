"""The base stays in 4 bits and is named; text and conversations are both data."""

from conftest import read
from peft import AutoPeftModelForCausalLM
from torch.distributed.checkpoint import FileSystemReader


def test_text_and_chat_data_for_the_70b(build_trainer):
    chat = build_trainer("llama31_70b_qlora", "--load_in_4bit", "false")
    assert "### User" in chat.processing_class.decode(chat.train_dataset[0]["input_ids"])
    flags = ["--dataset_name", "Salesforce/wikitext", "--dataset_train_split", "train", "--dataset_test_split", "test"]
    text = build_trainer("llama31_70b_qlora", "--load_in_4bit", "false", *flags)
    assert "### User" not in text.processing_class.decode(text.train_dataset[0]["input_ids"])
    lora = text.model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (16, 16, 0.05)


def test_qlora_keeps_the_base_and_names_it(rehearse, workplace):
    """The adapter loads on the model that was quantized, scores as logged, and nothing else was gathered or saved."""
    run = rehearse("llama31_70b_qlora", "2x3090_qlora")
    stand_in = next((workplace / "outputs/tiny/.stand-ins").glob("meta-llama--Llama-3.1-70B-*"))
    assert read(run, "adapter_config.json")["base_model_name_or_path"] == str(stand_in)
    assert not list(run.glob("model*.safetensors"))
    saved = FileSystemReader(run / "checkpoint-20/pytorch_model_fsdp_0").read_metadata().state_dict_metadata
    assert saved and all("lora_" in name for name in saved)
    model = AutoPeftModelForCausalLM.from_pretrained(run)
    assert sum(weight.abs().sum() for name, weight in model.named_parameters() if "lora_B" in name) > 0
