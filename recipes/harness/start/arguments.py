"""`parse`: from the values of a recipe and the command line to the arguments of a run.

A value comes from the first of these that sets it:
1. a flag, or the file of --config
2. with --tiny, the values of a rehearsal (rehearsal/tiny.py)
3. the recipe
4. the Accelerate config: precision and activation checkpointing
5. this project's defaults (DEFAULTS)
6. the defaults of transformers and TRL
"""

import copy
import dataclasses
import datetime
import hashlib
import json
import logging
import math
import os
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

from harness import configs, folder
from harness.compat.accelerate import allow_fsdp_on_cpu
from harness.compat.bitsandbytes import keep_4bit_layout
from harness.compat.torch import multiply_in_float32, offload_to_unpinned_memory
from harness.compat.transformers import offload_activations_to_unpinned_memory
from harness.compat.trl import install_training_template, pack_streams_in_batches, record_conversations
from harness.configs import AccelerateConfig
from harness.data import chat_templates, reading
from harness.data.loading import FIRST_ROWS, check_dataset, use_prepared_files
from harness.data.script_arguments import ScriptArguments, change_each, each_dataset, set_datasets
from harness.data.streams import documents_per_batch
from harness.hub import wait_for_hub
from harness.launched import NODE_VARIABLE, Checked, Launched, UserError, print_once
from harness.model.attention import print_attention
from harness.model.gpu_features import why_not_triton
from harness.model.loading import (
    build_adapter_on_meta,
    check_experts,
    check_host_memory,
    check_model,
    check_module_names,
    set_loading_options,
)
from harness.model.quantized import quantize_once, use_quantized_weights
from harness.nodes.network import check_all_reduce, exit_with_causes, wait_for_first_process
from harness.rehearsal import tiny
from harness.run import mirror
from harness.start import checks
from harness.start.flags import is_true, unknown_flag

import datasets
import torch
import transformers
import trl
import yaml
from accelerate.utils import check_cuda_p2p_ib_support
from huggingface_hub.constants import HF_HUB_OFFLINE
from torch.distributed import DistError
from transformers import TrainingArguments

DEFAULTS = {
    "logging_nan_inf_filter": False,  # a NaN loss must be visible
    "ddp_find_unused_parameters": False,  # these models use all parameters; transformers would search them in every step
    "save_total_limit": 2,  # a kill can leave the newest checkpoint incomplete; the one before it is complete
}
CONVERSATIONS = 16  # for evaluation, that a run keeps for --verify
Arguments = tuple[ScriptArguments, TrainingArguments, trl.ModelConfig]


