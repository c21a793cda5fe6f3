"""Everything between a built trainer and a finished run."""

import os
from pathlib import Path

from harness import folder
from harness.data.streams import fill_last_step, repeat_stream
from harness.launched import end_run, record_end
from harness.messages import UserError, print_once
from harness.model.quantized import install_byte_check
from harness.run.checkpoints import print_changed_rows, recover_checkpoints, restore_callbacks
from harness.run.disk import check_disk_space
from harness.run.evaluation import evaluate, print_best_checkpoint
from harness.run.failures import exit_for_known_failure, explain_missing_weights, only_report, only_report_if_all
from harness.run.generation import RewardsOfSteps, check_prompts, trains_on_rewards, writes_answers
from harness.run.held_out import has_held_out, save_held_out
from harness.run.losses import Loss, prepare_loss
from harness.run.parameters import freeze_unused_parts
from harness.run.profile import Profile
from harness.run.progress import replace_progress_bar
from harness.run.prompts import describe_rows
from harness.run.publishing import publish
from harness.run.results import print_summary, write_results
from harness.run.samples import generate_samples
from harness.run.saving import load_original_config, save_model, set_base_revision, write_model_card
from harness.run.sharded_files import check_sharded_files
from harness.run.sharding import AfterWrapping, compile_layers, prepare_gradient_scaler, prepare_sharding
from harness.run.stopping import (
    LastStepReached,
    MissedEvaluation,
    StopAtLastStep,
    StopIfUnchanged,
    StopOnNan,
    StoppedInEvaluation,
    make_cpu_group,
    make_group_for_failures,
)
from harness.run.trainer import RunTrainer, add_parts
from harness.run.weights import WeightsOfModel, check_saved_weights
from harness.runs import Run
from harness.signals import record_signal, set_signal_handler

import torch
from datasets import Dataset, IterableDataset
from torch.distributed import ProcessGroup
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput
from trl import DistillationConfig, DPOConfig, KTOConfig, RewardConfig


def run_training(trainer: Trainer, run: Run) -> None:
    """Resumes or starts, trains, evaluates, saves a model that `from_pretrained` loads, and reports.

    Args:
        trainer: a `transformers.Trainer` or `trl.SFTTrainer`, as built; `trainer.args.output_dir` is the run's folder.
        run: how it was started.

    Raises:
        UserError: for what the user can fix, also if the loss is NaN.
        RuntimeError: if the run is not sharded as its config says, or if sharding changed 4-bit weights.
    """
    try:
        prepare_training(trainer, run)
        for_failures = make_group_for_failures()  # not after the training, where it could fail
        output = train_steps(trainer)
        finish_training(trainer, run, output, for_failures)
    except UserError:
        raise
    except Exception as error:
        exit_for_known_failure(error, trainer)
        raise


def prepare_training(trainer: Trainer, run: Run) -> None:
    """Makes a trainer, whose model is not sharded yet, ready to start or to resume: a `RunTrainer` with callbacks."""
    report_dropped_rows(trainer)
    freeze_unused_parts(trainer)
    check_trainer(trainer)
    hidden = prepare_sharding(trainer, run.config)
    loss = prepare_loss(trainer)
    prepare_trainer(trainer, loss)
    group = make_cpu_group(trainer.args.ddp_timeout)
    checkpoint = recover_checkpoints(trainer.args)
    prepare_resume(trainer, checkpoint)
    if run.seen and writes_answers(trainer):
        options = {"chat_template_kwargs": trainer.args.chat_template_kwargs}
        run.seen.prompt |= describe_rows(trainer.train_dataset) | options
    if run.seen and trainer.is_world_process_zero():
        folder.write_json(Path(trainer.args.output_dir, folder.PROMPT), run.seen.prompt)
    parts = add_parts(trainer, group, checkpoint, load_original_config(trainer), loss, hidden)
    trained, total = parts.parameters
    print_once(f"Training {trained:,} of {total:,} parameters ({trained / total:.2%}).")
    set_signal_handler(record_signal)  # until now a signal ends the process: there is nothing to save
    for callback in callbacks_of(trainer, run):
        trainer.add_callback(callback)


def callbacks_of(trainer: RunTrainer, run: Run) -> list[TrainerCallback]:
    """The callbacks of a run, in the order in which they get each event: checks, saves, stops, measurements.

    So a checkpoint with NaN in it gets no completion marker, the marker lists the file of the position, and the time of a step
    that is saved or logged because of a signal is counted.
    """
    parts = trainer.parts
    checks = [AfterWrapping(trainer, run.config, run.processes, parts.loss, parts.hidden), StopOnNan()]
    # Without a reward, which RewardsOfSteps reports, no weight changes.
    checks.append(RewardsOfSteps(trainer) if trains_on_rewards(trainer) else StopIfUnchanged())
    saves = [parts.position, parts.reader, parts.checkpoints]
    stops = [parts.stop, MissedEvaluation(trainer, parts.resumed_from), StopAtLastStep()]
    measurements = [parts.progress, Profile()] if run.profile else [parts.progress]
    return [*checks, *saves, *stops, *measurements]


