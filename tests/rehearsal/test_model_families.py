"""A model from the Hub: a rehearsal reads its config and tokenizer only, training reads its weights too."""

import json
import shutil
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
    source, rows = tmp_path / "hub/models/some/unknown-llama", tmp_path / "hub/datasets/some/rows"
    tiny_tokenizer("Qwen/Qwen2-0.5B").save_pretrained(source)
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256}
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    rows.mkdir(parents=True)
    texts = [f"A text number {number}. {'word ' * 100}" for number in range(600)]
    Dataset.from_dict({"text": texts}).to_parquet(rows / "train.parquet")
    shutil.copy(ROOT / f"recipes/{RECIPE}.py", tmp_path / "mine.py")
    flags = ["--model_name_or_path", "some/unknown-llama", "--dataset_name", "some/rows", "--dataset_streaming", streaming]
    with serve(tmp_path / "hub", hub_port) as server:
        process = fork_launch("--tiny", tmp_path / "mine.py", "1x3090", *flags, "--max_steps", "4", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    results = read(tmp_path / "outputs/tiny/mine")
    assert (results["model"], results["dataset"]) == ("some/unknown-llama", "some/rows") and not results["fsdp_enabled"]
    assert read(tmp_path / "outputs/tiny/mine", "config.json")["model_type"] == "llama"
    assert not any(request.endswith("model.safetensors") for request in server.requests)


def test_model_and_stream_from_the_hub(environment, tmp_path):
    """No rehearsal: `python RECIPE.py` on a CPU with the recipe's own model and stream, over HTTP."""
    tiny_model("Qwen/Qwen2-0.5B", tmp_path / "hub/models/Qwen/Qwen2-0.5B")
    tiny_dataset("HuggingFaceFW/fineweb-edu", "sample-10BT", tmp_path / "hub/datasets/HuggingFaceFW/fineweb-edu")
    command = [sys.executable, ROOT / f"recipes/{RECIPE}.py", "--use_cpu", "--max_steps", "2"]
    command += ["--max_length", "64", "--global_batch_size", "4", "--per_device_train_batch_size", "2", "--max_eval_samples", "8"]
    with serve(tmp_path / "hub") as server:
        variables = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT / "recipes")}
        process = subprocess.run(command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    results = read(tmp_path / f"outputs/{RECIPE}")
    assert results["model"] == "Qwen/Qwen2-0.5B" and not results["tiny"] and results["global_step"] == 2
    assert len({request.split("/")[-1] for request in server.requests if request.endswith(".parquet")}) > 1
    assert any(request.startswith("GET /Qwen/Qwen2-0.5B/") and "model.safetensors" in request for request in server.requests)
