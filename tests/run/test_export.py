"""What is written beside a model."""

from harness.run import export

from huggingface_hub import ModelCard


def test_the_card_names_what_the_hub_knows(tmp_path):
    run = {"tiny": False, "recipe": "mine", "config": "1x3090", "model": "org/model", "dataset": str(tmp_path)}
    card = ModelCard(export._card(run, True))
    assert card.data.base_model == ["org/model"] and card.data.datasets is None  # a folder of this machine
    assert card.data.library_name == "transformers"
    assert ModelCard(export._card(run | {"dataset": "org/data"}, False)).data.datasets == ["org/data"]
