"""`parse`: from a recipe's numbers and the command line to checked arguments."""

import datetime
import hashlib
import logging
import os
import re
import sys
import warnings
from pathlib import Path

from harness import configs, folder, local_files, patience
from harness.commands import first_rows, hollow, prepare, quantize, stream_files
from harness.launched import Checked, Launched
from harness.nodes import network
from harness.rehearsal import fsdp_on_cpu, full_size, stand_ins
from harness.start import chat, checks, loading, memory, numbers


def parse(config_class, takes=(), **defaults):
    """Turns a recipe's numbers and the command line into the three argument objects of TRL's scripts.

    Args:
        config_class: `trl.SFTConfig`, `transformers.TrainingArguments` or a subclass; its fields become flags.
        takes: the shapes of rows the recipe can train on, the one it likes best first: "text", "messages", "prompt",
            "instruction" (see `harness.data`). Without it rows are what they are.
        **defaults: the recipe's numbers, by the names of the fields they set. Flags come first, then these, then what
            the Accelerate config says (precision, activation checkpointing). A rehearsal lowers them.

    Returns:
        `(DataArguments, config_class, trl.ModelConfig)`. In a rehearsal, model and data name tiny stand-ins.

    Ends the process with one line and exit code 2 when something is wrong.
    """
    launched = Launched.from_environment()
    config = configs.read(launched.config)
    sharded = config.get("distributed_type") == "FSDP" or bool(launched.command)
    _quieten()
    if sharded and launched.on_cpu and not launched.checking:
        fsdp_on_cpu.enable()
    data, args, model = numbers.read(config_class, defaults, launched, config)
    data.takes, data.named = (takes,) if isinstance(takes, str) else takes, data.dataset_name
    data.text_field, data.seed = getattr(args, "dataset_text_field", "text"), args.seed
    numbers.check(data, args, model)
    numbers.count_steps(data, args, launched.processes or int(os.environ.get("WORLD_SIZE", 1)))
    args.profile = data.profile  # `train` sees the training arguments only
    if args.report_to and not args.run_name:  # or trackio would begin another run for an evaluation at the end
        args.run_name = f"{Path(args.output_dir).name} {datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
    memory.asked.update(args=args, model=model, in_4bit=model.load_in_4bit, sharded=sharded)
    loading.complete(args, model, sharded, launched)
    if launched.checking or launched.plan or (not launched.recipe and args.process_index == 0):
        _check(data, args, model, launched, sharded)
    _substitute(data, args, model, launched, sharded)
    if launched.command:
        hollow.enter(args)
    if launched.command == "preview":
        first_rows.enter(data)
    elif launched.checking and not launched.command:
        raise Checked(args)
    patience.wait_for_the_hub()
    chat.prepare(args, model, data.given)
    if args.process_index or args.disable_tqdm:
        _without_bars()
    if args.world_size > 1 and not launched.plan:
        network.meet(args.device)
    return data, args, model


def _check(data, args, model, launched: Launched, sharded: bool):
    """Ends the process when something is wrong, or when the run is finished; takes the run's folder when all is well."""
    if model.load_in_4bit and sharded:
        checks.quantization(data, args, model)
    checks.arguments(data, args, model)
    checks.idle(data, args, model, sharded)
    if launched.plan:
        return None
    path, is_default = Path(args.output_dir), args.output_dir == folder.default(launched, sys.argv[0])
    identity = {} if launched.command else _identity(data, model, launched, sharded)
    if not launched.command:
        folder.check(path, identity, is_default)
    local_files.name_those_passed_over(data)
    if launched.tiny:
        stand_ins.prepare(data, model)
    checks.sources(data, args, model, launched)
    if launched.command:
        return
    folder.claim(path, identity, is_default)
    folder.end_if_finished(path, args.max_steps, args.num_train_epochs)
    if launched.tiny:
        stand_ins.announce(data, args, model)
    else:
        loading.announce(args, model, launched)


def _identity(data, model, launched: Launched, sharded: bool) -> dict:
    """What `run.json` says of a run."""
    return {
        "recipe": Path(launched.recipe or sys.argv[0]).stem,
        "config": Path(launched.config).stem,
        "model": model.model_name_or_path,
        "dataset": data.dataset_name,
        "dataset_config": data.dataset_config,
        "dataset_train_split": data.dataset_train_split,
        "sharded": sharded,
        "tiny": launched.tiny,
        "use_peft": model.use_peft,
        "load_in_4bit": model.load_in_4bit,
        "recipe_digest": hashlib.sha256(Path(launched.recipe or sys.argv[0]).read_bytes()).hexdigest()[:8],
        "data_digest": local_files.digest(data),
        "max_samples": data.max_samples,
        "max_eval_samples": data.max_eval_samples,
    }


def _substitute(data, args, model, launched: Launched, sharded: bool):
    """Puts in the place of model and data what is loaded instead: stand-ins in a rehearsal, 4-bit weights made beforehand."""
    if launched.plan:
        return full_size.substitute(data, args, model)
    name = model.model_name_or_path
    if launched.tiny:
        stand_ins.substitute(data, args, model)
    elif launched.command == "prepare":
        prepare.download(data, args, model, launched.attention)
    else:
        stream_files.substitute(data, args, launched.processes or args.world_size)
    if args.fp16 and launched.on_cpu and not launched.checking:
        fsdp_on_cpu.Fp16InFloat32().__enter__()  # until the process ends
    if model.load_in_4bit and launched.on_cpu:
        fsdp_on_cpu.keep_4bit_layout()
    if model.load_in_4bit and sharded and launched.command != "preview":
        if launched.checking:
            quantize.prepare(model, name)
        quantize.substitute(model, args)


def _quieten():
    """How one library calls another is for their authors to mend, not for whoever trains."""
    for module in ("transformers", "trl", "peft", "accelerate"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.device_mesh")  # of accelerate's calls
    # That a data set comes from the cache where there is no hub, `checks.sources` says.
    for talker in ("datasets.load", "datasets.packaged_modules.cache.cache"):
        logging.getLogger(talker).addFilter(lambda record: not re.search("offline mode|^Found the latest", record.getMessage()))
    # A tied head is not in a checkpoint because it is the embedding; nothing is missing.
    logging.getLogger("transformers.trainer").addFilter(lambda record: "['lm_head.weight']" not in record.getMessage())


def _without_bars():
    """One process shows progress; the others would write over it."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
