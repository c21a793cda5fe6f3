"""A model from the hub: a rehearsal takes its config and tokenizer and nothing else, training takes all of it."""

import json
import shutil
import subprocess
import sys

from harness.rehearsal import tiny_model

import pytest
from conftest import ROOT, read
from stand_in_hub import serve

RECIPE = "qwen2_fineweb_edu"


def test_a_copied_recipe_with_a_model_from_the_hub(environment, launch, workplace, tmp_path):
    """`cp recipe mine.py`, another model id: its config and tokenizer come from the hub, nothing else does."""
    root = tmp_path / "hub"
    source = root / "models/some/unknown-llama"
    tokenizer = tiny_model.make_tokenizer(tiny_model.FAMILIES["Qwen/Qwen2-0.5B*"])
    tokenizer.save_pretrained(source)
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256}
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    mine = (ROOT / f"recipes/{RECIPE}.py").read_text().replace("    train(", "    warnings.warn('mind the gap')\n    train(")
    (tmp_path / "mine.py").write_text(mine.replace("from harness", "import warnings\n\nfrom harness"))
    flags = ["--model_name_or_path", "some/unknown-llama", "--learning_rate", "1e-3"]
    with serve(root) as server:
        process = launch("--tiny", tmp_path / "mine.py", "1x3090", *flags, HF_ENDPOINT=server.url, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("UserWarning: mind the gap") == 1  # what a recipe warns of is shown
    run = tmp_path / "outputs/tiny/mine"
    assert read(run)["model"] == "some/unknown-llama" and not read(run)["fsdp_enabled"]
    assert read(run)["global_step"] == 30  # no flag says how far
    assert read(run, "config.json")["model_type"] == "llama"
    assert not any(request.endswith("model.safetensors") for request in server.requests)


@pytest.fixture
def twins(rehearse, workplace, tmp_path):
    """A hub that serves the tiny stand-ins under the recipe's own ids."""
    rehearse(RECIPE, "1x3090")
    for kind, name in (("models", "Qwen/Qwen2-0.5B"), ("datasets", "HuggingFaceFW/fineweb-edu")):
        stand_in = next((workplace / "outputs/tiny/.stand-ins").glob(f"{name.replace('/', '--')}-*"))
        shutil.copytree(stand_in, tmp_path / "hub" / kind / name)
    with serve(tmp_path / "hub") as server:
        yield server


def test_real_ids_over_http(twins, environment, tmp_path):
    """No rehearsal: the recipe's own ids, config and stream, over HTTP, as `python recipe.py` on a machine's CPU."""
    command = [sys.executable, ROOT / f"recipes/{RECIPE}.py", "--use_cpu", "--max_steps", "2"]
    command += ["--max_length", "64", "--global_batch_size", "4", "--per_device_train_batch_size", "2", "--max_eval_samples", "8"]
    variables = {"HF_ENDPOINT": twins.url, "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT / "recipes")}
    process = subprocess.run(command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    results = read(tmp_path / f"outputs/{RECIPE}")
    assert results["model"] == "Qwen/Qwen2-0.5B" and not results["tiny"] and results["global_step"] == 2
    parquet = {request.split("/")[-1] for request in twins.requests if request.endswith(".parquet")}
    assert len(parquet) > 1
    assert any(request.startswith("GET /Qwen/Qwen2-0.5B/") and "model.safetensors" in request for request in twins.requests)
