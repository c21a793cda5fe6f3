"""What is done at the end of `parse`: check the arguments, name what is loaded instead, change libraries in this process."""

import copy
import dataclasses
import functools
from datetime import datetime

from harness.compat.bitsandbytes import keep_4bit_layout
from harness.compat.torch import multiply_in_float32
from harness.compat.transformers import set_date_of_chat_templates, use_no_gpu_kernels
from harness.compat.trl import generate_in_evaluation_mode, keep_activation_checkpointing
from harness.data import chat_templates, reading
from harness.hub import check_model_exists
from harness.messages import print_once
from harness.model.loading import (
    build_adapter_on_meta,
    check_architecture,
    check_model,
    check_teacher,
    keep_adapter_in_text_part,
    set_loading_options,
)
from harness.model.packing import check_packing
from harness.model.weight_files import check_weights
from harness.rehearsal import tiny
from harness.runs import Run
from harness.start import checks
from harness.start.arguments import Arguments

import datasets
import transformers
from huggingface_hub.constants import HF_HUB_OFFLINE


def check_all_arguments(run: Run, arguments: Arguments) -> None:
    """Raises UserError for arguments that contradict each other, or that would have no effect. Reads no model and no dataset."""
    checks.check_flags_have_effect(run, *arguments)
    checks.check_optimizer(arguments[1], run.config)
    if hasattr(arguments[1], "max_completion_length"):
        checks.check_generation(*arguments[:2])


def set_model_options(run: Run, arguments: Arguments) -> None:
    """Sets how the model is loaded and its loss computed. After `check_all_arguments`, which looks at what was asked for."""
    _, training_args, model_args = arguments
    set_loading_options(training_args, model_args, run)
    if run.data.formats:  # rows of a recipe that names none can have images
        keep_adapter_in_text_part(model_args, run.tiny)
    if model_args.load_in_4bit and run.on_cpu:
        keep_4bit_layout()


def check_model_and_dataset(run: Run, arguments: Arguments, with_weights: bool = True) -> None:
    """Raises UserError unless the model (the tiny one of a rehearsal) can be opened and trained. `load` checks the dataset."""
    _, training_args, model_args = arguments
    data = run.data
    for source in data.sources:
        reading.print_ignored_files(source.name, source.config)
    display_name = model_args.model_name_or_path
    teacher = getattr(training_args, "teacher_model_name_or_path", None)
    if run.on_cpu:
        use_no_gpu_kernels()
    if teacher and not (run.tiny and tiny.family_of(teacher)):
        check_model_exists(teacher, training_args.teacher_model_revision or "main", "--teacher_model_name_or_path")
    if run.tiny:  # in copies: `replace_model_and_dataset` comes later
        if display_name and tiny.family_of(display_name) is None:
            check_model_exists(display_name, model_args.model_revision)
            check_architecture(training_args, model_args, display_name)
        tiny.make_models(training_args, model_args)
        training_args = copy.copy(training_args)
        model_args = copy.copy(model_args)
        tiny.use_replacements(data, training_args, model_args)
    else:
        if HF_HUB_OFFLINE:
            print_once("The Hub is not reachable, or HF_HUB_OFFLINE is set: using the files on this machine.")
        if display_name:
            check_model(training_args, model_args, run.is_sharded)
        if teacher:
            check_teacher(training_args, model_args)
    if not display_name:  # the recipe makes its model itself
        return
    check_packing(training_args, model_args, display_name, can_use_kernels=not (run.on_cpu and run.trains))
    if model_args.use_peft:
        build_adapter_on_meta(model_args, display_name)
    if with_weights and not run.tiny:
        check_weights(model_args.model_name_or_path, model_args.model_revision)  # last: it downloads them
        if teacher:
            check_weights(teacher, training_args.teacher_model_revision or "main")


def use_commit(arguments: Arguments, commit: str, of_teacher: str | None = None) -> None:
    """Makes the arguments name a commit of the models: a branch can change while a run trains, or before it resumes."""
    _, training_args, model_args = arguments
    options = getattr(training_args, "model_init_kwargs", None) or {}
    if model_args.model_name_or_path and options.get("revision", model_args.model_revision) == model_args.model_revision:
        tiny.use_model(training_args, model_args, model_args.model_name_or_path, commit)
    if of_teacher:
        training_args.teacher_model_revision = of_teacher


def replace_model_and_dataset(run: Run, arguments: Arguments) -> Run:
    """Makes a rehearsal use the tiny model and dataset: changes the arguments, and returns the run with other data."""
    if not run.tiny:
        return run
    return dataclasses.replace(run, data=tiny.use_replacements(run.data, *arguments[1:]))


def prepare_process(run: Run, arguments: Arguments, date: datetime | None = None) -> Run:
    """Changes the libraries in this process as the arguments need it. Returns what `prepare_data` does.

    `date`: that chat templates print, None for today's.
    """
    _, training_args, _ = arguments
    if run.on_cpu:
        use_no_gpu_kernels()
        multiply_in_float32()
    if training_args.use_cpu:
        # Liger's kernels and pinned memory need a GPU; the activations are in host memory already.
        for name in ("use_liger_kernel", "activation_offloading"):
            if getattr(training_args, name, False):
                setattr(training_args, name, False)
                print_once(f"--{name} is not used: this run has no GPU.")
        (training_args.activation_checkpointing_kwargs or {}).pop("offload", None)
    keep_activation_checkpointing()
    generate_in_evaluation_mode()
    set_date_of_chat_templates(date)
    return prepare_data(run, arguments)


def prepare_data(run: Run, arguments: Arguments) -> Run:
    """Sets which process shows progress. Returns the run with rows that fit the chat template."""
    _, training_args, model_args = arguments
    if training_args.process_index or training_args.disable_tqdm:  # one process shows progress
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
    name = model_args.model_name_or_path
    if not name:
        return run
    data = chat_templates.fit_template(run.data, training_args, model_args, run.given)
    check = functools.partial(
        chat_templates.check_conversations,
        training_args,
        model_args,
        run.given,
        model_name=name,
        splits_answers=data.split_conversations,
    )
    return dataclasses.replace(run, data=dataclasses.replace(data, check_conversations=check))
