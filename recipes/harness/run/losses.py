"""The loss: what it is a mean of, how micro-batches add up to a step, and evaluations, whose means do not depend on the batch."""

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness import folder
from harness.compat.trl import logged_metrics
from harness.data.images import ImageCollator
from harness.data.streams import StreamPosition
from harness.hub import temporary_failure
from harness.launched import OUT_OF_TIME
from harness.messages import HubLost, UserError, print_once
from harness.run.generation import trains_on_rewards
from harness.run.metrics import evaluation_losses, logged_by_evaluations
from harness.run.progress import size_of
from harness.run.sharding import base_of
from harness.run.stopping import maximum

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object
from datasets import IterableDataset
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl import DPOConfig, KTOConfig, SFTTrainer

# Metrics that are means over tokens, and over which; all others are means over rows.
OVER = {"entropy": "tokens", "mean_token_accuracy": "chosen", "logits/chosen": "chosen", "logits/rejected": "rejected"}
READ_AHEAD = 16  # steps of a stream at most; a step of 16,000 tokens has 1 MB


@dataclass
class Loss:
    """What the loss of a trainer is a mean of.

    TRL's trainers make the loss of a step such a mean themselves (`is_right`). Any other loss of a micro-batch is a mean over its
    tokens or rows: `share_of_step` weighs it, with any accumulation and number of processes.
    """

    own: str | None = None  # what computes it of the model's outputs; None: the model itself, or SFTTrainer without them
    unit: str = "row"  # or "token" (that has a label)
    is_right: bool = True
    shifts_labels: bool = False  # a token predicts the next one: the first label of a row is not in the loss
    is_cross_entropy: bool = False  # the mean negative log-likelihood of tokens, and nothing else
    is_of_library: bool = False  # transformers or TRL computes it, no code of the recipe

    def labels(self, batch: Any) -> torch.Tensor | None:
        """The labels in the loss, as transformers counts them; None for a batch without a tensor of labels."""
        labels = batch.get("shift_labels", batch.get("labels")) if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor):
            return None
        is_shifted = self.shifts_labels and "shift_labels" not in batch
        if is_shifted:
            return labels[..., 1:]
        return labels

    def tokens(self, batch: Any) -> torch.Tensor | None:
        """How many tokens of a batch have a label; None if no token has one, but each row, or none."""
        labels = self.labels(batch)
        if labels is None or labels.dim() < 2:
            return None
        return labels.ne(-100).sum()

    def share_of_step(self, trainer: Trainer, loss: torch.Tensor, tokens: torch.Tensor | None, of_step: Any) -> torch.Tensor:
        """What a micro-batch adds to the loss of its step. Of processes, the gradients are averaged, and losses in logs.

        `tokens` and `of_step`: those in the loss of the micro-batch, and of the step on all processes.
        """
        if self.unit == "row" or tokens is None or of_step is None:
            return loss / trainer.current_gradient_accumulation_steps
        return loss * (tokens * trainer.args.world_size / of_step)


def prepare_loss(trainer: Trainer) -> Loss:
    """Finds out what the loss of a trainer is a mean of, and keeps transformers from scaling it where `share_of_step` does.

    transformers 5.23 takes the loss of every model whose `forward` has **kwargs, of a `compute_loss_func` and of a
    `compute_loss` of the recipe's own for a sum that was divided by the tokens of the step. Most classifiers, encoder-decoders
    and masked language models return a mean instead, and so do many losses of recipes: their loss and gradients would be
    multiplied by the accumulation steps. A trainer whose class sets `loss_is_scaled_for_ga` scales its loss itself.
    Raises UserError for a loss whose steps would depend on the micro-batch.
    """
    check_loss_of_pairs(trainer)
    model = base_of(trainer.accelerator.unwrap_model(trainer.model))
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    loss = Loss(own_loss(trainer), is_cross_entropy=is_cross_entropy(trainer))
    is_of_sft = loss.own is None and isinstance(trainer, SFTTrainer)
    loss.is_of_library = is_of_sft or (loss.own is None and is_of_transformers(model))
    is_causal = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
    loss.shifts_labels = is_of_sft or (is_causal and not is_encoder_decoder)
    is_over_rows = trainer.loss_is_scaled_for_ga is False or getattr(trainer, "loss_is_mean_over", None) == "rows"
    loss.unit = "row" if is_over_rows or trains_on_rewards(trainer) else "token"
    loss.is_right = is_of_sft or trainer.loss_is_scaled_for_ga is not None
    if is_of_sft or not loss.is_right:
        trainer.model_accepts_loss_kwargs = True  # so that transformers counts the tokens of a step
    if not loss.is_right:
        trainer.loss_is_scaled_for_ga = True
    return loss


