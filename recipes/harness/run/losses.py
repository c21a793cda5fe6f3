"""What the loss of a trainer is a mean of. The loss itself is asked: it is computed with a few rows, before the first step."""

import contextlib
import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.compat.trl import logged_metrics
from harness.exchange import value_of_first
from harness.messages import UserError, print_once
from harness.run.parameters import base_of

import numpy
import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import send_to_device
from transformers import Trainer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl import DistillationConfig, SFTTrainer

SEARCHED_ROWS = 1_000  # of the training data, in which to look for TRIED_ROWS that have a token in the loss
TRIED_ROWS = 8  # of which two are chosen to ask for the unit
# How far two losses may be from each other, as a share, and count as equal: the same batch again, and the same rows in other
# batches, whose matrix products round otherwise.
SAME_BATCH, OTHER_BATCH = 1e-3, 5e-3


@dataclass
class Loss:
    """How the loss of a batch follows from those of its tokens or rows, and what makes the loss of a step of micro-batches.

    Where the trainers of TRL compute it, nothing has to be corrected (`is_right`). For all others, `count_for` and `scale` make
    the loss of a step the mean over its tokens or rows, with any accumulation and number of processes.
    """

    own: str | None = None  # what computes it of the model's outputs; None: the model itself, or SFTTrainer without them
    unit: str = "token"  # "token" (that has a label) or "row": what the loss of a batch is the mean over
    is_mean: bool = True  # False: of neither; it is taken for one over rows
    is_right: bool = True
    divides: bool = False  # by `num_items_in_batch`; otherwise it is the mean over its batch
    factor: float = 1  # by which it is multiplied because of `average_tokens_across_devices`
    shifts_labels: bool = False  # a token predicts the next one: the first label of a row is not in the loss
    is_cross_entropy: bool = False  # the mean negative log-likelihood of tokens, and nothing else
    is_measured: bool = True  # False: it is to be measured once the model is sharded
    is_stated: bool = False  # the class of the trainer says how the accumulation is to treat it
    is_of_library: bool = False  # transformers or TRL computes it, no code of the recipe
    rows: list = field(default_factory=list)  # the first ones of the training data, to measure it with
    make_batch: Callable[[list], Any] | None = None  # of rows, as the trainer's loader does
    batch: Any = None  # a micro-batch with which the loss was measured

    def is_undefined(self, tokens: torch.Tensor | None) -> bool:
        """Whether the loss of a micro-batch is a mean over no token, which is NaN."""
        return not self.divides and tokens is not None and not int(tokens)

    def tokens(self, batch: Any) -> torch.Tensor | None:
        """The tokens of a batch that have a label, as transformers counts them; None for a batch without labels."""
        labels = batch.get("shift_labels", batch.get("labels")) if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor):
            return None
        if self.shifts_labels and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return labels.ne(-100).sum()

    def count_for(self, is_training: bool, tokens: torch.Tensor | None, of_step: Any) -> Any:
        """The `num_items_in_batch` to pass on: those of the step, in an evaluation those of the batch; None for a mean."""
        if is_training and (self.divides or self.is_stated):
            return of_step
        return tokens.clamp(min=1) if self.divides and tokens is not None else None

    def scale(self, trainer: Trainer, tokens: torch.Tensor | None, of_step: Any) -> Any:
        """By what the loss of a micro-batch is to be multiplied. The gradients of processes are averaged, and losses in logs."""
        if not trainer.model.training:
            return 1 / self.factor
        if self.is_stated or self.unit == "row" or of_step is None:
            return 1
        processes = trainer.args.world_size
        return processes / self.factor if self.divides else tokens * processes / of_step


def find_loss(trainer: Trainer) -> Loss:
    """The loss of a trainer, which is not changed. If `is_measured` is False, call `measure` once the model is sharded.

    transformers 5.23 passes `num_items_in_batch` to every model whose `forward` has **kwargs, to a `compute_loss_func` and to a
    `compute_loss` of the recipe's own, and takes the result for a sum that was divided by it. Most classifiers,
    encoder-decoders and masked language models return a mean instead, and so do many losses of recipes: their loss and gradients
    were multiplied by the accumulation steps, and by the number of processes. To others it passes no number, such as to Qwen3.5:
    their steps were means of means, in which a token of a short row counts more.
    """
    model = base_of(trainer.accelerator.unwrap_model(trainer.model))
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    shifts = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss and not is_encoder_decoder
    loss = Loss(own=own_loss(trainer), shifts_labels=shifts, is_cross_entropy=is_cross_entropy(trainer))
    loss.is_of_library = loss.own is None and (isinstance(trainer, SFTTrainer) or is_of_transformers(model))
    if is_of_sft(trainer, loss):
        loss.shifts_labels = True
        return loss
    if trainer.loss_is_scaled_for_ga is not None and trainer.compute_loss.__module__.startswith("trl."):  # such as DPOTrainer
        loss.unit = "token" if isinstance(trainer.args, DistillationConfig) else "row"
        return loss
    with unchanged(trainer):
        loss.rows, loss.make_batch = read_first_rows(trainer, loss)
        has_names = isinstance(loss.make_batch(loss.rows[:1]), Mapping)
    if not has_names:
        return loss
    loss.is_right = loss.is_measured = False
    if not trainer.is_fsdp_enabled:
        measure(trainer, loss)
    return loss


