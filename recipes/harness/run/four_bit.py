"""4-bit weights under FSDP: sharded from host RAM, their bytes kept, their adapter trained in float32."""

import hashlib

from harness.launched import say
from harness.run.sharding import layers_of

import torch

SLACK = 2**26  # bytes of a GPU before there is a model: the first all-reduce, workspaces


def prepare(trainer):
    """Trains the adapter of a 4-bit model in float32, which computes in bf16 all the same.

    TRL casts it to bf16, and Adam's moments with it, whose decay of 0.1 % a step bf16 rounds away. Price: 8 bytes more for
    each trained parameter, where the shards live. Raises RuntimeError when FSDP is to shard a model that is on a GPU already.
    """
    model = trainer.model
    if not getattr(model, "is_loaded_in_4bit", False):
        return
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    if trainer.is_fsdp_enabled:
        if early := [name for name, weight in model.named_parameters() if weight.device.type not in ("cpu", "meta")]:
            raise RuntimeError(f"{early[0]} is on a GPU before it is sharded, and so may be the whole model: load into host RAM")
        layer = max(sum(weight.nbytes for weight in layer.parameters()) for layer in layers_of(model).values())
        if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 2 * layer + SLACK:
            raise RuntimeError(
                f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB were on the GPU before the model was sharded, more than two "
                f"layers ({2 * layer / 1e9:.1f} GB): something loads it there"
            )
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False  # PEFT would keep a float32 copy of what goes into each adapter
        # What accelerate does for bf16 without FSDP; under FSDP it would cast the packed weights. Without the cache, which
        # would keep a copy of every gathered adapter until the end of the pass.
        trainer.autocast_smart_context_manager = lambda *args, **kwargs: torch.autocast(
            trainer.args.device.type, torch.bfloat16, cache_enabled=False
        )


class BytesCheck:
    """Stops the run, on any rank, when 4-bit weights do not come out of FSDP as they went in.

    Remembers the packed bytes of every 4-bit weight in the first and the last layer, and compares them where they are
    used: gathered, on the device, in the first forward pass. Says so when all of them are the same.
    """

    def __init__(self, model):
        layers = list(layers_of(model).values())
        modules = [module for layer in layers[:1] + layers[-1:] for module in layer.modules()]
        packed = [module for module in modules if type(getattr(module, "weight", None)).__name__ == "Params4bit"]
        self.watched, self.same = {id(module.weight): module for module in packed}, 0
        for module in self.watched.values():
            self._watch(module, _digest(module.weight))

    def _watch(self, module, loaded: str):
        def compare(module, inputs):
            hook.remove()
            if _digest(module.weight) != loaded:
                raise RuntimeError(
                    "the 4-bit weights were changed by sharding: their storage was cast or its bits were not kept. "
                    "Use bnb_4bit_quant_storage float32 with mixed_precision 'no'"
                )
            self.same += 1
            if self.same == len(self.watched):
                say(f"The 4-bit weights are used as they were loaded: {self.same} compared, byte for byte.")

        hook = module.register_forward_pre_hook(compare)


def _digest(weight: torch.Tensor) -> str:
    copy = weight.detach().clone().view(torch.uint8).cpu()  # FSDP2 must stay able to free the storage, which numpy forbids
    return hashlib.sha256(copy.numpy()).hexdigest()
