"""Checks of the machine, and of the arguments against each other, before anything is started, downloaded or written."""

import importlib.metadata
import math
import os
import shutil
import sys
from pathlib import Path

from harness.configs import AccelerateConfig
from harness.data.script_arguments import ScriptArguments, is_slice
from harness.launched import NODE_VARIABLE, Launched, UserError, print_once
from harness.nodes.hardware import physical_cores
from harness.run.mirror import Storage
from harness.run.sharding import SHARDED_8BIT
from harness.start.flags import check_passwords

from transformers import TrainingArguments
from transformers.trainer import Trainer
from trl import ModelConfig

REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements.txt"
TESTED_PYTHON = (3, 11)


def print_untested_versions() -> None:
    """Prints a warning if the tests did not run with this Python or these packages."""
    untested = [] if sys.version_info[:2] == TESTED_PYTHON else [f"Python {sys.version_info[0]}.{sys.version_info[1]}"]
    lines = REQUIREMENTS.read_text("utf-8").splitlines() if REQUIREMENTS.is_file() else []
    for line in lines:
        requirement = line.split("#")[0].strip()
        if "==" in requirement:
            package, expected = requirement.split("==")
            try:
                found = importlib.metadata.version(package).split("+")[0]
            except importlib.metadata.PackageNotFoundError:
                continue
            if found != expected:
                untested.append(f"{package} {found} (tested: {expected})")
    if untested:
        print_once(f"warning: not tested with {', '.join(untested)}")


def count_gpus() -> int:
    """GPUs that this process may use. Raises UserError if there are GPUs that CUDA cannot use."""
    import torch

    count = torch.cuda.device_count()  # the driver's count
    if count and not torch.cuda.is_available():
        try:
            torch.cuda.init()
            reason = "no reason given"
        except RuntimeError as error:
            reason = str(error)
        raise UserError(
            f"PyTorch {torch.__version__} cannot use the {count} GPU{'s' if count > 1 else ''} of this machine: {reason[:300]} "
            "Update the driver, or install PyTorch for an older one: TORCH_INDEX=https://download.pytorch.org/whl/cu126 "
            "./launch.sh --install, or set PYTHON to an environment of yours. To rehearse on CPU, set CUDA_VISIBLE_DEVICES=''"
        )
    return count


