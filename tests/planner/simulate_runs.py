"""Simulates runs, each in its own process, forked from one that has imported the libraries. Writes 0.json, 1.json, …

    python simulate_runs.py '[["RECIPE.py", "CONFIG.yaml", ["--flag", "value"], "cuda"], …]' PORT

The last word of a run is its kind:
- "cuda": as on GPUs. "cuda to the end" adds the evaluation and the sample, "with all layers" simulates all layers also of a
  model whose layers are alike.
- "cpu": with the CPU's own kernels.
- "real": not simulated, but run on real tensors, in as many processes as the config has, which connect at PORT plus the number
  of the run. Writes the largest number of bytes that PyTorch's allocator held during the step, not the fields of `Simulation`.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

from harness import configs
from harness.folder import read_json
from harness.runs import Run
from planner import command, fakes, processes, simulation
from planner.size import PLANNED


class RealTensors:
    """Replaces `fakes.Fakes`: the model has its real weights, and PyTorch's profiler counts the bytes."""

    def __init__(self) -> None:
        import transformers

        load = transformers.PreTrainedModel.from_pretrained.__func__

        def from_pretrained(cls: type, name: str, *args: Any, **kwargs: Any) -> Any:
            source = read_json(Path(name, PLANNED)).get("model", name)
            return load(cls, source, *args, **kwargs | {"config": None, "revision": "main"})

        transformers.PreTrainedModel.from_pretrained = classmethod(from_pretrained)

    def join_processes(self, processes: int, per_node: int) -> None:
        """Does nothing: the variables of torch.distributed are set, and accelerate connects."""

    def fake(self, value: Any) -> Any:
        return value

    @contextlib.contextmanager
    def here(self, moment: str = "", **labels: str) -> Iterator[None]:
        import torch

        if moment != "forward":  # the states of the optimizer are made
            yield
            return
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        self.before = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())
        self.profile = torch.profiler.profile(profile_memory=True)
        self.profile.start()
        yield

    def peak(self) -> int:
        self.profile.stop()
        held = highest = self.before
        events = [event for event in self.profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            highest = max(highest, held)
        return highest


def measure_peak(run: Run, flags: list[str]) -> int:
    """Runs one step on real tensors; returns the largest number of bytes that were allocated."""
    tensors = RealTensors()
    simulation.simulate(run, flags, lambda ledger: tensors, with_evaluation=False)
    return tensors.peak()


def run_real(method: str, run: Run, flags: list[str], port: int) -> int:
    """Calls `measure_peak` in all processes of the config; returns the peak of the first one."""
    started = []
    for rank in range(run.processes):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = address | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.processes} if run.processes > 1 else {}
        with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
            started.append(processes.Process(method, measure_peak, run, flags))
    ends = [process.wait() for process in started]
    if any(code for code, _ in ends):
        raise RuntimeError(f"the run on real tensors failed with exit codes {[code for code, _ in ends]}")
    return ends[0][1]


def main(runs: str, port: str) -> None:
    method = processes.start_server()
    for number, (recipe, path, flags, kind) in enumerate(json.loads(runs)):
        run = command.fit_processes(recipe, configs.read(path))
        if kind == "real":
            result: int | dict[str, Any] = run_real(method, run, flags, int(port) + number)
        else:
            make_fakes = functools.partial(fakes.Fakes, cuda=kind != "cpu")
            options = "to the end" in kind, "with all layers" in kind
            code, found = processes.call(method, simulation.simulate, run, flags, make_fakes, *options)
            if found is None:
                raise RuntimeError(f"the simulation failed with exit code {code}")
            result = dataclasses.asdict(found)
        Path(f"{number}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main(*sys.argv[1:])
