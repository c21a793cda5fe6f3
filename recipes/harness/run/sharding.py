"""FSDP is what the config says, or the run stops: kind, world size, sharded layers, precision."""

import functools

import torch
from transformers import TrainerCallback


def set_precision(trainer, reduce_dtype: str = "float32"):
    """Computes in the config's precision, but reduces gradients in `reduce_dtype` and leaves the loss in float32.

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
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=getattr(torch, reduce_dtype))


def name_layers(trainer):
    """Names the layers to wrap: accelerate 1.15 refuses a model that also names those of its relatives, which see or hear."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.transformer_cls_names_to_wrap is None:
        plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in layers_of(trainer.model).values()})


def tell_apart(model):
    """Gives weights that only the first process has read an address each.

    accelerate 1.15 finds the optimizer's parameters again by address. Those without memory all have 0: they would be taken
    for one, and the others would not be trained.
    """
    for weight in model.parameters():
        if weight.is_meta:
            weight.data_ptr = functools.partial(id, weight)


def keep_head_gathered(model):
    """Gathers a frozen output head once and leaves it whole on every GPU.

    TRL's loss reads the head's weight past FSDP's hooks. Sharded, it would be gathered for every micro-batch, and with
    offload the loss would follow it to the CPU. Price: the whole head on every GPU, 2.1 GB for a 70B model. A head that
    is trained, or tied to the embedding, is gathered by its own unit.
    """
    from torch.distributed.fsdp import FSDPModule

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, FSDPModule) or head.weight.requires_grad or head.weight is embedding.weight:
        return
    head.set_reshard_after_backward(False)
    model.register_forward_pre_hook(lambda module, inputs: head.unshard())  # nothing happens when it is whole already


def carry_buffers(trainer):
    """Carries saved buffers, such as the bias that balances experts, past accelerate; returns what undoes it.

    accelerate 1.15 hands out sharded parameters only and takes a buffer of the state dict for one (its issue 3898). What
    is not in the state dict it keeps, on every process as it is there.
    """
    if getattr(trainer.accelerator.state, "fsdp_plugin", None) is None:
        return lambda: None
    hidden = []
    for module in trainer.model.modules():
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            if module._buffers[name] is not None:
                value = module._buffers[name]
                value = (torch.empty_like if value.is_meta else torch.Tensor.to)(value, device=trainer.args.device)
                torch.distributed.broadcast(value, 0)  # only the first process has read the model
                module._buffers[name] = value.cpu()
                module._non_persistent_buffers_set.add(name)
                hidden.append((module._non_persistent_buffers_set, name))
    return lambda: [names.discard(name) for names, name in hidden]


def layers_of(model) -> dict[str, torch.nn.Module]:
    """The transformer layers by name, wrapped by FSDP or not."""
    names = set(model._no_split_modules or [])
    return {name: module for name, module in model.named_modules() if names & {cls.__name__ for cls in type(module).__mro__}}


class AfterWrapping(TrainerCallback):
    """Asserts that training is distributed the way the config says, and tends to the output head."""

    def __init__(self, trainer, config: dict, processes: int):
        self.accelerator, self.config, self.processes = trainer.accelerator, config, processes
        self.put_back = carry_buffers(trainer)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self.config:
            verify(model, self.accelerator, self.config, self.processes)
        fsdp = self.config.get("fsdp_config", {})
        if fsdp.get("fsdp_reshard_after_backward") is False:
            gather_once(model)
        if fsdp.get("fsdp_reduce_each_batch"):
            reduce_each_batch(model)
        keep_head_gathered(model)
        self.put_back()


def gather_once(model):
    """Keeps the weights gathered from the first micro-batch of an optimizer step to the last.

    accelerate holds back the reduction of gradients until the last micro-batch; the weights now follow the same switch.
    Price: the whole model in the compute dtype on every GPU; whole gradients are there already, by accelerate's choice.
    """
    set_sync = model.set_requires_gradient_sync

    def set_both(requires_gradient_sync: bool, *, recurse: bool = True):
        set_sync(requires_gradient_sync, recurse=recurse)
        model.set_reshard_after_backward(requires_gradient_sync, recurse=recurse)

    model.set_requires_gradient_sync = set_both


def reduce_each_batch(model):
    """Gradients that accumulate stay sharded: each micro-batch reduces its own inside a replica, the last one across replicas.

    Price: a reduction for every micro-batch. Without it FSDP keeps whole float32 gradients on every GPU until the step.
    """
    model.set_requires_gradient_sync = model.set_requires_all_reduce


def verify(model, accelerator, config: dict, processes: int):
    """Raises RuntimeError unless kind, world size and every transformer layer are as `config` says."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    kind = "FSDP" if config["distributed_type"] == "FSDP" else "unsharded"
    actual = "FSDP" if accelerator.distributed_type == "FSDP" else "unsharded"
    if (actual, accelerator.num_processes) != (kind, processes):
        raise RuntimeError(
            f"the config says {kind} on {processes} processes, "
            f"but this run is {actual} on {accelerator.num_processes}: it was not started the way launch.sh starts it"
        )
    if kind != "FSDP":
        return
    layers = layers_of(model)
    whole = [n for n, m in layers.items() if not isinstance(m, FSDPModule)]
    whole += [f"{n}.{p}" for n, m in layers.items() for p, w in m.named_parameters() if not isinstance(w, DTensor)]
    if whole or not layers:
        raise RuntimeError(
            f"FSDP left {', '.join(whole[:3]) or 'every layer'} unsharded: "
            "check fsdp_auto_wrap_policy and fsdp_transformer_layer_cls_to_wrap in the config"
        )
