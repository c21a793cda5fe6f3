"""Out of memory ends a run with one error message: what ran, in which step, the peak, and the flags that save memory."""

import os
import sys

from harness import configs, contexts
from harness.contexts import Context
from harness.run import failures, samples
from harness.start import processes

import pytest
import torch
import transformers
from conftest import ROOT

ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
RECIPE = "qwen2_fineweb_edu"


def run_out(*args, **kwargs):
    raise torch.OutOfMemoryError(*ERROR.args)  # a new one, because an error keeps its traceback


# Where memory runs out: flags of the run, and words of the message.
PLACES = {
    "loss": ([], ["in the forward pass of step 1.", "--activation_checkpointing true or --per_device_train_batch_size 1"]),
    "backward": (
        ["--activation_checkpointing"],
        ["in the backward pass of step 1.", "--per_device_train_batch_size 1 or the config 1x3090_offload"],
    ),
    "optimizer": ([], ["in the optimizer step of step 1.", "the config 1x3090_offload or --use_peft --learning_rate 2e-4"]),
    "clipping": ([], ["clipping gradients of step 1.", "the config 1x3090_offload or --use_peft"]),
    "wrapping": ([], ["wrapping the model.", "the config 1x3090_offload or --use_peft"]),
    "batch": ([], ["preparing ", " step 1."]),
    "evaluation": (["--eval_steps", "1"], ["evaluating after step 1.", "--per_device_eval_batch_size 1 or the config"]),
    "checkpoint": (
        ["--save_steps", "1", "--use_peft"],
        ["saving a checkpoint after step 1.", "the config 1x3090_offload or --load_in_4bit"],
    ),
}


def test_memory_runs_out_while_the_trainer_is_built():
    """Its `__init__` has not set the state yet."""
    with pytest.raises(torch.OutOfMemoryError) as raised:
        Unfinished()
    message = failures._memory_message(raised.value)
    assert "ran out of memory loading the model. What saves most here: another config" in message


class Unfinished(transformers.Trainer):
    def __init__(self):
        run_out(self)


@pytest.mark.parametrize("place", PLACES)
def test_message_names_moment_and_flags(build_trainer, monkeypatch, place):
    flags, expected = PLACES[place]
    short = ["--max_steps", "2", "--max_length", "64", "--gradient_accumulation_steps", "1"]
    short += ["--max_eval_samples", "2", "--eval_on_start", "false"]
    trainer = build_trainer(RECIPE, *short, "--per_device_eval_batch_size", "2", *flags)
    owner, name = {
        "loss": (trainer.model, "forward"),
        "backward": (torch.Tensor, "backward"),
        "optimizer": (torch.optim.AdamW, "step"),
        "clipping": (trainer.accelerator, "clip_grad_norm_"),
        "wrapping": (trainer.accelerator, "prepare_model"),
        "batch": (trainer, "get_batch_samples"),
        "evaluation": (trainer, "prediction_step"),
        "checkpoint": (trainer, "_save_optimizer_and_scheduler"),
    }[place]
    monkeypatch.setattr(owner, name, run_out)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    message = failures._memory_message(raised.value)
    for words in ["ran out of memory ", *expected]:
        assert words in message


def test_advice_for_a_config_that_accumulates_unsharded_gradients(build_trainer, monkeypatch):
    trainer = build_trainer(
        RECIPE, "--gradient_accumulation_steps", "2", "--activation_checkpointing", "--max_length", "64", "--eval_strategy", "no"
    )
    config = configs.read(str(ROOT / "accelerate_configs/1x3090_offload.yaml"))
    monkeypatch.setattr(os, "environ", os.environ | {"ACCELERATE_USE_FSDP": "true"})
    monkeypatch.setattr(torch.optim.AdamW, "step", run_out)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    with contexts.active(Context("a.py", config)):
        assert "here: fsdp_reduce_each_batch: true in a copy of the config or" in failures._memory_message(raised.value)


def test_loading_and_samples(build_trainer, monkeypatch):
    trainer = build_trainer(RECIPE)
    monkeypatch.setattr(trainer.model, "generate", run_out)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        samples.generate_samples(trainer, True)
    message = failures._memory_message(raised.value)
    assert "ran out of memory generating samples. " in message and "1x3090_offload or --use_peft" in message
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", run_out)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        build_trainer("gpt2_xl_wikitext")
    message = failures._memory_message(raised.value)
    assert "ran out of memory loading the model. " in message and "1x3090_offload or --use_peft" in message


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU of 24 GB; a call sets how many bytes of it are free."""

    def call(free):
        found = {"is_available": True, "current_device": 0, "max_memory_allocated": 21.7e9, "max_memory_reserved": 23e9}
        for name, value in (found | {"mem_get_info": (free, 24e9)}).items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("T4", (), {"total_memory": 24e9}))

    monkeypatch.setenv("RANK", "1")
    return call


# What CUDA says when it can allocate no pinned memory, and nothing of its own on a GPU that is full.
OF_CUDA = torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com")


@pytest.mark.parametrize(
    ("error", "free", "expected"),
    [
        (ERROR, 1e9, "the GPU (24.0 GB; peak 21.7 GB, 23.0 GB reserved) ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 0, "the host ran out"),
        (OF_CUDA, 1e9, "the host ran out of memory loading the model: request more memory (SLURM: --mem), stop other"),
        (RuntimeError(f"Caught AcceleratorError in pin memory thread.\n{OF_CUDA}"), 1e9, "the host ran out"),
        (OF_CUDA, 1e7, "the GPU (24.0 GB; "),
        (RuntimeError("CUDA driver error: out of memory"), 1e9, "the GPU (24.0 GB; "),
    ],
    ids=["GPU", "host", "pinned", "pinned, in a thread", "GPU without any memory", "expandable segments"],
)
def test_host_and_gpu_are_distinguished(gpu, error, free, expected):
    gpu(free)
    assert failures._memory_message(error).startswith(f"process 1: {expected}")


def test_recipe_that_runs_out_of_memory(tmp_path, monkeypatch, capsys):
    """One error message and an exit code, no traceback."""

    class Exited(BaseException):
        pass

    def exit_process(code):
        assert code == failures.OUT_OF_MEMORY
        raise Exited

    path = tmp_path / "recipe.py"
    path.write_text("import torch\nraise torch.OutOfMemoryError('CUDA out of memory')\n")
    monkeypatch.setattr("os._exit", exit_process)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.argv", [])
    with pytest.raises(Exited):
        processes.run_recipe(str(path), [])
    error = capsys.readouterr().err
    assert error.strip().count("\n") == 0 and error.strip().startswith("error: ") and "Traceback" not in error


@pytest.mark.parametrize("code", [-9, 137])
def test_killed_process(capsys, code):
    """The message names host memory as the usual reason."""
    assert processes.explain_exit(code, 1) == 137
    message = capsys.readouterr().err
    assert "process 1 failed first (exit code 137): it was killed" in message and "memory was full" in message
