"""Called by launch.sh: `python -m harness.plan.command RECIPE.py CONFIG.yaml… [--flag value …]`.

Simulates the recipe with each config, says whether it fits and how long it takes, and, where it does not fit, what would
make it fit, each way tried by another simulation.
"""

import contextlib
import functools
import io
import json
import logging
import os
import sys
import warnings
from pathlib import Path

from harness import configs, hub
from harness.launched import Launched, fail
from harness.nodes import machines
from harness.plan import cards, pages, proposals
from harness.start import flags, server

OWN = {"--json": False, "--price_per_gpu_hour": True}  # flags of --plan itself; whether a value follows


def main(recipe: str, *words: str):
    paths = [word for word in words if word.endswith((".yaml", ".yml"))][: _leading(words)]
    own, arguments = _own(list(words[len(paths) :]))
    flags.check(Path(recipe), arguments)
    read = {path: configs.read(path) for path in paths}
    quiet = "--json" in own
    server.prepare()
    from harness.plan import fakes, length  # which import torch; a misspelt flag does not wait for it
    from harness.start import processes

    warnings.filterwarnings("ignore")
    if missing := fakes.broken():
        fail(f"cannot plan with these versions: {', '.join(missing)} is not there; everything else works without it")
    plans, price = [], float(own.get("--price_per_gpu_hour") or 0)
    # Neither a config nor what is proposed changes how many there are.
    rows = functools.cache(lambda: processes.call(length.rows_of_an_epoch, recipe, arguments)[1])
    for path, config in read.items():
        if not quiet:
            pages.progress(f"Simulating {Path(recipe).stem} with {Path(path).stem} …")
        found = run(recipe, path, config, arguments, optional=len(read) > 1)
        plans.append(found if "refused" in found else cards.plan(length.with_steps(found, rows), price))
    if quiet:
        print(json.dumps(plans[0] if len(read) == 1 else plans, indent=2))
    elif len(read) > 1:
        pages.side_by_side(plans)
    else:
        pages.whole(plans[0])
        print(f"\nPicture: {pages.draw(plans[0], found['curve'])}", flush=True)
        pages.proposals(proposals.tried(plans[0], found, paths[0], lambda *change: again(recipe, arguments, *change)))


def run(recipe: str, path: str, config: dict, arguments: list[str], optional: bool = False) -> dict:
    """One simulation, in a process of its own. Ends this one when it is refused, or returns the reason with `optional`."""
    from harness.start import processes

    launch = fit(recipe, path, config)
    code, found = processes.call(_simulated, launch, config, arguments, optional)
    if found is None:
        sys.exit(processes.ended(code))
    names = {"recipe": Path(recipe).stem, "config": Path(path).stem}
    names["global_batch_size"] = any(word.split("=")[0].replace("-", "_") == "__global_batch_size" for word in arguments)
    return found | names | ({} if "refused" in found else {"download": _download(found)})


def _simulated(launch: Launched, config: dict, arguments: list[str], optional: bool) -> dict:
    from harness.plan import simulation

    logging.disable(logging.WARNING)  # what libraries say of a run is not said of a plan
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return simulation.simulate(launch, config, arguments)
    except SystemExit as end:
        if optional and end.code == 2:
            return {"refused": said.getvalue().strip().removeprefix("error: ")}
        sys.stderr.write(said.getvalue())
        raise


def _download(found: dict) -> int:
    """Bytes, as the hub tells them; of a model it says nothing of, the parameters'. A stream downloads no files."""
    model, dataset, streams = (found["names"].get(name) for name in ("model", "dataset", "streaming"))
    weights = 0 if Path(model).is_dir() else hub.size("model", model, (".safetensors",))
    weights = found["parameters"] * found["hub_bytes"] if weights is None else weights
    is_here = streams or Path(dataset).exists()
    return weights + (0 if is_here else hub.size("dataset", dataset, (".parquet", ".jsonl", ".json", ".csv")) or 0)


def again(recipe: str, arguments: list[str], path: str, more: list[str]) -> dict:
    """A simulation with other flags; those given twice count as given last."""
    pages.progress(f"Trying {Path(path).stem} {' '.join(more)} …")
    return run(recipe, path, configs.read(path), [*arguments, *more], optional=True)


def fit(recipe: str, path: str, config: dict) -> Launched:
    """As many processes and nodes as the config says, or as the variables of launch.sh do."""
    nodes = machines.from_environment()
    count = nodes.count if nodes.count > 1 else config["num_machines"]
    gpus = nodes.processes or config["num_processes"] // config["num_machines"]
    gpus = 1 if config["distributed_type"] == "NO" else gpus
    replicas, shards = configs.mesh(config)
    if replicas * shards > 1 and count * gpus != replicas * shards:
        fail(f"{Path(path).name} is for {replicas} nodes of {shards} GPUs, not for {count} of {gpus}")
    return Launched(recipe=recipe, config=path, processes=count * gpus, nodes=count, on_cpu=True, plan=True)


def _leading(words) -> int:
    return next((number for number, word in enumerate(words) if word.startswith("-")), len(words))


def _own(words: list[str]) -> tuple[dict, list[str]]:
    """The flags of --plan, and those of the recipe."""
    own, rest = {}, []
    words = [part for word in words for part in (word.split("=", 1) if word.split("=")[0] in OWN else [word])]
    while words:
        word = words.pop(0)
        if word not in OWN:
            rest.append(word)
        elif OWN[word] and not words:
            fail(f"{word} needs a number")
        else:
            own[word] = words.pop(0) if OWN[word] else True
    try:
        assert float(own.get("--price_per_gpu_hour", 1)) > 0
    except (ValueError, AssertionError):
        fail(f"--price_per_gpu_hour is {own['--price_per_gpu_hour']}, expected a number above 0")
    return own, rest


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed
    code = 0
    try:
        main(*sys.argv[1:])
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 130
    server.leave(code or 0)
