"""Checks of the arguments against each other, before anything is started, downloaded or written."""

import copy
import math
import os
import re
import sys

from harness.configs import AccelerateConfig
from harness.contexts import Context
from harness.data.script_arguments import ScriptArguments
from harness.data.splits import is_slice
from harness.messages import UserError, last_line

import torch
from transformers import SchedulerType, TrainingArguments, get_scheduler
from transformers.trainer import Trainer
from transformers.utils import is_liger_kernel_available
from trl import ModelConfig

LIGER = "liger-kernel==0.8.5"  # the version of tests/cuda_build


def check_numbers(script_args: ScriptArguments, training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Raises UserError for a number that no run can have. NaN fails every comparison, so it is found too."""
    whole = 2**31 - 1  # more do not fit into the libraries' numbers
    largest = {"max_length": whole, "max_steps": whole, "seed": 2**32 - 1, "data_seed": 2**32 - 1, "label_smoothing_factor": 1}
    largest |= {"adam_beta1": 0.999999, "adam_beta2": 0.999999}
    smallest = {
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_length": 1,
        "max_tokens": 1,
        "global_batch_size": 1,
        "lora_r": 1,
        "learning_rate": sys.float_info.min,  # above 0
        "weight_decay": 0,
        "warmup_steps": 0,
        "max_grad_norm": 0,
        "seed": 0,
        "data_seed": 0,
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": 1,
        "dataset_num_proc": 1,
        "ddp_timeout": 1,
        "max_steps": -1,
        "label_smoothing_factor": 0,
        "neftune_noise_alpha": 0,
        "adam_beta1": 0,
        "adam_beta2": 0,
        "adam_epsilon": sys.float_info.min,
    }
    for kind in ("logging", "eval", "save"):
        if getattr(training_args, f"{kind}_strategy") == "steps":
            smallest[f"{kind}_steps"] = sys.float_info.min
    if training_args.max_steps <= 0 or "num_train_epochs" in script_args.given:
        smallest["num_train_epochs"] = sys.float_info.min
    if script_args.dataset_name == "":  # None: the recipe brings its own rows
        raise UserError("--dataset_name is empty: pass a Hub ID, a folder or a file")
    if training_args.max_steps == 0:
        raise UserError("--max_steps is 0, expected 1 or more, or -1 for --num_train_epochs")
    for name, least in smallest.items():
        value = next((getattr(part, name) for part in (script_args, training_args, model_args) if hasattr(part, name)), None)
        if value is None:
            continue
        if not isinstance(value, int | float):
            raise UserError(f"--{name} is {value!r}, expected a number")
        most = largest.get(name, math.inf)
        if not least <= value <= most or value == math.inf:
            expected = "a number above 0" if 0 < least < 1 else f"{least} or more"
            raise UserError(f"--{name} is {value}, expected {expected}{f', at most {most}' if name in largest else ''}")


def check_arguments(script_args: ScriptArguments, training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Raises UserError for arguments that contradict each other, show a token, or cost checkpoints. Call it after `set_steps`."""
    if training_args.hub_token:
        raise UserError(
            "--hub_token would be saved with the run and shown in the process list: use `.venv/bin/hf auth login` or HF_TOKEN"
        )
    if training_args.resume_from_checkpoint:
        raise UserError(
            "--resume_from_checkpoint is not needed: the same command resumes from the newest checkpoint in --output_dir"
        )
    if training_args.hub_strategy in ("checkpoint", "all_checkpoints"):
        raise UserError(
            "--hub_strategy: a checkpoint would be uploaded before it is complete, so no run could resume from it: leave it out"
        )
    if training_args.save_only_model:
        raise UserError("--save_only_model leaves out the optimizer, so the run could not resume: leave out the flag")
    if training_args.save_total_limit == 1:
        raise UserError("--save_total_limit 1 deletes the last checkpoint before the next one is complete: pass 2 or more")
    if (training_args.metric_for_best_model or "").endswith("loss") and training_args.greater_is_better:
        raise UserError("--greater_is_better: a loss is better when it is lower, so the worst model would be kept: leave it out")
    if "accuracy" in (training_args.metric_for_best_model or "") and training_args.greater_is_better is False:
        raise UserError("--greater_is_better: an accuracy is better when it is higher: leave it out")
    for name in ("split_batches", "dispatch_batches"):
        if getattr(training_args.accelerator_config, name):
            raise UserError(f"--accelerator_config: {name}: every process reads its own rows: leave it out")
    check_trackers(training_args.report_to)
    # `set_steps` has turned --max_tokens into max_steps.
    if script_args.dataset_streaming and training_args.max_steps <= 0 and not script_args.data.keeps_samples:
        raise UserError(
            "--max_steps: a stream has no length: pass --max_steps, --max_tokens for a number of tokens, or --max_samples for a "
            "number of rows that are trained on for --num_train_epochs"
        )
    for flag in ("dataset_train_split", "dataset_test_split"):
        if script_args.dataset_streaming and is_slice(getattr(script_args, flag)):
            raise UserError(
                f"--{flag} {getattr(script_args, flag)}: a stream has no slices: pass --max_samples, or --dataset_streaming "
                "false, which downloads the whole dataset"
            )
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not model_args.use_peft:
        raise UserError(
            "--load_in_4bit, --load_in_8bit: quantized weights are frozen, so nothing would be trained: add --use_peft"
        )
    model_init_kwargs = getattr(training_args, "model_init_kwargs", None) or {}
    check_remote_code(training_args, model_init_kwargs)
    check_parallelism(training_args, model_init_kwargs)
    if script_args.data.is_mixture:
        check_best_metric(script_args, training_args)


def check_best_metric(script_args: ScriptArguments, training_args: TrainingArguments) -> None:
    """Raises UserError for the evaluation loss of a dataset that the mixture does not have."""
    name = (training_args.metric_for_best_model or "").removeprefix("eval_")
    labels = [source.label for source in script_args.data.sources]
    if name.endswith("_loss") and name.removesuffix("_loss") not in labels:
        losses = ", ".join(f"eval_{label}_loss" for label in labels)
        raise UserError(f"--metric_for_best_model {training_args.metric_for_best_model}: pass eval_loss or one of {losses}")


def check_remote_code(training_args: TrainingArguments, model_init_kwargs: dict) -> None:
    """Raises UserError if Python code that comes with a model is to be run."""
    if getattr(training_args, "trust_remote_code", False) or "trust_remote_code" in model_init_kwargs:
        raise UserError(
            "--trust_remote_code: code that comes with a model is not run here: leave it out, and use a model whose architecture "
            "is part of transformers"
        )


def check_parallelism(training_args: TrainingArguments, model_init_kwargs: dict) -> None:
    """Raises UserError for tensor, context or sequence parallelism that a flag or a variable asks for.

    `configs.read` refuses the keys of a config. Batch sizes and tokens/s would be wrong by the number of processes that share
    a row.
    """
    options = [name for name in ("distributed_config", "tp_plan", "tp_size") if name in model_init_kwargs]
    asking = [f"--model_init_kwargs: {name}" for name in options]
    if training_args.parallelism_config:
        asking.append("--parallelism_config")
    for kind in ("TP", "CP", "SP"):  # what `accelerate launch --parallelism_config_tp_size` sets
        name = f"PARALLELISM_CONFIG_{kind}_SIZE"
        if os.environ.get(name, "1") != "1":
            asking.append(name)
    if asking:
        raise UserError(f"{asking[0]}: tensor, context and sequence parallelism are not supported: leave it out")


def check_flags_have_effect(
    script_args: ScriptArguments, training_args: TrainingArguments, model_args: ModelConfig, is_sharded: bool
) -> None:
    """Raises UserError for a flag that was passed and would change nothing, or something else than it says."""
    given = script_args.given
    for_adapters = sorted(name for name in given if name.startswith("lora_") or name in ("use_rslora", "use_dora"))
    if for_adapters and not model_args.use_peft:
        raise UserError(f"--{for_adapters[0]} is for adapters: add --use_peft")
    for_4bit = sorted(given & {"bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"})
    if for_4bit and not model_args.load_in_4bit:
        raise UserError(f"--{for_4bit[0]} is for 4-bit weights: add --load_in_4bit --use_peft")
    if training_args.do_predict or ("do_train" in given and not training_args.do_train):
        raise UserError("--do_train, --do_predict: a recipe trains and evaluates: leave them out")
    for_uploads = sorted(name for name in given if name.startswith("hub_"))
    if for_uploads and not script_args.repository:
        raise UserError(f"--{for_uploads[0]} is for uploads: add --push_to_hub")
    if others := set(for_uploads) - {"hub_model_id", "hub_private_repo"}:
        raise UserError(f"--{min(others)}: a run uploads its model once, when it is finished: leave out the flag")
    if script_args.ignore_bias_buffers:
        raise UserError("--ignore_bias_buffers is for trainers that these recipes do not use: leave it out")
    if getattr(training_args, "padding_free", False) and not training_args.packing and training_args.max_length:
        raise UserError("--padding_free: without --packing true, rows would not be cut at --max_length: pass --packing true")
    if getattr(training_args, "precompute_ref_log_probs", False) and model_args.use_peft and is_sharded:
        raise UserError(
            "--precompute_ref_log_probs: TRL computes these before FSDP moves the model to the GPU: leave out the flag, or use a "
            "config without FSDP"
        )
    for name in ("max_steps", "num_train_epochs"):
        if script_args.max_tokens and name in given:
            raise UserError(f"--max_tokens and --{name} set the same: pass one of them")
    if "lora_task_type" in given:
        raise UserError(f"--lora_task_type {model_args.lora_task_type}: the recipe says what its model is for: leave it out")
    is_quantized = model_args.load_in_4bit or model_args.load_in_8bit
    if is_quantized and not (hasattr(training_args, "model_init_kwargs") and model_args.model_name_or_path):
        raise UserError("--load_in_4bit, --load_in_8bit: this recipe loads the whole model itself: use a recipe with SFTTrainer")
    if model_args.load_in_8bit and is_sharded:
        raise UserError("--load_in_8bit: FSDP2 shards floating-point parameters only, so it is for one GPU: use --load_in_4bit")
    if model_args.load_in_4bit and is_sharded:
        check_sharded_4bit(script_args, training_args, model_args)
    elif model_args.load_in_4bit:
        check_unsharded_4bit(training_args, model_args)


def check_sharded_4bit(script_args: ScriptArguments, training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Raises UserError for options with which FSDP could not shard 4-bit weights, or would destroy them."""
    if model_args.bnb_4bit_quant_storage not in (None, "float32", "bfloat16", "float16"):
        raise UserError(
            f"--bnb_4bit_quant_storage {model_args.bnb_4bit_quant_storage} cannot be sharded: FSDP2 shards floating-point "
            "parameters only and would leave the whole model on every GPU: leave out the flag (float32)"
        )
    if training_args.fp16 or (training_args.bf16 and "bf16" in script_args.given):
        raise UserError(
            "--bf16 and --fp16 would cast the weights, which destroys packed 4-bit ones; sharded ones compute in bf16: leave out "
            "the flag, and use a config without mixed_precision: fp16"
        )
    default = ModelConfig().dtype
    if model_args.dtype != "bfloat16" and ("dtype" in script_args.given or model_args.dtype != default):
        raise UserError(f"--dtype {model_args.dtype}: sharded 4-bit weights compute in bfloat16: leave out the flag")
    if training_args.torch_compile:
        raise UserError(
            "--torch_compile: bitsandbytes wraps sharded 4-bit weights again in every forward pass, which cannot be compiled: "
            "leave out the flag"
        )


def check_unsharded_4bit(training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Raises UserError for 16-bit weights of another dtype than that of mixed precision: autocast cannot mix the two."""
    flag, computes_in = ("--bf16", "bfloat16") if training_args.bf16 else ("--fp16", "float16")
    is_mixed = training_args.bf16 or training_args.fp16
    if is_mixed and model_args.dtype in ("bfloat16", "float16") and model_args.dtype != computes_in:
        raise UserError(
            f"--dtype {model_args.dtype}: with {flag}, or that mixed_precision, the rest of a 4-bit model computes in "
            f"{computes_in}: pass --dtype {computes_in}"
        )


def check_liger(training_args: TrainingArguments, context: Context) -> None:
    """Raises UserError for --use_liger_kernel where its package or Triton is missing."""
    if not training_args.use_liger_kernel or context.is_simulated:
        return
    if training_args.torch_compile:
        raise UserError("--use_liger_kernel and --torch_compile both fuse the operators of a layer: leave out one of them")
    if not is_liger_kernel_available():
        raise UserError(f"--use_liger_kernel needs a package: {sys.executable} -m pip install --no-deps {LIGER}")
    if context.no_triton and not context.on_cpu:
        raise UserError(f"--use_liger_kernel needs Triton, which cannot be used here: {context.no_triton}: leave out the flag")


def check_optimizer(training_args: TrainingArguments, config: AccelerateConfig) -> None:
    """Raises UserError for an optimizer whose package is missing, or whose states FSDP cannot shard."""
    name = training_args.optim.value
    if config.is_fsdp and re.search("8bit|4bit|bnb|paged|lion|ademamix|adafactor|stable", name):
        raise UserError(f"--optim {name} is not for FSDP: use adamw_torch_fused, whose states are divided among all GPUs")
    if "paged" in name:
        raise UserError(f"--optim {name}: bitsandbytes does not page the states of a resumed run: use adamw_8bit")
    words = training_args.optim_args.split(",") if training_args.optim_args else []
    if malformed := [word for word in words if "=" not in word]:
        raise UserError(f"--optim_args: {malformed[0]!r} is not NAME=VALUE: separate several with commas")
    try:
        optimizer, options = Trainer.get_optimizer_cls_and_kwargs(training_args)
        if unread := [word for word in words if not is_read_by_optimizer(training_args, word)]:
            raise UserError(f"--optim_args: {name} does not read {', '.join(unread)}: leave it out")
        is_8bit = optimizer.__module__.startswith("bitsandbytes")  # it would ask every GPU
        built = None if is_8bit else optimizer([torch.nn.Parameter(torch.zeros(2, 2))], **options)
    except (ImportError, TypeError) as error:
        raise UserError(f"--optim {name}{_with(training_args.optim_args, 'optim_args')}: {last_line(error)}") from error
    except ValueError:  # it needs the model, or other arguments
        return
    if built is not None:
        check_schedule(training_args, built)


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


def check_schedule(training_args: TrainingArguments, optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for a learning rate schedule that cannot be built, as with an argument that it lacks or does not have."""
    steps = training_args.max_steps if training_args.max_steps > 0 else 1000  # how many an epoch has is not known yet
    name, options = training_args.lr_scheduler_type, training_args.lr_scheduler_kwargs
    try:
        get_scheduler(name, optimizer, training_args.get_warmup_steps(steps), steps, scheduler_specific_kwargs=options)
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"--lr_scheduler_type {SchedulerType(name).value}{_with(options, 'lr_scheduler_kwargs')}: {last_line(error)}: pass "
            "--lr_scheduler_kwargs '{…}' with its arguments"
        ) from error


def _with(options: object, flag: str) -> str:
    return f" --{flag} {options}" if options else ""


def check_trackers(names: list[str]) -> None:
    """Raises UserError if a tracker of --report_to is unknown or its package is missing."""
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise UserError(f"--report_to: unknown tracker {name}, expected one of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}")
        if name not in get_available_reporting_integrations():
            raise UserError(f"--report_to {name} needs a package: {sys.executable} -m pip install {name.replace('_', '-')}")
