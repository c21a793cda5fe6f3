"""Checks of the arguments against each other, before anything is started, downloaded or written.

Only of what would train something else without a word, lose a run, or fail after minutes with an error that does not say what to
do. Everything else is the libraries' own error.
"""

import argparse
import copy
import math
import re
import sys

from harness.configs import AccelerateConfig
from harness.data.images import AREA
from harness.data.script_arguments import ScriptArguments
from harness.data.tokenization import are_tokenized
from harness.messages import UserError, print_once
from harness.run.parameters import adapters_of, base_of, config_of
from harness.runs import Run, StartedRecipe

import torch
from datasets import IterableDataset
from transformers import TrainingArguments
from transformers.trainer import Trainer
from trl import ModelConfig, SFTTrainer

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


def check_refused(values: argparse.Namespace) -> None:
    """Raises UserError for a flag of REFUSED, by the recipe, a file or the command line."""
    for name, value in vars(values).items():
        reason = REFUSED.get(f"--{name} {value}") or (value and REFUSED.get(f"--{name}"))
        if reason:
            raise UserError(f"--{name}: {reason}")
    for name in ("trust_remote_code", "distributed_config", "tp_plan", "tp_size"):
        if name in (getattr(values, "model_init_kwargs", None) or ""):
            raise UserError(f"--model_init_kwargs: {name} is not supported: leave it out")


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


def check_built_trainer(recipe: StartedRecipe) -> None:
    """Raises UserError for a trainer that the recipe has built without arguments of the model."""
    model_args = recipe.arguments[2]
    check_rows_of_trl(recipe.trainer)
    model = recipe.trainer.model
    given = recipe.run.given
    adapters = adapters_of(model)
    is_quantized = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    advice = {}
    if model_args.use_peft and not adapters:
        advice["use_peft"] = "pass peft_config=get_peft_config(model_args) to TRL's trainer, or its result to get_peft_model"
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not is_quantized:
        advice["load_in_4bit"] = "pass quantization_config=get_quantization_config(model_args) to the trainer"
    for name in given & {"lora_r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"}:
        name_of_peft = "r" if name == "lora_r" else name
        if adapters and getattr(adapters[0], name_of_peft) != getattr(model_args, name):
            advice[name] = "make the settings of the adapter with get_peft_config(model_args)"
    asked = getattr(torch, model_args.dtype or "", None)
    config = config_of(base_of(model))
    if "dtype" in given and asked and config and not is_quantized and config.dtype not in (None, asked):
        advice["dtype"] = "pass dtype=model_args.dtype to from_pretrained"
    for name, change in advice.items():
        raise UserError(f"--{name} is not what the recipe builds: {change} there (functions of trl), or leave out the flag")


def check_rows_of_trl(trainer: Trainer) -> None:
    """Prints that SFTTrainer makes tokens of the rows of a recipe without `tokenize`.

    Raises UserError for a stream: the run would resume at another row, and train on some rows twice.
    """
    if not isinstance(trainer, SFTTrainer) or are_tokenized(trainer.args):
        return
    if isinstance(trainer.train_dataset, IterableDataset):
        raise UserError("--dataset_streaming: a stream resumes only if the recipe calls tokenize() before SFTTrainer: call it")
    print_once("SFTTrainer tokenizes the rows: the recipe does not call tokenize().")


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
