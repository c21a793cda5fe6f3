"""The model card and the samples that a run writes next to its model."""

from harness.compat.transformers import generate_on
from harness.model import quantized
from harness.run import generation, saving

import pytest
import torch
from transformers import PreTrainedModel


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_generate_the_same_number_of_tokens(build_trainer, monkeypatch, processes):
    """A process whose samples have ended continues to all-gather weights for the other processes."""
    trainer, synced = build_trainer("qwen2_chat"), []

    def generate(input_ids, synced_gpus, **options):
        synced.append(synced_gpus)
        return input_ids

    monkeypatch.setattr(trainer.model, "generate", generate)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", processes)
    generation.generate_samples(trainer, True, [])
    assert synced == [processes > 1]


def test_samples_of_an_adapter_with_offload(build_trainer, monkeypatch):
    """Its weights are in host memory. `generate` must not move the inputs there: FSDP would bring back only some of them."""
    trainer = build_trainer("qwen2_chat", "--use_peft")
    with generate_on(torch.device("cpu")):
        pass  # checks transformers' own function, which is replaced below
    monkeypatch.setattr("transformers.generation.utils.move_to_device", lambda value, device: pytest.fail(f"moved to {device}"))
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cpu", 0))  # not the device of the inputs, which is "cpu"
    generation.generate_samples(trainer, True, [])
    assert PreTrainedModel.device == torch.device("cpu", 0)


def test_adapter_names_the_revision_of_its_base_model(build_trainer, tmp_path):
    """That of the flag or, for an adapter on 4-bit weights, of the model that was quantized."""
    trainer = build_trainer("qwen2_chat", "--use_peft")
    settings = trainer.model.peft_config["default"]
    trainer.args.model_init_kwargs = {"revision": "v2"}
    saving.set_base_revision(trainer)
    assert settings.revision == "v2"
    (tmp_path / quantized.SOURCE).write_text('{"model": "a/b", "revision": "v3"}')
    settings.base_model_name_or_path = str(tmp_path)
    saving.set_base_revision(trainer)
    assert settings.revision == "v3"
