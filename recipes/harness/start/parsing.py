"""What a recipe's `parse` does: it finds how the recipe was started, reads the arguments, and prepares the run or command."""

import dataclasses
import logging
import os
import warnings
from typing import Any

from harness import runs
from harness.compat.transformers import never_ask_for_code
from harness.messages import is_first_process
from harness.start.arguments import Arguments, make_arguments, read_values
from harness.start.training import start_of_training

from accelerate.utils import check_cuda_p2p_ib_support

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


def parse(config_class: type, dataset_formats: tuple[str, ...] | str = (), **recipe: Any) -> Arguments:
    """See `harness.parse`, which turns a UserError into one message and exit code 2."""
    started = runs.started() or start_of_training()
    quiet_libraries()
    never_ask_for_code()
    disable_peer_to_peer()

    values, given = read_values(started.run, config_class, recipe)
    started.run = dataclasses.replace(started.run, given=given)
    started.choose_device(values)
    started.run, arguments = make_arguments(started.run, values, config_class, dataset_formats, recipe)
    started.arguments = arguments
    started.prepare(arguments)
    return arguments


def quiet_libraries() -> None:
    """Hides warnings that the user can do nothing about."""
    for module in ("transformers", "trl", "peft", "accelerate"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)  # how one library calls another
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.device_mesh")  # about accelerate's calls
    warnings.filterwarnings("ignore", message=".* returned a view tensor")  # as many models do, none of which changes it in place
    # `check_model_and_dataset` prints that a dataset comes from the cache where the Hub cannot be reached; a CPU has no TF32.
    # Names that a checkpoint lacks are those of tied weights: `check_saved_weights` finds others.
    # transformers compares --save_steps 0.1 with the number of steps that it became; run.json says what has really changed.
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_useful)


def _is_useful(record: logging.LogRecord) -> bool:
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