def parse(config_class: type, dataset_formats: tuple[str, ...] | str = (), **defaults: Any) -> Arguments:
    """Turns the values of a recipe and the command line into the three argument objects of TRL's scripts.

    Args:
        config_class: `trl.SFTConfig`, `transformers.TrainingArguments` or a subclass.
        dataset_formats: the formats of rows that the recipe can train on, its first choice first: "text", "messages",
            "prompt_completion", "instruction" (see `harness/data/formats.py`). Empty: rows stay as they are.
        **defaults: the values of the recipe, by the names of the arguments.

    Returns:
        `(script_args, training_args, model_args)`. In a rehearsal they name the tiny model and dataset.

    Raises:
        UserError: for anything the user can fix. `harness.parse` turns it into one message and exit code 2.
    """
    launched = find_launched()
    config = configs.read(launched.config)
    is_sharded = config.is_fsdp or launched.mode in ("preview", "prepare")
    quiet_libraries()
    disable_peer_to_peer()
    if is_sharded and launched.on_cpu and launched.mode in ("train", "plan") and not launched.only_check:
        allow_fsdp_on_cpu()
        offload_to_unpinned_memory()
    arguments = script_args, training_args, model_args = read_arguments(config_class, defaults, launched, config)
    script_args.dataset_formats = (dataset_formats,) if isinstance(dataset_formats, str) else dataset_formats
    if launched.mode == "preview":
        change_each(script_args, lambda one: setattr(one, "first_rows", FIRST_ROWS))
    checks.check_numbers(*arguments)
    checks.check_mirror(script_args, launched.mode)
    before = settings_of_continued_run(training_args, launched)
    set_steps(arguments, defaults, launched.processes or int(os.environ.get("WORLD_SIZE", 1)), launched.tiny, before)
    is_plain_start = not launched.recipe  # without launch.sh, nothing was checked before
    is_checking = launched.only_check or launched.mode == "plan" or (is_plain_start and training_args.process_index == 0)
    if is_checking:
        checks.check_arguments(*arguments)
        checks.check_flags_have_effect(*arguments, is_sharded)
        checks.check_optimizer(training_args, config)
    if is_plain_start and training_args.device.type == "cuda":
        checks.check_one_gpu(training_args)
        launched.no_triton = why_not_triton()
    set_loading_options(training_args, model_args, is_sharded, launched, script_args.given)
    if is_checking and launched.mode == "train" and not training_args.use_cpu:
        checks.check_gpus(training_args, model_args, is_sharded, launched)
    if is_checking and launched.mode != "plan":
        check_and_claim_run(arguments, launched, config, is_sharded)
    elif is_checking and launched.tiny:
        tiny.make_replacements(script_args, model_args)
    if launched.mode == "prepare" and launched.only_check:  # `commands/prepare.py` downloads the files next
        raise Checked(*arguments)
    model_name = model_args.model_name_or_path
    replace_model_and_dataset(arguments, launched)
    if launched.mode == "plan":
        check_module_names(model_args, config, model_name)
    if model_args.load_in_4bit and launched.on_cpu and launched.mode != "plan":
        keep_4bit_layout()
    if model_args.load_in_4bit and is_sharded and launched.mode in ("train", "prepare"):
        if is_checking or launched.mode == "prepare":
            quantize_once(model_args)
        use_quantized_weights(model_args, training_args)
    if launched.only_check:
        raise Checked(*arguments)
    if is_plain_start and training_args.world_size > 1:
        wait_for_first_process()
    prepare_process(arguments, launched)
    return arguments


def find_launched() -> Launched:
    """How this process was started: by launch.sh, by `accelerate launch`, or directly."""
    launched = Launched.from_environment()
    if launched.recipe or "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return launched
    launched.config = config_of_accelerate_launch()
    launched.processes = int(os.environ.get("WORLD_SIZE", 1))
    launched.on_cpu = is_true("use_cpu", sys.argv)
    os.environ.update(launched.to_environment())  # for `train`
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return launched
    if not launched.on_cpu and not torch.cuda.is_available():
        raise UserError("this machine has no GPU that PyTorch can use, and the config is for GPUs: pass --use_cpu")
    if not launched.config:
        print_once(
            f"warning: the config file of `accelerate launch` is unknown, so the keys {', '.join(sorted(configs.OWN_KEYS))} are "
            "not read, and sharding is not checked: pass the file with --config_file"
        )
    return launched


def config_of_accelerate_launch() -> str:
    """The value of --config_file of the `accelerate launch` that started this process, "" if there is none."""
    import psutil

    for process in psutil.Process().parents()[:2]:
        words = [part for word in process.cmdline() for part in word.split("=", 1)]
        if "--config_file" in words[:-1]:
            return str(Path(process.cwd(), words[words.index("--config_file") + 1]))
    return ""


def quiet_libraries() -> None:
    """Hides warnings that the user can do nothing about."""
    for module in ("transformers", "trl", "peft", "accelerate"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)  # how one library calls another
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.device_mesh")  # about accelerate's calls
    # `check_and_claim_run` prints that a dataset comes from the cache where the Hub cannot be reached; a CPU has no TF32.
    # Offline, `kernels` reports that it did not check the publisher of a kernel; it did when the kernel was downloaded.
    names = ("datasets.load", "datasets.packaged_modules.cache.cache", "transformers.training_args", "kernels.hf_hub")
    for name in names:
        logging.getLogger(name).addFilter(_is_useful)


