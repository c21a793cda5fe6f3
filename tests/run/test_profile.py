"""`--profile`: some steps in the middle of a run as traces, a table and a picture."""

import gzip
import json

from harness.run.profile import Profile, table

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

RECIPE = "qwen2_fineweb_edu"


@pytest.mark.parametrize(
    ("done", "max_steps", "pause", "accumulation", "steps"),
    [
        (0, 5, 0, 1, (3, 5)),
        (0, 20, 0, 1, (10, 12)),
        (0, 20, 10, 1, (12, 14)),  # between steps 10 and 11 is an evaluation
        (0, 20, 1, 1, (10, 12)),  # between all steps
        (0, 1000, 0, 2, (20, 22)),
        (500, 1000, 0, 2, (520, 522)),
        (0, 1000, 0, 16, (20, 20)),  # sixteen micro-batches are trace enough
    ],
)
def test_which_steps(tmp_path, capsys, done, max_steps, pause, accumulation, steps):
    args = TrainingArguments(output_dir=tmp_path, use_cpu=True, gradient_accumulation_steps=accumulation)
    state = TrainerState(global_step=done, max_steps=max_steps, eval_steps=pause, save_steps=0)
    profile = Profile(args)
    profile.on_train_begin(args, state, TrainerControl())
    assert (profile.first, profile.last) == steps
    profile.on_train_end(args, state, TrainerControl())
    assert f"stopped before step {steps[1]}" in capsys.readouterr().out


def test_a_run_that_is_too_short_or_has_one_already(tmp_path, capsys):
    args = TrainingArguments(output_dir=tmp_path, use_cpu=True)
    profile = Profile(args)
    profile.on_train_begin(args, TrainerState(global_step=96, max_steps=100), TrainerControl())
    assert profile.profiler is None
    assert capsys.readouterr().out == "No profile: it takes 5 steps, of which the first two are not looked at; 4 are left.\n"
    profile.table.parent.mkdir()
    profile.table.touch()
    profile.on_train_begin(args, TrainerState(global_step=0, max_steps=100), TrainerControl())
    assert profile.profiler is None and "has a profile" in capsys.readouterr().out


def test_a_signal_while_it_records(build_trainer, capsys):
    """Training ends as it would without a profile, of which nothing half is left."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 4

    trainer = build_trainer(RECIPE, "--profile", "--max_steps", "6", "--eval_strategy", "no", "--save_strategy", "no")
    trainer.add_callback(Stop())
    trainer.add_callback(profile := Profile(trainer.args))
    trainer.train()
    assert trainer.state.global_step == 4 and profile.first == 3 and not profile.folder.exists()
    assert "No profile: the run stopped before step 5" in capsys.readouterr().out


def test_table():
    ranks = [
        {"arithmetic": (60_000_000, 0), "all-reduce": (30_000_000, 15_000_000), "waiting": (25_000_000, 0)},
        {"arithmetic": (80_000_000, 0), "all-reduce": (10_000_000, 5_000_000), "host to GPU": (2_000_000, 0), "waiting": (0, 0)},
    ]
    assert table([100_000_000, 100_000_000], ranks, steps=2).splitlines() == [
        "|             | ms a step | share | hidden behind arithmetic |",
        "| ----------- | --------: | ----: | -----------------------: |",
        "| arithmetic  |      35.0 |   70% |                          |",
        "| all-reduce  |      10.0 |   20% |                      50% |",
        "| host to GPU |       0.5 |    1% |                       0% |",
        "| waiting     |       6.2 |   12% |                          |",
        "| a step      |      50.0 |  100% |                          |",
    ]


def test_profile_of_a_sharded_run(rehearse):
    """Two processes that shard: each leaves a trace; the table holds what FSDP sends."""
    flags = ["--profile", "--max_steps", "6", "--eval_strategy", "no", "--save_strategy", "no"]
    folder = rehearse(RECIPE, "4gpu_full_shard", *flags, NPROC_PER_NODE="2") / "profile"
    for rank in (0, 1):
        with gzip.open(folder / f"rank{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
        assert any(name.startswith("FSDP::all_gather") for name in names)
    text = (folder / "table.md").read_text()
    assert text.startswith(f"{RECIPE} × 4gpu_full_shard, steps 3 to 5, mean of 2 processes, on the CPU:")
    rows = {cells[1].strip(): cells[2:] for cells in (line.split("|") for line in text.splitlines() if line.startswith("| "))}
    for what in ("arithmetic", "all-gather", "reduce-scatter", "all-reduce", "all communication", "a step"):
        assert float(rows[what][0].replace(",", "")) > 0
    assert "other collectives" not in rows and "host to GPU" not in rows
    assert (folder / "timeline.png").stat().st_size > 5000
