"""Out of memory ends a run with one error message: of which device, in which step, and what helps."""

import sys
from unittest import mock

from harness.run import failures
from harness.start import launch

import pytest
import torch
from runs import train

ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
OF_CUDA = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com"  # or of pinned memory
RECIPE = "qwen2_fineweb_edu"


def test_memory_runs_out_in_a_step(build_trainer, monkeypatch, capfd):
    """The message has the step; the exit code is that of no memory."""
    trainer = build_trainer(RECIPE, "--max_steps", "2", "--max_length", "64", "--eval_strategy", "no", "--save_strategy", "no")
    monkeypatch.setattr(torch.optim.AdamW, "step", mock.Mock(side_effect=ERROR))
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as raised:
        train(trainer)
    assert raised.value.code == failures.OUT_OF_MEMORY
    assert "error: out of memory at step 0: CUDA out of memory" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ERROR, "--plan"),
        (RuntimeError("CUDA driver error: out of memory"), "--plan"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), failures.HOST_ADVICE),
        (torch.AcceleratorError(OF_CUDA), f"{failures.GPU_ADVICE}; if it is the host's, {failures.HOST_ADVICE}"),
        (MemoryError(), failures.HOST_ADVICE),
    ],
    ids=["GPU", "expandable segments", "host", "GPU or pinned", "Python"],
)
def test_host_and_gpu_are_distinguished(monkeypatch, capsys, error, advice):
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit, match="12"):
        failures.exit_if_out_of_memory(error)
    assert advice in capsys.readouterr().err


def test_killed_process(capsys):
    """The message names host memory as the usual reason."""
    assert launch.explain_exit(-9, 1) == launch.explain_exit(137, 1) == 137
    assert capsys.readouterr().err.count("memory was full") == 2
