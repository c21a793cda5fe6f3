"""RunTrainer: what a run overrides in the trainer that a recipe has made, of whatever class."""

import contextlib
import functools
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.compat.guards import changes
from harness.compat.trl import logged_metrics
from harness.data.reading import too_few_steps
from harness.data.streams import StreamPosition
from harness.folder import step_of
from harness.messages import UserError, print_once
from harness.run.checkpoints import Checkpoints, WeightsOfModel, load_converted
from harness.run.generation import order_by_epoch, writes_answers
from harness.run.losses import AgreedReader, Loss, Means, changed, check_unit, read_equally
from harness.run.marker import read_marker
from harness.run.progress import Progress
from harness.run.sharding import HiddenBuffers, show_saved_buffers
from harness.run.stopping import StopAfterSignal, StoppedInEvaluation

import torch
from accelerate.utils import OPTIMIZER_NAME
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemReader
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, SchedulerType, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput
from trl import DistillationConfig


@dataclass
class Parts:
    """What a run adds to a trainer, and what is known only before the model is sharded."""

    checkpoint: Path | None  # that the run resumes from
    resumed_from: int  # its step, 0 for a new run
    loss: Loss
    hidden: HiddenBuffers
    parameters: tuple[int, int]  # how many are trained, and how many there are
    position: StreamPosition
    reader: AgreedReader
    progress: Progress
    checkpoints: Checkpoints
    stop: StopAfterSignal