def _is_useful(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(words in message for words in ("offline mode", "Found the latest", "The speedups for torchdynamo"))


def disable_peer_to_peer() -> None:
    """Makes NCCL send through host memory where the driver cannot copy between GPUs: RTX 40xx with a driver before 550.40.07.

    `accelerate launch` sets the same variables. Without them TrainingArguments raises NotImplementedError there, also for one
    process.
    """
    if not check_cuda_p2p_ib_support():
        for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
            os.environ.setdefault(name, "1")


class Parser(trl.TrlParser):
    """TRL's parser. Raises UserError, and records which arguments the file of --config sets."""

    given = frozenset()

    def set_defaults_with_config(self, **arguments: Any) -> list[str]:
        self.given = frozenset(arguments)
        return super().set_defaults_with_config(**arguments)

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message.split("\n")[0])


def read_arguments(config_class: type, defaults: dict[str, Any], launched: Launched, config: AccelerateConfig) -> Arguments:
    """The three argument objects, with the precedence that is described at the top of this file."""
    classes = (ScriptArguments, config_class, trl.ModelConfig)
    names = {field.name for cls in classes for field in dataclasses.fields(cls)}
    for name in defaults:
        if name not in names:
            raise UserError(f"{Path(sys.argv[0]).name}: {unknown_flag(name, sorted(names))}")
    parser = Parser(classes, allow_abbrev=False)
    parser.set_defaults_with_config(
        **DEFAULTS
        | {
            "output_dir": folder.default_output_dir(launched, sys.argv[0]),
            "disable_tqdm": not sys.stderr.isatty(),  # in a log file a progress bar is a thousand lines
            "use_cpu": launched.on_cpu,
        }
        | values_of_config(config)
        | defaults
        | (tiny.VALUES if launched.tiny else {})
    )
    parser.given = frozenset()  # from here on, what the file of --config sets
    *parsed, rest = _parse_command_line(parser)
    if rest:
        raise UserError(unknown_flag(rest[0], [f"--{name}" for name in names]))
    _check_lists(classes, parsed, parser.given)
    arguments = script_args, training_args, _ = tuple(parsed)
    flags = (word.split("=")[0] for word in sys.argv[1:] if word.startswith("--"))
    script_args.given = parser.given | {flag[2:].replace("-", "_").removeprefix("no_") for flag in flags}
    set_dependent_values(script_args, training_args, defaults, launched)
    set_datasets(script_args)
    copy_for_train(script_args, training_args)
    return arguments


def _parse_command_line(parser: Parser) -> tuple:
    """What the parser makes of the flags and the file of --config, and the flags that it does not know."""
    try:
        return parser.parse_args_and_config(return_remaining_strings=True)
    except IndexError as error:  # TRL takes the word after --config
        raise UserError("--config needs the path of a YAML file with arguments") from error
    except DistError as error:  # TrainingArguments connects the processes
        exit_with_causes(error)
    except json.JSONDecodeError as error:
        raise UserError(f"{error.doc} is not JSON ({error.msg}), which the flag before it needs") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config: not a readable YAML file: {error}") from error
    except (ValueError, OSError) as error:
        reason = str(error).split("\n")[0]
        if "one of fp16 and bf16" in reason:
            reason = (
                "fp16 and bf16 are both set, one by a flag and one by the recipe or config: pass --bf16 false or --fp16 false too"
            )
        raise UserError(reason) from error


