"""The three objects of arguments: their values, of the recipe and the flags, what follows from them, and what is refused.

A value comes from the first of these that sets it:
1. a flag, or the file of --config
2. with --tiny, the values of a rehearsal (rehearsal/tiny.py)
3. the recipe
4. the Accelerate config: precision, activation checkpointing, use_cpu
5. this project's defaults (DEFAULTS)
6. the defaults of transformers and TRL
"""

import argparse
import copy
import dataclasses
import datetime
import difflib
import json
import math
import os
import re
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.configs import AccelerateConfig, read_yaml
from harness.data import reading
from harness.data.formats import DESCRIPTIONS
from harness.data.images import AREA
from harness.data.reading import DataSettings, Source, length_of_rows, rows_of_step
from harness.messages import UserError, plural, print_once
from harness.nodes.network import exit_with_causes
from harness.rehearsal import tiny
from harness.run.saving import Repository
from harness.runs import Run
from harness.start.flags import help_text

import trl
from torch.distributed import DistError
from transformers import TrainingArguments
from transformers.trainer import Trainer
from trl import ModelConfig

DEFAULTS = {
    "logging_nan_inf_filter": False,  # a NaN loss must be visible
    "ddp_find_unused_parameters": False,  # these models use all parameters; transformers would search them in every step
    "save_total_limit": 2,  # a kill can leave the newest checkpoint incomplete; the one before it is complete
    "num_generations_eval": 1,  # GRPO and RLOO: other prompts say more about a model than other answers to the same one
}
# Values of --optim whose states FSDP cannot shard, or that compute something else with a part of a weight.
NOT_FOR_FSDP = re.compile("8bit|4bit|bnb|paged|lion|ademamix|adafactor|stable")
SHARDED_BY_CONFIG = "the config says how a run is sharded: ./launch.sh lists them"
UPLOADED_TOO_EARLY = "a checkpoint would be uploaded before it is complete, so no run could resume from it"
LEAST = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_length": 1,
    "global_batch_size": 1,
    "max_tokens": 1,
    "max_samples": 1,
    "max_eval_samples": 1,
    "max_pixels": AREA,
    "learning_rate": sys.float_info.min,
}
# A flag with a value, or with any value that is not off: why it makes a run wrong, or loses it.
REFUSED = {
    "--accelerator_config": "it can change the rows of a step: leave it out",
    "--average_tokens_across_devices False": "a token of a process with few tokens would count more",
    "--deepspeed": SHARDED_BY_CONFIG,
    "--fsdp": SHARDED_BY_CONFIG,
    "--fsdp_config": SHARDED_BY_CONFIG,
    "--greater_is_better True": "of a loss the worst model would be kept; for other metrics it is so by itself",
    "--hub_strategy all_checkpoints": UPLOADED_TOO_EARLY,
    "--hub_strategy checkpoint": UPLOADED_TOO_EARLY,
    "--hub_token": "it would be saved with the run: use `.venv/bin/hf auth login` or HF_TOKEN",
    "--parallelism_config": "tensor, context and sequence parallelism are not supported",
    "--resume_from_checkpoint": "the same command resumes from the newest checkpoint in --output_dir",
    "--save_only_model": "without the optimizer the run could not resume",
    "--save_total_limit 1": "the last checkpoint would be deleted before the next one is complete: pass 2 or more",
    "--sync_ref_model": "no checkpoint has the reference model that moves: a run that resumes would compare with another one",
    "--trust_remote_code": "code that comes with a model is not run here: use an architecture that is part of transformers",
    "--use_transformers_continuous_batching": "the trained weights would be rounded to bf16, where small updates are lost",
}


