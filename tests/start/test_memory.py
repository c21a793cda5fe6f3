"""Out of memory is one line: the moment, the step, the peak, the flags that help."""

import sys

from harness.run import export
from harness.start import memory, processes, worker

import pytest
import torch

ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
RECIPE = "qwen2_fineweb_edu"


def runs_out(*args, **kwargs):
    raise torch.OutOfMemoryError(*ERROR.args)  # a new one, for errors remember where they were


@pytest.mark.parametrize(
    ("flags", "moment", "helps"),
    [
        ([], "loss", ["forward pass ran in step 1.", "--activation_checkpointing true", "--per_device_train_batch_size 1"]),
        (["--activation_checkpointing"], "backward", ["backward pass ran in step 1.", "_size 1 or the config 1x3090_offload"]),
        ([], "optimizer", ["optimizer stepped in step 1.", "the config 1x3090_offload or --use_peft --learning_rate 2e-4"]),
        ([], "clipping", ["gradients were clipped in step 1.", "the config 1x3090_offload or --use_peft"]),
        ([], "batch", ["a step was prepared in step 1."]),
        (
            ["--eval_steps", "1"],
            "evaluation",
            ["evaluated after step 1.", "_eval_batch_size 1 or the config"],
        ),
        (
            ["--save_steps", "1", "--use_peft"],
            "checkpoint",
            ["checkpoint was saved after step 1.", "offload or --load_in_4bit"],
        ),
    ],
)
def test_the_line_names_moment_and_flags(build_trainer, monkeypatch, flags, moment, helps):
    trainer = build_trainer(RECIPE, "--max_steps", "2", "--per_device_eval_batch_size", "2", *flags)
    if moment == "loss":
        monkeypatch.setattr(trainer.model, "forward", runs_out)
    elif moment == "backward":
        monkeypatch.setattr(torch.Tensor, "backward", runs_out)
    elif moment == "optimizer":
        monkeypatch.setattr(torch.optim.AdamW, "step", runs_out)
    elif moment == "clipping":
        monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", runs_out)
    elif moment == "batch":
        monkeypatch.setattr(trainer, "get_batch_samples", runs_out)
    elif moment == "evaluation":
        monkeypatch.setattr(trainer, "prediction_step", runs_out)
    else:
        monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", runs_out)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    line = memory._line(raised.value)
    for words in ["ran out of memory while", *helps]:
        assert words in line, line


def test_loading_and_samples(build_trainer, monkeypatch):
    trainer = build_trainer(RECIPE)
    monkeypatch.setattr(trainer.model, "generate", runs_out)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        export.sample(trainer, True)
    assert "while the samples were made. " in memory._line(raised.value)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", runs_out)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        build_trainer("gpt2_xl_wikitext")
    assert "while the model was loaded. " in memory._line(raised.value)


def test_the_peak_is_that_of_the_gpu(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for name, value in {
        "is_available": True,
        "current_device": 0,
        "max_memory_allocated": 21.7e9,
        "max_memory_reserved": 23e9,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("T4", (), {"total_memory": 24e9}))
    assert "process 1: the GPU (24.0 GB; peak 21.7 GB, 23.0 GB reserved) ran out" in memory._line(ERROR)
    assert "process 1: the host ran out" in memory._line(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))


def test_a_recipe_that_runs_out_ends_in_one_line(tmp_path, monkeypatch, capsys):
    class Ended(BaseException):
        pass

    def leave(code):
        assert code == memory.EXIT_CODE
        raise Ended

    path = tmp_path / "recipe.py"
    path.write_text("import torch\nraise torch.OutOfMemoryError('CUDA out of memory')\n")
    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.argv", [])
    with pytest.raises(Ended):
        worker.recipe(str(path), [])
    error = capsys.readouterr().err
    assert error.strip().count("\n") == 0 and error.strip().startswith("error: ") and "Traceback" not in error


@pytest.mark.parametrize("code", [-9, 137])
def test_a_killed_process_points_to_host_memory(capsys, code):
    assert processes.ended(code, 1) == 137
    assert "process 1 failed first (exit code 137): it was killed, most often by the kernel" in capsys.readouterr().err
