"""Everything that can be known to be wrong before a process is spawned, a model downloaded or a file written."""

import copy
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

from harness.launched import fail, say
from harness.rehearsal import stand_ins
from harness.start import models

REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements.txt"
TESTED_PYTHON = (3, 11)


def versions():
    """Warns, in one line, about a Python or package version the tests did not run with."""
    differing = [] if sys.version_info[:2] == TESTED_PYTHON else [f"Python {sys.version_info[0]}.{sys.version_info[1]}"]
    pins = [line.split() for line in REQUIREMENTS.read_text("utf-8").splitlines()] if REQUIREMENTS.is_file() else []
    for pin in pins:
        if pin and "==" in pin[0]:
            package, wanted = pin[0].split("==")
            try:
                found = importlib.metadata.version(package).split("+")[0]
            except importlib.metadata.PackageNotFoundError:
                continue
            if found != wanted:
                differing.append(f"{package} {found} (tested: {wanted})")
    if differing:
        say(f"warning: not tested with {', '.join(differing)}")


def gpu_count() -> int:
    """GPUs this process may use. Fails when they are there and CUDA is not."""
    import torch

    count = torch.cuda.device_count()  # of the driver
    if count and not torch.cuda.is_available():
        try:
            torch.cuda.init()
            reason = "no reason given"
        except RuntimeError as error:
            reason = str(error)
        fail(
            f"{count} GPU{'s' * (count > 1)} and no CUDA for PyTorch {torch.__version__}: {reason[:300]} Update the driver, or "
            "set PYTHON to an environment with a PyTorch for it; to rehearse on the CPU, CUDA_VISIBLE_DEVICES=''"
        )
    return count


def bf16(config: dict, name: str, gpus: int):
    """Fails for bf16 on a GPU that only emulates it (`torch.cuda.is_bf16_supported` says yes to those)."""
    import torch

    if config.get("mixed_precision") != "bf16":
        return
    for index in range(gpus):
        major, minor = torch.cuda.get_device_capability(index)
        if major < 8:
            fail(
                f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor} and no bf16 arithmetic, which "
                f"{name} asks for: use a config with mixed_precision: fp16"
            )


def shared_memory(launched):
    """Fails when /dev/shm has no room for what processes share: locks, and NCCL's buffers (33 MB each, as its errors say)."""
    shm, nccl = Path("/dev/shm"), 33 * (launched.processes // launched.nodes) * (not launched.on_cpu)
    if not shm.is_dir():
        return
    megabytes = 1 + (nccl if launched.processes > launched.nodes and os.environ.get("NCCL_SHM_DISABLE") != "1" else 0)
    room = shutil.disk_usage(shm).free / 1e6
    if room < megabytes:
        fail(
            f"/dev/shm has {room:.0f} MB free, and {megabytes} are needed: delete what is left there, or give a container more "
            "(docker run --shm-size=1g, or --ipc=host)" + ", or set NCCL_SHM_DISABLE=1" * (megabytes > 1)
        )


def arguments(data, args, model):
    """The arguments against each other."""
    if args.hub_token:
        fail("--hub_token would be saved with the run and seen in the process list: use `hf auth login` or HF_TOKEN")
    if args.push_to_hub:
        fail("--push_to_hub would upload checkpoints: when the run is done, `hf upload OWNER/NAME` its folder")
    if args.resume_from_checkpoint:
        fail("--resume_from_checkpoint is not needed: the same command goes on from the newest checkpoint in --output_dir")
    if args.save_only_model:
        fail("--save_only_model leaves out the optimizer, so the run could not go on: leave the flag out")
    if args.save_total_limit == 1:
        fail("--save_total_limit 1 deletes the last checkpoint before the next one is whole: give 2 or more")
    trackers(args.report_to)
    if data.dataset_streaming and args.max_steps <= 0:
        fail("a stream has no length: give --max_steps, or --max_tokens for a token budget")
    if (model.load_in_4bit or model.load_in_8bit) and not model.use_peft:
        fail("quantized weights are frozen, so nothing would train: add --use_peft")


def idle(data, args, model, sharded: bool):
    """Flags that were given, and would change nothing or what they do not say."""
    adapters = {name for name in data.given if name.startswith("lora_")} | data.given & {"use_rslora", "use_dora"}
    if adapters and not model.use_peft:
        fail(f"--{min(adapters)} is for adapters: add --use_peft")
    in_4bit = data.given & {"bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"}
    if in_4bit and not model.load_in_4bit:
        fail(f"--{min(in_4bit)} is for 4-bit weights: add --load_in_4bit --use_peft")
    if data.ignore_bias_buffers:
        fail("--ignore_bias_buffers is for trainers that these recipes do not use: leave it out")
    if data.max_tokens and "max_steps" in data.given:
        fail("--max_tokens and --max_steps decide the same: give one of them")
    if model.lora_task_type != "CAUSAL_LM":
        fail(f"--lora_task_type {model.lora_task_type} is for other models: these recipes train causal language models")
    if (model.load_in_4bit or model.load_in_8bit) and not hasattr(args, "model_init_kwargs"):
        fail("this recipe loads its model itself, whole: take one with an SFTTrainer for --load_in_4bit or --load_in_8bit")
    if model.load_in_8bit and sharded:
        fail("--load_in_8bit is for one GPU, FSDP2 shards floating-point parameters only: take --load_in_4bit")
    if model.load_in_4bit and sharded and "dtype" in data.given and model.dtype != "bfloat16":
        fail(f"--dtype {model.dtype} would be passed over, sharded 4-bit weights compute in bfloat16: leave the flag out")


def trackers(names: list[str]):
    """The packages of --report_to are here."""
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            fail(f"--report_to {name} is none of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}")
        if name not in get_available_reporting_integrations():
            fail(f"--report_to {name} needs its package: {sys.executable} -m pip install {name.replace('_', '-')}")


def quantization(data, args, model):
    """4-bit weights that FSDP could not shard, or would destroy."""
    if model.bnb_4bit_quant_storage not in ("float32", "bfloat16", "float16"):
        fail(
            f"--bnb_4bit_quant_storage {model.bnb_4bit_quant_storage} cannot be sharded: FSDP2 shards floating-point "
            "parameters only and would leave the whole model on every GPU; leave the flag out (float32)"
        )
    if (args.bf16 or args.fp16) and data.given & {"bf16", "fp16"}:
        fail(
            "--bf16 and --fp16 ask for a cast of the weights, which would destroy packed 4-bit ones: leave the flag out; "
            "the model already computes in the dtype it is loaded in (bf16)"
        )


def sources(data, args, model, launched):
    """Model and data can be opened, and are for each other and the run; in a rehearsal, their stand-ins."""
    from harness.start import chat  # which imports transformers

    from huggingface_hub.constants import HF_HUB_OFFLINE

    name = model.model_name_or_path
    if launched.tiny:
        data, model = copy.copy(data), copy.copy(model)
        data.dataset_name, model.model_name_or_path = str(stand_ins.data_folder(data)), str(stand_ins.model_folder(model))
        model.model_revision = "main"
    else:
        if HF_HUB_OFFLINE:
            say("Without the hub: model and data are those that are on this machine.")
        models.check(args, model, with_weights=launched.command != "preview")
    chat.check(args, model, data.given, data.check(), name)
