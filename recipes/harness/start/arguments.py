"""From the values of a recipe and the command line to the three argument objects of a run.

A value comes from the first of these that sets it:
1. a flag, or the file of --config
2. with --tiny, the values of a rehearsal (rehearsal/tiny.py)
3. the recipe
4. the Accelerate config: precision and activation checkpointing
5. this project's defaults (DEFAULTS)
6. the defaults of transformers and TRL
"""

import argparse
import dataclasses
import datetime
import difflib
import math
import os
import sys
import typing
from pathlib import Path
from typing import Any

from harness.batches import length_of_rows, rows_of_step
from harness.configs import AccelerateConfig, read_yaml
from harness.data import reading
from harness.data.script_arguments import ScriptArguments
from harness.data.settings import settings_of_data, sources_of
from harness.messages import UserError, plural, print_once
from harness.nodes.network import exit_with_causes
from harness.rehearsal import tiny
from harness.run.publishing import take_repository
from harness.runs import Run
from harness.start import checks
from harness.start.flags import help_text
from harness.start.record import settings_of

import trl
from torch.distributed import DistError
from transformers import TrainingArguments

DEFAULTS = {
    "logging_nan_inf_filter": False,  # a NaN loss must be visible
    "ddp_find_unused_parameters": False,  # these models use all parameters; transformers would search them in every step
    "save_total_limit": 2,  # a kill can leave the newest checkpoint incomplete; the one before it is complete
    "num_generations_eval": 1,  # GRPO and RLOO: other prompts say more about a model than other answers to the same one
}
Arguments = tuple[ScriptArguments, TrainingArguments, trl.ModelConfig]


def read_values(run: Run, config_class: type, recipe: dict[str, Any]) -> tuple[argparse.Namespace, frozenset[str]]:
    """The values of all arguments, and the names of those that a flag or the file of --config sets. Connects no process.

    `recipe`: the values of the recipe, by the names of the arguments; `config_class`: see `harness.parse`.
    Raises UserError for anything that the user can fix.
    """
    words = sys.argv[1:]
    if {"--help", "-h"} & set(words):
        print_once(help_text(Path(run.recipe), config_class, recipe))
        sys.exit(0)
    classes = (ScriptArguments, config_class, trl.ModelConfig)
    parser = Parser(classes, allow_abbrev=False, conflict_handler="resolve")  # GRPOConfig has a chat_template_kwargs too
    parser.add_argument("--config")
    path = parser.parse_known_args(words)[0].config
    in_file = (read_yaml(path, "--config") if path else None) or {}  # None: an empty file
    of_harness = DEFAULTS | values_of_config(run.config) | {"output_dir": run.default_output_dir}
    of_harness["disable_tqdm"] = not sys.stderr.isatty()  # in a log file a progress bar is a thousand lines
    parser.set_defaults_with_config(**of_harness)  # not every class of arguments has all of them
    unknown = parser.set_defaults_with_config(**recipe)
    if run.tiny:  # which must not claim the folder of the run
        parser.set_defaults_with_config(**tiny.values_for(config_class) | {"output_dir": run.default_output_dir})
    unknown += parser.set_defaults_with_config(**in_file)
    values, rest = parser.parse_known_args(words)
    if wrong := unknown + rest:
        word = wrong[0]
        near = difflib.get_close_matches(word, [f"--{name}" for name in vars(values)], n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists what the recipe sets"
        raise UserError(f"{word} is no flag of {Path(run.recipe).name}, and no value of the flag before it: {hint}")
    checks.check_refused(values)
    flags = {word[2:].split("=")[0].replace("-", "_").removeprefix("no_") for word in words if word.startswith("--")}
    return values, frozenset(flags | in_file.keys()) - {"config"}


def make_arguments(
    run: Run,
    values: argparse.Namespace,
    config_class: type,
    dataset_formats: tuple[str, ...] | str,
    recipe: dict[str, Any],
) -> tuple[Run, Arguments]:
    """The three argument objects, and the run with what follows from them. Connects the processes: TrainingArguments does.

    `values`: what `read_values` has found.

    Raises UserError for anything that the user can fix.
    """
    used = vars(values) | {"use_cpu": run.on_cpu or values.use_cpu}
    follows_step = used.get("steps_per_generation") is None and used.get("generation_batch_size") is None
    if "num_generations" in used and follows_step:
        used["steps_per_generation"] = used["num_generations"]  # passes GRPOConfig's check; `set_generations` sets it
    if "num_generations" in used and used["load_best_model_at_end"] and used["metric_for_best_model"] is None:
        used["metric_for_best_model"] = "reward"  # the loss of an evaluation on rewards is 0
    arguments = script_args, training_args, model_args = make_objects(used, config_class)
    if model_args.model_name_or_path and Path(model_args.model_name_or_path).is_dir():  # an adapter records it
        model_args.model_name_or_path = str(Path(model_args.model_name_or_path).absolute())
    set_dependent_values(run, script_args, training_args, recipe)
    checks.check_numbers(run, script_args, training_args)
    processes = run.processes or int(os.environ.get("WORLD_SIZE", 1))
    set_steps(run, arguments, recipe, processes)
    if "num_generations" in used:
        set_generations(training_args, processes, follows_step)
    data = settings_of_data(script_args, training_args, dataset_formats, run.given)
    if run.tiny and "max_eval_samples" not in run.given:
        data = data.with_each(eval_rows_of_run=recipe.get("max_eval_samples", ScriptArguments.max_eval_samples))
    run = dataclasses.replace(
        run,
        settings=settings_of(values, tuple(map(type, arguments))),
        data=data,
        profile=script_args.profile,
        repository=take_repository(training_args),
    )
    return run, arguments


class Parser(trl.TrlParser):
    """TRL's parser, which raises UserError."""

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message.split("\n")[0])


