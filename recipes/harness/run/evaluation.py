"""The evaluation of a run: means over tokens or rows, and the metric that chooses the best checkpoint."""

from pathlib import Path
from typing import Any, NamedTuple

from harness import folder
from harness.compat.trl import logged_metrics
from harness.messages import print_once
from harness.run.metrics import evaluation_losses, logged_by_evaluations
from harness.run.progress import size_of

import torch
from accelerate.data_loader import prepare_data_loader
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import Trainer
from trl import DPOConfig


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


# Metrics that are means over tokens, and over which; all others are means over rows.
OVER = {"entropy": "tokens", "mean_token_accuracy": "chosen", "logits/chosen": "chosen", "logits/rejected": "rejected"}


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
