"""A recipe in this process: `parse`, `train`, how its failures are reported, and running one for a command."""

import atexit
import dataclasses
import functools
import logging
import multiprocessing
import multiprocessing.util  # its exit handler is registered before ours, so it runs after it
import os
import runpy
import signal
import sys
import time
import warnings
from datetime import datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from harness import configs, runs
from harness.compat.datasets import map_in_one_process
from harness.compat.torch import multiply_in_float32
from harness.compat.transformers import never_ask_for_code, set_date_of_chat_templates, use_no_gpu_kernels
from harness.compat.trl import generate_in_evaluation_mode, keep_activation_checkpointing
from harness.data import chat_templates
from harness.launched import (
    OUT_OF_TIME,
    end_of_imports,
    has_ended,
    last_signal,
    launched,
    record_end,
    set_interrupt_handler,
    set_signal_handler,
)
from harness.messages import HubLost, UserError, exit_on_user_error, is_first_process, print_once
from harness.model.attention import check_packing
from harness.model.models import check_models, set_loading_options
from harness.model.quantized import quantize_once, use_quantized_weights
from harness.nodes.network import answer_of_first, check_all_reduce, values_of_nodes
from harness.rehearsal import tiny
from harness.run import training
from harness.run.failures import exit_for_known_failure, raise_if_of_library
from harness.run.trainer import RunTrainer
from harness.runs import GpuFeatures, Run, StartedRecipe
from harness.start.arguments import Arguments, make_arguments, read_values
from harness.start.claim import claim_folder, make_repository
from harness.start.environment import LEFT_TO_ARGUMENTS, config_of_accelerate, set_environment_of_accelerate
from harness.start.machine import check_nodes, choose_device, facts_of_node

import datasets
import torch
import transformers
from accelerate.utils import check_cuda_p2p_ib_support
from transformers import Trainer, set_seed

DAEMON_TIMEOUT = 2  # seconds for the daemons of a process to exit when it exits
LOGGERS = (
    "datasets.load",
    "datasets.packaged_modules.cache.cache",
    "transformers.training_args",
    "transformers.trainer_utils",
    "transformers.trainer",
    "transformers.modeling_utils",
)
# In messages about which the user can do nothing.
HIDDEN = (
    "offline mode",
    "Found the latest",
    "The speedups for torchdynamo",
    "do not match the ones in the `trainer_state",
    "missing keys in the checkpoint",
)