@dataclass
class ScriptArguments(trl.ScriptArguments):
    """TRL's ScriptArguments, budgets that do not depend on the number of GPUs, and several datasets."""

    dataset_name: list[str] | None = field(
        default=None,
        metadata={"help": "A Hub ID, a folder, a file or a glob; with --dataset_weights several datasets."},
    )
    dataset_config: list[str] | None = field(
        default=None, metadata={"help": "Config of the dataset; of several datasets one for each, `default` for those without."}
    )
    dataset_weights: list[float] | None = field(
        default=None,
        metadata={"help": "For several datasets: the share that each has of the rows, as 0.6 0.3 0.1 or 6 3 1."},
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows per optimizer step on all processes together; sets gradient_accumulation_steps."},
    )
    max_tokens: int | None = field(default=None, metadata={"help": "Train on this many tokens; sets max_steps."})
    max_samples: int | None = field(
        default=None,
        metadata={
            "help": "Train on at most this many documents. A stream with num_train_epochs keeps them in memory. Of several "
            "datasets exactly so many: small ones are repeated."
        },
    )
    max_eval_samples: int = field(
        default=256, metadata={"help": "Documents held out for evaluation and never trained on, at most; of each dataset."}
    )
    column_map: dict[str, str] | str | None = field(
        default=None, metadata={"help": 'New names of columns, as JSON: \'{"question": "prompt", "answer": "completion"}\'.'}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "What the chat template gets besides the messages, as JSON: '{\"enable_thinking\": false}'. The column "
            "chat_template_kwargs of a row has precedence. Without effect on rows that are no conversations."
        },
    )
    max_pixels: int = field(
        default=1_000_000,
        metadata={"help": "Of recipes for images: larger ones are shrunk to so many pixels, also by the saved processor."},
    )
    text_rows: str | None = field(
        default=None,
        metadata={
            "help": "What a row of text files is. Without the flag a line; with several files, or Markdown, a document.",
            "choices": ["line", "document"],
        },
    )
    split_conversations: bool = field(
        default=False,
        metadata={
            "help": "One row for every answer of a conversation, for templates that drop the reasoning of earlier ones. Without "
            "effect on other rows."
        },
    )
    profile: bool = field(default=False, metadata={"help": "Profile one step in the middle of the run."})

    def __post_init__(self) -> None:
        """A list of one dataset becomes the dataset, and the JSON of a flag a dict."""
        for name in ("dataset_name", "dataset_config"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) == 1:
                setattr(self, name, value[0])
        for name in ("column_map", "chat_template_kwargs"):
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    setattr(self, name, dict(json.loads(value)))
                except (TypeError, ValueError) as error:
                    raise UserError(f"--{name}: no JSON object: {value}") from error


Arguments = tuple[ScriptArguments, TrainingArguments, trl.ModelConfig]


