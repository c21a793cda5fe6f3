"""A recipe that trains, in each of its processes: what `parse` does before the training."""

import argparse
import atexit
import contextlib
import dataclasses
import json
import os
import platform
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from harness import configs, folder, runs
from harness.compat.accelerate import allow_fsdp_on_cpu
from harness.compat.datasets import map_in_one_process
from harness.data import reading
from harness.hub import commit_of
from harness.launched import launched
from harness.messages import UserError, print_once
from harness.model.gpu_features import find_gpu_features
from harness.model.quantized import quantize_once, use_quantized_weights
from harness.nodes.network import answer_of_first, check_all_reduce, is_of_several, publish_of_node, values_of_nodes
from harness.rehearsal import tiny
from harness.restarts import CHOICE_OF_ROWS
from harness.run import session
from harness.run.prompts import SeenRows
from harness.run.publishing import make_repository
from harness.runs import NO_FEATURES, GpuFeatures, Run, StartedRecipe
from harness.start import machine
from harness.start.arguments import Arguments
from harness.start.environment import (
    ALLOCATOR_VARIABLES,
    GROWING,
    LEFT_TO_ARGUMENTS,
    config_of_accelerate,
    set_environment_of_accelerate,
)
from harness.start.preparing import (
    check_all_arguments,
    check_model_and_dataset,
    prepare_process,
    replace_model_and_dataset,
    set_model_options,
    use_commit,
)
from harness.start.recipes import begin_process, report_failures_of, report_missing_train
from harness.start.record import command_of, digest_of_file

import torch
from accelerate.utils import gather_object
from transformers import Trainer, TrainingArguments, set_seed

SECONDS_TO_SEE_IT = 75  # NFS can show a new file 60 s later (its option acdirmax)


def start_of_training() -> StartedRecipe:
    """The recipe of a process that was started to train, by launch.sh, `accelerate launch`, torchrun or python."""
    run = Run(sys.argv[0], trains=True)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if call := launched():
        config = configs.read(call.config)
        run = dataclasses.replace(run, config=config, tiny=call.tiny, nodes=call.nodes, processes=processes)
        set_environment_of_accelerate(run)
        if restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            print_once(f"Started again after a crash, for the {restarts}. time (--max_restarts).")
    elif "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by `accelerate launch`
        run = dataclasses.replace(run, config=config_of_accelerate(), processes=processes)
        os.environ.update(LEFT_TO_ARGUMENTS)
    started = TrainedRecipe(run)
    runs.set_started(started)
    begin_process()
    report_failures_of(started)
    return started


class TrainedRecipe(StartedRecipe):
    """A recipe that trains."""

    def choose_device(self, values: argparse.Namespace) -> None:
        """Finds whether the run computes on CPU, and sets what CUDA and accelerate read at their first use."""
        run = self.run
        if launched():
            on_cpu = machine.must_use_cpu(run, values)
        else:
            on_cpu = run.on_cpu or values.use_cpu
            if run.is_sharded:
                print_once(f"warning: {', '.join(sorted(configs.OWN_KEYS))} of a config are read with ./launch.sh only.")
            if not on_cpu and torch.cuda.is_available() and not os.environ.keys() & set(ALLOCATOR_VARIABLES):
                print_once(f"Set PYTORCH_ALLOC_CONF={GROWING} before a start without ./launch.sh: GPU memory fragments less.")
        machine.set_allocator(run, values)
        if on_cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # FSDP would take the GPU of a machine that has too few
            if run.is_sharded:
                allow_fsdp_on_cpu()
        self.run = dataclasses.replace(run, on_cpu=on_cpu)

    def prepare(self, arguments: Arguments) -> None:
        # Again, after `start_of_training`: torch has put its own hook around it when it connected the processes.
        report_failures_of(self)
        self.run = prepare_run(self.run, arguments)
        if launched():
            atexit.register(report_missing_train, self)

    def train(self, trainer: Trainer) -> None:
        session.run_training(trainer, self.run)
        # Not earlier: what a recipe does after `train` can need the other processes. And not later, when they may have exited.
        atexit.register(trainer.end)


class Claim(NamedTuple):
    """What all processes need to know of the run that the first one has claimed."""

    date: str  # of its first start
    commit: str  # of the model
    teacher_commit: str | None  # None without a teacher, and in a rehearsal


def prepare_run(run: Run, arguments: Arguments) -> Run:
    """Prepares each process for the run. The first one checks it and claims the output directory, the others wait."""
    _, training_args, model_args = arguments
    output_dir = Path(training_args.output_dir)
    if is_of_several():
        publish_of_node(lambda: facts_of_node(run, training_args))
    gpu = GpuFeatures(*answer_of_first("arguments", lambda: check_nodes_and_arguments(run, arguments)))
    run = dataclasses.replace(run, gpu=gpu, lock=folder.lock_of(output_dir))
    set_model_options(run, arguments)

    claim = Claim(*answer_of_first("run", lambda: claim_run(run, arguments)))
    use_commit(arguments, claim.commit, claim.teacher_commit)
    if training_args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # of the checks
    run = replace_model_and_dataset(run, arguments)

    if run.nodes > 1 and training_args.save_strategy != "no":
        check_folder_is_shared(output_dir)
    if model_args.load_in_4bit and run.is_sharded:
        answer_of_first("weights", lambda: quantize_once(model_args), first_of_node=True)
        use_quantized_weights(model_args, training_args)
    run = prepare_process(run, arguments, datetime.fromisoformat(claim.date))
    set_seed(training_args.seed)  # before a recipe makes a model: all processes make the same
    if training_args.world_size > 1:
        map_in_one_process()
        check_all_reduce(training_args.device)
    return dataclasses.replace(run, seen=SeenRows({"rows": None, "chat_template_kwargs": run.data.template_arguments}))