def check_loss_of_pairs(trainer: Trainer) -> None:
    """Raises UserError for a loss of pairs of which a part is a mean over tokens: a step would depend on the micro-batch.

    Prints a warning for a loss that compares the rows of a micro-batch with each other, as KTO does.
    """
    args = trainer.args
    sizes = (args.per_device_train_batch_size, args.per_device_eval_batch_size)
    if isinstance(args, DPOConfig) and "sft" in args.loss_type and sizes != (1, 1):
        raise UserError(
            "--loss_type sft is a mean over the tokens of a micro-batch, the others are means over its pairs, so a step would "
            "depend on the micro-batch: pass --per_device_train_batch_size 1 --per_device_eval_batch_size 1"
        )
    kinds = args.loss_type if isinstance(args, DPOConfig | KTOConfig) else []
    if "kto" in kinds or "aot" in kinds or "aot_unpaired" in kinds:
        print_once(
            "warning: --loss_type: this loss compares the rows of a micro-batch with each other. It depends on "
            "--per_device_train_batch_size, and that of an evaluation on --per_device_eval_batch_size and the number of processes"
        )


def check_unit(trainer: Trainer, loss: Loss, tokens: torch.Tensor | None) -> None:
    """Raises UserError for a loss of tokens that may be a mean over them or over rows: steps could be weighed wrongly."""
    if tokens is None:
        loss.unit = "row"
    elif not loss.is_of_library and getattr(trainer, "loss_is_mean_over", None) not in ("tokens", "rows"):
        raise UserError(
            f"{loss.own or type(trainer.model).__name__}: is the loss of a micro-batch the mean over its tokens or its rows? Set "
            'loss_is_mean_over = "tokens" or "rows" in the class of the trainer, or on the trainer before train(). A sum that is '
            "divided by num_items_in_batch is a mean over tokens"
        )


def own_loss(trainer: Trainer) -> str | None:
    """What computes the loss of the model's outputs; None if the model itself does, or SFTTrainer, which needs no outputs."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    compute_loss = getattr(trainer.compute_loss, "__func__", trainer.compute_loss)
    if compute_loss in (Trainer.compute_loss, SFTTrainer.compute_loss):
        return None
    return "compute_loss"


def is_cross_entropy(trainer: Trainer) -> bool:
    """Whether the loss is certainly the mean negative log-likelihood of tokens.

    It is not with DPO, classifiers, DFT, label smoothing and a loss of the recipe's own, which could add anything to it.
    """
    args = trainer.args
    model = base_of(trainer.accelerator.unwrap_model(trainer.model))
    if own_loss(trainer) or args.label_smoothing_factor or "nll" not in getattr(args, "loss_type", "nll"):
        return False
    if isinstance(trainer, SFTTrainer):
        return True
    adds_router_loss = getattr(getattr(model, "config", None), "output_router_logits", False)
    is_causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return is_of_transformers(model) and is_causal and not adds_router_loss


def is_of_transformers(model: torch.nn.Module) -> bool:
    """Whether the loss that a model returns is computed by transformers' own code."""
    return type(model).forward.__module__.startswith("transformers.")


@contextlib.contextmanager
def changed(holder: Any, name: str, value: Any) -> Iterator[None]:
    """In this context, `value` is the attribute `name` of `holder`."""
    before = getattr(holder, name, None)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def evaluate(trainer: Trainer) -> dict[str, float]:
    """The evaluation of the model that is saved, {} without evaluation rows."""
    if trainer.eval_dataset is None:
        return {}
    logged = logged_by_evaluations(trainer.state.log_history, step_of_saved_model(trainer))
    if evaluation_losses(logged):
        return logged
    return trainer.evaluate()


def step_of_saved_model(trainer: Trainer) -> int:
    """The last step, or that of the best checkpoint with `load_best_model_at_end`."""
    best = trainer.state.best_model_checkpoint
    if best and trainer.args.load_best_model_at_end:
        return folder.step_of(Path(best))
    return trainer.state.global_step


