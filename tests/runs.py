"""The tests' way to runs: starts one, checks one without training, builds a trainer, and reads what a run has written.

Tests of runs as a whole need nothing else of the harness. What is imported from it is imported inside functions: tests that
import no torch use this module too.
"""

import dataclasses
import hashlib
import json
import os
import runpy
import shutil
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import yaml
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]

# A checkpoint in the middle and one at the end.
SHORT = ["--max_steps", "6", "--save_steps", "4", "--eval_steps", "6", "--logging_steps", "1"]


def fewer_processes(config: str) -> dict:
    """NPROC_PER_NODE=2 for a config of the project with four or more processes: two show as much, unless shards are replicated.

    Three stay three, because their shards have different sizes.
    """
    file = ROOT / f"accelerate_configs/{config}.yaml"
    settings = yaml.safe_load(file.read_text()) if "/" not in str(config) else {}
    has_more = settings.get("num_processes", 1) > 3 and "parallelism_config" not in settings
    return {"NPROC_PER_NODE": "2"} if has_more else {}


def write_hybrid_2x2(folder: Path) -> Path:
    """Writes the hybrid config for four processes, two replicas of two shards; returns its path."""
    settings = yaml.safe_load((ROOT / "accelerate_configs/2x4gpu_hybrid_shard.yaml").read_text())
    assert settings["parallelism_config"]["parallelism_config_dp_shard_size"] == 4
    settings["parallelism_config"]["parallelism_config_dp_shard_size"] = 2
    settings["num_processes"] = 4
    path = folder / "hybrid_2x2.yaml"
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(yaml.safe_dump(settings))
    return draft.rename(path)


class Rehearsals:
    """Called with a recipe, a config and flags (SHORT unless they set max_steps); returns the output directory."""

    def __init__(self, launch, fork_launch, folder: Path):
        self.launch, self.fork_launch, self.folder = launch, fork_launch, folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, recipe, config, *flags, **variables) -> Path:
        flags = flags if "--max_steps" in flags else (*flags, *SHORT)
        variables = fewer_processes(config) | variables
        key = json.dumps([recipe, config, flags, variables], default=str)
        run = self.folder / f"{Path(recipe).stem}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        failure = run.with_suffix(".txt")  # empty after a success
        with FileLock(run.with_suffix(".lock")):
            if not failure.exists():
                launch = self.launch if {"PYTHON", "PYTHONPATH"} & variables.keys() else self.fork_launch
                process = launch("--tiny", recipe, config, "--output_dir", run, *flags, **variables)
                failure.write_text("" if process.returncode == 0 else process.stdout + process.stderr)
        assert not failure.read_text(), failure.read_text()
        return run


def check_run(recipe, config, processes: int, tiny: bool = False) -> bool:
    """Runs a recipe in this process up to the end of the checks, as its first process would with this config."""
    from harness import runs
    from harness.model.models import check_models
    from harness.start import claim, machine

    class CheckedRecipe(runs.StartedRecipe):
        is_checked = False

        def choose_device(self):
            self.run = dataclasses.replace(self.run, on_cpu=machine.must_use_cpu(self.run))

        def prepare(self):
            machine.check_nodes([machine.facts_of_node(self.run, *self.arguments[1:])])
            run, _ = claim.claim_folder(self.run, self.arguments)
            check_models(run, self.arguments)
            run.lock.release()
            self.is_checked = True
            raise runs.RecipeStopped

    started = CheckedRecipe(runs.Run(str(recipe), config, processes, tiny=tiny, trains=True))
    with runs.running(started):
        runpy.run_path(str(recipe), run_name="__main__")
    return started.is_checked


def build_trainer(recipe, output_dir: Path, *flags):
    """Runs a recipe (name or path) in this process, tiny; returns the trainer that it passes to `train`."""
    import harness
    from harness import runs
    from harness.start import recipes

    path, trainers = recipe if "/" in recipe else str(ROOT / "recipes" / f"{recipe}.py"), []
    run = runs.Run(path, processes=1, tiny=True, trains=True, on_cpu=True)
    argv = [path, "--output_dir", str(output_dir), *flags]
    replaced = mock.patch.object(harness, "train", trainers.append), mock.patch.object(sys, "argv", argv)
    with replaced[0], replaced[1], runs.running(recipes.TrainedRecipe(run)):
        runpy.run_path(path, run_name="__main__")
    return trainers[-1]


