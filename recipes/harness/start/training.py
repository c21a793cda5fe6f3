"""The contexts of a run: `Check` in one process before it starts, `Train` in each of its processes."""

import argparse
import atexit
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from harness import configs, contexts, folder
from harness.batches import rows_of_step
from harness.compat.accelerate import allow_fsdp_on_cpu
from harness.compat.datasets import map_in_one_process
from harness.contexts import CheckedRun, Context, RecipeStopped
from harness.data import reading
from harness.messages import UserError, plural, print_once
from harness.model.attention import print_attention
from harness.model.gpu_features import VARLEN, why_not_triton
from harness.model.quantized import quantize_once, use_quantized_weights
from harness.nodes.network import check_all_reduce, wait_for_first_process
from harness.rehearsal import tiny
from harness.run import session
from harness.run.marker import settings_of_checkpoint
from harness.run.prompts import describe_rows
from harness.run.publishing import SAME_COMMAND, check_repository, publish
from harness.run.settings import RunSettings
from harness.run.trainer import RunTrainer
from harness.start import machine
from harness.start.arguments import Arguments
from harness.start.preparing import (
    check_all_arguments,
    check_model_and_dataset,
    prepare_process,
    replace_model_and_dataset,
    set_model_options,
)
from harness.start.record import record_start, settings_of, values_of

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments, set_seed
from trl.data_utils import is_conversational

CONVERSATIONS = 16  # for evaluation, that a run keeps for --verify


@dataclass
class RunContext(Context):
    """Of a run: it continues the one in its output directory, if there is one."""

    is_training_run = True

    def settings_of_checkpoint(self, output_dir: str) -> dict[str, Any]:
        return settings_of_continued_run(self, output_dir)


@dataclass
class Check(RunContext):
    """Checks a run and claims its output directory. Ends the recipe after `parse`."""

    checked: CheckedRun | None = None

    def before_arguments(self, values: argparse.Namespace) -> None:
        self.on_cpu = values.use_cpu = machine.must_use_cpu(self, values)

    def prepare(self, arguments: Arguments) -> None:
        machine.check_shared_memory(self)
        machine.print_few_cores(self)
        script_args, training_args, _ = arguments
        usable = usable_numbers_of_nodes(self, training_args)
        identity = check_and_claim_run(self, arguments)
        saves, restarts = training_args.save_strategy != "no", script_args.max_restarts
        self.checked = CheckedRun(training_args.output_dir, identity, self.on_cpu, saves, restarts, usable)
        raise RecipeStopped


@dataclass
class Train(RunContext):
    """Trains. `is_checked` is False without launch.sh: then the first process checks the run while the others wait."""

    is_checked: bool = True
    settings: RunSettings = field(default_factory=RunSettings)

    def before_arguments(self, values: argparse.Namespace) -> None:
        if not self.is_checked:
            self.on_cpu = values.use_cpu
            check_start_without_launcher(self, values)
        values.use_cpu = self.on_cpu
        if self.is_sharded and self.on_cpu:
            allow_fsdp_on_cpu()

    def prepare(self, arguments: Arguments) -> None:
        script_args, training_args, model_args = arguments
        if not self.is_checked and training_args.device.type == "cuda":
            machine.check_one_gpu(training_args)
            self.attention, self.no_triton = features_of_gpu(training_args.device), why_not_triton()
        identity = None
        if not self.is_checked and training_args.process_index == 0:
            identity = check_and_claim_run(self, arguments, is_checked=False)
        else:
            set_model_options(self, arguments)
            replace_model_and_dataset(self, arguments)
        if model_args.load_in_4bit and self.is_sharded:
            use_quantized_weights(model_args, training_args)
        if not self.is_checked and training_args.world_size > 1:
            wait_for_first_process()
        if self.min_nodes and training_args.process_index == 0:
            record_other_number_of_processes(self, arguments)
        prepare_process(self, arguments, folder.date_of(folder.read_json(Path(training_args.output_dir, folder.RUN))))
        set_seed(training_args.seed)  # before a recipe makes a model: all processes make the same
        if training_args.world_size > 1:
            map_in_one_process()
            check_all_reduce(training_args.device)
        data = script_args.data
        self.settings = RunSettings(
            config=self.config,
            processes=self.processes,
            nodes_change=self.min_nodes > 0,
            tiny=self.tiny,
            identity=identity,
            profile=script_args.profile,
            dataset_weights={source.label: source.weight for source in data.sources} if data.is_mixture else None,
            asked_accumulation_steps=script_args.asked_accumulation_steps,
            repository=script_args.repository,
            prompt={"rows": None, "chat_template_kwargs": script_args.chat_template_kwargs},
        )

    def tokenized(self, trainer: Trainer, split: str, rows: Any, tokenized: Any) -> None:
        """Records how prompts look, and keeps the first evaluation conversations, with their tokens.

        --verify compares the prompts of a server with the tokens that were trained, and the packed rows have no messages.
        """
        if "begins" not in self.settings.prompt:  # of the training rows, unless they are a stream
            self.settings.prompt |= describe_rows(rows)
        if split != "train" and isinstance(rows, Dataset) and is_conversational(rows[0]):
            self.settings.conversations += tokenized.take(CONVERSATIONS)

    def built(self, trainer: Trainer) -> None:
        script_args, _, model_args = self.arguments
        used = values_of(script_args, trainer.args, model_args)
        self.settings.used = {name: value for name, value in used.items() if script_args.parsed.get(name) != value}
        try:
            session.train(trainer, self.settings)
        except Exception as error:
            has_read_rows = isinstance(trainer, RunTrainer) and not trainer.is_first_step
            # In the first step, these are about columns that the model needs and the rows do not have.
            is_of_rows = isinstance(error, ValueError | TypeError | LookupError | AttributeError)
            self.has_trained = has_read_rows and (trainer.state.global_step > 0 or not is_of_rows)
            raise
        # Not earlier: what a recipe does after `train` can need the other processes. And not later, when they may have exited.
        atexit.register(trainer.end)


