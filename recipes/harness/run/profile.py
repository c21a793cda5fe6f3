"""`--profile`: the trace of one step in the middle of a run, by PyTorch's profiler, and its table of operators."""

from pathlib import Path

from harness.messages import print_once

import torch
from torch.profiler import schedule
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


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