def claim_run(run: Run, arguments: Arguments) -> Claim:
    """What the first process does: locks the output directory, checks the run and writes run.json.

    A run that continues uses the commit of its first start. Raises UserError for what the user can fix. Exits if the run is
    finished. Prints what differs from what was asked for.
    """
    _, training_args, model_args = arguments
    output_dir = Path(training_args.output_dir)
    if not training_args.use_cpu:
        machine.check_bf16(training_args, model_args, run)
    identity = identity_of_run(run, arguments)
    folder.acquire(run.lock)
    before = folder.read_json(output_dir / folder.RUN, "config", "sharded", "data_files", "settings")
    is_another = not identity.items() <= before.items()
    if run.tiny and before and is_another and training_args.output_dir == run.default_output_dir:
        folder.delete_training(output_dir)
        print_once(f"The earlier rehearsal in {output_dir} was deleted: it is another one.")
    folder.check_same_run(output_dir, before, identity)
    folder.exit_if_finished(output_dir, identity, training_args.max_steps, training_args.num_train_epochs)
    if before.get("commit") and folder.has_trained(output_dir):
        use_commit(arguments, before["commit"], before.get("teacher_commit"))
    check_model_and_dataset(run, arguments)
    if run.repository and not run.tiny:
        make_repository(run.repository)

    commit = model_args.model_revision
    teacher_commit = None
    teacher = getattr(training_args, "teacher_model_name_or_path", None)
    if model_args.model_name_or_path and not run.tiny:
        commit = commit_of(model_args.model_name_or_path, commit)
    if teacher and not run.tiny:
        teacher_commit = commit_of(teacher, training_args.teacher_model_revision or "main")
    date = before.get("date") or datetime.now().isoformat(timespec="seconds")
    of_start = {"date": date, "commit": commit, "teacher_commit": teacher_commit, "command": command_of(run)}
    folder.write_run(output_dir, before, identity | of_start)
    if run.tiny:
        tiny.print_notice(run.data, training_args, model_args)
    return Claim(date, commit, teacher_commit)


def facts_of_node(run: Run, training_args: TrainingArguments) -> dict[str, Any]:
    """What the first process of the run must know of this node."""
    problem, features = "", NO_FEATURES
    try:
        machine.check_one_gpu(training_args)
        machine.check_shared_memory(run)
        if training_args.device.type == "cuda":
            features = find_gpu_features()
    except UserError as error:
        problem = str(error)
    files = {Path(path).name: digest_of_file(path) for path in (run.recipe, run.config.path) if path}
    start = f"{sys.argv[1:]} {files} {features}"
    return {"host": platform.node(), "features": features, "problem": problem, "start": start}


def check_nodes_and_arguments(run: Run, arguments: Arguments) -> GpuFeatures:
    """What the GPUs of all nodes can.

    Raises UserError if a node has a problem, or other flags, files or GPUs, and for arguments that contradict.
    """
    nodes = values_of_nodes() if is_of_several() else [facts_of_node(run, arguments[1])]
    first = nodes[0]
    for node in nodes:
        problem = node["problem"]
        if not problem and node["start"] != first["start"]:
            problem = f"started with {node['start']}, {first['host']} with {first['start']}: start all nodes alike"
        if problem:
            raise UserError(f"{node['host']}: {problem}" if len(nodes) > 1 else problem)
    check_all_arguments(run, arguments)
    return GpuFeatures(*first["features"])


def check_folder_is_shared(output_dir: Path) -> None:
    """Raises UserError unless all nodes see the run.json that the first process has written. Collective.

    Otherwise their checkpoints could not be put together.
    """
    deadline = time.monotonic() + SECONDS_TO_SEE_IT
    file = output_dir / folder.RUN
    written = answer_of_first("shared folder", lambda: digest_of_file(str(file)))
    while not (sees := file.is_file() and digest_of_file(str(file)) == written) and time.monotonic() < deadline:
        time.sleep(0.5)
        with contextlib.suppress(OSError):  # the folder is not there
            os.scandir(output_dir).close()
    if not all(gather_object([sees])):
        raise UserError(
            f"--output_dir: {output_dir} is not the same folder on all nodes: pass a folder on a file system that all nodes "
            "share, or --save_strategy no"
        )


def identity_of_run(run: Run, arguments: Arguments) -> dict[str, Any]:
    """The content of run.json."""
    script_args, _, model_args = arguments
    sources = run.data.sources
    identity = {
        "recipe": Path(run.recipe).stem,
        "config": run.config.name,
        "model": model_args.model_name_or_path,
        "dataset": run.data.display_name,
        "datasets": [reading.absolute_name(source.name) for source in sources],
        "dataset_weights": [round(source.weight, 9) for source in sources],
        "sharded": run.is_sharded,
        "tiny": run.tiny,
        "use_peft": model_args.use_peft,
        "load_in_4bit": model_args.load_in_4bit,
        "recipe_digest": digest_of_file(run.recipe),
        "settings": run.settings,
        "data_files": [file for source in sources for file in reading.file_versions(source.name)],
        **{name: getattr(script_args, name) for name in CHOICE_OF_ROWS},
    }
    return json.loads(json.dumps(identity))  # as it is in the file, with which it is compared
