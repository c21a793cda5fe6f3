"""Where a run's numbers come from: flags, the recipe, the Accelerate config, and what follows from them."""

import json
import math
import os
import sys
from pathlib import Path

from harness import folder
from harness.data import DataArguments
from harness.launched import Launched, fail
from harness.nodes import network
from harness.rehearsal import stand_ins
from harness.start import flags

import trl
import yaml
from torch.distributed import DistError


class Parser(trl.TrlParser):
    """TRL's parser, with one line per error. Knows which arguments the file of --config gives."""

    given = frozenset()

    def set_defaults_with_config(self, **arguments):
        self.given = frozenset(arguments)
        return super().set_defaults_with_config(**arguments)

    def error(self, message):
        fail(message.split("\n")[0])


def read(config_class, defaults: dict, launched: Launched, config: dict) -> tuple:
    """The three argument objects: flags before the recipe's numbers before the config's before transformers' own."""
    parser = Parser([DataArguments, config_class, trl.ModelConfig], allow_abbrev=False)
    fields = {action.dest for action in parser._actions}
    if misspelt := [name for name in defaults if name not in fields]:
        fail(f"{Path(sys.argv[0]).name}: {flags.unknown(misspelt[0], sorted(fields))}")
    values = {
        "output_dir": folder.default(launched, sys.argv[0]),
        "logging_nan_inf_filter": False,  # a NaN loss is to be seen
        "disable_tqdm": not sys.stderr.isatty(),  # in a log file a bar is a thousand lines
        "ddp_find_unused_parameters": False,  # transformers would search for some in every step
        "save_total_limit": 2,  # the newest checkpoint may be cut short by a kill; the one before it is whole
        **({"use_cpu": True} if launched.on_cpu else {}),
        **_from_config(config, defaults),
        **(stand_ins.NUMBERS if launched.tiny else {}),
    }
    parser.set_defaults_with_config(**values)
    parser.given = frozenset()
    try:
        *parsed, rest = parser.parse_args_and_config(return_remaining_strings=True)
    except IndexError:
        fail("--config needs the path of a YAML file with arguments")
    except DistError as error:  # training arguments connect the processes
        network.give_up(error)
    except json.JSONDecodeError as error:
        fail(f"{error.doc} is not JSON ({error.msg}), which the flag before it takes")
    except yaml.YAMLError as error:
        fail(f"the file of --config is not a readable YAML file: {error}")
    except (ValueError, OSError) as error:
        fail(str(error).split("\n")[0])
    for action in parser._actions:
        if action.dest in parser.given and action.nargs in ("+", "*"):
            value = next(getattr(part, action.dest) for part in parsed if hasattr(part, action.dest))
            if value is not None and not isinstance(value, list | str):
                fail(f"{action.dest} in the file of --config is {value!r}, expected a list")
    if rest:
        fail(flags.unknown(rest[0], [option for action in parser._actions for option in action.option_strings]))
    data, args, _ = parsed
    words = (word.split("=")[0] for word in sys.argv[1:] if word.startswith("--"))
    data.given = parser.given | {word[2:].replace("-", "_").removeprefix("no_") for word in words}
    if data.dataset_name != defaults.get("dataset_name"):  # whose config and splits are not those of another
        for name in {"dataset_config", "dataset_train_split", "dataset_test_split"} - data.given:
            setattr(data, name, getattr(DataArguments, name))
    if "per_device_eval_batch_size" not in data.given:
        args.per_device_eval_batch_size = min(args.per_device_eval_batch_size, args.per_device_train_batch_size)
    return parsed


def check(data, args, model):
    """Fails at a number that no run can have. NaN is smaller and larger than nothing, so it is found as well."""
    steps = [f"{kind}_steps" for kind in ("logging", "eval", "save") if getattr(args, f"{kind}_strategy") == "steps"]
    least = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), 1)
    least |= dict.fromkeys(("max_length", "max_tokens", "global_batch_size", "lora_r"), 1)
    least |= dict.fromkeys(("learning_rate", "num_train_epochs", *steps), sys.float_info.min)  # more than 0
    least |= dict.fromkeys(("weight_decay", "warmup_steps", "max_grad_norm", "seed", "dataloader_num_workers"), 0)
    if data.dataset_name == "":  # None: a recipe that brings its own rows
        fail("--dataset_name is empty: give an id of the hub, a folder or a file")
    if args.max_steps == 0:
        fail("--max_steps is 0, expected 1 or more, or -1 for as many as --num_train_epochs has")
    for name, smallest in least.items():
        value = next((getattr(part, name) for part in (data, args, model) if hasattr(part, name)), None)
        if value is None or (name == "num_train_epochs" and args.max_steps > 0):
            continue
        if not isinstance(value, int | float):
            fail(f"--{name} is {value!r}, expected a number")
        if not smallest <= value < math.inf:
            fail(f"--{name} is {value}, expected {'a number above 0' if 0 < smallest < 1 else f'{smallest} or more'}")


def count_steps(data, args, processes: int):
    """What follows from numbers that do not depend on how many processes there are: the batch, and the budget of tokens."""
    rows = args.per_device_train_batch_size * processes
    given = data.given & {"global_batch_size", "gradient_accumulation_steps"}
    if len(given) > 1:
        fail("--global_batch_size and --gradient_accumulation_steps decide the same: give one of them")
    if data.global_batch_size and "gradient_accumulation_steps" not in given:
        args.gradient_accumulation_steps, rest = divmod(data.global_batch_size, rows)
        if rest or args.gradient_accumulation_steps < 1:
            near = max(1, round(data.global_batch_size / rows)) * rows
            fail(
                f"--global_batch_size {data.global_batch_size} is not a multiple of {rows}, which is "
                f"--per_device_train_batch_size {args.per_device_train_batch_size} on {processes} "
                f"process{'es' * (processes > 1)}: give --global_batch_size {near}, or another micro-batch"
            )
    if data.max_tokens:
        per_step = rows * args.gradient_accumulation_steps * getattr(args, "max_length", 1024)
        args.max_steps = math.ceil(data.max_tokens / per_step)


def _from_config(config: dict, defaults: dict) -> dict:
    """The recipe's numbers, with what the Accelerate config decides."""
    precision = config.get("mixed_precision")
    if precision is not None:
        # `accelerate launch` has put it here too, where transformers would find it and `--bf16 false` would not reach.
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        defaults = {"bf16": precision == "bf16", "fp16": precision == "fp16", **defaults}
    if config.get("fsdp_config", {}).get("fsdp_activation_checkpointing"):
        # accelerate's own wrapper recomputes with other random numbers, so dropout (GPT-2, LoRA) would differ between
        # forward and backward. transformers' own checkpointing keeps them, and a flag can turn it off.
        os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "false"
        defaults = {**defaults, "activation_checkpointing": True}
    return defaults