def check_gpus(training_args: TrainingArguments, model_args: ModelConfig, is_sharded: bool, launched: Launched) -> None:
    """Raises UserError if this machine's GPUs cannot compute what the arguments ask for."""
    check_bf16(training_args, model_args, is_sharded, max(1, launched.processes // launched.nodes))
    if training_args.torch_compile and training_args.torch_compile_backend == "inductor" and launched.no_triton:
        raise UserError(f"--torch_compile needs Triton, which cannot be used here: {launched.no_triton}: leave out the flag")


def check_one_gpu(training_args: TrainingArguments) -> None:
    """Raises UserError if this process, started without launch.sh, would train on several GPUs.

    transformers would wrap the model in nn.DataParallel: more rows per step than `global_batch_size`, and packed rows without the
    lengths of their documents.
    """
    if training_args.n_gpu > 1:
        raise UserError(
            f"one process would train on {training_args.n_gpu} GPUs with nn.DataParallel, which recipes do not support: set "
            f"CUDA_VISIBLE_DEVICES=0 to use one GPU, or start the recipe with launch.sh or `.venv/bin/torchrun --nproc-per-node "
            f"{training_args.n_gpu}`"
        )


def check_bf16(training_args: TrainingArguments, model_args: ModelConfig, is_sharded: bool, gpus: int) -> None:
    """Raises UserError for bf16 on a GPU that only emulates it; `torch.cuda.is_bf16_supported` accepts those.

    The config, the recipe or a flag can set mixed precision. Without it the model computes in its own dtype.
    """
    import torch

    if training_args.fp16 or not (training_args.bf16 or model_args.dtype == "bfloat16"):
        return
    advice = f"pass --bf16 false --fp16 true --dtype {'float16' if model_args.use_peft else 'float32'}"
    if model_args.load_in_4bit and is_sharded:
        advice = "sharded 4-bit weights compute in bf16 only, so use other GPUs"
    for index in range(min(gpus, torch.cuda.device_count())):
        major, minor = torch.cuda.get_device_capability(index)
        if major < 8:
            raise UserError(
                f"this run computes in bf16, but {torch.cuda.get_device_name(index)} has compute capability {major}.{minor} and "
                f"no bf16 arithmetic: {advice}"
            )


def print_few_cores(launched: Launched) -> None:
    """Prints a warning if this node has fewer cores than GPUs, as in a SLURM job without --cpus-per-task."""
    gpus, cores = launched.processes // launched.nodes, physical_cores()
    if not launched.on_cpu and cores < gpus:
        node = os.environ.get(NODE_VARIABLE, "0")
        print(
            f"warning: node {node} gives this run {cores} core{'s' if cores > 1 else ''} for {gpus} GPUs, so the processes wait "
            "for each other: ask for more (SLURM: --cpus-per-task, 8 for each GPU)",
            file=sys.stderr,
            flush=True,
        )


def check_shared_memory(launched: Launched) -> None:
    """Raises UserError if /dev/shm is too small for the locks of the processes, and for NCCL's buffers of 33 MB each."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return
    needed = 1
    if not launched.on_cpu and launched.processes > launched.nodes and os.environ.get("NCCL_SHM_DISABLE") != "1":
        needed += 33 * (launched.processes // launched.nodes)
    free = shutil.disk_usage(shm).free / 1e6
    if free < needed:
        advice = ", or set NCCL_SHM_DISABLE=1" if needed > 1 else ""
        raise UserError(
            f"/dev/shm has {free:.0f} MB free, {needed} MB are needed: delete old files there, or give the container more "
            f"(docker run --shm-size=1g, or --ipc=host){advice}"
        )


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
    if training_args.push_to_hub:
        raise UserError(
            "--push_to_hub would upload checkpoints: upload the finished folder with `.venv/bin/hf upload OWNER/NAME`"
        )
    if training_args.resume_from_checkpoint:
        raise UserError(
            "--resume_from_checkpoint is not needed: the same command resumes from the newest checkpoint in --output_dir"
        )
    if training_args.save_only_model:
        raise UserError("--save_only_model leaves out the optimizer, so the run could not resume: leave out the flag")
    if training_args.save_total_limit == 1:
        raise UserError("--save_total_limit 1 deletes the last checkpoint before the next one is complete: pass 2 or more")
    check_trackers(training_args.report_to)
    # `set_steps` has turned --max_tokens into max_steps.
    if script_args.dataset_streaming and training_args.max_steps <= 0 and not script_args.keeps_samples:
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
    check_parallelism(training_args)
    if script_args.mixture:
        check_best_metric(training_args)


def check_best_metric(training_args: TrainingArguments) -> None:
    """Raises UserError for the evaluation loss of a dataset that the mixture does not have."""
    name, labels = (training_args.metric_for_best_model or "").removeprefix("eval_"), training_args.dataset_weights
    if name.endswith("_loss") and name.removesuffix("_loss") not in labels:
        losses = ", ".join(f"eval_{label}_loss" for label in labels)
        raise UserError(f"--metric_for_best_model {training_args.metric_for_best_model}: pass eval_loss or one of {losses}")


def check_mirror(script_args: ScriptArguments, mode: str) -> None:
    """Raises UserError for a --mirror that this run cannot have: an unknown URL, a missing package, a command without a run."""
    if script_args.mirror is None:
        return
    if mode != "train":
        raise UserError(f"--mirror is for training, --{mode} writes no checkpoints: leave it out")
    check_passwords([f"--mirror={script_args.mirror}"])
    Storage(script_args.mirror)


def check_parallelism(training_args: TrainingArguments) -> None:
    """Raises UserError for tensor, context or sequence parallelism that a flag or a variable asks for.

    `configs.read` refuses the keys of a config. Batch sizes and tokens/s would be wrong by the number of processes that share
    a row.
    """
    model_init_kwargs = getattr(training_args, "model_init_kwargs", None) or {}
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
    if for_uploads := sorted(name for name in given if name.startswith("hub_")):
        raise UserError(
            f"--{for_uploads[0]}: a run uploads nothing: upload the finished folder with `.venv/bin/hf upload OWNER/NAME`"
        )
    if script_args.ignore_bias_buffers:
        raise UserError("--ignore_bias_buffers is for trainers that these recipes do not use: leave it out")
    for name in ("max_steps", "num_train_epochs"):
        if script_args.max_tokens and name in given:
            raise UserError(f"--max_tokens and --{name} set the same: pass one of them")
    if model_args.lora_task_type != "CAUSAL_LM":
        raise UserError(f"--lora_task_type {model_args.lora_task_type}: these recipes train causal language models only")
    is_quantized = model_args.load_in_4bit or model_args.load_in_8bit
    if is_quantized and not hasattr(training_args, "model_init_kwargs"):
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


def check_optimizer(training_args: TrainingArguments, config: AccelerateConfig) -> None:
    """Raises UserError for an optimizer whose package is missing, or whose states FSDP cannot shard."""
    name = training_args.optim.value
    try:
        optimizer, _ = Trainer.get_optimizer_cls_and_kwargs(training_args)
    except ImportError as error:
        raise UserError(f"--optim {name}: {error}") from error
    except ValueError:  # it needs the model, or other arguments
        return
    if not config.is_fsdp or not optimizer.__module__.startswith("bitsandbytes"):
        return
    if name not in SHARDED_8BIT:
        raise UserError(
            f"--optim {name}: FSDP cannot shard its states: use adamw_8bit, or adamw_torch_fused, whose float32 states are "
            "divided among all GPUs"
        )
    if config.offload_params:
        raise UserError(
            f"--optim {name}: with fsdp_offload_params the optimizer runs on the CPU, where bitsandbytes takes many times as "
            "long: use adamw_torch_fused"
        )


def check_trackers(names: list[str]) -> None:
    """Raises UserError if a tracker of --report_to is unknown or its package is missing."""
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise UserError(f"--report_to: unknown tracker {name}, expected one of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}")
        if name not in get_available_reporting_integrations():
            raise UserError(f"--report_to {name} needs a package: {sys.executable} -m pip install {name.replace('_', '-')}")
