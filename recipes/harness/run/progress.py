"""The progress of a run: its tokens and seconds are counted, and a line is printed at every log."""

import datetime
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.messages import print_once
from harness.run.generation import micro_batches_of_generation
from harness.run.metrics import evaluation_losses, format_metrics, own_metrics

import torch
from accelerate.utils import gather_object
from torch.profiler import schedule
from tqdm.auto import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

LONG = 1800  # seconds that are left of a run on a CPU, above which it prints what would be faster
SHOWN = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "rows_per_second")


class BarWithoutLogs(ProgressCallback):
    """transformers' progress bar. Its `on_log` would print the logs a second time, as a dictionary."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        pass


def replace_progress_bar(trainer: Trainer) -> None:
    """Leaves out what transformers prints at a log: `Progress` prints a line."""
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(BarWithoutLogs)


@dataclass(eq=False)
class Progress(TrainerCallback):
    """Counts tokens and seconds of a run, including its parts before a resume, and prints a line at every log.

    `tokens` go through the model, padding included; `loss_tokens` count in the loss. `seconds` are spent in optimizer steps
    and in waiting for their data, without start, evaluations and checkpoints.
    """

    trainer: Trainer
    before: dict  # what `so_far` returned when the checkpoint was written, {} for a new run
    # Of this start; `before` has those of earlier ones.
    rows: int = 0
    tokens: int = 0
    loss_tokens: torch.Tensor | int = 0
    seconds: float = 0.0
    running_since: float | None = None  # None before the first step of an epoch
    first_step: int = 0
    began: float = field(default_factory=time.monotonic)
    # At the last log.
    logged: int = 0  # tokens, or rows without any
    logged_seconds: float = 0.0
    seconds_left: float | None = None

    def count(self, batches: list[dict], loss_tokens: torch.Tensor | int | None) -> None:
        """To be called with the batches of every step, and the tokens in the loss over all processes."""
        shared = micro_batches_of_generation(self.trainer.args)
        for batch in batches:
            rows, tokens = size_of(batch)
            self.rows += rows // shared
            self.tokens += tokens
        if loss_tokens is not None:
            self.loss_tokens += loss_tokens

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.first_step = state.global_step
        self.began = time.monotonic()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self.running_since is None:
            self.running_since = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._log_with_checkpoint(args, state, control)
        if torch.cuda.is_available() and (control.should_log or control.should_evaluate or control.should_save):
            torch.cuda.synchronize()  # the GPU's work for the steps so far is part of them
        now = time.monotonic()
        of_step = now - self.running_since
        self.seconds += of_step
        self.running_since = now
        steps = state.global_step - self.first_step
        steps_left = state.max_steps - state.global_step
        self.seconds_left = self.seconds / steps * steps_left
        left = of_step * steps_left
        if steps == 2 and args.device.type == "cpu" and left > LONG:  # the first step is slower than the others
            print_once(
                f"A step takes {of_step:.1f} s on this CPU, the rest of the run {left / 3600:.1f} hours. "
                "Faster: fewer rows (--max_samples) or steps (--max_steps), shorter rows (--max_length), or a GPU"
            )

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._log_with_checkpoint(args, state, control)
        self.running_since = None

    def _log_with_checkpoint(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Logs at every checkpoint and at the last step: a logged loss is the mean since the last log, which a resume forgets."""
        if args.logging_strategy != "no" and (control.should_save or state.global_step >= state.max_steps):
            control.should_log = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.running_since = time.monotonic()

    on_save = on_evaluate

    def log_fields(self, logs: dict) -> dict[str, float]:
        """The speed since the last log; in fp16 the gradient scaler's scale."""
        if "loss" not in logs:
            return {}
        scaler = self.trainer.accelerator.scaler
        fields = {"loss_scale": scaler.get_scale()} if scaler else {}
        name = "tokens" if self.tokens else "rows"  # images, or other rows without tokens
        counted = getattr(self, name)
        if self.seconds > self.logged_seconds:
            speed = self.trainer.args.world_size * (counted - self.logged) / (self.seconds - self.logged_seconds)
            fields[f"{name}_per_second"] = round(speed, 1)
        self.logged = counted
        self.logged_seconds = self.seconds
        return fields

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs: object) -> None:
        line = format_logs(logs, state.global_step, state.max_steps, self.seconds_left)
        if line and state.is_world_process_zero:
            tqdm.write(line)

    def so_far(self) -> dict[str, float]:
        """Tokens on all processes and seconds of the whole run. Collective. `runtime` is in seconds and includes everything."""
        counted = {
            "rows": sum(gather_object([self.rows])),
            "tokens": sum(gather_object([self.tokens])),
            "loss_tokens": int(self.loss_tokens),
            "seconds": self.seconds,
            "runtime": time.monotonic() - self.began,
        }
        return {name: round(self.before.get(name, 0) + number, 3) for name, number in counted.items()}


def size_of(batch: Any) -> tuple[int, int]:
    """Rows and tokens of a micro-batch, whatever it has; of packed rows, the sequences."""
    if not isinstance(batch, Mapping):  # the rows themselves, of a trainer that makes its batches later
        return len(batch), 0
    rows = next((len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), 0)
    ids = batch.get("input_ids")
    return rows, ids.numel() if isinstance(ids, torch.Tensor) else 0


def format_logs(logs: dict, step: int, steps: int, seconds_left: float | None) -> str:
    """The line for a person, "" for logs that say nothing new."""
    shown = {name: logs[name] for name in SHOWN if name in logs}
    if "eval_reward" not in logs:  # its loss compares several answers to a prompt, and here is one
        shown |= evaluation_losses(logs)
    shown |= own_metrics(logs)
    text = format_metrics({name.removeprefix("eval_"): value for name, value in shown.items()})
    if text and any(name.startswith("eval_") for name in shown):
        text = f"evaluation {text}"
    if "loss" in logs and seconds_left is not None:
        text += f", {datetime.timedelta(seconds=round(seconds_left))} left"
    return text and f"step {step:,}/{steps:,}  {text}"


class Profile(TrainerCallback):
    """Each process writes the trace of a step to `profile/` in the output directory, the first one also the table."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.folder = Path(args.output_dir, "profile")
        self.rank = args.process_index
        steps = state.max_steps - state.global_step
        when = schedule(wait=min(steps // 3, 20), warmup=1, active=1, repeat=1)  # the first steps are slower than the others
        self.profiler = torch.profiler.profile(schedule=when, on_trace_ready=self.write)
        self.profiler.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.profiler.step()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.profiler.stop()

    def write(self, profiler: torch.profiler.profile) -> None:
        self.folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / f"rank{self.rank}.json.gz"))
        if self.rank == 0:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=20, max_name_column_width=60)
            (self.folder / "table.txt").write_text(table, "utf-8")
            print_once(f"\n{table}\nThe table and the traces (for https://ui.perfetto.dev) are in {self.folder}\n")
