"""`--profile`: what a few steps in the middle of a run spend their time on. Chrome traces, a table, a picture."""

import os
from pathlib import Path

from harness.folder import RUN, read_json
from harness.launched import say
from harness.run.timeline import ARITHMETIC, CATEGORIES, WAITING, measure, sort_out

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.profiler import ProfilerActivity, schedule
from transformers import TrainerCallback

HEADER = ("", "ms a step", "share", "hidden behind arithmetic")


class Profile(TrainerCallback):
    """Records some steps and leaves `profile/` in the run's folder."""

    def __init__(self, args):
        self.folder, self.rank, self.profiler = Path(args.output_dir, "profile"), args.process_index, None
        self.table = self.folder / "table.md"  # written last
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # on every process it would announce its beginning and its end

    def on_train_begin(self, args, state, control, **kwargs):
        count = max(1, min(3, 12 // args.gradient_accumulation_steps))  # a step of many micro-batches makes a large trace
        left = state.max_steps - state.global_step
        if broadcast_object_list([self.table.is_file()])[0]:
            return say(f"This run has a profile, {self.table}; for another one move its folder away.")
        if left < count + 2:
            return say(f"No profile: it takes {count + 2} steps, of which the first two are not looked at; {left} are left.")
        possible = range(state.global_step + max(3, min(left // 2, 20)), state.max_steps - count + 2)
        pauses = [every for every in (state.eval_steps, state.save_steps) if every]
        self.first = next(  # no evaluation or checkpoint among its steps, where that can be
            (n for n in possible if not any(step % every == 0 for every in pauses for step in range(n - 1, n - 1 + count))),
            possible[0],
        )
        self.last = self.first + count - 1
        self.profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            schedule=schedule(wait=self.first - state.global_step - 2, warmup=1, active=count, repeat=1),
            on_trace_ready=self._write,
        )
        self.profiler.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self.profiler is None:
            return
        if torch.cuda.is_available() and state.global_step in (self.first - 1, self.last):
            torch.cuda.synchronize()  # so that what is looked at begins and ends on the GPU when it does on the host
        self.profiler.step()
        if state.global_step == self.last:
            self._stop()

    def on_train_end(self, args, state, control, **kwargs):
        if self.profiler is not None:
            self.profiler.on_trace_ready = None
            self._stop()
            say(f"No profile: the run stopped before step {self.last}, where it would have been complete.")

    def _stop(self):
        self.profiler.stop()
        self.profiler = None

    def _write(self, profiler):
        """Writes this process's trace, gathers what each spent its time on (collective), and shows the mean."""
        self.folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / f"rank{self.rank}.json.gz"))
        events = [(e.name(), e.activity_type(), e.start_ns(), e.end_ns()) for e in profiler.profiler.kineto_results.events()]
        steps = sorted((s, e) for name, kind, s, e in events if name.startswith("ProfilerStep#") and kind == "user_annotation")
        found = sort_out(events)
        begin, end = steps[0][0], steps[-1][1]
        on_gpu = any(kind == "kernel" for _, kind, _, _ in events)
        ranks = gather_object([(end - begin, on_gpu, measure(found, begin, end))])
        if self.rank:
            return
        run, where = read_json(self.folder.parent / RUN), "GPU" if on_gpu else "CPU"
        title = f"{run.get('recipe', 'run')} × {run.get('config', '')}, "
        text = (
            f"{title}steps {self.first} to {self.last}, mean of {len(ranks)} process{'es' * (len(ranks) > 1)}, on the {where}"
            f"{' (the profiler saw no kernel of the GPU)' * (torch.cuda.is_available() and not on_gpu)}:\n\n"
            + table([whole for whole, *_ in ranks], [rows for *_, rows in ranks], len(steps))
        )
        draw(found, *steps[0], f"{title}step {self.first} of process 0, on the {where}", self.folder / "timeline.png")
        self.table.write_text(text, "utf-8")
        say(f"\n{text}\nTraces (for https://ui.perfetto.dev) and a timeline are in {self.folder}\n")


def table(wholes: list[int], ranks: list[dict[str, tuple[int, int]]], steps: int) -> str:
    """A table of what `measure` found over `steps` steps on each rank, which took `wholes` ns: their mean."""
    names = [*dict.fromkeys(what for rows in ranks for what in rows if what != WAITING), WAITING]
    whole, lines = sum(wholes), [HEADER]
    for what in names:
        took, hidden = (sum(rows.get(what, (0, 0))[column] for rows in ranks) for column in (0, 1))
        behind = f"{hidden / took:.0%}" if took and what not in (ARITHMETIC, WAITING) else ""
        lines.append((what, f"{took / 1e6 / steps / len(ranks):,.1f}", f"{took / whole:.0%}", behind))
    lines.append(("a step", f"{whole / 1e6 / steps / len(ranks):,.1f}", "100%", ""))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    lines.insert(1, (*("-" * widths[0],), *("-" * (width - 1) + ":" for width in widths[1:])))
    return "".join(
        f"| {line[0].ljust(widths[0])} | {' | '.join(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))} |\n"
        for line in lines
    )


def draw(found: dict[str, list[tuple[int, int]]], begin: int, end: int, title: str, path: Path):
    """Draws what went on from `begin` to `end`, a line for each category."""
    from matplotlib.figure import Figure

    bars = {w: [((s - begin) / 1e6, (e - s) / 1e6) for s, e in found.get(w, []) if s < end and e > begin] for w in CATEGORIES}
    lanes = [what for what in CATEGORIES if bars[what]]
    figure = Figure(figsize=(10, 0.9 + 0.35 * len(lanes)), layout="tight")
    axes = figure.subplots()
    for lane, what in enumerate(lanes):
        axes.broken_barh(bars[what], (lane - 0.4, 0.8), color=f"C{CATEGORIES.index(what)}")
    axes.set(xlabel="ms", xlim=(0, (end - begin) / 1e6), title=title)
    axes.set(yticks=range(len(lanes)), yticklabels=lanes, ylim=(len(lanes) - 0.5, -0.5))
    figure.savefig(path, dpi=120)
