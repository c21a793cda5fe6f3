"""The batches of a step: all processes read them or none does, and the first step has tokens in the loss."""

import threading
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from runs import add_parts, read


def test_no_token_in_the_loss(fork_launch):
    """The prompts are longer than a row, so every answer is truncated: one error message from all processes together."""
    process = fork_launch("--tiny", "llama31_8b_lora", "4gpu_full_shard", "--max_length", "8", NPROC_PER_NODE="2")
    assert process.returncode == 2 and process.stderr.count("error: ") == 1, process.stderr
    assert "--max_length" in process.stderr and "Traceback" not in process.stderr


@pytest.mark.parametrize(("variables", "code"), [({}, 75), ({"BAD_ROW": "1"}, 2)], ids=["hub lost", "bad row"])
def test_one_of_two_processes_cannot_read(rehearse, variables, code):
    """No process gets batches. They agree on it before they gather the number of tokens: otherwise one would wait there."""
    script, flags = ROOT / "tests/run/lose_hub.py", ["--max_steps", "2", "--ddp_timeout", "20"]
    run = rehearse(script, "4gpu_ddp", *flags, NPROC_PER_NODE="2", **variables)
    steps_of_first, steps_of_second = (read(run, f"batches_{rank}.json")["steps"] for rank in (0, 1))
    (count, tokens, total, stops), (other_count, other_tokens, other_total, other_stops) = steps_of_first[0], steps_of_second[0]
    assert count == other_count == 2 and not stops and not other_stops
    assert total == other_total == tokens + other_tokens
    assert steps_of_first[1] == steps_of_second[1] == [0, 0, None, True]
    assert read(run, "batches_0.json")["exit code"] == read(run, "batches_1.json")["exit code"] == code


def batch_of(number):
    return {name: torch.full((1, 4), number) for name in ("input_ids", "labels")}


@pytest.fixture
def read_step(build_trainer):
    """Reads a step of two of the given batches of a stream, with a state after each step; returns them and the state."""
    trainer = build_trainer("qwen2_fineweb_edu", "--max_steps", "2")
    position = add_parts(trainer).position
    trainer.state.max_steps = 2

    def with_states(batches):
        position.micro_batches = SimpleNamespace(states=deque())
        for number, batch in enumerate(batches):
            if number % 2:
                position.micro_batches.states.append({0: {"rows": number}})
            yield batch

    def call(batches, global_step=0):
        trainer.state.global_step = global_step
        position.loader = batches
        read, _ = trainer.get_batch_samples(None, 2, trainer.args.device)
        return [int(batch["labels"][0, 0]) for batch in read], position.states

    return with_states, call


def test_stream_is_read_one_step_ahead(read_step):
    """While the first step computes, the batches of the second are read; the state stays that of the first."""
    with_states, call = read_step
    is_read = threading.Event()

    def rows():
        for number in range(9):
            if number == 3:
                is_read.set()
            yield batch_of(number)

    batches = with_states(rows())
    assert call(batches) == ([0, 1], {0: {"rows": 1}})
    assert is_read.wait(20)
    assert call(batches, global_step=1) == ([2, 3], {0: {"rows": 3}})
    assert next(batches)["labels"][0, 0] == 4  # nothing is read for a third step