def start_without_launcher() -> Train:
    """The context of a recipe that was started by `accelerate launch`, torchrun or python; from here on that of this process."""
    context = Train(recipe=sys.argv[0], is_checked=False)
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by `accelerate launch`
        context.config = configs.read(config_of_accelerate_launch())
        context.processes = int(os.environ.get("WORLD_SIZE", 1))
    contexts.set_current(context)
    return context


def features_of_gpu(device: torch.device) -> list[str]:
    """The attention implementations that the GPU of this process supports; launch.sh asks for all processes."""
    return [VARLEN] if torch.cuda.get_device_capability(device) >= (8, 0) else []


def check_start_without_launcher(context: Train, values: argparse.Namespace) -> None:
    """Raises UserError for a run on GPUs that are not there. Prints what is not checked."""
    if values.bf16 and not context.on_cpu and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise UserError(
            "this machine has no GPU that PyTorch can use: pass --use_cpu to train on the CPU, or rehearse the recipe: "
            f"./launch.sh --tiny {Path(context.recipe).stem} CONFIG"
        )
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    if not context.on_cpu and not torch.cuda.is_available():
        raise UserError("this machine has no GPU that PyTorch can use, and the config is for GPUs: pass --use_cpu")
    if not context.config.path:
        print_once(
            f"warning: the config file of `accelerate launch` is unknown, so the keys {', '.join(sorted(configs.OWN_KEYS))} are "
            "not read, and sharding is not checked: pass the file with --config_file"
        )


def config_of_accelerate_launch() -> str:
    """The value of --config_file of the `accelerate launch` that started this process, "" if there is none."""
    import psutil

    for process in psutil.Process().parents()[:2]:
        words = [part for word in process.cmdline() for part in word.split("=", 1)]
        if "--config_file" in words[:-1]:
            return str(Path(process.cwd(), words[words.index("--config_file") + 1]))
    return ""


def settings_of_continued_run(context: Context, output_dir: str) -> dict[str, Any]:
    """The settings of the checkpoint in the output directory, {} if there is none or another rehearsal replaces its run."""
    if context.tiny and output_dir == context.default_output_dir:
        run = folder.read_json(Path(output_dir, folder.RUN))
        if (run.get("config"), run.get("recipe_digest")) != (context.config.name, digest_of_recipe(context.recipe)):
            return {}
    try:
        return settings_of_checkpoint(Path(output_dir))
    except OSError as error:
        raise UserError(f"--output_dir: {output_dir} cannot be read ({error.strerror}): choose another folder") from error


def check_and_claim_run(context: Context, arguments: Arguments, is_checked: bool = True) -> dict[str, Any]:
    """Checks a run, claims its output directory, and quantizes its model if that is needed; returns its run.json.

    `is_checked`: see `Train`.

    Raises UserError for what the user can fix. Exits if the run is finished. Prints what differs from what was asked for. The
    arguments then name what is loaded instead of the model and the dataset.
    """
    script_args, training_args, model_args = arguments
    check_all_arguments(context, arguments)
    set_model_options(context, arguments)
    if not training_args.use_cpu:
        machine.check_gpus(training_args, model_args, context)

    output_dir, is_default = Path(training_args.output_dir), training_args.output_dir == context.default_output_dir
    identity = identity_of_run(context, arguments)
    folder.check_output_dir(output_dir, identity, is_default, context.joins)
    check_model_and_dataset(context, arguments)
    if script_args.repository and not context.tiny:
        check_repository(script_args.repository)

    if not folder.is_replaced_rehearsal(output_dir, identity, is_default):
        length = training_args.max_steps, training_args.num_train_epochs
        is_uploaded = True
        if script_args.repository and not context.tiny and folder.finished_results(output_dir, *length):
            is_uploaded = publish(output_dir, script_args.repository, SAME_COMMAND)
        if not is_uploaded:
            sys.exit(1)
        folder.exit_if_finished(output_dir, identity, *length)
    began = folder.date_of(folder.read_json(output_dir / folder.RUN)) or datetime.now()
    identity["date"] = began.isoformat(timespec="seconds")
    if not (context.joins and (output_dir / folder.RUN).is_file()):
        folder.claim_output_dir(output_dir, identity, is_default)
    record_start(context, output_dir, script_args.asked, is_checked)
    print_differences(context, arguments)
    replace_model_and_dataset(context, arguments)
    if model_args.load_in_4bit and context.is_sharded:
        quantize_once(model_args)
    return identity