def _check_lists(classes: tuple[type, ...], parsed: list[Any], given: frozenset[str]) -> None:
    """Raises UserError if the file of --config gives a single value for an argument that is a list: TRL does not check it."""
    hints = {name: hint for cls in classes for name, hint in typing.get_type_hints(cls).items()}
    for name in sorted(given):
        value = next((getattr(part, name) for part in parsed if hasattr(part, name)), None)
        if value is not None and _is_list(hints.get(name)) and not isinstance(value, list | str):
            raise UserError(f"--config: {name} is {value!r}, expected a list")


def set_dependent_values(
    script_args: ScriptArguments, training_args: TrainingArguments, defaults: dict[str, Any], launched: Launched
) -> None:
    """Sets arguments that were not given and depend on others. `defaults`: the values of the recipe."""
    given = script_args.given
    of_recipe = ScriptArguments(dataset_name=defaults.get("dataset_name"))
    if script_args.dataset_name != of_recipe.dataset_name:  # another dataset has its own config and splits
        own = {"dataset_config", "dataset_train_split", "dataset_test_split", "dataset_weights"}
        for name in own - given:
            setattr(script_args, name, getattr(ScriptArguments, name))
    if "per_device_eval_batch_size" not in given:
        # transformers' own default of 8 would be the largest batch of the run.
        smaller = min(training_args.per_device_eval_batch_size, training_args.per_device_train_batch_size)
        training_args.per_device_eval_batch_size = smaller
    if training_args.eval_strategy == "no" and "eval_on_start" not in given:
        training_args.eval_on_start = False
    script_args.output_dir = training_args.output_dir
    if launched.tiny and "max_eval_samples" not in given:
        script_args.eval_rows_of_run = defaults.get("max_eval_samples", ScriptArguments.max_eval_samples)
    script_args.text_field, script_args.seed = getattr(training_args, "dataset_text_field", "text"), training_args.seed
    if training_args.report_to and not training_args.run_name:  # trackio would start another run for the last evaluation
        training_args.run_name = f"{Path(training_args.output_dir).name} {datetime.datetime.now():%Y-%m-%d %H:%M:%S}"


def copy_for_train(script_args: ScriptArguments, training_args: TrainingArguments) -> None:
    """Copies what `train` needs of the script arguments into the training arguments, which are all it has."""
    training_args.profile, training_args.mirror = script_args.profile, script_args.mirror
    training_args.dataset_weights = {one.label: one.weight for one in each_dataset(script_args)} if script_args.mixture else None


def _is_list(hint: Any) -> bool:
    return any(part is list or typing.get_origin(part) is list for part in (hint, *typing.get_args(hint)))


def values_of_config(config: AccelerateConfig) -> dict[str, Any]:
    """What an Accelerate config says about training arguments. The recipe and flags can change it.

    accelerate has also put it into the environment, where transformers would find it, and flags would have no effect.
    """
    values = {"activation_checkpointing": config.activation_checkpointing}
    if config.activation_checkpointing:
        # accelerate's own checkpointing recomputes with other random numbers, so dropout would differ between forward and
        # backward; transformers' checkpointing restores them.
        os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "false"
    if config.activation_checkpointing_offload:
        os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"] = "false"
        values["activation_checkpointing_kwargs"] = {"offload": True}
    if config.mixed_precision is not None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        values |= {"bf16": config.mixed_precision == "bf16", "fp16": config.mixed_precision == "fp16"}
    return values


def settings_of_continued_run(training_args: TrainingArguments, launched: Launched) -> dict[str, Any]:
    """The settings of the checkpoint in the output directory, {} if there is none or another rehearsal replaces its run."""
    output_dir, recipe = Path(training_args.output_dir), Path(launched.recipe or sys.argv[0])
    if launched.mode != "train":
        return {}
    if launched.tiny and training_args.output_dir == folder.default_output_dir(launched, sys.argv[0]):
        run = folder.read_json(output_dir / folder.RUN)
        if (run.get("config"), run.get("recipe_digest")) != (Path(launched.config).stem, digest_of_recipe(recipe)):
            return {}
    return folder.settings_of_checkpoint(output_dir)