def read_values(run: Run, config_class: type, recipe: dict[str, Any]) -> Run:
    """The run with the values of all arguments, and the names of those that a flag or the file of --config sets.

    Connects no process. `recipe`: the values of the recipe, by the names of the arguments; `config_class`: see `parse`.
    Raises UserError for anything that the user can fix.
    """
    words = sys.argv[1:]
    if {"--help", "-h"} & set(words):
        print_once(help_text(Path(run.recipe), config_class, ScriptArguments, recipe))
        sys.exit(0)
    parser = Parser((ScriptArguments, config_class, trl.ModelConfig), allow_abbrev=False, conflict_handler="resolve")
    parser.add_argument("--config")
    path = parser.parse_known_args(words)[0].config
    in_file = read_yaml(path, "--config") if path else {}
    own = DEFAULTS | values_of_config(run.config) | {"output_dir": default_output_dir(run)}
    own["disable_tqdm"] = not sys.stderr.isatty()  # in a log file a progress bar is a thousand lines

    # The last one wins. Not every class of arguments has all of the first ones.
    parser.set_defaults_with_config(**own)
    unknown = parser.set_defaults_with_config(**recipe)
    if run.tiny:  # which must not claim the folder of the run
        parser.set_defaults_with_config(**tiny.values_for(config_class), output_dir=own["output_dir"])
    unknown += parser.set_defaults_with_config(**in_file)
    values, rest = parser.parse_known_args(words)
    if wrong := unknown + rest:
        near = difflib.get_close_matches(wrong[0], [f"--{name}" for name in vars(values)], n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists what the recipe sets"
        raise UserError(f"{wrong[0]} is no flag of {Path(run.recipe).name}, and no value of the flag before it: {hint}")
    check_refused(values)
    flags = {word[2:].split("=")[0].replace("-", "_").removeprefix("no_") for word in words if word.startswith("--")}
    return dataclasses.replace(run, values=values, given=frozenset(flags | in_file.keys()) - {"config"})


def default_output_dir(run: Run) -> str:
    """`outputs/RECIPE`, for a rehearsal `outputs/tiny/RECIPE`."""
    return str(Path("outputs", "tiny" if run.tiny else "") / Path(run.recipe).stem)


def make_arguments(
    run: Run, config_class: type, dataset_formats: tuple[str, ...] | str, recipe: dict[str, Any]
) -> tuple[Run, Arguments]:
    """The three argument objects, and the run with what follows from them. Connects the processes: TrainingArguments does.

    Raises UserError for anything that the user can fix.
    """
    used = vars(run.values) | {"use_cpu": run.on_cpu or run.values.use_cpu}
    follows_step = used.get("steps_per_generation") is None and used.get("generation_batch_size") is None
    if "num_generations" in used and follows_step:
        used["steps_per_generation"] = used["num_generations"]  # passes GRPOConfig's check; `set_generations` sets it
    if "num_generations" in used and used["load_best_model_at_end"] and used["metric_for_best_model"] is None:
        used["metric_for_best_model"] = "reward"  # the loss of an evaluation on rewards is 0
    arguments = script_args, training_args, model_args = make_objects(used, config_class)
    if model_args.model_name_or_path and Path(model_args.model_name_or_path).is_dir():  # an adapter records it
        model_args.model_name_or_path = str(Path(model_args.model_name_or_path).absolute())
    if isinstance(model_args.lora_target_modules, str) and model_args.lora_target_modules.isidentifier():
        # TRL makes a string of a single name, which PEFT reads as a regular expression for whole names.
        model_args.lora_target_modules = [model_args.lora_target_modules]
    set_dependent_values(run, script_args, training_args, recipe)
    check_numbers(run, script_args, training_args)
    processes = run.processes or int(os.environ.get("WORLD_SIZE", 1))
    set_steps(run, arguments, recipe, processes)
    if "num_generations" in used:
        set_generations(training_args, processes, follows_step)
    check_arguments(run, *arguments)
    data = settings_of_data(script_args, training_args, dataset_formats, run.given)
    if run.tiny and "max_eval_samples" not in run.given:
        data = data.with_each(eval_rows_of_run=recipe.get("max_eval_samples", ScriptArguments.max_eval_samples))
    repository = take_repository(training_args)
    if run.tiny:
        repository = None
    return dataclasses.replace(run, data=data, profile=script_args.profile, repository=repository), arguments


def take_repository(training_args: TrainingArguments) -> Repository | None:
    """The repository of --push_to_hub, None without it. The trainer itself gets none.

    It would make a public one when it is built, also for a command, and upload checkpoints.
    """
    if not training_args.push_to_hub:
        return None
    training_args.push_to_hub = False
    return Repository(
        training_args.hub_model_id or Path(training_args.output_dir).name, training_args.hub_private_repo is not False
    )


class Parser(trl.TrlParser):
    """TRL's parser, which raises UserError. Two classes can have the same argument, as chat_template_kwargs of GRPO."""

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


def settings_of_data(
    script_args: ScriptArguments,
    training_args: TrainingArguments,
    formats: tuple[str, ...] | str = (),
    given: frozenset[str] = frozenset(),
) -> DataSettings:
    """What the arguments of a run say about its data. Raises UserError for datasets that do not belong together.

    `formats`: see DataSettings. `given`: names of the arguments that the user passed.
    """
    formats = tuple(filter(None, [formats] if isinstance(formats, str) else formats))
    unknown = set(formats) - DESCRIPTIONS.keys()
    if unknown:
        raise UserError(f"dataset_formats: {min(unknown)!r} is no format: use one or several of {', '.join(DESCRIPTIONS)}")
    has_own = hasattr(training_args, "chat_template_kwargs")  # GRPOTrainer renders the prompts itself
    return DataSettings(
        sources=tuple(sources_of(script_args)),
        formats=formats,
        streaming=script_args.dataset_streaming,
        max_samples=script_args.max_samples,
        max_eval_samples=script_args.max_eval_samples,
        column_map=script_args.column_map,
        template_arguments=None if has_own else script_args.chat_template_kwargs,
        split_conversations=script_args.split_conversations,
        text_field=getattr(training_args, "dataset_text_field", "text"),
        seed=training_args.seed,
        output_dir=training_args.output_dir,
        keeps_samples=bool(script_args.max_samples) and training_args.max_steps <= 0,
        needs_test_split="dataset_test_split" in given,
        is_read_in_order=getattr(type(training_args), "train_sampling_strategy", "") == "sequential",
    )


def sources_of(script_args: ScriptArguments) -> list[Source]:
    """The datasets that the arguments name. Raises UserError unless each of several has a weight, and if any a config."""
    if not script_args.dataset_name:
        return []
    names = script_args.dataset_name
    if isinstance(names, str):
        names = [names]
    configs = script_args.dataset_config or ["default"] * len(names)
    if isinstance(configs, str):
        configs = [configs]
    weights = script_args.dataset_weights or [1.0]
    if not len(names) == len(weights) == len(configs) or not all(0 < weight < math.inf for weight in weights):
        raise UserError(
            f"--dataset_name names {len(names)} datasets: pass a weight above 0 for each, for equal shares --dataset_weights "
            f"{' '.join(['1'] * len(names))}, and if one has a --dataset_config, one for each, `default` for those without. "
            "Files of one dataset are a folder, or a glob in quotes"
        )
    return [
        Source(
            name,
            None if config == "default" else config,
            train_split=script_args.dataset_train_split,
            test_split=script_args.dataset_test_split,
            text_rows=script_args.text_rows,
            display_name=name if config == "default" or len(names) == 1 else f"{name} {config}",
            weight=weight / sum(weights),
        )
        for name, config, weight in zip(names, configs, weights, strict=True)
    ]


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
    values = {"activation_checkpointing": config.activation_checkpointing, "use_cpu": config.use_cpu}
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


def check_numbers(run: Run, script_args: ScriptArguments, training_args: TrainingArguments) -> None:
    """Raises UserError for a number with which a run would train nothing, or something else. NaN is refused too."""
    least = LEAST
    if training_args.max_steps <= 0 or "num_train_epochs" in run.given:
        least = least | {"num_train_epochs": sys.float_info.min}
    if training_args.max_steps < 1 and training_args.max_steps != -1:  # transformers would train for --num_train_epochs
        raise UserError(f"--max_steps is {training_args.max_steps}, expected 1 or more, or -1 for --num_train_epochs")
    values = vars(training_args) | vars(script_args)
    for name, smallest in least.items():
        value = values.get(name)
        if value is not None and not (isinstance(value, int | float) and smallest <= value < math.inf):
            expected = "a number above 0" if 0 < smallest < 1 else f"{smallest} or more"
            raise UserError(f"--{name} is {value}, expected {expected}")


def check_refused(values: argparse.Namespace) -> None:
    """Raises UserError for a flag of REFUSED, by the recipe, a file or the command line."""
    for name, value in vars(values).items():
        reason = REFUSED.get(f"--{name} {value}") or (value and REFUSED.get(f"--{name}"))
        if reason:
            raise UserError(f"--{name}: {reason}")
    for name in ("trust_remote_code", "distributed_config", "tp_plan", "tp_size"):
        if name in (getattr(values, "model_init_kwargs", None) or ""):
            raise UserError(f"--model_init_kwargs: {name} is not supported: leave it out")


def check_arguments(run: Run, script_args: ScriptArguments, training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Raises UserError for arguments that contradict each other, or that would have no effect. Reads no model and no dataset."""
    check_flags_have_effect(run, script_args, training_args, model_args)
    check_optimizer(training_args, run.config)
    if hasattr(training_args, "max_completion_length"):
        check_generation(script_args, training_args)


def check_generation(script_args: ScriptArguments, training_args: TrainingArguments) -> None:
    """Raises UserError for groups of answers that a step does not hold, or that a run would generate again when it resumes.

    And for a stream, of which DistillationTrainer would fail after both models are loaded, with an error that does not name it.
    """
    if script_args.dataset_streaming:
        raise UserError("--dataset_streaming: the prompts of a trainer that generates cannot be streamed: leave it out")
    if not hasattr(training_args, "num_generations"):
        return
    if training_args.metric_for_best_model in ("loss", "eval_loss"):  # the first checkpoint would be the best one
        raise UserError("--metric_for_best_model: the loss of an evaluation on rewards is 0: leave it out, or pass reward")
    rows = training_args.generation_batch_size
    group = training_args.num_generations
    if rows % group:
        raise UserError(f"--num_generations {group}: {rows} answers at a time are no multiple: pass another --global_batch_size")
    shared = training_args.steps_per_generation * getattr(training_args, "num_iterations", 1)
    if training_args.gradient_accumulation_steps % shared and training_args.save_strategy != "no":
        raise UserError(
            f"--steps_per_generation, --num_iterations: {shared} micro-batches share their answers, more than a step has, so a "
            "resumed run would generate others: leave them out, or pass --save_strategy no"
        )


def check_flags_have_effect(
    run: Run, script_args: ScriptArguments, training_args: TrainingArguments, model_args: ModelConfig
) -> None:
    """Raises UserError for a flag that was passed and would change nothing, or something else than it says."""
    given = run.given
    schedule = training_args.lr_scheduler_type.value
    unread = {}
    if not model_args.use_peft:
        unread["--use_peft"] = {name for name in given if name.startswith("lora_") or name in ("use_rslora", "use_dora")}
    if not model_args.load_in_4bit:
        unread["--load_in_4bit --use_peft"] = {"bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"}
    if training_args.warmup_steps and schedule in ("constant", "reduce_lr_on_plateau", "greedy"):
        unread[f"another --lr_scheduler_type than {schedule}"] = {"warmup_steps"}
    if hasattr(training_args, "label_smoothing"):  # of DPO
        unread["a trainer that reads it: leave it out, --label_smoothing is DPO's own"] = {"label_smoothing_factor"}
    if script_args.max_tokens:
        unread["leaving out --max_tokens"] = {"max_steps", "num_train_epochs"}
    if "global_batch_size" in given:
        unread["leaving out --global_batch_size"] = {"gradient_accumulation_steps"}
    for needed, names in unread.items():
        if names & given:
            raise UserError(f"--{min(names & given)} has no effect without {needed}")
    if model_args.load_in_4bit or model_args.load_in_8bit:
        check_quantized(run, training_args, model_args)


def check_quantized(run: Run, training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Raises UserError for options with which quantized weights would not be sharded, or be destroyed."""
    if not run.is_sharded:
        return
    if model_args.load_in_8bit:
        raise UserError("--load_in_8bit: FSDP2 shards floating-point parameters only, so it is for one GPU: use --load_in_4bit")
    computes_in = (None, ModelConfig().dtype, "bfloat16")
    given = run.given
    wrong = {
        "bnb_4bit_quant_storage": model_args.bnb_4bit_quant_storage not in (None, "float32", "bfloat16", "float16"),
        "fp16": training_args.fp16,
        "bf16": training_args.bf16 and "bf16" in given,
        "dtype": model_args.dtype not in computes_in or ("dtype" in given and model_args.dtype != "bfloat16"),
        "torch_compile": training_args.torch_compile,
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(
                f"--{name}: sharded 4-bit weights are stored as floating-point numbers, computed in bfloat16 without mixed "
                "precision (which would destroy their bits), and not compiled: leave out the flag"
            )


def check_optimizer(training_args: TrainingArguments, config: AccelerateConfig) -> None:
    """Raises UserError for an optimizer whose states FSDP cannot shard, and for arguments that transformers ignores."""
    name = training_args.optim.value
    if config.is_fsdp and NOT_FOR_FSDP.search(name):
        raise UserError(f"--optim {name} is not for FSDP: use adamw_torch_fused, whose states are divided among all GPUs")
    if "paged" in name:
        raise UserError(f"--optim {name}: bitsandbytes does not page the states of a resumed run: use adamw_8bit")
    for word in training_args.optim_args.split(",") if training_args.optim_args else []:
        if "=" not in word or not is_read_by_optimizer(training_args, word):
            raise UserError(f"--optim_args: {name} does not read {word!r}: pass NAME=VALUE of its arguments, separated by commas")


def is_read_by_optimizer(training_args: TrainingArguments, word: str) -> bool:
    """Whether the optimizer reads this one of `optim_args`, NAME=VALUE: transformers ignores others without a word."""
    changed = copy.copy(training_args)
    changed.optim_args = None
    _, without = Trainer.get_optimizer_cls_and_kwargs(changed)
    changed.optim_args = f"{word.partition('=')[0]}=0.37"  # no default
    try:
        return Trainer.get_optimizer_cls_and_kwargs(changed)[1] != without
    except (ValueError, AttributeError):  # it is no number
        return True