class EvaluationBatches(list[range]):
    """The evaluation rows of a process: in each step as many as the others have, and no row twice.

    accelerate completes the last batch with the first rows, which would count twice. Here the last rows, fewer than processes,
    are batches of all processes (`shared`): then means are right, whether a trainer gathers them or not.
    """

    def __init__(self, rows: int, size: int, processes: int, process: int) -> None:
        first = 0
        while rows - first >= processes:
            count = min(size, (rows - first) // processes)
            start = first + process * count
            self.append(range(start, start + count))
            first += processes * count
        steps = len(self)
        for start in range(first, rows, size):
            self.append(range(start, min(start + size, rows)))
        self.shared = range(steps, len(self))


def read_equally(trainer: Trainer, loader: DataLoader) -> DataLoader:
    """A loader of `EvaluationBatches` for one of transformers; a stream's as it is."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset | IterableDataset):
        return loader
    args = trainer.args
    batches = EvaluationBatches(len(loader.dataset), args.eval_batch_size, args.world_size, args.process_index)
    names = ("collate_fn", "num_workers", "pin_memory", "prefetch_factor", "multiprocessing_context")
    divided = DataLoader(loader.dataset, batch_sampler=batches, **{name: getattr(loader, name) for name in names})
    return prepare_data_loader(
        divided,
        device=trainer.accelerator.device,
        num_processes=1,  # it is divided already
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
        non_blocking=trainer.accelerator.non_blocking,
    )


class Sizes(NamedTuple):
    """The weight of a batch's loss, and those of its metrics: scalars of a batch, or tensors of all batches."""

    weight: torch.Tensor
    rows: torch.Tensor
    tokens: torch.Tensor
    chosen: torch.Tensor  # of pairs the tokens of the chosen answers and of the rejected ones; else all tokens
    rejected: torch.Tensor


class Means:
    """The loss and TRL's metrics of an evaluation as means over its tokens or rows.

    transformers and TRL log the mean over batches, in which the tokens of a short batch count more.
    """

    def __init__(self, trainer: Trainer, loader: DataLoader) -> None:
        self.trainer = trainer
        sampler = getattr(loader, "batch_sampler", None)
        self.batches = sampler if isinstance(sampler, EvaluationBatches) else None
        self.steps: list[torch.Tensor] = []  # the loss of each batch, and its `Sizes`
        self.answer_tokens: torch.Tensor | None = None  # of the last batch, if the trainer writes the answers itself
        self.gather_all = trainer.gather_function

    def sizes(self, batch: Any) -> Sizes:
        """What `add` needs of the next batch; before its loss is computed, which may change the batch."""
        loss = self.trainer.parts.loss
        count = len(self.batches[len(self.steps)]) if self.batches else size_of(batch)[0]
        rows = torch.tensor(float(count), device=self.trainer.accelerator.device)
        tokens = loss.tokens(batch)
        if isinstance(self.trainer.args, DPOConfig):  # the chosen answers first
            chosen, rejected = (mask.sum() for mask in batch["completion_mask"][:, 1:].chunk(2))
            return Sizes(rows, rows, chosen + rejected, chosen, rejected)
        if tokens is None:
            tokens = rows
        return Sizes(rows if loss.unit == "row" else tokens, rows, tokens, tokens, tokens)

    def add(self, sizes: Sizes, loss: torch.Tensor | None) -> None:
        if self.answer_tokens is not None:
            sizes = sizes._replace(weight=self.answer_tokens, tokens=self.answer_tokens)
        value = torch.full((), torch.nan) if loss is None else loss.detach().mean()
        device = self.trainer.accelerator.device
        self.steps.append(torch.stack([number.to(device, torch.float32) for number in (value, *sizes)]))

    def gather(self, data: Any, **options: Any) -> Any:
        """Gathers predictions, those of a shared batch from one process."""
        is_shared = self.batches is not None and len(self.steps) - 1 in self.batches.shared
        if is_shared:
            return data
        return self.gather_all(data, **options)

    def finish(self) -> float | None:
        """The mean loss, None without a batch; makes TRL's metrics such means too. Collective."""
        if not self.steps:
            return None
        accelerator = self.trainer.accelerator
        gathered = accelerator.gather(torch.stack(self.steps)[None]).cpu().double()
        losses, *numbers = gathered.unbind(-1)  # by process and step
        sizes = Sizes(*numbers)
        if self.batches:
            for size in sizes:
                size[:, self.batches.shared] /= accelerator.num_processes
        metrics = logged_metrics(self.trainer).get("eval", {})
        for name, values in metrics.items():
            of_batches = torch.tensor(values, dtype=torch.double)
            is_number = ~of_batches.isnan()  # it is NaN for a batch of which a function gives no reward, or without variance
            counts = getattr(sizes, OVER.get(name, "rows")).sum(0)
            if len(of_batches) != len(counts):
                continue
            counts = counts[is_number]
            if counts.sum():
                metrics[name] = [float(counts @ of_batches[is_number] / counts.sum())]
        total = torch.where(sizes.weight > 0, losses * sizes.weight, 0).sum()
        return float(total / sizes.weight.sum())


def print_best_checkpoint(trainer: Trainer) -> None:
    """Prints which evaluation chose the weights that are saved, with `load_best_model_at_end`."""
    state = trainer.state
    if not trainer.args.load_best_model_at_end:
        return
    if state.best_model_checkpoint:
        best = f"{trainer.args.metric_for_best_model} {state.best_metric:.4f}"
        print_once(f"The saved model is that of step {step_of_saved_model(trainer)}, the best one: {best}.")
    else:
        print_once("warning: no checkpoint has an evaluation, so the saved model is that of the last step, not the best one")


Step = tuple[list[dict], dict[int, dict]]  # micro-batches, and the states of a stream after them


@dataclass(eq=False)
class AgreedReader(TrainerCallback):
    """Reads a step on all processes, or on none if one of them lost the Hub or met a row of a stream that it cannot read.

    Then all stop, with a checkpoint if there is progress to save. A stream is read ahead, in a thread, so that no GPU waits for
    the tokenizer: packing takes many documents at once.
    """

    trainer: Trainer
    group: ProcessGroup | None
    position: StreamPosition
    saved_step: int  # of the last checkpoint
    steps: queue.Queue[Step | BaseException] | None = None  # that were read ahead
    error: str = ""  # why this process cannot read
    exit_code: int = 0  # of the run, if one of the processes cannot read

    @property
    def is_stream(self) -> bool:
        return isinstance(self.trainer.train_dataset, IterableDataset)

    def next_step(self, iterator: Iterator, count: int) -> Step:
        """`count` micro-batches. `iterator`: of the trainer's loader, without those that a resumed run was trained on.

        A stream is read from its own loader, which starts where the run was stopped. Errors of the thread are raised here.
        """
        if not self.is_stream:
            return self._read(iterator, count)
        if self.steps is None:
            # A step of sixteen images of a megapixel has 400 MB.
            self.steps = queue.Queue(1 if isinstance(self.trainer.data_collator, ImageCollator) else READ_AHEAD)
            # It does not keep the process from exiting.
            threading.Thread(target=self._read_ahead, args=(count,), name="read ahead", daemon=True).start()
        step = self.steps.get()
        if isinstance(step, BaseException):
            raise step
        return step

    def _read(self, iterator: Iterator, count: int) -> Step:
        batches = list(itertools.islice(iterator, count))
        return batches, self.position.states_after_next_step()

    def _read_ahead(self, count: int) -> None:
        """Reads all steps."""
        try:
            iterator = iter(self.position.loader)
            for _ in range(self.trainer.state.max_steps - self.trainer.state.global_step):
                self.steps.put(self._read(iterator, count))
        except BaseException as error:
            self.steps.put(error)

    def read(self, iterator: Iterator, count: int) -> list[dict]:
        """The micro-batches of the next step, [] on all processes if one of them has none. Collective."""
        batches = []
        states = {}
        code = 0
        try:
            batches, states = self.next_step(iterator, count)
        except Exception as error:
            reason = str(error) if isinstance(error, HubLost) else temporary_failure(error)  # the latter of `datasets`
            if not self.is_stream or not (reason or isinstance(error, UserError)):
                raise
            self.error = reason or str(error)
            code = OUT_OF_TIME if reason else 2
        self.exit_code = maximum(code, self.group) if self.is_stream else 0
        if self.exit_code:
            self.trainer.control.should_training_stop = self.trainer.control.should_log = True
            return []
        self.position.states = states
        return batches

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.saved_step = state.global_step

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """transformers ends the epoch when the run stops. Then nothing is evaluated, and saved only what is not saved yet."""
        if self.exit_code:
            control.should_evaluate = False
            control.should_save = args.save_strategy != "no" and state.global_step > self.saved_step

    def report_stop(self) -> int:
        """The exit code, after one message from all processes, if one of them could not read; else 0. Collective."""
        if not self.exit_code:
            return 0
        reason = max(gather_object([self.error]), key=len)
        kind = hint = ""
        if self.exit_code != OUT_OF_TIME:  # a file that was mended has changed, so the same command would be refused
            kind = "error: "
        elif self.saved_step:
            hint = f" The same command resumes from step {self.saved_step}."
        print_once(f"\n{kind}Stopped at step {self.trainer.state.global_step}: {reason}.{hint}")
        return self.exit_code
