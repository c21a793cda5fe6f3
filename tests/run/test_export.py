"""What is written beside a model."""

from harness.run import export

import pytest
from huggingface_hub import ModelCard


def test_the_card_names_what_the_hub_knows(tmp_path):
    run = {"tiny": False, "recipe": "mine", "config": "1x3090", "model": "org/model", "dataset": str(tmp_path)}
    card = ModelCard(export._card(run, True))
    assert card.data.base_model == ["org/model"] and card.data.datasets is None  # a folder of this machine
    assert card.data.library_name == "transformers"
    assert ModelCard(export._card(run | {"dataset": "org/data"}, False)).data.datasets == ["org/data"]


@pytest.mark.parametrize("processes", [1, 2])
def test_no_process_waits_for_another_while_samples_are_made(build_trainer, monkeypatch, processes):
    """One whose answers have ended goes on gathering weights for those whose have not."""
    trainer, asked = build_trainer("qwen2_chat"), []

    def generate(input_ids, synced_gpus, **options):
        asked.append(synced_gpus)
        return input_ids

    monkeypatch.setattr(trainer.model, "generate", generate)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", processes)
    export.sample(trainer, True)
    assert asked == [processes > 1]
