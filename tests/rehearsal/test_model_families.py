"""A model from the Hub: a rehearsal reads its config and tokenizer only, training reads its weights too."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, slow
from datasets import Dataset
from local_hub import serve
from runs import read, tiny_dataset, tiny_model, tiny_tokenizer

pytestmark = slow

RECIPE = "qwen2_fineweb_edu"


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_copied_recipe_with_another_model_and_dataset(fork_launch, hub_port, tmp_path, streaming):
    """`cp RECIPE.py mine.py` and other Hub IDs: the rehearsal gets config, tokenizer and the first rows, and no weights."""
    root = tmp_path / "hub"
    source = root / "models/some/unknown-llama"
    tokenizer = tiny_tokenizer("Qwen/Qwen2-0.5B")
    tokenizer.save_pretrained(source)
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256}
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    (root / "datasets/some/rows").mkdir(parents=True)
    texts = [f"A text number {number}. {'word ' * 100}" for number in range(600)]
    Dataset.from_dict({"text": texts}).to_parquet(root / "datasets/some/rows/train.parquet")
    mine = (ROOT / f"recipes/{RECIPE}.py").read_text()
    mine = mine.replace("    train(", "    warnings.warn('a warning of the recipe')\n    train(")
    (tmp_path / "mine.py").write_text(mine.replace("from harness", "import warnings\n\nfrom harness"))
    flags = ["--model_name_or_path", "some/unknown-llama", "--learning_rate", "1e-3", "--dataset_name", "some/rows"]
    flags += ["--dataset_streaming", streaming]
    with serve(root, hub_port) as server:
        process = fork_launch("--tiny", tmp_path / "mine.py", "1x3090", *flags, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("UserWarning: a warning of the recipe") == 1
    run = tmp_path / "outputs/tiny/mine"
    assert (read(run)["model"], read(run)["dataset"]) == ("some/unknown-llama", "some/rows") and not read(run)["fsdp_enabled"]
    assert read(run)["global_step"] == 30  # the default of a rehearsal
    assert read(run, "config.json")["model_type"] == "llama"
    assert not any(request.endswith("model.safetensors") for request in server.requests)


@pytest.fixture
def hub_with_tiny_files(tmp_path):
    """A Hub that serves the tiny model and dataset under the names that the recipe uses."""
    tiny_model("Qwen/Qwen2-0.5B", tmp_path / "hub/models/Qwen/Qwen2-0.5B")
    tiny_dataset("HuggingFaceFW/fineweb-edu", "sample-10BT", tmp_path / "hub/datasets/HuggingFaceFW/fineweb-edu")
    with serve(tmp_path / "hub") as server:
        yield server


def test_model_and_stream_from_the_hub(hub_with_tiny_files, environment, tmp_path):
    """No rehearsal: `python RECIPE.py` on a CPU with the recipe's own model and stream, over HTTP."""
    command = [sys.executable, ROOT / f"recipes/{RECIPE}.py", "--use_cpu", "--max_steps", "2"]
    command += ["--max_length", "64", "--global_batch_size", "4", "--per_device_train_batch_size", "2", "--max_eval_samples", "8"]
    variables = {"HF_ENDPOINT": hub_with_tiny_files.url, "HF_HOME": str(tmp_path / "cache")}
    variables["PYTHONPATH"] = str(ROOT / "recipes")
    process = subprocess.run(command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    results = read(tmp_path / f"outputs/{RECIPE}")
    assert results["model"] == "Qwen/Qwen2-0.5B" and not results["tiny"] and results["global_step"] == 2
    requests = hub_with_tiny_files.requests
    parquet = {request.split("/")[-1] for request in requests if request.endswith(".parquet")}
    assert len(parquet) > 1
    assert any(request.startswith("GET /Qwen/Qwen2-0.5B/") and "model.safetensors" in request for request in requests)