def record_other_number_of_processes(context: Context, arguments: Arguments) -> None:
    """Adds an entry to starts.json if the processes have started again on another number of nodes."""
    script_args, training_args, _ = arguments
    output_dir = Path(training_args.output_dir)
    starts = folder.read_starts(output_dir)
    if starts and starts[-1].get("processes") != context.processes:
        record_start(context, output_dir, script_args.asked, is_checked=True)


def usable_numbers_of_nodes(context: Context, training_args: TrainingArguments) -> list[int]:
    """On how many nodes the run can train as many rows per step, in whole replicas; the largest number last.

    Raises UserError if the smallest number of NNODES=MIN:MAX is none of them.
    """
    if not context.min_nodes:
        return [context.nodes]
    if training_args.save_strategy == "no":
        raise UserError(
            "--save_strategy no: a run with NNODES=MIN:MAX resumes from a checkpoint when the nodes change: save some"
        )
    rows, per_node = rows_of_step(training_args, context.processes), context.processes // context.nodes
    of_replica = max(1, context.config.shards // per_node)  # nodes
    per_step = training_args.per_device_train_batch_size * per_node  # the fewest rows of a node
    counts = range(context.min_nodes, context.nodes + 1)
    usable = [count for count in counts if rows % (per_step * count) == 0 and count % of_replica == 0]
    if context.min_nodes not in usable:
        raise UserError(
            f"NNODES is {context.min_nodes}:{context.nodes}, but a step has {rows} rows, and on "
            f"{plural(context.min_nodes, 'node')} it needs a multiple of {per_step * context.min_nodes}: pass another "
            "--global_batch_size, or other numbers in NNODES"
        )
    return usable


def print_differences(context: Context, arguments: Arguments) -> None:
    """Prints what a run does that was not asked for."""
    script_args, training_args, model_args = arguments
    steps, asked = training_args.gradient_accumulation_steps, script_args.asked_accumulation_steps
    if asked not in (None, steps):
        print_once(
            f"gradient_accumulation_steps is {steps}, not {asked}, so that a step has as many rows as in "
            f"{training_args.output_dir}."
        )
    if context.tiny:
        tiny.print_notice(*arguments)
        if script_args.repository:
            print_once("A rehearsal uploads nothing: --push_to_hub is for the run.")
    if model_args.model_name_or_path:
        print_attention(model_args, context)


def identity_of_run(context: Context, arguments: Arguments) -> dict[str, Any]:
    """The content of run.json."""
    script_args, _, model_args = arguments
    of_mixture = {}
    sources = script_args.data.sources
    if script_args.data.is_mixture:
        of_mixture["datasets"] = [reading.absolute_name(source.name) for source in sources]
        of_mixture["dataset_weights"] = [round(source.weight, 9) for source in sources]
    identity = {
        "recipe": Path(context.recipe).stem,
        "config": context.config.name,
        "model": model_args.model_name_or_path,
        "dataset": script_args.data.display_name if of_mixture or not sources else reading.absolute_name(sources[0].display_name),
        **of_mixture,
        "dataset_config": None if of_mixture else script_args.dataset_config,
        "dataset_train_split": script_args.dataset_train_split,
        "sharded": context.is_sharded,
        "tiny": context.tiny,
        "use_peft": model_args.use_peft,
        "load_in_4bit": model_args.load_in_4bit,
        "recipe_digest": digest_of_recipe(context.recipe),
        "settings": (settings := settings_of(script_args.asked)),
        "defaults": {name: script_args.defaults[name] for name in settings},
        "data_files": [file for source in sources for file in reading.file_versions(source.name)],
        **{name: getattr(script_args, name) for name in folder.CHOICE_OF_ROWS},
    }
    return json.loads(json.dumps(identity))  # as it is in the file, with which it is compared


def digest_of_recipe(recipe: str) -> str:
    return hashlib.sha256(Path(recipe).read_bytes()).hexdigest()[:8]