def make_objects(values: dict[str, Any], config_class: type) -> Arguments:
    """An object of each class."""
    try:
        return tuple(
            cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.init})
            for cls in (ScriptArguments, config_class, trl.ModelConfig)
        )
    except DistError as error:
        exit_with_causes(error)


def set_dependent_values(
    run: Run, script_args: ScriptArguments, training_args: TrainingArguments, recipe: dict[str, Any]
) -> None:
    """Sets arguments that were not given and depend on others. `recipe`: the values of the recipe."""
    given = run.given
    of_recipe = ScriptArguments(dataset_name=recipe.get("dataset_name"))
    if script_args.dataset_name != of_recipe.dataset_name:  # another dataset has its own config and splits
        own = {"dataset_config", "dataset_train_split", "dataset_test_split", "dataset_weights"}
        for name in own - given:
            setattr(script_args, name, getattr(ScriptArguments, name))
    has_groups = hasattr(training_args, "num_generations")  # GRPO, whose batches are multiples of these
    if "per_device_eval_batch_size" not in given and not has_groups:
        # transformers' own default of 8 would be the largest batch of the run.
        smaller = min(training_args.per_device_eval_batch_size, training_args.per_device_train_batch_size)
        training_args.per_device_eval_batch_size = smaller
    if training_args.eval_strategy == "no" and "eval_on_start" not in given:
        training_args.eval_on_start = False
    if training_args.report_to and not training_args.run_name:  # trackio would start another run for the last evaluation
        training_args.run_name = f"{Path(training_args.output_dir).name} {datetime.datetime.now():%Y-%m-%d %H:%M:%S}"


def values_of_config(config: AccelerateConfig) -> dict[str, Any]:
    """What an Accelerate config says about training arguments. The recipe and flags can change it."""
    values = {"activation_checkpointing": config.activation_checkpointing}
    if config.activation_checkpointing_offload:
        values["activation_checkpointing_kwargs"] = {"offload": True}
    if config.mixed_precision is not None:
        values |= {"bf16": config.mixed_precision == "bf16", "fp16": config.mixed_precision == "fp16"}
    return values


