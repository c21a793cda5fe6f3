"""RunTrainer: what a run overrides in the trainer that a recipe has made, of whatever class."""

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import folder
from harness.compat.transformers import TrainerWithHooks, add_overrides
from harness.compat.trl import logged_metrics
from harness.data.streams import StreamPosition, fill_last_step, repeat_stream
from harness.folder import step_of
from harness.launched import end_run, record_end, record_signal, set_signal_handler
from harness.messages import UserError, print_once
from harness.model.quantized import install_byte_check
from harness.run.checkpoints import Checkpoints, check_disk_space, print_changed_rows, recover_checkpoints, restore_callbacks
from harness.run.evaluation import AgreedReader, Means, evaluate, print_best_checkpoint, read_equally
from harness.run.failures import exit_for_known_failure, only_report, only_report_if_all
from harness.run.generation import RewardsOfSteps, check_prompts, order_by_epoch, trains_on_rewards, writes_answers
from harness.run.held_out import has_held_out, save_held_out
from harness.run.losses import Loss, changed, check_unit, prepare_loss
from harness.run.marker import read_marker
from harness.run.parameters import WeightsOfModel, check_saved_weights, count_parameters, freeze_unused_parts, load_converted
from harness.run.progress import Profile, Progress, replace_progress_bar
from harness.run.prompts import describe_rows
from harness.run.results import print_summary, write_results
from harness.run.samples import answer_before, generate_samples
from harness.run.saving import load_original_config, publish, save_model, set_base_revision, write_model_card
from harness.run.schedule import fit_schedule
from harness.run.sharded_files import check_sharded_files
from harness.run.sharding import (
    AfterWrapping,
    HiddenBuffers,
    compile_layers,
    prepare_gradient_scaler,
    prepare_sharding,
    show_saved_buffers,
)
from harness.run.stopping import (
    LastStepReached,
    MissedEvaluation,
    StopAfterSignal,
    StopAtLastStep,
    StopIfUnchanged,
    StopOnNan,
    StoppedInEvaluation,
    make_cpu_group,
    make_group_for_failures,
)
from harness.runs import Run

import torch
from datasets import Dataset, IterableDataset
from torch.distributed import ProcessGroup
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from trl import DistillationConfig, DPOConfig, KTOConfig, RewardConfig


@dataclass
class Parts:
    """What a run adds to a trainer, and what is known only before the model is sharded."""

    checkpoint: Path | None  # that the run resumes from
    position: StreamPosition
    reader: AgreedReader
    progress: Progress
    checkpoints: Checkpoints
    stop: StopAfterSignal
    loss: Loss
    hidden: HiddenBuffers
    parameters: tuple[int, int]  # how many are trained, and how many there are

    @property
    def resumed_from(self) -> int:
        """The step of the checkpoint."""
        if self.checkpoint:
            return step_of(self.checkpoint)
        return 0