class TrainerPrecision:
    """The precision in which a run computes; `--plan` simulates with it too."""

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager:
        """Sharded 4-bit models compute under autocast in bf16, without autocast's cache of weights.

        accelerate enters autocast for bf16, but also makes FSDP cast all weights, which destroys packed 4-bit ones; so bf16 is
        off for these models, and autocast with it. The cache would keep a copy of every gathered adapter until the end of the
        pass.
        """
        if self.is_fsdp_enabled and getattr(self.model, "is_loaded_in_4bit", False):
            return torch.autocast(self.args.device.type, torch.bfloat16, cache_enabled=False)
        return super().autocast_smart_context_manager(*args, **kwargs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Computes what some trainers generate here in the precision of the training.

        accelerate has put autocast around the forward pass of the outermost module only, and `generate` of an adapter calls
        another.
        """
        with self.accelerator.autocast(), self.autocast_smart_context_manager():
            return super()._prepare_inputs(inputs)


class RunTrainer(TrainerPrecision):
    """A trainer with the `parts` of a run.

    | method here, and of the library | who calls it | when |
    |---|---|---|
    | get_train_dataloader, create_scheduler | Trainer.train | once, before the first step |
    | _load_from_checkpoint, _load_optimizer_and_scheduler | Trainer.train | before the first step, if the run resumes |
    | get_batch_samples | Trainer.train | before each step |
    | _prepare_inputs | training_step, prediction_step | for each micro-batch, of training and evaluation |
    | compute_loss, autocast_smart_context_manager | training_step, prediction_step | then |
    | log | Trainer.train, Trainer.evaluate | at every log of training and evaluation |
    | _evaluate, _determine_best_metric | Trainer.train | when an evaluation is due |
    | get_eval_dataloader, evaluation_loop | Trainer.evaluate | for each evaluation dataset |
    | prediction_step | evaluation_loop | for each batch of it |
    | _save_checkpoint | Trainer.train | when a checkpoint is due |
    | _load_best_model | Trainer.train | after the last step |
    """

    parts: Parts
    is_first_step = True
    means: Means | None = None  # of the evaluation that is going on
    may_leave_evaluation = False  # after a signal: it is one of the training

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        if writes_answers(self):
            order_by_epoch(loader)
        return keep_workers_after_sigterm(self.parts.position.divide(loader))

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        fit_schedule(self.args, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *model: Any) -> None:
        """transformers loads with `strict=False`: weights whose names `save_pretrained` has converted would stay as they are."""
        show_saved_buffers(self.parts.hidden)
        if not load_converted(self.model, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, *model)  # that of SentenceTransformerTrainer takes no model

    def _load_best_model(self) -> None:
        show_saved_buffers(self.parts.hidden)
        if not load_converted(self.model, Path(self.state.best_model_checkpoint)):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        """torch requires a state of every sharded weight that is trained, but one without a gradient until then has none.

        A part of a model is never used, or only for some rows. torch makes no state for a frozen weight.
        """
        sharded = Path(checkpoint, f"{OPTIMIZER_NAME}_0")
        without = []
        if sharded.is_dir():
            saved = FileSystemReader(sharded).read_metadata().state_dict_metadata
            with_state = {name.rpartition(".")[0] for name in saved}
            for name, weight in self.model.named_parameters():
                plain_name = name.replace("_checkpoint_wrapped_module.", "")  # of activation checkpointing
                if weight.requires_grad and f"optimizer.state.{plain_name}" not in with_state:
                    without.append(weight.requires_grad_(False))
        super()._load_optimizer_and_scheduler(checkpoint)
        for weight in without:
            weight.requires_grad_(True)

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

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        if self.means is not None and isinstance(self.args, DistillationConfig):
            self.means.answer_tokens = prepared["completion_mask"].sum()
        return prepared

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
        check_unit(self, loss, tokens)
        if tokens is not None:
            # A mean over no token is NaN, and FSDP needs all processes to compute. The host does not read the number: it would
            # wait for the GPU.
            is_empty = tokens == 0
            inputs = inputs | {name: inputs[name].masked_fill(is_empty, 0) for name in {"labels", "shift_labels"} & inputs.keys()}
        count = labels.ne(-100).sum().clamp(min=1) if loss.own and labels is not None else None
        # Otherwise transformers multiplies it by the number of processes, and passes the number to the model.
        with changed(self.args, "average_tokens_across_devices", False), changed(self, "model_accepts_loss_kwargs", False):
            found = super().compute_loss(model, inputs, num_items_in_batch=count, **options)
        value, *outputs = found if return_outputs else [found]
        if self.model.training:
            value = loss.share_of_step(self, value, tokens, num_items_in_batch)
        if tokens is not None:
            value = value * ~is_empty
        if return_outputs:
            return (value, *outputs)
        return value

    def log(self, logs: dict, *args: Any, **kwargs: Any) -> None:
        """A callback gets the logs after the state, and after the trackers, which were added first."""
        # Not a copy: the best checkpoint may be chosen by what SFTTrainer adds to it.
        logs.update(self.parts.progress.log_fields(logs))
        super().log(logs, *args, **kwargs)

    def get_eval_dataloader(self, *args: object, **kwargs: object) -> DataLoader:
        loader = super().get_eval_dataloader(*args, **kwargs)
        # Of several answers to a prompt TRL's loader keeps the groups together.
        is_of_transformers = getattr(super().get_eval_dataloader, "__func__", None) is Trainer.get_eval_dataloader
        has_single_rows = getattr(self.args, "num_generations_eval", 0) == 1 or isinstance(self.args, DistillationConfig)
        return keep_workers_after_sigterm(read_equally(self, loader) if is_of_transformers or has_single_rows else loader)

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

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float] | None:
        """An evaluation of the training. After a signal it is left, with a checkpoint as if it had not begun; then it is None.

        The resumed run makes it. Raises StoppedInEvaluation if there is nothing to save: before the first step of this start.
        """
        self.may_leave_evaluation = True
        logged = len(self.state.log_history)  # several evaluation datasets log one after the other
        with tempfile.TemporaryDirectory() as random_numbers:
            self._save_rng_state(random_numbers)
            try:
                return super()._evaluate(*args, **kwargs)
            except StoppedInEvaluation:
                self.means = None
                if self.state.global_step == self.parts.reader.saved_step:
                    raise
                del self.state.log_history[logged:]
                logged_metrics(self).get("eval", {}).clear()  # of its batches, which TRL would log at the end of the run
                self._load_rng_state(random_numbers)
                self.control.should_training_stop = True
                self.control.should_save = self.args.save_strategy != "no"
                return None
            finally:
                self.may_leave_evaluation = False

    def _determine_best_metric(self, metrics: dict[str, float] | None, trial: Any) -> bool:
        """Saves at the best evaluation. transformers saves at save_steps only, and the model of the last step at the end."""
        if metrics is None:  # the evaluation was left
            return self.control.should_save
        is_new_best = super()._determine_best_metric(metrics, trial)
        if is_new_best and self.args.load_best_model_at_end:
            self.control.should_save = True
        return is_new_best

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.parts.checkpoints.before_save(Path(self.args.output_dir, f"checkpoint-{self.state.global_step}"))
        super()._save_checkpoint(model, trial)

    def load_best_checkpoint(self) -> None:
        """Loads the weights of the best checkpoint with `load_best_model_at_end`.

        `Trainer.train` does so only after it has trained a step, which a run that was killed after its last step does not.
        """
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            self._load_best_model()

    def evaluate_step(self) -> None:
        """Evaluates as `Trainer.train` does: also for a scheduler that depends on the loss, and for the best checkpoint.

        At the step of a checkpoint, so that nothing is saved.
        """
        if super()._determine_best_metric(metrics=self._evaluate(None, None), trial=None):
            self.state.best_model_checkpoint = str(Path(self.args.output_dir, f"checkpoint-{self.state.global_step}"))


def add_parts(
    trainer: Trainer,
    weights: WeightsOfModel,
    parameters: tuple[int, int],
    group: ProcessGroup | None = None,
    checkpoint: Path | None = None,
    original: PreTrainedConfig | None = None,
    loss: Loss | None = None,
    hidden: HiddenBuffers = (),
) -> Parts:
    """Makes a trainer a `RunTrainer` that resumes from `checkpoint`, None for a new run; returns its parts."""
    limit = trainer.args.save_total_limit
    trainer.args.save_total_limit = None  # `Checkpoints` deletes old ones
    progress = Progress(trainer, read_marker(checkpoint)["progress"] if checkpoint else {})
    position = StreamPosition(trainer, checkpoint)
    resumed_from = step_of(checkpoint) if checkpoint else 0
    trainer.parts = Parts(
        checkpoint,
        resumed_from,
        loss or Loss(),
        hidden,
        parameters,
        position,
        AgreedReader(trainer, group, position, resumed_from),
        progress,
        Checkpoints(trainer, progress, weights, limit, original),
        StopAfterSignal(trainer, group),
    )
    add_overrides(trainer, RunTrainer)
    return trainer.parts


@changes(
    "transformers:Trainer.get_train_dataloader(self)",
    "transformers:Trainer.get_eval_dataloader(self, eval_dataset)",
    "transformers:Trainer.get_batch_samples(self, epoch_iterator, num_batches, device)",
    "transformers:Trainer._get_num_items_in_batch(self, batch_samples, device)",
    "transformers:Trainer.log(self, logs, start_time)",
    "transformers:Trainer.autocast_smart_context_manager(self, cache_enabled)",
    "transformers:Trainer._prepare_inputs(self, inputs)",
    "transformers:Trainer._save_checkpoint(self, model, trial)",
    "transformers:Trainer._load_from_checkpoint(self, resume_from_checkpoint, model)",
    "transformers:Trainer._load_best_model(self)",
    "transformers:Trainer._load_optimizer_and_scheduler(self, checkpoint)",
    "transformers:Trainer._save_rng_state(self, output_dir)",
    "transformers:Trainer._load_rng_state(self, checkpoint)",
    "transformers:Trainer._evaluate(self, trial, ignore_keys_for_eval, skip_scheduler)",
    "transformers:Trainer._determine_best_metric(self, metrics, trial)",
)
def add_overrides(trainer: Any, overrides: type[TrainerPrecision]) -> None:
    """Puts the methods of `overrides` in front of those of a trainer that a recipe has made, of whatever class.

    The documented way is a subclass of Trainer, but recipes choose the class.
    Upstream: no issue found for hooks between reading the batches of a step and the gather of their tokens, before a save, and
    for autocast without a mixed precision policy of FSDP.
    Checked with: transformers 5.23.0, accelerate 1.15.0.
    Remove when: TrainerCallback has events for them.
    """
    own = type(trainer)
    # Methods that a recipe has set on the trainer itself would hide those of the class.
    names = vars(trainer).keys() & {*dir(overrides)}
    methods = {name: staticmethod(vars(trainer).pop(name)) for name in names}
    of_recipe = type(own.__name__, (own,), methods) if methods else own
    trainer.__class__ = type(f"Run{own.__name__}", (overrides, of_recipe), {"__module__": own.__module__})


def fit_schedule(args: TrainingArguments, steps: int) -> None:
    """Prints what is wrong with so many optimizer steps, and shortens the warmup of a short run.

    The only step is none of it, and a share does not take half of the steps: transformers rounds it up, and the first learning
    rate of a warmup is 0.
    """
    if steps == 1:
        args.warmup_steps = 0
    elif args.warmup_steps < 1 and 2 * args.get_warmup_steps(steps) >= steps:
        args.warmup_steps = int(args.warmup_steps * steps)
    few = too_few_steps(steps)
    if few and args.max_steps <= 0:  # they follow from the rows
        print_once(f"warning: {few}")
    if args.lr_scheduler_type == SchedulerType.WARMUP_STABLE_DECAY:
        phases = {"num_stable_steps": 0, "num_decay_steps": 0} | (args.lr_scheduler_kwargs or {})
        end = args.get_warmup_steps(steps) + phases["num_stable_steps"] + phases["num_decay_steps"]
        if end > steps or (phases["num_stable_steps"] and end < steps):
            print_once(f"warning: --lr_scheduler_kwargs: the phases of the schedule have {end} steps, the run has {steps}")


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