def is_of_sft(trainer: Trainer, loss: Loss) -> bool:
    """Whether it is the loss of SFTTrainer, which uses `num_items_in_batch` with every model."""
    return loss.own is None and isinstance(trainer, SFTTrainer)


def adapt_trainer(trainer: Trainer, loss: Loss) -> None:
    """Makes the trainer count the tokens of a step, which `Loss.count_for` passes on or not; once the loss is measured."""
    is_corrected = not loss.is_right and not loss.is_stated
    if is_corrected or is_of_sft(trainer, loss):
        trainer.model_accepts_loss_kwargs = True
    if is_corrected:
        trainer.loss_is_scaled_for_ga = loss.unit == "token"
    if not loss.is_mean:
        trainer.args.per_device_eval_batch_size = 1
        print_once(
            "warning: the loss of two rows together is neither the mean over their tokens nor over the two: padding counts, or "
            "rows are compared with each other. So evaluations take one row at a time, and the loss of a step depends on "
            "--per_device_train_batch_size"
        )


def own_loss(trainer: Trainer) -> str | None:
    """What computes the loss of the model's outputs; None if the model itself does, or SFTTrainer, which needs no outputs."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    compute_loss = getattr(trainer.compute_loss, "__func__", trainer.compute_loss)
    return None if compute_loss in (Trainer.compute_loss, SFTTrainer.compute_loss) else "compute_loss"


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
    classes = {cls.__name__ for cls in type(model).__mro__}  # FSDP makes a subclass
    adds_router_loss = getattr(getattr(model, "config", None), "output_router_logits", False)
    return bool(is_of_transformers(model) and classes & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()} and not adds_router_loss)


def is_of_transformers(model: torch.nn.Module) -> bool:
    """Whether the loss that a model returns is computed by transformers' own code."""
    return type(model).forward.__module__.startswith("transformers.")


def read_first_rows(trainer: Trainer, loss: Loss) -> tuple[list, Callable[[list], Any]]:
    """The first rows of the training data that have a token in the loss, if any has, and what makes a batch of them."""
    loader = trainer.get_train_dataloader()
    dataset = loader.dataset.dataset if isinstance(loader.dataset, IterableDatasetShard) else loader.dataset

    def make_batch(rows: list) -> Any:
        return send_to_device(loader.collate_fn(rows), trainer.args.device)

    count = max(TRIED_ROWS, trainer.args.train_batch_size)
    with_token = (row for row in itertools.islice(dataset, SEARCHED_ROWS) if loss.tokens(make_batch([row])) != 0)
    return list(itertools.islice(with_token, count)) or list(itertools.islice(dataset, count)), make_batch


def measure(trainer: Trainer, loss: Loss) -> None:
    """Computes the loss of a few rows to find what it is a mean of. All processes get the same rows, and the same answer.

    Raises UserError if the loss of a micro-batch is neither divided by `num_items_in_batch` nor a mean.
    """
    loss.is_stated = trainer.loss_is_scaled_for_ga is not None
    with unchanged(trainer):
        batch = loss.make_batch(loss.rows[: trainer.args.train_batch_size])
        factor, ratio = ask_for_count(trainer, loss, batch)
        if loss.is_stated:
            ratio = 0.5 if trainer.loss_is_scaled_for_ga else 1.0
        if ratio is not None and min(abs(ratio - 0.5), abs(ratio - 1)) > SAME_BATCH:
            raise UserError(
                f"with twice the num_items_in_batch, the loss of {loss.own or 'the model'} is {ratio:.3g} times as large: "
                "a part of it is divided by num_items_in_batch and a part is not. Divide all of it, so that steps are means over "
                "tokens, or nothing, so that they are means over the micro-batches (or set loss_is_scaled_for_ga in the class of "
                "the trainer, and divide by the accumulation steps yourself)"
            )
        loss.divides = ratio is not None and ratio < 0.75
        loss.factor = factor if loss.divides else 1.0
        if not loss.divides:
            loss.unit, loss.is_mean = ask_for_unit(trainer, loss)
    loss.is_measured = True
    loss.batch = batch
    loss.rows = []
    loss.make_batch = None