def add_parts(trainer, loss=None):
    """Adds to a trainer what a run adds; returns it."""
    from harness.run import trainer as of_run
    from harness.run.checkpoints import WeightsOfModel

    return of_run.add_parts(trainer, WeightsOfModel(trainer.model), (1, 1), loss=loss)


def train(trainer, **started) -> None:
    """Does in this process what `train` of a recipe does, started like this. It handles no signal."""
    from harness.run import training
    from harness.runs import Run, StartedRecipe

    from trl import ModelConfig

    recipe = StartedRecipe(Run("recipe.py", **started), (None, trainer.args, ModelConfig()), trainer)
    with mock.patch.object(training, "set_signal_handler", lambda handler: None):
        training.run_training(recipe)


def tiny_tokenizer(name: str):
    """That of a rehearsal of a model."""
    from harness.rehearsal import tiny

    return tiny.make_tokenizer(tiny.family_of(name))


def tiny_model(name: str, folder: Path) -> Path:
    """Writes that of a rehearsal of a model into a folder."""
    from harness.rehearsal import tiny

    tiny.make_tiny_model(name, "main", folder)
    return folder


def tiny_dataset(name: str, config: str, folder: Path) -> None:
    """Copies that of a rehearsal into a folder, as the config of this name."""
    from harness.rehearsal import tiny

    shutil.copytree(tiny.DATASETS[name], folder)
    (folder / "README.md").write_text((folder / "README.md").read_text().replace("default", config))


def tiny_documents() -> list[str]:
    """The texts of the dataset of a rehearsal."""
    from harness.rehearsal import tiny

    return tiny.documents()


def merge(run: Path, out: Path, *flags) -> None:
    """Does in this process what `--merge` does."""
    from harness.commands import merge as command

    command.main(str(run), str(out), *flags)


def load_saved(run: Path):
    """The model of a run as `--chat` loads it."""
    from harness.commands import saved

    return saved.load_model(run)


def data_settings(name, formats=(), given=(), seed=0, output_dir="", max_steps=1, **settings):
    """What `load` of a recipe with these formats reads: a dataset, or a list of them."""
    from harness.start.arguments import ScriptArguments, settings_of_data

    script_args = ScriptArguments(dataset_name=[*map(str, name)] if isinstance(name, list) else str(name), **settings)
    training_args = SimpleNamespace(seed=seed, output_dir=str(output_dir), max_steps=max_steps)
    return settings_of_data(script_args, training_args, formats, given)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def begin_at(checkpoint: Path, run: Path) -> Path:
    """Makes the folder of a run that was killed when it had written this checkpoint of another run."""
    shutil.copytree(checkpoint, run / checkpoint.name)
    shutil.copy(checkpoint.parent / "run.json", run)
    return run


def wait_for_checkpoint(run: Path, step: int, process, log: Path) -> None:
    """Waits until a run has completed a checkpoint. It runs on."""
    wait_until(lambda: is_complete(run, step) or process.poll() is not None, 120, log.read_text)
    assert process.poll() is None, log.read_text()


def is_complete(run: Path, step: int) -> bool:
    return (run / f"checkpoint-{step}/complete.json").is_file()


def history(run: Path, key: str = "loss") -> list[dict]:
    """The entries of a run's log that have a key."""
    return [entry for entry in read(run, "trainer_state.json")["log_history"] if key in entry]


def losses(run: Path) -> dict[int, tuple]:
    """What a run logged: step to (loss, grad_norm)."""
    return {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in history(run)}


def weights(run: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(run / "model.safetensors")


def has_same_weights(run: Path, other: Path) -> bool:
    """Bit for bit."""
    import torch

    ours, theirs = weights(run), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def assert_one_error(process, *words):
    """The process printed one error that has `words`, exited with code 2, and did nothing else."""
    assert process.returncode == 2, process.stdout + process.stderr
    assert process.stderr.count("\n") == 1 and process.stderr.startswith("error: "), process.stderr
    assert not process.stdout
    for word in words:
        assert word in process.stderr, process.stderr


def wait_until(condition, seconds: float, describe):
    """Waits until `condition()`; fails with `describe()` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(folder: Path, name: str = "train_results.json") -> dict:
    return json.loads((folder / name).read_text())