def set_steps(run: Run, arguments: Arguments, recipe: dict[str, Any], processes: int) -> None:
    """Sets gradient_accumulation_steps from global_batch_size, and max_steps from max_tokens or the flag num_train_epochs.

    `recipe`: the values of the recipe.
    """
    script_args, training_args, _ = arguments
    set_accumulation_steps(run, arguments, recipe, processes)
    if trains_for_epochs(run, script_args):
        script_args.dataset_streaming = False
        if not run.tiny and "num_train_epochs" not in run.given:
            training_args.max_steps = -1
            training_args.num_train_epochs = 1
    if script_args.max_tokens:
        if length_of_rows(training_args) is None:
            raise UserError("--max_tokens: the rows have no maximum length: pass --max_steps")
        tokens = rows_of_step(training_args, processes) * length_of_rows(training_args)
        training_args.max_steps = math.ceil(script_args.max_tokens / tokens)
    elif "num_train_epochs" in run.given and "max_steps" not in run.given:
        training_args.max_steps = -1


def set_accumulation_steps(run: Run, arguments: Arguments, recipe: dict[str, Any], processes: int) -> None:
    """Sets gradient_accumulation_steps from global_batch_size; the flag gradient_accumulation_steps wins.

    A rehearsal has its own micro-batch. It checks that the batch of the run is possible, and takes micro-batches of one row
    if its own micro-batch cannot make up the global batch.
    """
    script_args, training_args, _ = arguments
    if "gradient_accumulation_steps" in run.given:
        return
    rows = script_args.global_batch_size
    micro_batch = training_args.per_device_train_batch_size
    if run.tiny:
        of_run = micro_batch
        if "per_device_train_batch_size" not in run.given:
            of_run = recipe.get("per_device_train_batch_size", type(training_args).per_device_train_batch_size)
        accumulation_steps(rows or recipe.get("global_batch_size"), of_run, processes)
        if rows and rows % (micro_batch * processes):
            training_args.per_device_train_batch_size = micro_batch = 1
    if rows:
        training_args.gradient_accumulation_steps = accumulation_steps(rows, micro_batch, processes)


def set_generations(training_args: TrainingArguments, processes: int, follows_step: bool) -> None:
    """Sets how many answers GRPOConfig, or RLOOConfig, generates at a time, as itself would from the final accumulation.

    `follows_step`: those of an optimizer step; otherwise `steps_per_generation` is set.
    """
    if follows_step:
        training_args.steps_per_generation = training_args.gradient_accumulation_steps
    rows = training_args.per_device_train_batch_size * processes
    training_args.generation_batch_size = rows * training_args.steps_per_generation


def trains_for_epochs(run: Run, script_args: ScriptArguments) -> bool:
    """Whether a recipe that streams reads files of the user's own, without a flag for the number of steps or rows.

    The recipe's number of steps is for its own dataset. So it trains for one epoch, or for --num_train_epochs.
    """
    if not script_args.dataset_streaming or "dataset_name" not in run.given:
        return False
    flags = {"dataset_streaming", "max_steps", "max_tokens", "max_samples"}
    return not flags & run.given and all(reading.is_local(source.name) for source in sources_of(script_args))


def accumulation_steps(rows: int | None, micro_batch: int, processes: int) -> int:
    """Micro-batches per optimizer step of `rows` rows; 1 for None. Raises UserError if they cannot be divided."""
    unit = micro_batch * processes
    steps, rest = divmod(rows or unit, unit)
    if rest:
        raise UserError(
            f"--global_batch_size {rows} is not a multiple of {unit}, which is --per_device_train_batch_size {micro_batch} on "
            f"{plural(processes, 'process')}: pass --global_batch_size {max(1, steps) * unit} or {(steps + 1) * unit}, another "
            "micro-batch, or another NPROC_PER_NODE"
        )
    return steps