def ask_for_count(trainer: Trainer, loss: Loss, batch: Any) -> tuple[float, float | None]:
    """By what the loss of a micro-batch is multiplied on several processes, and what doubling `num_items_in_batch` does to it.

    The second is None if no number is passed, and if the loss does not say it: it is 0 or NaN, as without any label.
    """
    tokens = loss.tokens(batch)
    args = trainer.args
    if tokens is None or not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
        return 1.0, None
    once, twice = (loss_of(trainer, batch, tokens.float() * times) for times in (1, 2))
    factor = 1.0
    if args.world_size > 1:
        args.average_tokens_across_devices = False
        alone = loss_of(trainer, batch, tokens.float())
        args.average_tokens_across_devices = True
        factor = round(once / alone, 4) if alone else 1.0  # a number of processes: the weights must not change it
    is_known = math.isfinite(once) and once != 0
    return value_of_first((factor, twice / once) if is_known else (1.0, 0.5))


def ask_for_unit(trainer: Trainer, loss: Loss) -> tuple[str, bool]:
    """Whether a loss is the mean over the "token"s or over the "row"s of its batch, and False if it is neither; then "row".

    The loss of the rows with the fewest and the most tokens together is compared with those of each.
    """
    batches = [loss.make_batch([row]) for row in loss.rows[:TRIED_ROWS]]
    counts = [label_count(loss, batch) for batch in batches]
    has_labels = any(counts)
    usable = [index for index, count in enumerate(counts) if count or not has_labels]
    if len(usable) < 2:
        return "token" if has_labels else "row", True
    fewest, *_, most = sorted(usable, key=counts.__getitem__)
    together = loss.make_batch([loss.rows[fewest], loss.rows[most]])
    alone = [batches[fewest], batches[most]]
    if has_labels and not is_same(loss.make_batch([loss.rows[most]]), alone[1]):  # such as masked tokens: other ones each time
        alone.clear()
        for row in (0, 1):
            alone.append({name: value[row : row + 1] for name, value in together.items()})
    counts = [label_count(loss, batch) for batch in alone]
    of_both = loss_of(trainer, together, None, is_training=False)
    of_each = [loss_of(trainer, batch, None, is_training=False) for batch in alone]
    expected = {"row": sum(of_each) / 2}  # the loss of both, by what it could be the mean over
    if any(counts):
        expected["token"] = (counts[0] * of_each[0] + counts[1] * of_each[1]) / sum(counts)
    unit = min(sorted(expected, reverse=True), key=lambda name: abs(expected[name] - of_both))
    is_known = all(of_each) and all(map(math.isfinite, (of_both, *of_each)))
    if is_known and abs(expected[unit] - of_both) > OTHER_BATCH * abs(of_both):
        return tuple(value_of_first(("row", False)))
    return tuple(value_of_first((unit, True)))


def label_count(loss: Loss, batch: Any) -> int:
    """The tokens of a batch that have a label, 0 for a batch without labels."""
    tokens = loss.tokens(batch)
    return 0 if tokens is None else int(tokens)


def is_same(one: Mapping, other: Mapping) -> bool:
    """Whether two batches have the same tensors."""
    return all(torch.equal(value, other[name]) for name, value in one.items() if isinstance(value, torch.Tensor))


def loss_of(trainer: Trainer, batch: Any, count: torch.Tensor | None, is_training: bool = True) -> float:
    """The loss of a batch without gradients, each time with the same random numbers."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    trainer.model.train(is_training)
    is_compiled = trainer.args.torch_compile
    eager = torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()  # each length once more
    with torch.no_grad(), eager, trainer.accelerator.autocast(), trainer.compute_loss_context_manager():
        return float(trainer.compute_loss(trainer.model, copy.copy(batch), num_items_in_batch=count).mean())


@contextlib.contextmanager
def unchanged(trainer: Trainer) -> Iterator[None]:
    """Afterwards the model, the random numbers and what the trainer counts are as before."""
    modes = [(module, module.training) for module in trainer.model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
    numbers = {name: value for name, value in vars(trainer).items() if isinstance(value, int | float)}
    metrics = logged_metrics(trainer)
    logged = copy.deepcopy(logged_metrics(trainer))
    state = random.getstate()
    of_numpy = numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield
    random.setstate(state)
    numpy.random.set_state(of_numpy)
    vars(trainer).update(numbers)
    metrics.update(logged)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for module, is_training in modes:
        module.training = is_training