def set_steps(
    arguments: Arguments, recipe: dict[str, Any], processes: int, is_tiny: bool, before: dict[str, Any] | None = None
) -> None:
    """Sets gradient_accumulation_steps from global_batch_size, and max_steps from max_tokens or the flag num_train_epochs.

    `recipe`: the values of the recipe. `before`: the settings of the checkpoint that the run continues.
    """
    script_args, training_args, _ = arguments
    set_accumulation_steps(arguments, recipe, processes, is_tiny)
    if "gradient_accumulation_steps" in script_args.given or not script_args.global_batch_size:
        keep_rows_of_step(training_args, processes, before or {})
    if trains_for_epochs(script_args):
        script_args.dataset_streaming = False
        if not is_tiny and "num_train_epochs" not in script_args.given:
            training_args.max_steps, training_args.num_train_epochs = -1, 1
    if script_args.max_tokens:
        rows = training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps * processes
        training_args.max_steps = math.ceil(script_args.max_tokens / (rows * getattr(training_args, "max_length", 1024)))
    elif "num_train_epochs" in script_args.given and "max_steps" not in script_args.given:
        training_args.max_steps = -1
    script_args.keeps_samples = bool(script_args.max_samples) and training_args.max_steps <= 0


def set_accumulation_steps(arguments: Arguments, recipe: dict[str, Any], processes: int, is_tiny: bool) -> None:
    """Sets gradient_accumulation_steps from global_batch_size; the flag gradient_accumulation_steps wins.

    A rehearsal has its own micro-batch. It checks that the batch of the run is possible, and takes micro-batches of one row
    if its own micro-batch cannot make up the global batch.
    """
    script_args, training_args, _ = arguments
    given = script_args.given
    if {"global_batch_size", "gradient_accumulation_steps"} <= given:
        raise UserError("--global_batch_size and --gradient_accumulation_steps set the same: pass one of them")
    if "gradient_accumulation_steps" in given:
        return
    rows, micro_batch = script_args.global_batch_size, training_args.per_device_train_batch_size
    if is_tiny:
        of_run = recipe.get("per_device_train_batch_size", type(training_args).per_device_train_batch_size)
        if "per_device_train_batch_size" in given:
            of_run = micro_batch
        accumulation_steps(rows or recipe.get("global_batch_size"), of_run, processes)
        if rows and rows % (micro_batch * processes):
            training_args.per_device_train_batch_size = micro_batch = 1
    if rows:
        training_args.gradient_accumulation_steps = accumulation_steps(rows, micro_batch, processes)


def trains_for_epochs(script_args: ScriptArguments) -> bool:
    """Whether a recipe that streams reads files of the user's own, without a flag for the number of steps or rows.

    The recipe's number of steps is for its own dataset. So it trains for one epoch, or for --num_train_epochs.
    """
    flags = {"dataset_streaming", "max_steps", "max_tokens", "max_samples"}
    are_local = all(reading.is_local(one.dataset_name) for one in each_dataset(script_args))
    has_own_data = "dataset_name" in script_args.given and are_local
    return script_args.dataset_streaming and has_own_data and not flags & script_args.given


def accumulation_steps(rows: int | None, micro_batch: int, processes: int) -> int:
    """Micro-batches per optimizer step of `rows` rows; 1 for None. Raises UserError if they cannot be divided."""
    steps, rest = divmod(rows or micro_batch * processes, micro_batch * processes)
    if rest or steps < 1:
        unit = micro_batch * processes
        below, above = rows // unit * unit, (rows // unit + 1) * unit
        raise UserError(
            f"--global_batch_size {rows} is not a multiple of {unit}, which is --per_device_train_batch_size {micro_batch} on "
            f"{processes} process{'es' if processes > 1 else ''}: pass --global_batch_size "
            f"{f'{below} or {above}' if below else above}, or another micro-batch{or_processes(rows, micro_batch)}"
        )
    return steps


