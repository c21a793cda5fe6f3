"""A run resumes from its newest complete checkpoint as if it had not been interrupted."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

from harness import folder
from harness.messages import UserError
from harness.run import checkpoints, marker

import pytest
import torch
import transformers
from conftest import ROOT, slow
from peft import LoraConfig, get_peft_model
from runs import SHORT, begin_at, fewer_processes, has_same_weights, history, losses, read, train
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import save
from trl import SFTTrainer

RECIPE = "qwen2_fineweb_edu"


def test_run_killed_after_its_last_step(rehearse, fork_launch, workdir):
    """It trains no other step, and saves the best model: here that of the first checkpoint, as a high learning rate does harm."""
    flags = ["--max_steps", "4", "--save_steps", "2", "--eval_steps", "2", "--eval_on_start", "false"]
    flags += ["--load_best_model_at_end", "true", "--learning_rate", "3"]
    uninterrupted = rehearse(RECIPE, "1x3090_offload", *flags)
    run = workdir / "runs/killed-before-the-best"
    shutil.copytree(uninterrupted, run)
    for name in ("train_results.json", "model.safetensors"):
        (run / name).unlink()
    process = fork_launch("--tiny", RECIPE, "1x3090_offload", "--output_dir", run, *flags)
    assert process.returncode == 0, process.stderr
    results = read(run)
    assert (results["global_step"], results["resumed_from_step"]) == (4, 4) and losses(run) == losses(uninterrupted)
    assert results["tokens"] > 0 and results["train_runtime"] > 0  # from before the kill
    assert results["eval_loss"] == read(uninterrupted)["eval_loss"] and has_same_weights(run, uninterrupted)


def test_best_evaluation_has_a_checkpoint(fork_launch, workdir):
    """Also between two saves. If it is deleted, the best one from then on is chosen. Here the best is the first.

    The resumed run logs as often as it is told to, not as the run did before, and transformers' warning about that is hidden.
    """
    run = workdir / "runs/best-between-saves"
    flags = ["--save_steps", "4", "--eval_steps", "2", "--load_best_model_at_end", "true", "--learning_rate", "3"]
    flags += ["--output_dir", run, "--eval_on_start", "false"]
    process = fork_launch("--tiny", RECIPE, "1x3090", *flags, "--max_steps", "4", "--logging_steps", "0.5")
    assert process.returncode == 0 and "The saved model is that of step 2" in process.stdout, process.stderr
    evaluations = [log["eval_loss"] for log in history(run, "eval_loss")]
    assert len(evaluations) == 2 and read(run)["eval_loss"] == evaluations[0] < evaluations[1]

    shutil.rmtree(run / "checkpoint-2")
    process = fork_launch("--tiny", RECIPE, "1x3090", *flags, "--max_steps", "6", "--logging_steps", "0.1")
    assert process.returncode == 0 and "do not match" not in process.stderr, process.stderr
    assert "The saved model is that of step 6" in process.stdout
    assert list(losses(run)) == [1, 2, 4, 5, 6]


@pytest.mark.parametrize(("recipe", "config"), [("llama31_70b_qlora", "2x3090_qlora"), ("llama31_8b_lora", "4gpu_full_shard")])
def test_resumed_equals_uninterrupted(rehearse, fork_launch, workdir, recipe, config):
    """From the checkpoint in the middle of a finished run: the second half logs the same losses, bit for bit."""
    uninterrupted = rehearse(recipe, config)
    middle = min(uninterrupted.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    files = {path.relative_to(middle).as_posix() for path in middle.rglob("*") if path.is_file()}
    assert {*read(middle, "complete.json")["files"]} == files - {"complete.json"}, "those of both processes"
    run = begin_at(middle, workdir / "runs" / f"resumed-{recipe}")
    process = fork_launch("--tiny", recipe, config, "--output_dir", run, *SHORT, **fewer_processes(config))
    assert process.returncode == 0, process.stderr
    assert read(run)["resumed_from_step"] == 4
    assert losses(run) == losses(uninterrupted)
    for name in ("train_loss", "eval_loss_on_start", "eval_loss"):  # of the whole run
        assert read(run)[name] == read(uninterrupted)[name]
    assert [log["step"] for log in history(run, "eval_loss")] == [0, 6]


@pytest.mark.parametrize("config", ["4gpu_ddp", "4gpu_full_shard"])
def test_resumed_model_with_unused_layers(rehearse, fork_launch, workdir, config):
    """A part gets no gradient, is frozen or not, and the names in an unsharded checkpoint are not those in the model."""
    script, flags = ROOT / "tests/run/unused_layers.py", ["--max_steps", "4", "--save_steps", "2", "--logging_steps", "1"]
    uninterrupted = rehearse(script, config, *flags)
    run = begin_at(uninterrupted / "checkpoint-2", workdir / f"runs/unused-{config}")
    process = fork_launch("--tiny", script, config, "--output_dir", run, *flags, **fewer_processes(config))
    assert process.returncode == 0 and "in the checkpoint" not in process.stderr, process.stderr
    assert read(run)["resumed_from_step"] == 2
    assert losses(run) == losses(uninterrupted) and len(losses(run)) == 4
    assert has_same_weights(run, uninterrupted)


def test_resumed_fp16_run_equals_uninterrupted(rehearse, fork_launch, workdir):
    """With a real gradient scaler: the same losses, scales and skipped steps, and the same weights, bit for bit."""
    script, config = ROOT / "tests/run/overflow_in_fp16.py", "3xt4_shard_grad_op"
    flags = ["--max_steps", "6", "--save_steps", "3", "--logging_steps", "1", "--eval_strategy", "no"]
    uninterrupted = rehearse(script, config, *flags, NPROC_PER_NODE="2")
    run = begin_at(uninterrupted / "checkpoint-3", workdir / "runs/resumed-fp16")
    process = fork_launch("--tiny", script, config, "--output_dir", run, *flags, NPROC_PER_NODE="2")
    assert process.returncode == 0 and read(run)["resumed_from_step"] == 3, process.stderr

    def steps_of(run):
        return [[entry[name] for name in ("loss", "grad_norm", "loss_scale", "learning_rate")] for entry in history(run)]

    expected = steps_of(uninterrupted)
    assert steps_of(run) == expected
    assert [math.isinf(norm) for _, norm, *_ in expected] == [True, True, False, False, True, False]
    assert [scale / 2**20 for _, _, scale, _ in expected] == [1 / 2, 1 / 4, 1 / 4, 1 / 2, 1 / 4, 1 / 4]
    for file in ("checkpoint-6/scaler.pt", "checkpoint-6/scheduler.pt", "model.safetensors"):
        assert (run / file).read_bytes() == (uninterrupted / file).read_bytes(), file


@pytest.mark.parametrize(
    ("before", "processes", "streaming"),
    [(1, 2, "true"), (2, 1, "false"), pytest.param(4, 2, "true", marks=slow)],
    ids=["stream", "memory", "stream of four"],
)
def test_resume_on_other_number_of_processes(rehearse, fork_launch, workdir, before, processes, streaming):
    """One process resumes as two, two as one, four as two: the same global batches in float32 give the same losses."""
    flags = ["--max_steps", "4", "--save_steps", "2", "--logging_steps", "1", "--eval_strategy", "no", "--max_length", "64"]
    flags += ["--per_device_train_batch_size", "1", "--global_batch_size", "4", "--dataset_streaming", streaming]
    flags += ["--bf16", "false", "--learning_rate", "3e-3"]
    uninterrupted = rehearse(RECIPE, "4gpu_full_shard", *flags, NPROC_PER_NODE=str(before))
    run = begin_at(uninterrupted / "checkpoint-2", workdir / f"runs/{before}-on-{processes}")
    process = fork_launch("--tiny", RECIPE, "4gpu_full_shard", "--output_dir", run, *flags, NPROC_PER_NODE=str(processes))
    assert process.returncode == 0 and "warning" not in process.stdout, process.stdout + process.stderr
    results = read(run)
    assert (results["resumed_from_step"], results["world_size"], results["global_batch_size"]) == (2, processes, 4)
    expected = losses(uninterrupted)
    assert losses(run).keys() == expected.keys()
    for step, (loss, grad_norm) in losses(run).items():
        assert loss == pytest.approx(expected[step][0], abs=1e-4), step
        assert grad_norm == pytest.approx(expected[step][1], rel=1e-3), step


@pytest.mark.parametrize(
    ("now", "is_stream", "message"),
    [
        ({"processes": 2, "per_device_train_batch_size": 4}, False, ""),
        ({"processes": 2}, False, "rows of a step 16 (was 32)"),
        ({"processes": 8}, True, ""),
        ({"max_length": 64, "seed": 1}, True, "max_length 64 (was 32), seed 1 (was 0)"),
    ],
)
def test_warnings_compare_rows(tmp_path, capsys, monkeypatch, now, is_stream, message):
    """Steps of two rows in each of four micro-batches on four processes, then of as many rows or not."""
    saved = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_length": 32, "packing": True, "seed": 0}
    state = SimpleNamespace(num_processes=4)
    monkeypatch.setattr(checkpoints, "PartialState", lambda: state)
    checkpoint = tmp_path / "checkpoint-3"
    marker.begin_writing(checkpoint)
    marker.write_marker(checkpoint, {"row_settings": checkpoints.row_settings(SimpleNamespace(**saved)), "files": {"a": [0, ""]}})
    state.num_processes = now.pop("processes", 4)
    checkpoints.print_changed_rows(checkpoint, SimpleNamespace(**saved | now), is_stream)
    printed = capsys.readouterr().out
    assert message in printed and bool(printed) == bool(message)


SMALL = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def small_model(**changes) -> torch.nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(num_key_value_heads=2, **SMALL | changes))


@pytest.fixture(params=["plain", "sharded", "adapter"])
def saved_model(request, tmp_path):
    """A checkpoint of a model, and a function that makes it with changes."""

    def make(alpha=8, **changes):
        model = small_model(tie_word_embeddings=True, **changes)
        settings = LoraConfig(target_modules=["q_proj"], lora_alpha=alpha)
        return get_peft_model(model, settings) if request.param == "adapter" else model

    model, checkpoint = make(), tmp_path / "checkpoint-1"
    marker.begin_writing(checkpoint)
    if request.param == "sharded":
        save({"model": model.state_dict()}, checkpoint_id=checkpoint / folder.SHARDED)
    else:
        model.save_pretrained(checkpoint)
    trained = checkpoints.WeightsOfModel(model).trained
    marker.write_marker(checkpoint, {"files": {"a": [0, ""]}, "trained": trained})
    return checkpoint, make


def test_weights_of_another_model_are_refused(saved_model, error_of):
    checkpoint, make = saved_model

    def problem(model):
        return error_of(checkpoints.check_saved_weights, checkpoint, checkpoints.WeightsOfModel(model))

    checkpoints.check_saved_weights(checkpoint, checkpoints.WeightsOfModel(make()))
    assert "another shape" in problem(make(hidden_size=16))
    assert "it lacks " in problem(make(num_hidden_layers=3))
    frozen = make()
    next(weight for weight in frozen.parameters() if weight.requires_grad).requires_grad_(False)
    assert "the run trained other ones" in problem(frozen)
    assert "--output_dir: " in problem(make(num_hidden_layers=1))
    assert not hasattr(frozen, "peft_config") or "lora_alpha 8, this one 16" in problem(make(16))


@pytest.mark.parametrize(
    ("is_adapter", "left_out"), [(True, "all"), (True, "one"), (True, "the file"), (False, "all"), (False, "one")]
)
def test_checkpoint_without_what_was_trained_is_not_complete(build_trainer, monkeypatch, is_adapter, left_out):
    """As adapters that are saved empty or in part: the run ends at its first save, before the completion marker."""
    flags = ["--max_steps", "2", "--save_steps", "1", "--eval_strategy", "no", "--max_length", "32"]
    trainer = build_trainer("qwen2_chat", *flags, *(["--use_peft"] if is_adapter else []))
    save = SFTTrainer._save

    def save_in_part(self, output_dir=None, state_dict=None):
        save(self, output_dir, state_dict)
        (path,) = Path(output_dir).glob("*.safetensors")
        saved = load_file(path)
        path.unlink()
        if left_out != "the file":
            save_file({} if left_out == "all" else {name: saved[name] for name in sorted(saved)[1:]}, path)

    monkeypatch.setattr(SFTTrainer, "_save", save_in_part)
    with pytest.raises(RuntimeError, match="does not have the weights that were trained"):
        train(trainer)
    assert folder.newest_complete_checkpoint(Path(trainer.args.output_dir)) is None


def test_names_that_save_pretrained_converts(tmp_path):
    """Experts are one weight in the model, and in the files one each."""

    def make(**sizes):
        config = transformers.Qwen3MoeConfig(num_key_value_heads=2, num_experts=2, moe_intermediate_size=8, **SMALL | sizes)
        return transformers.Qwen3MoeForCausalLM(config)

    saved, model = make(), make()
    saved.save_pretrained(tmp_path)
    assert not checkpoints.WeightsOfModel(model).problem(tmp_path)
    assert checkpoints.load_converted(model, tmp_path)
    for name, weight in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    with pytest.raises(RuntimeError, match="lacks weights"):
        checkpoints.load_converted(make(num_hidden_layers=1), tmp_path)
    assert checkpoints.WeightsOfModel(make(num_hidden_layers=3)).problem(tmp_path)


def test_callback_continues_with_its_state(build_trainer):
    """No evaluation is better than the first one, at step 1, so the run stops at step 4, also if it was interrupted at step 2."""
    flags = ["--max_steps", "6", "--save_steps", "1", "--eval_steps", "1", "--eval_on_start", "false", "--max_length", "32"]
    flags += ["--learning_rate", "1e-12", "--load_best_model_at_end", "true", "--save_total_limit", "9"]

    def build():
        trainer = build_trainer("qwen2_chat", *flags)
        trainer.callback_handler.callbacks.insert(0, transformers.EarlyStoppingCallback(early_stopping_patience=3))
        return trainer, Path(trainer.args.output_dir)

    whole, run = build()
    train(whole)
    resumed, other_run = build()
    for step in (1, 2):
        shutil.copytree(run / f"checkpoint-{step}", other_run / f"checkpoint-{step}")
    train(resumed)
    assert whole.state.global_step == resumed.state.global_step == 4
    callbacks = [[type(callback) for callback in trainer.callback_handler.callbacks] for trainer in (whole, resumed)]
    assert callbacks[0] == callbacks[1]


def test_checkpoint_with_nan_is_not_complete(build_trainer, monkeypatch):
    """The weights became NaN in a run without logs: it stops before the checkpoint gets its completion marker."""
    flags = ["--max_steps", "2", "--save_steps", "1", "--logging_strategy", "no", "--logging_first_step", "false"]
    trainer = build_trainer("qwen2_chat", *flags, "--eval_strategy", "no")
    next(trainer.model.parameters()).data[0] = float("nan")
    with pytest.raises(UserError, match="NaN or infinite at step 1: try a lower --learning_rate"):
        train(trainer)
    assert Path(trainer.args.output_dir, "checkpoint-1").is_dir()
    assert folder.newest_complete_checkpoint(Path(trainer.args.output_dir)) is None


def flip_bit(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def copied_run(rehearse, tmp_path):
    """A copy of a run with two checkpoints that is not finished, and the original."""
    original = rehearse("qwen2_chat", "1x3090")
    run = tmp_path / "run"
    shutil.copytree(original, run, ignore=shutil.ignore_patterns("train_results.json"))
    return run, original


def test_losses_after_damage_are_those_of_uninterrupted_run(copied_run, fork_launch):
    run, uninterrupted = copied_run
    flip_bit(run / "checkpoint-6/optimizer.pt")
    (run / "damaged-checkpoint-6").mkdir()  # an earlier one
    (run / "checkpoint-8").mkdir()  # as a kill during a save leaves it
    (run / "checkpoint-8/writing").touch()
    process = fork_launch("--tiny", "qwen2_chat", "1x3090", "--output_dir", run, *SHORT)
    assert process.returncode == 0 and "damaged: optimizer.pt was changed" in process.stdout, process.stderr
    assert "checkpoint-8 is incomplete" in process.stdout
    assert read(run)["resumed_from_step"] == 4 and losses(run) == losses(uninterrupted)
    assert len(list(run.glob("damaged-checkpoint-6-*/optimizer.pt"))) == 1
    model = (run / "model.safetensors").read_bytes()
    assert model == (uninterrupted / "model.safetensors").read_bytes()


def test_nothing_is_changed_if_no_checkpoint_is_complete(copied_run, error_of):
    run, _ = copied_run
    for path in run.glob("checkpoint-*"):
        (path / "scheduler.pt").unlink()
    before = sorted(run.rglob("*"))
    assert error_of(checkpoints.recover_checkpoints, SimpleNamespace(output_dir=str(run))).startswith("--output_dir: ")
    assert sorted(run.rglob("*")) == before


def test_there_are_never_more_checkpoints_than_the_limit(build_trainer, monkeypatch):
    """Even while one is written."""
    trainer = build_trainer("qwen2_chat", "--max_steps", "3", "--save_steps", "1", "--eval_strategy", "no", "--max_length", "64")
    run, seen, write = Path(trainer.args.output_dir), [], SFTTrainer._save_checkpoint

    def save(*arguments):
        seen.append(sorted(path.name for path in run.glob("checkpoint-*")))
        write(*arguments)

    monkeypatch.setattr(SFTTrainer, "_save_checkpoint", save)
    train(trainer)
    assert seen == [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"], ["checkpoint-2", "checkpoint-3"]]
    assert folder.newest_complete_checkpoint(run) == run / "checkpoint-3"


@pytest.mark.parametrize(("limit", "kept"), [(2, 1), (3, 2), (0, 4), (None, 4)])
def test_save_total_limit(tmp_path, limit, kept):
    """Before a checkpoint is written, older ones are deleted, but not the best one. 0, negative or None: all are kept."""
    args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=limit)
    for step in (0, 1, 2, 3, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    state = SimpleNamespace(best_model_checkpoint="somewhere/checkpoint-0")
    trainer = SimpleNamespace(args=args, state=state, model=torch.nn.Linear(1, 1))
    checkpoints.Checkpoints(trainer, None, None, limit, None)._delete_old(tmp_path / "checkpoint-5")
    assert [folder.step_of(path) for path in folder.checkpoints(tmp_path)] == [*[4, 3, 2, 1][:kept], 0]


@pytest.mark.parametrize(
    ("saved", "used"),
    [("elsewhere/checkpoint-2", "run/checkpoint-2"), ("elsewhere/checkpoint-3", None), ("elsewhere", None), (None, None)],
)
def test_best_checkpoint_is_in_the_output_directory(tmp_path, saved, used):
    """The state of a resumed run can name another folder: where the run was, or one that someone else has written."""
    for path in ("elsewhere/checkpoint-2", "elsewhere/checkpoint-3", "run/checkpoint-2"):
        (tmp_path / path).mkdir(parents=True)
    args = SimpleNamespace(output_dir=str(tmp_path / "run"), save_total_limit=None)
    trainer = SimpleNamespace(args=args, model=torch.nn.Linear(1, 1))
    state = transformers.TrainerState(best_model_checkpoint=saved and str(tmp_path / saved))
    args = transformers.TrainingArguments(use_cpu=True)
    checkpoints.Checkpoints(trainer, None, None, None, None).on_train_begin(args, state, None)
    assert state.best_model_checkpoint == (used and str(tmp_path / used))


@pytest.mark.parametrize("file", ["scheduler.pt", "rng_state_1.pth"])
def test_nodes_agree_if_one_sees_damage(tmp_path, monkeypatch, capsys, file):
    """The second of two nodes sees a damaged checkpoint: in a file that the first one writes, or in its own."""
    for path in [tmp_path / f"{rank}/run/checkpoint-{step}" for rank in range(2) for step in (4, 8)]:
        path.mkdir(parents=True)
        for name in ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
            (path / name).write_text(name)
        marker.begin_writing(path)
        marker.write_marker(path, {"progress": {}, "files": marker.sync_files(path, lambda name: True)})
    flip_bit(tmp_path / "1/run/checkpoint-8" / file)
    of_second = []
    process = SimpleNamespace(num_processes=2, is_local_main_process=True, wait_for_everyone=lambda: None)
    monkeypatch.setattr(checkpoints, "PartialState", lambda: process)
    monkeypatch.setattr(checkpoints, "broadcast_object_list", lambda values: values)
    # The first node sees no damage itself; it comes after the second one here, and gets its answers in the same order.
    gathers = {1: lambda values: of_second.extend(values) or ["", *values], 0: lambda values: [*values, of_second.pop(0)]}
    for rank, gather in gathers.items():
        monkeypatch.chdir(tmp_path / str(rank))
        monkeypatch.setattr(checkpoints, "gather_object", gather)
        process.process_index, process.is_main_process = rank, rank == 0
        assert checkpoints.recover_checkpoints(SimpleNamespace(output_dir="run")) == Path("run/checkpoint-4")
    assert f"checkpoint-8 is damaged: {file} was changed. It was renamed" in capsys.readouterr().out
    assert Path("run/damaged-checkpoint-8").is_dir() and not of_second


def test_best_metric_of_sft_trainer(rehearse):
    """SFTTrainer adds it to the metrics of an evaluation while it logs them."""
    flags = ["--metric_for_best_model", "mean_token_accuracy", "--max_steps", "4", "--eval_steps", "2"]
    state = read(rehearse("qwen2_chat", "1x3090", *flags), "trainer_state.json")
    assert 0 <= state["best_metric"] < 1 and state["best_global_step"]