class RunTrainer(TrainerWithHooks):
    """A trainer with the `parts` of a run."""

    parts: Parts
    is_first_step = True
    means: Means | None = None  # of the evaluation that is going on

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        if writes_answers(self):
            order_by_epoch(loader)
        return keep_workers_after_sigterm(self.parts.position.divide(loader))

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        fit_schedule(self.args, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def get_eval_dataloader(self, *args: object, **kwargs: object) -> DataLoader:
        loader = super().get_eval_dataloader(*args, **kwargs)
        # Of several answers to a prompt TRL's loader keeps the groups together.
        is_of_transformers = getattr(super().get_eval_dataloader, "__func__", None) is Trainer.get_eval_dataloader
        has_single_rows = getattr(self.args, "num_generations_eval", 0) == 1 or isinstance(self.args, DistillationConfig)
        return keep_workers_after_sigterm(read_equally(self, loader) if is_of_transformers or has_single_rows else loader)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple:
        """The loss of a micro-batch as its share of the step's loss, in an evaluation the mean of the batch; see `Loss`."""
        loss = self.parts.loss
        options = {"return_outputs": True} if return_outputs else {}
        if loss.is_right:
            # DistillationTrainer calls a part of the model, around which accelerate has put no autocast.
            is_partial = isinstance(self.args, DistillationConfig)
            with self.accelerator.autocast() if is_partial else contextlib.nullcontext():
                return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **options)
        labels = loss.labels(inputs)  # before the loss takes them out
        tokens = loss.tokens(inputs)
        is_empty = tokens is not None and not int(tokens)
        check_unit(self, loss, tokens)
        if is_empty:  # a mean over no token is NaN, and FSDP needs all processes to compute
            inputs = inputs | {name: inputs[name].clamp(min=0) for name in ("labels", "shift_labels") if name in inputs}
        count = labels.ne(-100).sum().clamp(min=1) if loss.own and labels is not None else None
        # Otherwise transformers multiplies it by the number of processes, and passes the number to the model.
        with changed(self.args, "average_tokens_across_devices", False), changed(self, "model_accepts_loss_kwargs", False):
            found = super().compute_loss(model, inputs, num_items_in_batch=count, **options)
        value, *outputs = found if return_outputs else [found]
        if is_empty:
            value = value * 0
        elif self.model.training:
            value = loss.share_of_step(self, value, tokens, num_items_in_batch)
        if return_outputs:
            return (value, *outputs)
        return value

    def evaluation_loop(
        self, dataloader: DataLoader, *args: Any, metric_key_prefix: str = "eval", **options: Any
    ) -> EvalLoopOutput:
        """transformers logs the mean of the means of batches, and counts the rows that complete the last batch."""
        self.means = Means(self, dataloader)
        # The loss of a router depends on which rows are in a batch together.
        with changed(self, "gather_function", self.means.gather), changed(self, "aux_loss_enabled", False):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **options)
        loss = self.means.finish()
        self.means = None
        if f"{metric_key_prefix}_loss" in output.metrics:
            output.metrics[f"{metric_key_prefix}_loss"] = loss
        return output

    def prediction_step(self, model: torch.nn.Module, inputs: dict, *args: object, **kwargs: object) -> tuple:
        sizes = self.means.sizes(inputs)  # before the loss takes the labels out
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        self.means.add(sizes, loss)
        return loss, logits, labels

    def see_inputs(self, inputs: Any) -> None:
        if self.means is not None and isinstance(self.args, DistillationConfig):
            self.means.answer_tokens = inputs["completion_mask"].sum()

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list[dict], Any]:
        """transformers lets an exception of the data loader end one process, while the others wait for its number of tokens.

        Raises UserError, on all processes, if no token of the first step counts in the loss.
        """
        batches = self.parts.reader.read(epoch_iterator, num_batches)  # none on one process: none on all of them
        loss_tokens = self._get_num_items_in_batch(batches, device)  # gathered from all processes
        if self.is_first_step and batches and loss_tokens is not None and not int(loss_tokens):
            raise UserError(
                "no token of the first step counts in the loss: either the answers begin after --max_length tokens, or nothing "
                "is marked as an answer. ./launch.sh --preview shows the rows"
            )
        self.is_first_step = False
        self.parts.progress.count(batches, loss_tokens)
        if loss_tokens is not None:
            loss_tokens = loss_tokens.clamp(min=1)  # of a step without any: its loss is 0, and 0 / 0 would be NaN
        return batches, loss_tokens

    def log(self, logs: dict, *args: Any, **kwargs: Any) -> None:
        """A callback gets the logs after the state, and after the trackers, which were added first."""
        # Not a copy: the best checkpoint may be chosen by what SFTTrainer adds to it.
        logs.update(self.parts.progress.log_fields(logs))
        super().log(logs, *args, **kwargs)

    def evaluate_unless_stopped(self, evaluate: Callable, restore_random_numbers: Callable) -> dict[str, float] | None:
        """Leaves the evaluation after a signal, with a checkpoint as if it had not begun: the resumed run makes it.

        Raises StoppedInEvaluation if there is nothing to save: before the first step of this start.
        """
        self.is_evaluation_left = True
        logged = len(self.state.log_history)  # several evaluation datasets log one after the other
        try:
            return evaluate()
        except StoppedInEvaluation:
            self.means = None
            if self.state.global_step == self.parts.reader.saved_step:
                raise
            del self.state.log_history[logged:]
            logged_metrics(self).get("eval", {}).clear()  # of its batches, which TRL would log at the end of the run
            restore_random_numbers()
            self.control.should_training_stop = True
            self.control.should_save = self.args.save_strategy != "no"
            return None
        finally:
            self.is_evaluation_left = False

    def load_weights(self, checkpoint: Path) -> bool:
        show_saved_buffers(self.parts.hidden)
        return load_converted(self.model, checkpoint)

    def before_checkpoint(self, checkpoint: Path) -> None:
        self.parts.checkpoints.before_save(checkpoint)


def add_parts(
    trainer: Trainer,
    group: ProcessGroup | None,
    checkpoint: Path | None,
    original: PreTrainedConfig | None = None,
    loss: Loss | None = None,
    hidden: HiddenBuffers | None = None,
) -> Parts:
    """Makes a trainer a `RunTrainer` that resumes from `checkpoint`, None for a new run; returns its parts."""
    progress = Progress(trainer, read_marker(checkpoint)["progress"] if checkpoint else {})
    position = StreamPosition(trainer, checkpoint)
    trainer.parts = Parts(
        checkpoint,
        position,
        AgreedReader(trainer, group, position),
        progress,
        Checkpoints(trainer, progress, original),
        StopAfterSignal(trainer, group),
        loss or Loss(),
        hidden or [],
        count_parameters(trainer.model),
    )
    trainer.parts.reader.saved_step = trainer.parts.resumed_from
    add_overrides(trainer, RunTrainer)
    return trainer.parts


def keep_workers_after_sigterm(loader: DataLoader) -> DataLoader:
    """Makes the workers of a loader ignore SIGTERM. They still exit with the process that started them.

    A worker exits when it gets SIGTERM, and then torch raises RuntimeError in the training process, at any line. So a SIGTERM to
    a whole process group would end a run before it can write its checkpoint.
    """
    base = getattr(loader, "base_dataloader", loader)  # accelerate's loader contains torch's
    base.worker_init_fn = functools.partial(_ignore_sigterm, base.worker_init_fn)
    return loader


def _ignore_sigterm(initialize: Callable[[int], None] | None, worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if initialize:
        initialize(worker)


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
        before = answer_before(trainer, run.tiny)
        output = train_steps(trainer)
        finish_training(trainer, run, output, for_failures, before)
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


def finish_training(
    trainer: RunTrainer, run: Run, output: TrainOutput | None, for_failures: ProcessGroup | None, before: list[str]
) -> None:
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
        generate_samples(trainer, run.tiny, before)
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
            raise UserError(
                f"only the first process has the weights of {name}: set fsdp_cpu_ram_efficient_loading: false in a copy of the "
                "config"
            )


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