def or_processes(rows: int, micro_batch: int) -> str:
    """The end of a message: which numbers of processes have steps of `rows` rows, "" if none has."""
    slots, rest = divmod(rows, micro_batch)
    counts = [str(count) for count in range(1, slots + 1) if slots % count == 0]
    if rest or not counts:
        return ""
    words = counts[0] if len(counts) == 1 else f"{', '.join(counts[:-1])} or {counts[-1]}"
    return f", or train the same steps on {words} process{'' if words == '1' else 'es'} (NPROC_PER_NODE)"


def keep_rows_of_step(training_args: TrainingArguments, processes: int, before: dict[str, Any]) -> None:
    """Sets gradient_accumulation_steps so that a run has as many rows per step as before, on more or fewer processes.

    For runs without a global_batch_size. `before`: the settings of the checkpoint, {} without one. Raises UserError if this
    number of processes cannot have these steps. Does nothing if gradient_accumulation_steps or the micro-batch were changed.
    """
    asked, micro_batch = training_args.gradient_accumulation_steps, training_args.per_device_train_batch_size
    training_args.asked_accumulation_steps = asked  # a checkpoint has what was asked for, and what was used
    if before.get("asked_accumulation_steps") != asked or before["per_device_train_batch_size"] != micro_batch:
        return
    micro_batches = before["gradient_accumulation_steps"] * before["world_size"]
    if micro_batches % processes:
        raise UserError(
            f"--output_dir: the steps of the run in {training_args.output_dir} have {micro_batches * micro_batch} rows, which "
            f"{processes} processes cannot divide: pass another --gradient_accumulation_steps"
            f"{or_processes(micro_batches * micro_batch, micro_batch)}"
        )
    training_args.gradient_accumulation_steps = micro_batches // processes


def check_and_claim_run(arguments: Arguments, launched: Launched, config: AccelerateConfig, is_sharded: bool) -> None:
    """Checks output directory, mirror, model and dataset. For training it then claims directory and mirror for this run.

    Exits if the run in one of them is finished. Prints what differs from what was asked for.
    """
    script_args, training_args, model_args = arguments
    is_training = launched.mode == "train"
    output_dir = Path(training_args.output_dir)
    is_default = training_args.output_dir == folder.default_output_dir(launched, sys.argv[0])
    identity = identity_of_run(arguments, launched, is_sharded) if is_training else {}
    if is_training:
        folder.check_output_dir(output_dir, identity, is_default)
    for one in each_dataset(script_args):
        reading.print_how_files_are_read(one.dataset_name, one.dataset_config, one.text_rows)
    uses_mirror = is_training and bool(script_args.mirror) and NODE_VARIABLE not in os.environ  # the first node's launcher
    results_in_mirror = mirror.check(script_args.mirror, identity, output_dir) if uses_mirror else {}
    if launched.tiny:
        tiny.make_replacements(script_args, model_args)
    check_model_and_dataset(arguments, launched, config)
    if not is_training:
        return
    folder.claim_output_dir(output_dir, identity, is_default)
    if uses_mirror:
        mirror.exit_if_finished(script_args.mirror, results_in_mirror, training_args)
    folder.exit_if_finished(output_dir, training_args.max_steps, training_args.num_train_epochs)
    if uses_mirror:
        mirror.claim(script_args.mirror, identity, output_dir)
    steps, asked = training_args.gradient_accumulation_steps, getattr(training_args, "asked_accumulation_steps", None)
    if asked not in (None, steps):
        print_once(f"gradient_accumulation_steps is {steps}, not {asked}, so that a step has as many rows as in {output_dir}.")
    if launched.tiny:
        tiny.print_notice(*arguments)
    else:
        check_host_memory(model_args, configs.read(launched.config), launched)
    print_attention(training_args, model_args, launched)


