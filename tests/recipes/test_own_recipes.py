"""Recipes of other kinds than the shipped ones go through the same life: rehearsal, kill, resume, sharding, save, report."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, at_night
from filelock import FileLock
from runs import begin_at, losses, read
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

OWN = Path(__file__).parent / "own"
SHORT = ["--max_steps", "4", "--save_steps", "2", "--eval_steps", "4", "--logging_steps", "1", "--max_eval_samples", "4"]
# Of each recipe: the class that loads its model, its metrics, and why it has no samples, "" if it has.
KINDS = {
    "module": (None, ["small_accuracy", "large_accuracy"], "Network does not continue texts"),
    "translate": (AutoModelForSeq2SeqLM, [], "T5ForConditionalGeneration does not continue texts"),
    "preferences": (AutoModelForCausalLM, ["rewards/accuracies", "rewards/margins"], ""),
    "kto": (AutoModelForCausalLM, ["rewards/chosen", "rewards/rejected"], ""),
}


@pytest.fixture(scope="session")
def rows(shared):
    path = shared / "sentences.jsonl"
    texts = [f"The number {number} comes before {number + 1}, and after {number - 1}" for number in range(24)]
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():  # a run is refused if the time of its file has changed since another worker began it
            path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


@pytest.mark.parametrize("recipe", ["module", "preferences", *at_night("translate", "kto")])
def test_trains_saves_and_resumes(rehearse, fork_launch, workdir, rows, tmp_path, recipe):
    model_class, metrics, why_no_samples = KINDS[recipe]
    command = [OWN / f"{recipe}.py", "1x3090", *([] if recipe == "module" else ["--dataset_name", rows]), *SHORT]
    run = rehearse(*command)
    results = read(run)
    assert results["global_step"] == 4 and (run / "README.md").is_file() == (recipe != "module")  # it has no config
    assert all(f"eval_{name}" in results for name in metrics), results
    assert (run / "samples.txt").exists() == (not why_no_samples) and not (run / "held_out.parquet").exists()
    assert "perplexity" not in results
    assert ("rows_per_second" in results) == (recipe == "module")
    if model_class is None:
        assert {"layers.0.weight", "layers.2.bias"} <= load_file(run / "model.safetensors").keys()
    else:
        model_class.from_pretrained(run)

    killed = begin_at(run / "checkpoint-2", tmp_path / "killed")
    process = fork_launch("--tiny", *command, "--output_dir", killed, cwd=workdir)
    assert process.returncode == 0 and read(killed)["resumed_from_step"] == 2, process.stdout + process.stderr
    assert process.stdout.count(why_no_samples or "No samples") == bool(why_no_samples)
    name = "model.safetensors" if (run / "model.safetensors").exists() else "adapter_model.safetensors"
    before, after = load_file(run / name), load_file(killed / name)
    assert losses(run) == losses(killed) and all(before[key].equal(after[key]) for key in before)


@pytest.mark.parametrize("recipe", ["preferences", *at_night("weighed", "module")])
def test_batches_and_processes_change_no_number(rehearse, tmp_path_factory, recipe):
    """Of training and evaluation: 5 evaluation rows of unequal length, one at a time, and two on each of two processes."""
    path, many = tmp_path_factory.getbasetemp() / "unequal.jsonl", " and so on"
    texts = [f"The number {number} comes before {number + 1}{many * (9 * (number % 5 == 0))}" for number in range(120)]
    rows = [{"messages": [{"role": role, "content": text} for role in ("user", "assistant")], "text": text} for text in texts]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    flags = [] if recipe == "module" else ["--dataset_name", path]
    flags += [*SHORT, "--max_eval_samples", "5", "--bf16", "false"]
    flags += ["--dtype", "float32"] if recipe == "preferences" else []
    large = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--per_device_eval_batch_size", "1"]
    small = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2", "--per_device_eval_batch_size", "2"]
    one = rehearse(OWN / f"{recipe}.py", "1x3090", *flags, *large)
    two = rehearse(OWN / f"{recipe}.py", "4gpu_ddp", *flags, *small)
    histories = [read(run, "trainer_state.json")["log_history"] for run in (one, two)]
    for entry, other in zip(*histories, strict=True):
        names = [name for name in entry if name in ("loss", "grad_norm") or name.startswith("eval_")]
        names = [name for name in names if not name.endswith(("_runtime", "_per_second", "num_tokens"))]
        assert {name: other[name] for name in names} == pytest.approx({name: entry[name] for name in names}, rel=1e-3, abs=1e-4)


def test_recipe_of_the_page(fork_launch, workdir, tmp_path):
    """As docs/your-recipe.md says: own rows, metric, callback and flag. A run that the callback has stopped is finished."""
    page = (ROOT / "docs/your-recipe.md").read_text()
    source = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    recipe, data, run = tmp_path / "mine.py", tmp_path / "reviews.jsonl", tmp_path / "run"
    recipe.write_text(source)
    texts = [f"Number {number} is {'good' if number % 2 else 'bad'}" for number in range(40)]
    data.write_text("\n".join(json.dumps({"text": text, "label": number % 2}) for number, text in enumerate([*texts, " "])))
    flags_of_run = ["--dataset_name", data, "--output_dir", run, "--max_steps", "6", "--eval_steps", "2", "--good_enough", "0.1"]
    command = ["--tiny", recipe, "1x3090", *flags_of_run]
    process = fork_launch(*command, cwd=workdir)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stderr.count("LOAD REPORT") <= 1 and "score.weight" in process.stderr
    results = read(run)
    assert results["global_step"] == 2 and results["eval_accuracy"] >= 0.1 and "eval_accuracy_on_start" in results
    assert read(run, "data.json")["skipped"], "keep drops the empty row"
    again = fork_launch(*command, cwd=workdir)
    assert again.returncode == 0 and "is finished: 2 steps" in again.stdout and "Training " not in again.stdout
