"""`--profile`: what a few steps in the middle of a run spend their time on. Writes Chrome traces, a table and a picture."""

import bisect
import os
import re
from collections import defaultdict
from pathlib import Path

from harness.exchange import gather_values, value_of_first
from harness.folder import RUN, draft_of, read_json
from harness.messages import plural, print_once

import torch
from torch.profiler import ProfilerActivity, schedule
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

COMPUTE, WAITING, COMMUNICATION = "compute", "waiting", "all communication"
# A name comes before those that are a part of it.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send", "recv", "reduce", "gather")
# Copies by a part of their names. One from GPU to GPU is communication.
HOST_COPIES = {"HtoD": "host to GPU", "DtoH": "GPU to host"}
COPIES = HOST_COPIES | {"PtoP": "GPU to GPU"}
CATEGORIES = (COMPUTE, *COLLECTIVES, "other collectives", "GPU to GPU", *HOST_COPIES.values())
# CPU operators that compute nothing: calls of collectives, and autograd's wrappers around what a hook does.
NOT_COMPUTE = re.compile(r"_?c10d|autograd::|torch::autograd")
HEADER = ("", "ms per step", "share", "hidden behind compute")

Interval = tuple[int, int]  # start and end in ns
Event = tuple[str, str, int, int]  # name, kind (`cat` in a Chrome trace), start and end in ns


class Profile(TrainerCallback):
    """Records a few steps and writes `profile/` into the output directory."""

    def __init__(self, args: TrainingArguments) -> None:
        self.folder, self.rank, self.profiler = Path(args.output_dir, "profile"), args.process_index, None
        self.table = self.folder / "table.md"  # written last
        self.first = self.last = 0  # the steps to record
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise every process logs when it starts and stops

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Chooses the steps to record and starts the profiler, which waits for them; or says why there is no profile."""
        count = max(1, min(3, 12 // args.gradient_accumulation_steps))  # steps with many micro-batches make large traces
        left = state.max_steps - state.global_step
        if value_of_first(self.table.is_file()):
            print_once(f"No new profile: this run has one already. To record another one, move {self.table.parent} away.")
            return
        if left < count + 2:
            print_once(f"No profile: {left} steps are left, and it needs {count + 2} (2 before the recorded ones).")
            return
        self.first = _choose_first_step(state, count, left)
        self.last = self.first + count - 1
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        steps_to_wait = self.first - state.global_step - 2  # the step before the first recorded one is to warm up
        self.profiler = torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=steps_to_wait, warmup=1, active=count, repeat=1),
            on_trace_ready=self._write,
        )
        self.profiler.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self.profiler is None:
            return
        if torch.cuda.is_available() and state.global_step in (self.first - 1, self.last):
            torch.cuda.synchronize()  # so that the recorded steps begin and end on the GPU when they do on the host
        self.profiler.step()
        if state.global_step == self.last:
            self._stop()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self.profiler is not None:
            self.profiler.on_trace_ready = None
            self._stop()
            print_once(f"No profile: the run stopped before step {self.last}.")

    def _stop(self) -> None:
        self.profiler.stop()
        self.profiler = None

    def _write(self, profiler: torch.profiler.profile) -> None:
        """Writes this process's trace; the first process also prints and writes the mean of all. Collective."""
        self.folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / f"rank{self.rank}.json.gz"))
        events = [(e.name(), e.activity_type(), e.start_ns(), e.end_ns()) for e in profiler.profiler.kineto_results.events()]
        steps = sorted((s, e) for name, kind, s, e in events if name.startswith("ProfilerStep#") and kind == "user_annotation")
        begin, end = steps[0][0], steps[-1][1]
        by_category = group_events(events)
        has_kernels = any(kind == "kernel" for _, kind, _, _ in events)
        ranks = gather_values((end - begin, measure(by_category, begin, end)))
        if self.rank != 0:
            return
        run, device = read_json(self.folder.parent / RUN), "GPU" if has_kernels else "CPU"
        title = f"{run.get('recipe', 'run')} × {run.get('config', '')}, "
        no_kernels = " (the profiler recorded no kernel of the GPU)" if torch.cuda.is_available() and not has_kernels else ""
        text = (
            f"{title}steps {self.first} to {self.last}, mean of {plural(len(ranks), 'process')}, on the {device}{no_kernels}:\n\n"
        ) + format_table([total for total, _ in ranks], [times for _, times in ranks], len(steps))
        picture = self.folder / "timeline.png"
        draw_timeline(by_category, *steps[0], f"{title}step {self.first} of process 0, on the {device}", picture)
        with draft_of(self.table) as draft:
            draft.write_text(text, "utf-8")
        print_once(f"\n{text}\nTraces (for https://ui.perfetto.dev) and a timeline are in {self.folder}\n")


