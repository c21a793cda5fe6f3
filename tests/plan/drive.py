"""Simulates runs, each in a process forked from one that has imported the libraries; names a file with what was found for each.

    python drive.py '[["RECIPE.py", "CONFIG.yaml", ["--flag", "value"], "cuda"], …]'

The last word says how: "cuda" as on GPUs, "cuda to the end" with evaluation and sample besides, "cpu" with the CPU's own
kernels, "real" on real tensors, in as many processes as the config says; of those the allocator's peak over the step is written.
"""

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

from harness import configs
from harness.folder import read_json
from harness.plan import command, fakes, simulation
from harness.rehearsal.full_size import NAMES
from harness.start import processes, server


class Real:
    """In the place of `fakes.Fakes`: tensors that hold something, with the allocator's own account of their bytes."""

    def __init__(self, ledger):
        import transformers

        load = transformers.PreTrainedModel.from_pretrained.__func__

        def from_pretrained(cls, name, *arguments, **options):
            source = read_json(Path(name, NAMES)).get("model", name)
            return load(cls, source, *arguments, **options | {"config": None, "revision": "main"})

        transformers.PreTrainedModel.from_pretrained = classmethod(from_pretrained)

    def join(self, processes: int, on_a_node: int):
        """The variables are there; accelerate connects."""

    def fake(self, value):
        return value

    @contextlib.contextmanager
    def here(self, moment="", **labels):
        import torch

        if moment != "forward":  # the optimizer's states are made
            yield
            return
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        inner = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        self.before = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in inner}.values())
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


def real(path: str, rank: int, port: int, launch, config, flags):
    if launch.processes > 1:
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": launch.processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in here.items()})
    made = []

    def make(ledger):
        made.append(Real(ledger))
        return made[0]

    simulation.simulate(launch, config, flags, make, False)
    if rank == 0:
        Path(path).write_text(json.dumps(made[0].peak()))


def main(runs: str, port: str):
    server.prepare()
    context = multiprocessing.get_context(server.method)
    for number, (recipe, path, flags, kind) in enumerate(json.loads(runs)):
        config = configs.read(path)
        launch, out = command.fit(recipe, path, config), f"{number}.json"
        if kind == "real":
            ranks = [
                context.Process(target=real, args=(out, rank, int(port) + number, launch, config, flags))
                for rank in range(launch.processes)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        else:
            make = functools.partial(fakes.Fakes, cuda=kind in ("cuda", "cuda to the end"))
            _, found = processes.call(simulation.simulate, launch, config, flags, make, "to the end" in kind)
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    code = 1
    try:
        main(*sys.argv[1:])
        code = 0
    finally:
        if code:
            import traceback

            traceback.print_exc()
        server.leave(code)
