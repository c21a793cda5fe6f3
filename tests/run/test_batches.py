"""The batches of a step: all processes read them or none does, and the first step has tokens in the loss."""

from conftest import ROOT, read


def test_no_token_in_the_loss(fork_launch):
    """The prompts are longer than a row, so every answer is truncated: one error message from all processes together."""
    process = fork_launch("--tiny", "llama31_8b_lora", "4gpu_full_shard", "--max_length", "8", NPROC_PER_NODE="2")
    assert process.returncode == 2 and process.stderr.count("error: ") == 1, process.stderr
    assert "no token of the first step counts in the loss" in process.stderr and "Traceback" not in process.stderr


def test_hub_lost_to_one_of_two_processes(rehearse):
    """No process gets batches. They agree on it before they gather the number of tokens: otherwise one would wait there."""
    script, flags = ROOT / "tests/run/lose_hub.py", ["--max_steps", "2", "--ddp_timeout", "20"]
    run = rehearse(script, "4gpu_ddp", *flags, NPROC_PER_NODE="2")
    steps_of_first, steps_of_second = (read(run, f"batches_{rank}.json")["steps"] for rank in (0, 1))
    (count, tokens, total, stops), (other_count, other_tokens, other_total, other_stops) = steps_of_first[0], steps_of_second[0]
    assert count == other_count == 2 and not stops and not other_stops
    assert total == other_total == tokens + other_tokens
    assert steps_of_first[1] == steps_of_second[1] == [0, 0, None, True]
    assert read(run, "batches_0.json")["exit code"] == read(run, "batches_1.json")["exit code"] == 75