def _choose_first_step(state: TrainerState, count: int, left: int) -> int:
    """A step half-way, but at most 20 steps ahead; if possible one with no evaluation or checkpoint in the recorded time.

    `left`: steps until the end, at least `count` + 2.
    """
    candidates = range(state.global_step + max(3, min(left // 2, 20)), state.max_steps - count + 2)
    intervals = [interval for interval in (state.eval_steps, state.save_steps) if interval]
    for first in candidates:
        # The recording begins before the evaluation and the checkpoint that follow step first - 1.
        saved_within = range(first - 1, first - 1 + count)
        if not any(step % interval == 0 for interval in intervals for step in saved_within):
            return first
    return candidates[0]


def group_events(events: list[Event]) -> dict[str, list[Interval]]:
    """Category: intervals of all that one process did.

    If kernels ran on a GPU, only they and the GPU's copies count; the host's part shows as waiting. Without a GPU, gloo's
    transfers count, and the operators that call no collective, in which they would wait.
    """
    intervals = defaultdict(list)
    if any(kind == "kernel" for _, kind, _, _ in events):
        for name, kind, start, end in events:
            if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
                intervals[_category_on_gpu(name, kind)].append((start, end))
        return intervals

    calls = sorted(start for name, kind, start, _ in events if kind == "cpu_op" and name.startswith(("c10d", "_c10d")))

    def calls_collective(start: int, end: int) -> bool:
        return bisect.bisect(calls, start) < bisect.bisect(calls, end)

    pending = []  # collectives that were called; gloo runs them in order
    for name, kind, start, end in sorted(events, key=lambda event: event[2]):
        if name.startswith("gloo:"):
            # gloo implements reduce-scatter by all-reduce; the call says which one it is.
            own = _collective(name)
            called = next((c for c in pending if c == own or (c, own) == ("reduce-scatter", "all-reduce")), None)
            if called:
                pending.remove(called)
            intervals[called or own].append((start, end))
        elif kind == "cpu_op" and name.startswith("c10d::"):
            pending.append(_collective(name))
        elif kind == "cpu_op" and "::" in name and not NOT_COMPUTE.match(name) and not calls_collective(start, end):
            intervals[COMPUTE].append((start, end))
    return intervals


def _category_on_gpu(name: str, kind: str) -> str:
    """The row of the table that a kernel, copy or memset on the GPU belongs to. `kind` is that of the trace's event."""
    if "nccl" in name.lower():
        return _collective(name)
    if kind == "gpu_memcpy":
        for word, category in COPIES.items():
            if word in name:
                return category
    return COMPUTE  # kernels, memsets, and copies within a GPU


def _collective(name: str) -> str:
    """`ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(…)` and `c10d::_reduce_scatter_base_` are both a reduce-scatter."""
    letters = re.sub("[^a-z]", "", name.lower().split("(")[0])
    return next((kind for kind in COLLECTIVES if kind.replace("-", "") in letters), "other collectives")


def covered(intervals: list[Interval]) -> int:
    """How much time at least one of the intervals covers, in ns."""
    total, until = 0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def measure(by_category: dict[str, list[Interval]], begin: int, end: int) -> dict[str, tuple[int, int]]:
    """Category: (time between `begin` and `end`, part of it that is hidden behind compute), in ns.

    Waiting is the time in which nothing else happens. The other categories can overlap, so their sum can exceed the total.
    """
    clipped = {}
    for category in CATEGORIES:
        parts = [(max(s, begin), min(e, end)) for s, e in by_category.get(category, []) if s < end and e > begin]
        if parts:
            clipped[category] = parts
    everything = [interval for parts in clipped.values() for interval in parts]
    compute = clipped.pop(COMPUTE, [])
    transfers = [part for category, parts in clipped.items() if category not in HOST_COPIES.values() for part in parts]
    if transfers:
        clipped[COMMUNICATION] = transfers
    times = {COMPUTE: (covered(compute), 0)}
    for category, parts in clipped.items():
        time = covered(parts)
        times[category] = time, time + covered(compute) - covered(parts + compute)
    times[WAITING] = end - begin - covered(everything), 0
    return times


def format_table(totals: list[int], ranks: list[dict[str, tuple[int, int]]], steps: int) -> str:
    """The mean over ranks of what `measure` returned for `steps` steps, which took `totals` ns."""
    categories = dict.fromkeys(category for times in ranks for category in times if category != WAITING)
    total, lines = sum(totals), [HEADER]
    for category in [*categories, WAITING]:
        time = sum(times.get(category, (0, 0))[0] for times in ranks)
        hidden = sum(times.get(category, (0, 0))[1] for times in ranks)
        share_hidden = f"{hidden / time:.0%}" if time and category not in (COMPUTE, WAITING) else ""
        lines.append((category, f"{time / 1e6 / steps / len(ranks):,.1f}", f"{time / total:.0%}", share_hidden))
    lines.append(("one step", f"{total / 1e6 / steps / len(ranks):,.1f}", "100%", ""))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    lines.insert(1, tuple("-" * width if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths)))
    text = ""
    for line in lines:
        numbers = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        text += f"| {line[0].ljust(widths[0])} | {' | '.join(numbers)} |\n"
    return text


def draw_timeline(by_category: dict[str, list[Interval]], begin: int, end: int, title: str, path: Path) -> None:
    """Draws what happened from `begin` to `end`, one row per category."""
    from matplotlib.figure import Figure

    bars = {}
    for category in CATEGORIES:
        parts = [((s - begin) / 1e6, (e - s) / 1e6) for s, e in by_category.get(category, []) if s < end and e > begin]
        if parts:
            bars[category] = parts
    figure = Figure(figsize=(10, 0.9 + 0.35 * len(bars)), layout="tight")
    axes = figure.subplots()
    for row, (category, parts) in enumerate(bars.items()):
        axes.broken_barh(parts, (row - 0.4, 0.8), color=f"C{CATEGORIES.index(category)}")
    axes.set(xlabel="ms", xlim=(0, (end - begin) / 1e6), title=title)
    axes.set(yticks=range(len(bars)), yticklabels=list(bars), ylim=(len(bars) - 0.5, -0.5))
    with draft_of(path) as draft:
        figure.savefig(draft, dpi=120)