def end_process(recipe: StartedRecipe, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The `sys.excepthook` of a recipe: one message, and the right exit code. It exits itself: Python would exit with code 1."""
    code = 1
    try:
        with exit_on_user_error():
            report_failure(recipe, error)
    except SystemExit as end:
        code = end.code
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def report_failure(recipe: StartedRecipe, error: BaseException) -> None:
    """Exits with a message about an error of a recipe, or raises UserError."""
    if isinstance(error, UserError | KeyboardInterrupt):
        raise error
    if isinstance(error, HubLost):
        print(f"error: {error}. The same command resumes later", file=sys.stderr, flush=True)
        record_end(OUT_OF_TIME)
        sys.exit(OUT_OF_TIME)
    path = recipe.run.recipe
    if isinstance(error, Exception):
        exit_for_known_failure(error)
        trainer = recipe.trainer
        has_begun = isinstance(trainer, RunTrainer) and not trainer.is_first_step
        # In the first step, these are about columns that the model needs and the rows do not have.
        is_of_rows = isinstance(error, ValueError | TypeError | LookupError | AttributeError)
        if not has_begun or (is_of_rows and trainer.state.global_step == 0):
            raise_if_of_library(error, path)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)  # if all processes fail alike, the first one prints its traceback, and the launcher stops the others
        if last_signal():
            sys.exit(1)
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != path:  # from the recipe's own lines on
        trace = trace.tb_next
    sys.__excepthook__(type(error), error.with_traceback(trace), trace)
    sys.exit(1)


def run_recipe(recipe: StartedRecipe, flags: list[str]) -> None:
    """Does what `python RECIPE flags` does, until `recipe` needs no more of it. Known failures are one message."""
    path = recipe.run.recipe
    sys.argv = [path, *flags]
    sys.path.insert(0, str(Path(path).parent))
    try:
        with runs.running(recipe):
            runpy.run_path(path, run_name="__main__")
    except Exception as error:
        report_failure(recipe, error)


def build_trainer(recipe: StartedRecipe, flags: list[str]) -> None:
    """Runs a recipe until it calls `train` with its trainer."""
    run_recipe(recipe, flags)
    if recipe.trainer is None:
        raise UserError(without_train(recipe))
    training.check_built_trainer(recipe)


def without_train(recipe: StartedRecipe) -> str:
    return f"{Path(recipe.run.recipe).name} ended without calling train(): its last line must be train(trainer), from `harness`"


def report_missing_train(recipe: StartedRecipe) -> None:
    """Runs at the exit of a process of the launcher: `trainer.train()` neither resumes nor saves the model."""
    if recipe.trainer is None and is_first_process() and not has_ended():
        print(f"error: {without_train(recipe)}", file=sys.stderr, flush=True)
        record_end(2)


def prepare_exit() -> None:
    """Runs before the exit handler of multiprocessing, which waits for daemons, such as workers that ignore SIGTERM.

    They have some time, because a Pool ends its workers itself.
    """
    set_signal_handler(signal.SIG_IGN)  # the run has ended: a signal would only interrupt the exit handlers
    set_interrupt_handler(signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise when a worker is killed
    if any(child.daemon for child in multiprocessing.active_children()):
        signal.signal(signal.SIGALRM, kill_daemons)  # no timer: Python 3.12 starts no thread while it exits
        signal.alarm(DAEMON_TIMEOUT)


def kill_daemons(number: int, frame: FrameType | None) -> None:
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def parse(config_class: type, dataset_formats: tuple[str, ...] | str = (), **defaults: Any) -> Arguments:
    """Turns the values of a recipe and the command line into the three argument objects of TRL's scripts.

    Args:
        config_class: the class of the trainer's arguments, such as `trl.SFTConfig`, `transformers.TrainingArguments`, or a
            dataclass that inherits from one. Its fields are flags.
        dataset_formats: the formats to which `load` converts rows, the first choice first: "text", "messages",
            "prompt_completion", "instruction", "question_answer", "preference", "images". Empty: rows keep their columns.
        **defaults: the values of the recipe, by the names of the fields of `config_class`, `trl.ModelConfig` and
            `ScriptArguments`. Flags override them.

    Returns:
        `(script_args, training_args, model_args)`. In a rehearsal `model_args` names a tiny model, and `load` reads a tiny
        dataset.
    """
    recipe = runs.started() or start_of_training()
    recipe.run = read_values(recipe.run, config_class, defaults)
    quiet_libraries()
    disable_peer_to_peer()
    recipe.choose_device()
    if recipe.run.on_cpu:
        use_no_gpu_kernels()
    never_ask_for_code()
    recipe.run, recipe.arguments = make_arguments(recipe.run, config_class, dataset_formats, defaults)
    recipe.prepare()
    return recipe.arguments


def train(trainer: Trainer) -> None:
    """Resumes or starts, trains, evaluates, saves the model and writes the results. A recipe calls it once, at its end.

    Args:
        trainer: a `transformers.Trainer` of any class, built with the `training_args` that `parse` has returned. What it has no
            use for, such as samples of a classifier, is left out.
    """
    recipe = runs.started()
    recipe.trainer = trainer
    recipe.train()


def quiet_libraries() -> None:
    """Hides warnings that the user can do nothing about."""
    for module in ("transformers", "trl", "peft", "accelerate"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)  # how one library calls another
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.device_mesh")  # about accelerate's calls
    warnings.filterwarnings("ignore", message=".* returned a view tensor")  # as many models do, none of which changes it in place
    # The launcher prints that the Hub cannot be reached, so that datasets come from the cache; a CPU has no TF32.
    # Names that a checkpoint lacks are those of tied weights: `check_saved_weights` finds others.
    # transformers compares --save_steps 0.1 with the number of steps that it became; run.json says what has really changed.
    for name in LOGGERS:
        logging.getLogger(name).addFilter(is_useful)


def is_useful(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if " LOAD REPORT from: " in message:  # the table of the weights that a model's files lack, such as a new head
        return is_first_process()
    return not any(words in message for words in HIDDEN)


def disable_peer_to_peer() -> None:
    """Makes NCCL send through host memory where the driver cannot copy between GPUs: RTX 40xx with a driver before 550.40.07.

    `accelerate launch` sets the same variables. Without them TrainingArguments raises NotImplementedError there, also for one
    process.
    """
    if not check_cuda_p2p_ib_support():
        for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
            os.environ.setdefault(name, "1")


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
        if run.config.is_fsdp:
            print_once(f"warning: {', '.join(sorted(configs.OWN_KEYS))} of a config are read with ./launch.sh only.")
    end_of_imports()
    atexit.register(prepare_exit)
    recipe = TrainedRecipe(run)
    sys.excepthook = functools.partial(end_process, recipe)
    runs.set_started(recipe)
    return recipe


class TrainedRecipe(StartedRecipe):
    """A recipe that trains."""

    def choose_device(self) -> None:
        self.run = choose_device(self.run)

    def prepare(self) -> None:
        # Again, after `start_of_training`: torch has put its own hook around it when it connected the processes.
        sys.excepthook = functools.partial(end_process, self)
        self.run = prepare_run(self.run, self.arguments)
        if launched():
            atexit.register(report_missing_train, self)

    def train(self) -> None:
        training.run_training(self)
        # Not earlier: what a recipe does after `train` can need the other processes. And not later, when they may have exited.
        atexit.register(self.trainer.end)


def prepare_run(run: Run, arguments: Arguments) -> Run:
    """Prepares each process for the run. The first one checks it and claims the output directory, the others wait."""
    _, training_args, model_args = arguments
    name = model_args.model_name_or_path
    nodes = values_of_nodes(lambda: facts_of_node(run, training_args, model_args))
    gpu = GpuFeatures(*answer_of_first("nodes", lambda: check_nodes(nodes)))
    run = dataclasses.replace(run, gpu=gpu)
    run, date = claim_folder(run, arguments)

    answer_of_first("model", lambda: check_models(run, arguments))
    if run.repository:
        answer_of_first("repository", lambda: make_repository(run.repository))
    set_loading_options(training_args, model_args, run)
    if run.tiny:
        run = dataclasses.replace(run, data=tiny.use_replacements(run.data, training_args, model_args))
    if name:
        answer_of_first("packing", lambda: check_packing(training_args, model_args, name, can_use_kernels=not run.on_cpu))
    if model_args.load_in_4bit and run.is_sharded:
        answer_of_first("weights", lambda: quantize_once(model_args), first_of_node=True)
        use_quantized_weights(model_args, training_args)

    set_date_of_chat_templates(datetime.fromisoformat(date))
    run = prepare_process(run, arguments)
    set_seed(training_args.seed)  # before a recipe makes a model: all processes make the same
    if training_args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # of the checks
    if training_args.world_size > 1:
        map_in_one_process()
        check_all_reduce(training_args.device)
    return run


def prepare_process(run: Run, arguments: Arguments) -> Run:
    """Changes the libraries in this process as the arguments need it. Returns what `prepare_data` does."""
    _, training_args, _ = arguments
    if run.on_cpu:
        multiply_in_float32()
    # On an H100 or a B200, cuDNN's attention makes a plan for each new shape of a batch (up to 1 s) and length of a text (54 ms).
    torch.backends.cuda.enable_cudnn_sdp(False)
    keep_activation_checkpointing()
    generate_in_evaluation_mode()
    if training_args.use_cpu:
        # Liger's kernels and pinned memory need a GPU; the activations are in host memory already.
        for option in ("use_liger_kernel", "activation_offloading"):
            if getattr(training_args, option, False):
                setattr(training_args, option, False)
                print_once(f"--{option} is not used: this run has no GPU.")
        (training_args.activation_checkpointing_kwargs or {}).pop("offload", None)
    return prepare_data(run, arguments)


def prepare_data(run: Run, arguments: Arguments) -> Run:
    """Sets which process shows progress. Returns the run with rows that fit the chat template."""
    _, training_args, model_args = arguments
    if training_args.process_index or training_args.disable_tqdm:  # one process shows progress
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
    if not model_args.model_name_or_path:
        return run
    return dataclasses.replace(run, data=chat_templates.fit_template(run.data, training_args, model_args, run.given))
