"""FSDP is what the config says, or the run stops: kind, world size, sharded layers, precision."""

import torch
from transformers import TrainerCallback


def set_precision(trainer):
    """Computes in the config's precision, but reduces gradients and leaves the loss in float32.

    accelerate 1.15 gives FSDP2 one dtype for parameters, reduction and outputs, which rounds the loss itself to bf16.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.mixed_precision_policy is None:
        return
    if getattr(trainer.model, "is_loaded_in_4bit", False):
        plugin.mixed_precision_policy = None  # a cast would destroy the packed bits
        return
    compute = plugin.mixed_precision_policy.param_dtype
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


class ShardingCheck(TrainerCallback):
    """Asserts after wrapping that training is distributed the way the config says."""

    def __init__(self, trainer, config: dict):
        self.accelerator, self.config = trainer.accelerator, config

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self.config:
            verify(model, self.accelerator, self.config)


def verify(model, accelerator, config: dict):
    """Raises RuntimeError unless kind, world size and every transformer layer are as `config` says."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    kind = "FSDP" if config["distributed_type"] == "FSDP" else "unsharded"
    actual = "FSDP" if accelerator.distributed_type == "FSDP" else "unsharded"
    if (actual, accelerator.num_processes) != (kind, config["num_processes"]):
        raise RuntimeError(
            f"the config says {kind} on {config['num_processes']} processes, "
            f"but this run is {actual} on {accelerator.num_processes}: it was not started the way launch.sh starts it"
        )
    if kind != "FSDP":
        return
    names = set(model._no_split_modules or [])
    layers = {n: m for n, m in model.named_modules() if names & {cls.__name__ for cls in type(m).__mro__}}
    whole = [n for n, m in layers.items() if not isinstance(m, FSDPModule)]
    whole += [f"{n}.{p}" for n, m in layers.items() for p, w in m.named_parameters() if not isinstance(w, DTensor)]
    if whole or not layers:
        raise RuntimeError(
            f"FSDP left {', '.join(whole[:3]) or 'every layer'} unsharded: "
            "check fsdp_auto_wrap_policy and fsdp_transformer_layer_cls_to_wrap in the config"
        )