def identity_of_run(arguments: Arguments, launched: Launched, is_sharded: bool) -> dict[str, Any]:
    """The content of run.json."""
    script_args, _, model_args = arguments
    recipe, of_mixture = Path(launched.recipe or sys.argv[0]), {}
    if script_args.mixture:
        datasets = each_dataset(script_args)
        of_mixture["datasets"] = [one.dataset_name for one in datasets]
        of_mixture["dataset_weights"] = [round(one.weight, 9) for one in datasets]
    return {
        "recipe": recipe.stem,
        "config": Path(launched.config).stem,
        "model": model_args.model_name_or_path,
        "dataset": script_args.display_name,
        **of_mixture,
        "dataset_config": script_args.dataset_config,
        "dataset_train_split": script_args.dataset_train_split,
        "sharded": is_sharded,
        "tiny": launched.tiny,
        "use_peft": model_args.use_peft,
        "load_in_4bit": model_args.load_in_4bit,
        "recipe_digest": digest_of_recipe(recipe),
        "data_files": [file for one in each_dataset(script_args) for file in reading.file_versions(one.dataset_name)],
        **{name: getattr(script_args, name) for name in folder.CHOICE_OF_ROWS},
    }


def digest_of_recipe(recipe: Path) -> str:
    return hashlib.sha256(recipe.read_bytes()).hexdigest()[:8]


def check_model_and_dataset(arguments: Arguments, launched: Launched, config: AccelerateConfig) -> None:
    """Raises UserError unless model and dataset (the tiny ones of a rehearsal) can be opened and fit each other."""
    script_args, training_args, model_args = arguments
    display_name = model_args.model_name_or_path
    if launched.tiny:  # in copies: `replace_model_and_dataset` comes later
        script_args, training_args, model_args = map(copy.copy, arguments)
        tiny.use_replacements(script_args, training_args, model_args)
    else:
        if HF_HUB_OFFLINE:
            print_once("The Hub is not reachable, or HF_HUB_OFFLINE is set: using the files on this machine.")
        check_model(training_args, model_args, with_weights=launched.mode != "preview")
    check_module_names(model_args, config, display_name)
    check_experts(model_args)
    if model_args.use_peft:
        build_adapter_on_meta(model_args, display_name)
    rows = check_dataset(script_args)
    splits = script_args.split_conversations
    chat_templates.check_conversations(training_args, model_args, script_args.given, rows, display_name, splits)


def replace_model_and_dataset(arguments: Arguments, launched: Launched) -> None:
    """Makes the arguments name what is loaded instead: the tiny model and dataset, or the files of --prepare."""
    script_args, training_args, _ = arguments
    if launched.tiny:
        tiny.use_replacements(*arguments)
    elif launched.mode == "plan":
        tiny.use_planned_size(*arguments)
    else:
        processes = launched.processes or training_args.world_size
        change_each(script_args, lambda one: use_prepared_files(one, training_args, processes))


def prepare_process(arguments: Arguments, launched: Launched) -> None:
    """Patches what this process needs, and checks that it can communicate with the others."""
    script_args, training_args, model_args = arguments
    if launched.on_cpu and launched.mode != "plan":
        multiply_in_float32()
    if training_args.use_cpu and getattr(training_args, "activation_offloading", False):
        training_args.activation_offloading = False  # a plan says so itself
        if launched.mode != "plan":
            print_once("--activation_offloading: activations stay where they are, because this run has no GPU.")
    if training_args.use_cpu and launched.mode != "plan" and (training_args.activation_checkpointing_kwargs or {}).get("offload"):
        offload_activations_to_unpinned_memory()
    wait_for_hub()
    install_training_template(chat_templates.training_template)
    pack_streams_in_batches(documents_per_batch)
    if launched.mode == "train":
        record_conversations(CONVERSATIONS)
    chat_templates.set_template_file(training_args, model_args, script_args.given)
    if training_args.process_index or training_args.disable_tqdm:  # one process shows progress
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
    if training_args.world_size > 1 and launched.mode != "plan":
        check_all_reduce(training_args.device)
