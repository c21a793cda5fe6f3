"""How the model is loaded: its attention, its dtype, and where 4-bit weights go."""

import json
import os
import warnings
from pathlib import Path

from harness.launched import say
from harness.rehearsal import stand_ins


def complete(args, model, sharded: bool, launched):
    """Fills in how a trainer loads the model that it is given by name, and how its loss is computed."""
    if launched.attention and not launched.on_cpu and not model.attn_implementation and _takes_flash(args, model, launched.tiny):
        model.attn_implementation = launched.attention
    if isinstance(model.lora_target_modules, str) and model.lora_target_modules.isidentifier():
        model.lora_target_modules = [model.lora_target_modules]  # TRL makes a text of a single name, PEFT a pattern of a text
    if launched.torch_loss:
        _compute_loss_in_torch()
    is_4bit = model.load_in_4bit and sharded
    if is_4bit:
        # FSDP2 shards floating-point parameters only, and keeps their bits when it need not cast them.
        model.bnb_4bit_quant_storage = model.bnb_4bit_quant_storage or "float32"
        model.dtype = "bfloat16"
        _into_host_ram()
    elif sharded and int(os.environ.get("RANK", 0)) and os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING") == "true":
        _leave_weights_to_the_first()
    if hasattr(args, "model_init_kwargs"):
        given = args.model_init_kwargs or {}
        given = json.loads(given) if isinstance(given, str) else given
        kwargs = {"dtype": model.dtype, "revision": model.model_revision, "attn_implementation": model.attn_implementation}
        args.model_init_kwargs = {**kwargs, **given}


def _takes_flash(args, model, tiny: bool) -> bool:
    """Whether the model's class has FlashAttention and computes in 16 bits, the only ones that it takes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    if not (args.bf16 or args.fp16 or model.dtype in ("bfloat16", "float16")):
        return False
    name, revision = model.model_name_or_path, model.model_revision
    if tiny:
        name, revision = str(stand_ins.model_folder(model)), "main"
        if not Path(name).is_dir():  # yet; nothing is loaded before it is
            return True
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
    except Exception:  # the check says what is wrong
        return True
    return getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_flash_attn", False)


def _into_host_ram():
    """Never the whole 4-bit model on one GPU: FSDP moves a layer at a time there, to shard it.

    A `device_map` of ours would not do: SFTTrainer (trl 1.16) sets None in every distributed run, which transformers takes
    for the current GPU.
    """
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    Bnb4BitHfQuantizer.update_device_map = lambda self, device_map: {"": "cpu"}


def _leave_weights_to_the_first():
    """Only the first process reads the weights, and hands them out when they are sharded; this one learns their shapes.

    transformers 5.23 reads them in every process (its issue 43749), so that a node's host RAM holds as many copies
    wherever the dtype is not that of the file.
    """
    import torch
    from transformers import core_model_loading

    def shape_of(tensor, device=None, dtype=None):
        shape = tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape  # of a file, or of a tensor
        return torch.empty(shape, dtype=dtype, device="meta")

    core_model_loading._materialize_copy = shape_of


def _compute_loss_in_torch():
    """TRL's loss without Triton, in tiles of 4,096 words of the vocabulary where its own are 32,768.

    In float32 torch keeps seven such tiles at a time: 2 x 256 tokens of GPT-2 XL need 59 MB, and would need 470 MB.
    """
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    chunked_logprob._TRITON_AVAILABLE, utils._CHUNKED_LOGPROB_CHUNK_SIZE = False, 4096


def choose() -> tuple[str, str]:
    """What the GPUs of this machine can have, asked once in the launcher so that all processes do the same.

    Returns the attention, FlashAttention-2 where the flash-attn package or a prebuilt one of `kernels` is there ("" leaves it
    to transformers: SDPA for most models), and why TRL's loss cannot use Triton, "" where it can.
    """
    import torch
    from transformers.utils import is_flash_attn_2_available

    warnings.filterwarnings("ignore")  # of a driver that is too old, for one: `checks` says so in a line
    if not torch.cuda.is_available():
        return "", ""
    if torch.cuda.get_device_capability() < (8, 0):  # triton issue 10918
        return "", f"it does not support {torch.cuda.get_device_name()}"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # compiles what it launches kernels with
        reason = ""
    except Exception as error:  # no compiler, no Python.h, no libcuda: each says so in a kind of its own
        reason = f"{(str(error).splitlines() or [repr(error)])[0]} (apt install gcc python3-dev)"
    return "flash_attention_2" if is_flash_attn_2_available(kernels_fallback_ok=True) else "", reason


def announce(args, model, launched):
    """Says, of a run on GPUs, which attention it has and what it costs, and whether the loss is the slower one."""
    from transformers import AutoConfig

    if launched.on_cpu:
        return
    if launched.torch_loss:
        say(f"TRL's loss runs in torch, a little slower, not in Triton: {launched.torch_loss}")
    if "flash" in (model.attn_implementation or ""):
        return say(f"Attention: {model.attn_implementation}.")
    chosen = model.attn_implementation or "transformers' choice, for most models SDPA"
    config = AutoConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision).get_text_config()
    tokens = args.per_device_train_batch_size * (getattr(args, "max_length", None) or 0)
    if getattr(args, "packing", False) and tokens:
        # 4 x tokens x hidden for each token and layer, beside 2 x 12 x hidden x hidden of its weights.
        say(
            f"Attention: {chosen}, with a mask: each token meets all {tokens:,} of its row, about "
            f"{tokens / 6 / config.hidden_size:.0%} of the weights' arithmetic. FlashAttention-2 needs compute capability 8.0, "
            "16 bits, a model that has it, and a prebuilt kernel from the hub or the flash-attn package."
        )
