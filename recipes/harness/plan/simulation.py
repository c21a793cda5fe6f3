"""One run, simulated: the recipe's own main, trainer, sharding, loss and optimizer, at full size, on tensors that hold nothing.

Simulated are loading, one optimizer step with the optimizer's states in place, an evaluation, a sample and the final save,
as the first process sees them. A simulation changes its process for good, so it has one of its own.
"""

import contextlib
import functools
import gc
import json
import os
import resource
import tempfile
import time
from pathlib import Path

from harness import configs
from harness.folder import read_json
from harness.launched import Launched
from harness.plan import arithmetic
from harness.plan.fakes import Fakes
from harness.plan.ledger import Ledger
from harness.plan.step import Enough, Step
from harness.rehearsal.full_size import NAMES
from harness.run import session, sharding
from harness.start import launch as launcher
from harness.start import worker

import datasets
import torch
import transformers


def simulate(launch: Launched, config: dict, flags: list[str], make=Fakes, to_the_end: bool = True) -> dict:
    """Everything one run can be asked, for `arithmetic` and `pages` to make numbers of.

    `make` makes what tensors and processes are; the tests hold a run on real ones against it. Without `to_the_end`, evaluation
    and sample, which need less memory than training, are left out.
    Raises RuntimeError when what was counted is not what the config says.
    """
    began = time.monotonic()
    gc.freeze()  # or every collection would look through the libraries
    gc.set_threshold(200_000)
    command = launcher._accelerate(launch, config)
    ledger, found = Ledger(), {}
    fakes = make(ledger)
    if command is not None:
        os.environ.update(_accelerate(command, launch.recipe))
        fakes.join(launch.processes, launch.processes // launch.nodes)
    session.train = functools.partial(
        _train, ledger=ledger, fakes=fakes, config=config, launch=launch, found=found, to_the_end=to_the_end
    )
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    with (
        tempfile.TemporaryDirectory(prefix="plan-") as folder,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),  # what a run says is of its stand-ins
        contextlib.suppress(Enough),
    ):
        worker.recipe(launch.recipe, [*flags, "--output_dir", folder, "--report_to", "none", "--disable_tqdm", "true"])
    found |= {
        "peaks": ledger.peaks(),
        "host_peaks": ledger.peaks("host"),
        "hull": arithmetic.hull(ledger),
        "curve": arithmetic.curve(ledger),
        "seconds": time.monotonic() - began,
        "own_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    return found


def _accelerate(command: list[str], path: str) -> dict[str, str]:
    """What `accelerate launch` would set in the environment."""
    from accelerate.commands import launch

    arguments, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args([*command, path]))
    return launch.prepare_multi_gpu_env(arguments)


def _train(trainer, ledger: Ledger, fakes: Fakes, config: dict, launch: Launched, found: dict, to_the_end: bool):
    """What stands in for `session.train`: the same trainer, one step, on a batch of full length. Ends with `Enough`."""
    args, model = trainer.args, trainer.model
    batch = _full(next(iter(trainer.get_train_dataloader())), args)
    ledger.vocabulary = model.config.get_text_config().vocab_size
    shards = configs.mesh(config)[1] if configs.mesh(config) != (1, 1) else launch.processes
    found |= _facts(trainer, batch)
    if not config.get("fsdp_config"):
        for tensor in (*model.parameters(), *model.buffers()):
            ledger.mark(tensor, "weights", "gpu")
    session.prepare(trainer, config)
    reads_once = config.get("fsdp_config", {}).get("fsdp_cpu_ram_efficient_loading") and not found["packed"]
    found["copies"] = 1 if reads_once else launch.processes // launch.nodes  # of the model in a node's host memory, at load
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False  # would take the weights from the meta device
    shards = shards if trainer.is_fsdp_enabled else 1
    found |= {"shards": shards, "replicas": launch.processes // shards, "processes": launch.processes, "nodes": launch.nodes}
    found["expected"] = arithmetic.expected(arithmetic.shapes(model), shards, trainer.is_fsdp_enabled and args.bf16 | args.fp16)
    trainer.add_callback(sharding.AfterWrapping(trainer, config, launch.processes))
    trainer.add_callback(Step(trainer, config, ledger, fakes, batch, found, to_the_end))
    wrap = trainer._prepare_for_training

    def prepare(*arguments):
        if not trainer.is_fsdp_enabled:
            with fakes.here(holder="gradients"):  # DDP's buckets are made now
                return wrap(*arguments)
        with ledger, ledger.within(holder="weights", place="host"):  # device meshes are real
            return wrap(*arguments)

    trainer._prepare_for_training = prepare
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def _full(batch: dict, args) -> dict:
    """A batch in which every row is as long as it may be and every token counts: the most that can happen."""
    length = getattr(args, "max_length", None)
    rows = args.per_device_train_batch_size
    tokens = next(t for name, t in batch.items() if name == "input_ids")
    packed = tokens.shape[0] == 1 and "position_ids" in batch
    wide = rows * length if packed and length else length or tokens.shape[1]
    full = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            value = torch.ones(1 if packed else rows, wide, dtype=value.dtype)
        full[name] = value
    return full


def _facts(trainer, batch: dict) -> dict:
    """What is known before anything runs."""
    model, args = trainer.model, trainer.args
    weights = [(w.numel(), w.element_size(), w.requires_grad, hasattr(w, "quant_type")) for w in model.parameters()]
    packed = sum(count * size for count, size, _, is_packed in weights if is_packed)
    trained = sum(count for count, _, is_trained, _ in weights if is_trained)
    original = model.get_base_model().config if hasattr(model, "get_base_model") else model.config
    adapter = hasattr(model, "peft_config")
    parameters = sum(count for count, _, _, is_packed in weights if not is_packed) + 2 * packed
    published = json.loads(Path(original.name_or_path, "config.json").read_text("utf-8"))
    dtype = published.get("dtype") or published.get("torch_dtype") or "float32"
    return {
        "parameters": parameters - (trained if adapter else 0),
        "trained": trained,
        "packed": packed,
        "adapter": adapter,
        "names": read_json(Path(original.name_or_path, NAMES)),
        "hub_bytes": getattr(torch, dtype).itemsize,
        "bf16": bool(args.bf16) or packed > 0,
        "tokens": batch["input_ids"].numel(),
        "micro_batch": args.per_device_train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        "max_length": getattr(args, "max_length", None),
        "checkpointing": bool(args.gradient_checkpointing),
        "max_steps": args.max_steps,
        "epochs": args.num_train_epochs,
        "optimizer": str(args.optim),
    }
