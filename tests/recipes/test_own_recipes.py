"""Recipes of other kinds than the shipped ones go through the same life: rehearsal, kill, resume, sharding, save, report."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, at_night, slow
from filelock import FileLock
from peft import AutoPeftModelForSequenceClassification
from runs import begin_at, losses, read
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

OWN = Path(__file__).parent / "own"
SHORT = ["--max_steps", "4", "--save_steps", "2", "--eval_steps", "4", "--logging_steps", "1", "--max_eval_samples", "4"]
# Of each recipe: flags, the class that loads its model, its metrics, and why it has no samples, "" if it has.
KINDS = {
    "module": ([], None, ["small_accuracy", "large_accuracy"], "Network does not continue texts"),
    "translate": ([], AutoModelForSeq2SeqLM, [], ""),
    "preferences": ([], AutoModelForCausalLM, ["rewards/accuracies", "rewards/margins"], ""),
    "kto": ([], AutoModelForCausalLM, ["rewards/chosen", "rewards/rejected"], ""),
    "reward": (["--use_peft"], AutoPeftModelForSequenceClassification, ["accuracy"], "does not continue texts"),
}


@pytest.fixture(scope="session")
def rows(shared):
    path = shared / "sentences.jsonl"
    texts = [f"The number {number} comes before {number + 1}, and after {number - 1}" for number in range(24)]
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():  # a run is refused if the time of its file has changed since another worker began it
            path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


@pytest.fixture
def rehearse_own(rehearse, rows):
    def call(recipe, config="1x3090", *more, **variables):
        data = [] if recipe in ("module", "handmade") else ["--dataset_name", rows]
        flags_of_kind = KINDS[recipe][0] if recipe in KINDS else []
        return rehearse(OWN / f"{recipe}.py", config, *data, *flags_of_kind, *SHORT, *more, **variables)

    return call


@pytest.mark.parametrize("recipe", ["module", "preferences", *at_night("translate", "kto", "reward")])
def test_trains_saves_and_resumes(rehearse_own, fork_launch, workdir, rows, tmp_path, recipe):
    _, model_class, metrics, why_no_samples = KINDS[recipe]
    run = rehearse_own(recipe)
    results = read(run)
    assert results["global_step"] == 4 and (run / "README.md").is_file()
    assert all(f"eval_{name}" in results for name in metrics), results
    assert (run / "samples.txt").exists() == (not why_no_samples) and not (run / "held_out.parquet").exists()
    assert "perplexity" not in results
    assert ("rows_per_second" in results) == (recipe == "module")
    if model_class is None:
        assert {"layers.0.weight", "layers.2.bias"} <= load_file(run / "model.safetensors").keys()
    else:
        model_class.from_pretrained(run, **({"num_labels": 1} if recipe == "reward" else {}))

    killed = begin_at(run / "checkpoint-2", tmp_path / "killed")
    data = [] if recipe == "module" else ["--dataset_name", rows]
    command = ["--tiny", OWN / f"{recipe}.py", "1x3090", "--output_dir", killed, *data, *KINDS[recipe][0], *SHORT]
    process = fork_launch(*command, cwd=workdir)
    assert process.returncode == 0 and read(killed)["resumed_from_step"] == 2, process.stdout + process.stderr
    assert process.stdout.count(why_no_samples or "No samples") == bool(why_no_samples)
    name = "model.safetensors" if (run / "model.safetensors").exists() else "adapter_model.safetensors"
    before, after = load_file(run / name), load_file(killed / name)
    assert losses(run) == losses(killed) and all(before[key].equal(after[key]) for key in before)


@slow
@pytest.mark.parametrize("recipe", ["preferences", "reward"])
def test_sharded_equals_unsharded(rehearse_own, recipe):
    """Also the loss, which transformers would multiply by the number of processes.

    Rewards of a new head are so far from 0 that bf16 rounds them by a hundredth, with FSDP also between the layers.
    """
    precision = ["--bf16", "false"] if recipe == "reward" else []
    one = rehearse_own(recipe, "1x3090", *precision)
    two = rehearse_own(recipe, "4gpu_full_shard", "--gradient_accumulation_steps", "1", *precision)
    assert read(two)["fsdp_enabled"] and read(two)["world_size"] == 2
    if recipe == "reward":  # it evaluates after `train`
        assert read(two, "after_results.json")["eval_loss"] == pytest.approx(read(two)["eval_loss"], rel=1e-3)
    for (loss, _), (of_two, _) in zip(losses(one).values(), losses(two).values(), strict=True):
        assert of_two == pytest.approx(loss, **({"rel": 1e-4} if precision else {"rel": 0.02, "abs": 0.005}))


@pytest.mark.parametrize("recipe", ["preferences", *at_night("distill", "weighed", "tagger", "module")])
def test_batches_and_processes_change_no_number(rehearse, tmp_path_factory, recipe):
    """Of training and evaluation: 5 evaluation rows of unequal length, one at a time, and two on each of two processes."""
    path, many = tmp_path_factory.getbasetemp() / "unequal.jsonl", " and so on"
    texts = [f"The number {number} comes before {number + 1}{many * (9 * (number % 5 == 0))}" for number in range(120)]
    rows = [{"messages": [{"role": role, "content": text} for role in ("user", "assistant")], "text": text} for text in texts]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    flags = [] if recipe == "module" else ["--dataset_name", path]
    flags += [*SHORT, "--max_eval_samples", "5", "--bf16", "false"]
    flags += ["--dtype", "float32"] if recipe in ("distill", "preferences") else []
    large = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--per_device_eval_batch_size", "1"]
    small = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2", "--per_device_eval_batch_size", "2"]
    one = rehearse(OWN / f"{recipe}.py", "1x3090", *flags, *large)
    two = rehearse(OWN / f"{recipe}.py", "4gpu_ddp", *flags, *small)
    histories = [read(run, "trainer_state.json")["log_history"] for run in (one, two)]
    for entry, other in zip(*histories, strict=True):
        names = [name for name in entry if name in ("loss", "grad_norm") or name.startswith("eval_")]
        names = [name for name in names if not name.endswith(("_runtime", "_per_second", "num_tokens"))]
        assert {name: other[name] for name in names} == pytest.approx({name: entry[name] for name in names}, rel=1e-3, abs=1e-4)
    if recipe == "distill":  # its loss has the distance from a teacher, which is not saved
        assert read(one)["loss_is_mean_over"] == "tokens" and not read(one)["loss_is_cross_entropy"]
        assert not [name for name in load_file(one / "model.safetensors") if "teacher" in name]


@slow
def test_second_model_of_processes_that_read_no_weights(fork_launch, workdir):
    """One message names the key of the config that helps."""
    flags = ["--dataset_name", "trl-lib/Capybara", "--output_dir", "without-weights", "--max_length", "32"]
    process = fork_launch("--tiny", OWN / "distill.py", "4gpu_full_shard", *flags, cwd=workdir, NPROC_PER_NODE="2")
    assert process.returncode == 2 and "Traceback" not in process.stderr, process.stderr
    (message,) = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert "fsdp_cpu_ram_efficient_loading: false" in message


@slow
def test_preview_says_what_it_cannot_show(fork_launch, workdir, rows):
    for recipe, reason in (("module", "Network does not"), ("translate", "T5ForConditionalGeneration does not"), ("reward", "")):
        data = [] if recipe == "module" else ["--dataset_name", rows]
        process = fork_launch("--preview", "--tiny", OWN / f"{recipe}.py", *data, cwd=workdir)
        assert process.returncode == 0, process.stdout + process.stderr
        assert process.stdout.count("--- a row as the trainer gets it") == 2 and "not shown" in process.stdout
        assert reason in process.stdout


@slow
def test_model_without_a_name_can_be_recovered(rehearse_own, fork_launch, workdir, tmp_path):
    """From a sharded checkpoint, which has no other copy of its config, and is the only thing that a killed run has."""
    run = rehearse_own("handmade", "1x3090_offload")
    process = fork_launch("--merge", run / "checkpoint-4", tmp_path / "merged", cwd=workdir)
    assert process.returncode == 0, process.stdout + process.stderr
    saved, merged = (AutoModelForSequenceClassification.from_pretrained(path).state_dict() for path in (run, tmp_path / "merged"))
    assert saved.keys() == merged.keys() and all(saved[name].equal(merged[name]) for name in saved)


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


def test_help(launch):
    text = launch(OWN / "module.py", "--help").stdout
    assert text.startswith("module.py has no docstring.") and "--output_dir outputs/mine" in text
    assert "    --width 8  Units of the hidden layer." in text
