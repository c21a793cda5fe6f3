"""How the model is loaded: its attention, its dtype, and where 4-bit weights go."""

import json


def complete(args, model, sharded: bool):
    """Fills in how a trainer loads the model that it is given by name."""
    model.attn_implementation = model.attn_implementation or attention()
    is_4bit = model.load_in_4bit and sharded
    if is_4bit:
        # FSDP2 shards floating-point parameters only, and keeps their bits when it need not cast them.
        model.bnb_4bit_quant_storage = model.bnb_4bit_quant_storage or "float32"
        model.dtype = "bfloat16"
        _into_host_ram()
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


def attention() -> str | None:
    """FlashAttention-2 where this GPU can have it (the flash-attn package, else a prebuilt one of `kernels`).

    None elsewhere: transformers chooses, SDPA for most models.
    """
    import torch
    from transformers.utils import is_flash_attn_2_available

    ampere = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    return "flash_attention_2" if ampere and is_flash_attn_2_available(kernels_fallback_ok=True) else None
