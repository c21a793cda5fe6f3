"""How the model is loaded: its attention, its dtype, and where 4-bit weights go."""

import json
import os

from accelerate.utils import str_to_bool


def complete(args, model, sharded: bool):
    """Fills in how a trainer loads the model that it is given by name."""
    model.attn_implementation = model.attn_implementation or attention()
    is_4bit = model.load_in_4bit and sharded
    if is_4bit:
        # FSDP2 shards floating-point parameters only, and keeps their bits when it need not cast them.
        model.bnb_4bit_quant_storage = model.bnb_4bit_quant_storage or "float32"
        model.dtype = "bfloat16"
        _into_host_ram()
    elif sharded and int(os.environ.get("RANK", 0)) and str_to_bool(os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")):
        _leave_weights_to_the_first()
    if hasattr(args, "model_init_kwargs"):
        given = args.model_init_kwargs or {}
        given = json.loads(given) if isinstance(given, str) else given
        kwargs = {"dtype": model.dtype, "revision": model.model_revision, "attn_implementation": model.attn_implementation}
        args.model_init_kwargs = {**kwargs, **given}


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


def attention() -> str | None:
    """FlashAttention-2 where this GPU can have it (the flash-attn package, else a prebuilt one of `kernels`).

    None elsewhere: transformers chooses, SDPA for most models.
    """
    import torch
    from transformers.utils import is_flash_attn_2_available

    ampere = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    return "flash_attention_2" if ampere and is_flash_attn_2_available(kernels_fallback_ok=True) else None
