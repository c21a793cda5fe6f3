"""A run whose first step has nothing to learn from ends before it, on all processes, with one line."""


def test_nothing_to_learn_from(starts):
    """The prompts are longer than a row, so every answer is cut off."""
    process = starts("--tiny", "llama31_8b_lora", "4gpu_full_shard", "--max_length", "8", NPROC_PER_NODE="2")
    assert process.returncode == 2 and process.stderr.count("error: ") == 1, process.stderr
    assert "no token of the first step is trained on" in process.stderr and "Traceback" not in process.stderr