def train_steps(trainer: RunTrainer) -> TrainOutput | None:
    """Trains to the last step; returns None if there was none left. Ends the process if the run stops earlier."""
    parts = trainer.parts
    output = None
    if parts.checkpoint:
        print_once(f"Resuming from {parts.checkpoint}; rows that were trained on are skipped.")
    try:
        output = trainer.train(resume_from_checkpoint=str(parts.checkpoint) if parts.checkpoint else None)
    except StoppedInEvaluation:
        pass  # `report_stop` has the exit code
    except LastStepReached:
        trainer.is_in_train = False
        trainer.load_best_checkpoint()
    except KeyboardInterrupt:
        print_once(f"\nStopped at step {trainer.state.global_step}. {folder.resume_hint(Path(trainer.args.output_dir))}")
        record_end(130)
        os._exit(130)  # other processes may never reach the end of a collective
    code = parts.reader.report_stop() or parts.stop.report_stop()
    parts.stop.group = parts.reader.group = None  # `Trainer.end` destroys it: what still refers to it would do so again
    if code:
        trainer.end()
        end_run(code)
    return output


def finish_training(trainer: RunTrainer, run: Run, output: TrainOutput | None, for_failures: ProcessGroup | None) -> None:
    """Saves the model; then evaluates it, and writes and prints the results: an error there makes no run fail."""
    output_dir = Path(trainer.args.output_dir)
    is_first = trainer.is_world_process_zero()
    print_best_checkpoint(trainer)
    save_model(trainer, trainer.parts.checkpoints.original)
    evaluation: dict[str, float] = {}
    with only_report_if_all("the last evaluation", for_failures):
        evaluation = evaluate(trainer)
    folder.remove_link(output_dir / TRAINER_STATE_NAME)
    trainer.save_state()
    with only_report("what --verify compares with"):
        if is_first and has_held_out(trainer):
            save_held_out(trainer, run.seen.conversations if run.seen else [])
    results = write_results(trainer, output, evaluation)
    with only_report("README.md"):
        write_model_card(trainer)
    with only_report_if_all("samples.txt", for_failures):
        generate_samples(trainer, run.tiny)
    with only_report("the summary"):
        print_summary(results, str(output_dir))
    if run.repository and not run.tiny and is_first:
        publish(output_dir, run.repository)  # meanwhile, no other process waits for this one
    if run.lock:
        run.lock.release()


def check_trainer(trainer: Trainer) -> None:
    """Raises UserError for a run that would reach its end and be wrong, or fail long after its start."""
    if not any(weight.requires_grad for weight in trainer.model.parameters()):
        raise UserError(
            "no parameter of the model is trained: an adapter that PeftModel.from_pretrained loads needs is_trainable=True, and "
            "requires_grad_(False) leaves nothing to train"
        )
    if writes_answers(trainer):
        check_prompts(trainer)
    for name, other in vars(trainer).items():  # such as ref_model, or the teacher of a recipe's own trainer
        is_other = isinstance(other, torch.nn.Module) and name not in ("model", "model_wrapped")
        if is_other and any(weight.is_meta for weight in other.parameters()):
            raise UserError(explain_missing_weights(name))


def report_dropped_rows(trainer: Trainer) -> None:
    """Prints how many of the rows that `load` has returned a trainer does not use, for example because they are too long.

    TRL's trainers for pairs drop rows, and so do recipes with DistillationTrainer. For others a recipe tokenizes, and may make
    several rows of one, or one of several.
    """
    args = trainer.args
    if not isinstance(args, DPOConfig | KTOConfig | RewardConfig | DistillationConfig):
        return
    summary = folder.read_json(Path(args.output_dir, folder.DATA))
    for kind, rows, key in (
        ("training", trainer.train_dataset, "loaded_rows"),
        ("evaluation", trainer.eval_dataset, "loaded_eval_rows"),
    ):
        missing = summary.get(key, 0) - len(rows) if isinstance(rows, Dataset) else 0
        if missing > 0:
            print_once(
                f"warning: {missing:,} of {summary[key]:,} {kind} rows are not used: the recipe or the trainer has dropped them "
                "(see --max_length)."
            )


def prepare_trainer(trainer: Trainer, loss: Loss) -> None:
    """Changes of a trainer that do not depend on a checkpoint."""
    set_base_revision(trainer)
    compile_layers(trainer)
    if trainer.is_fsdp_enabled:
        install_byte_check(trainer.model)
    repeat_stream(trainer)
    fill_last_step(trainer, with_empty_rows=loss.is_of_library)
    replace_progress_bar(trainer)
    # The default waits, for each tensor of a batch, until the GPU has computed everything that was queued before.
    trainer.accelerator.dataloader_config.non_blocking = True


def prepare_resume(trainer: Trainer, checkpoint: Path | None) -> None:
    """Prints what is different from the run that wrote the checkpoint. Raises UserError if this run cannot continue it."""
    if checkpoint:
        check_sharded_files(checkpoint)
        check_saved_weights(checkpoint, WeightsOfModel(trainer.accelerator.unwrap_model(trainer.model)))
        restore_callbacks(trainer, checkpoint)
        print_changed_rows(checkpoint, trainer.args, isinstance(trainer.train_dataset, IterableDataset))
        trainer.args.eval_on_start = False  # the state of the checkpoint has that evaluation
    check_disk_space(trainer)
    prepare_gradient_scaler(trainer)
