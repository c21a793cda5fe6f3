"""Tensors that hold nothing, and one process that stands for all. Here, in `kernels`, `wrapping` and `four_bit` stands all that
is private of the libraries; `broken()` says what of it is not there in the installed versions.

Fake tensors are on the CPU device, for on a machine without a GPU torch computes no backward pass on fake CUDA ones. The CPU
has other kernels, which keep other things for backward; those are replaced. Nothing is put back: a simulation has a process
of its own.
"""

import contextlib
import functools
import importlib
import os

from harness.plan import kernels, wrapping

import torch

# What is replaced or called, by module; tests/plan/test_fakes.py looks whether it still does what is needed.
NEEDED = {
    "accelerate.commands.launch": ("_validate_launch_command", "prepare_multi_gpu_env"),
    "torch._C": ("_ExcludeDispatchKeyGuard",),
    "torch._subclasses.fake_tensor": ("FakeTensor", "FakeTensorMode"),
    "torch.amp": ("GradScaler._maybe_opt_step",),
    "torch.testing._internal.distributed.fake_pg": ("FakeStore",),
    "torch.distributed.fsdp._fully_shard._fsdp_init": ("_move_states_to_device",),
    "torch.distributed.fsdp._fully_shard._fsdp_param": ("FSDPParam.all_gather_inputs", "FSDPParam._init_sharded_param"),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": ("foreach_reduce",),
    "torch.distributed.tensor._sharding_prop": ("ShardingPropagator._propagate_tensor_meta_non_cached",),
    "torch.nn.parallel.distributed": ("_verify_param_shape_across_processes", "_sync_module_states"),
    "torch.optim.optimizer": ("_get_foreach_kernels_supported_devices",),
    "torch.utils._foreach_utils": ("_get_foreach_kernels_supported_devices",),
    "torch.utils.flop_counter": ("flop_registry",),
    "torch.utils.weak": ("WeakIdKeyDictionary",),
    "transformers": ("Trainer._prepare_for_training", "Trainer._clip_grad_norm"),
    "transformers.modeling_utils": ("PreTrainedModel._from_config",),
    "trl.kernels.chunked_logprob": ("_use_triton", "_forward_kernel", "_backward_kernel", "_addmm_fp32"),
    "trl.trainer.utils": ("_use_triton",),
    "trl.trainer.sft_trainer": ("get_peft_model",),
    "bitsandbytes.nn": ("Linear4bit",),
}


def broken() -> list[str]:
    """Names of `NEEDED` that the installed versions do not have."""
    missing = []
    for module, names in NEEDED.items():
        for name in names:
            try:
                functools.reduce(getattr, name.split("."), importlib.import_module(module))
            except (ImportError, AttributeError):
                missing.append(f"{module}.{name}")
    return missing


class Fakes:
    """The replacements for one simulation, counted in `ledger`. Without `cuda` the CPU's own kernels stay, for comparison."""

    def __init__(self, ledger, cuda: bool = True):
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        class Mode(FakeTensorMode):
            def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
                if keywords and getattr(keywords.get("device"), "index", None) is not None:  # DDP says cpu:0
                    keywords = {**keywords, "device": torch.device(keywords["device"].type)}
                return super().__torch_dispatch__(function, types, arguments, keywords)

        self.ledger, self.mode = ledger, Mode(allow_non_fake_inputs=True)
        # accelerate knows the optimizer's parameters by their address; if all were at 0, Adam would update one of them.
        FakeTensor.data_ptr = lambda tensor: tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
        self._scalars()
        self._converting()
        self._loading()
        wrapping.offload(ledger)
        wrapping.data_parallel(ledger)
        wrapping.shapes_only(ledger)
        if cuda:
            self.library = kernels.as_on_cuda()
            kernels.loss(ledger)

    @contextlib.contextmanager
    def here(self, **labels):
        """Every tensor made in here holds nothing, and is counted."""
        with self.mode, self.ledger, self.ledger.within(**labels):
            yield

    def join(self, processes: int, on_a_node: int):
        """This process is the first of many that are not there."""
        from torch.testing._internal.distributed.fake_pg import FakeStore

        ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": on_a_node}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)

    def fake(self, value):
        return self.mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    def _scalars(self):
        """Whatever is asked of a tensor that holds nothing is 1, and no gradient overflows."""
        item = torch.Tensor.item
        torch.amp.GradScaler._maybe_opt_step = lambda scaler, optimizer, state, *arguments: optimizer.step(*arguments)

        def scalar(tensor):
            if type(tensor) is not self.kind:
                return item(tensor)
            return True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1

        take = torch.Tensor.__getitem__

        def chosen(tensor, index):
            if type(index) is self.kind and index.dtype is torch.bool:  # as many as there are: the most it can be
                return take(tensor.flatten(0, index.dim() - 1), torch.arange(index.numel(), device=tensor.device))
            return take(tensor, index)

        torch.Tensor.__getitem__ = chosen
        self.kind = type(self.mode.from_tensor(torch.empty(1)))
        torch.Tensor.item = scalar
        for name in ("__bool__", "__int__", "__float__", "__index__"):
            convert = {"__bool__": bool, "__float__": float}.get(name, int)
            original = getattr(torch.Tensor, name)
            replaced = lambda tensor, c=convert, o=original: c(scalar(tensor)) if type(tensor) is self.kind else o(tensor)  # noqa: E731
            setattr(torch.Tensor, name, replaced)

    def _converting(self):
        """`module.to(…)`: torch would swap what is fake with what it becomes, which nothing may refer to then."""

        def apply(module, function, recurse=True):
            for child in module.children() if recurse else ():
                child._apply(function)
            for weight in module._parameters.values():
                if weight is not None and (new := function(weight)) is not weight:
                    weight.data = new
            module._buffers.update({name: function(value) for name, value in module._buffers.items() if value is not None})
            return module

        torch.nn.Module._apply = apply

    def _loading(self):
        from harness.plan import four_bit

        import peft
        import transformers
        from trl.trainer import sft_trainer

        def from_pretrained(cls, name, *arguments, config=None, dtype=None, quantization_config=None, **options):
            revision = options.get("revision") or "main"
            config = config or transformers.AutoConfig.from_pretrained(name, revision=revision)
            dtype = getattr(torch, dtype, config.dtype) if isinstance(dtype, str) else dtype or config.dtype or torch.float32
            with self.mode:
                model = cls._from_config(config, dtype=dtype, attn_implementation=options.get("attn_implementation"))
                model.name_or_path = config.name_or_path = str(name)
                if quantization_config is not None:
                    four_bit.quantize(model, quantization_config)
            for tensor in (*model.parameters(), *model.buffers()):
                self.ledger.mark(tensor, "weights", "host")
            return model.eval()

        transformers.PreTrainedModel.from_pretrained = classmethod(from_pretrained)

        def get_peft_model(*arguments, **options):
            with self.here(holder="weights", place="host"):
                return adapt(*arguments, **options)

        adapt = peft.get_peft_model
        peft.get_peft_model = sft_trainer.get_peft_model = get_peft_model
