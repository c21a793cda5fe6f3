"""What a simulation replaces: tensors without memory, the other processes, CUDA's kernels, loading.

The tensors are torch's fake tensors on the CPU device: on a machine without a GPU, torch runs no backward pass on fake CUDA
tensors. The CPU has other kernels, which keep other tensors for backward; those that matter are replaced by what CUDA runs.
Nothing is restored: a simulation has a process of its own.
"""

import contextlib
import functools
import importlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

from harness.compat.guards import changes, expected_names
from harness.compat.transformers import build_from_config, load_models_with
from harness.model.models import HOST_MEMORY
from harness.run.sharding import local_tensor
from planner.attention import flash_workspace
from planner.ledger import VARLEN_BACKWARD, Ledger, tensors_in
from planner.quantized import quantize

import torch
from transformers import BitsAndBytesConfig
from transformers.initialization import no_init_weights

with expected_names():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Operators that CUDA's autocast computes in float32 and the CPU's does not (PyTorch's page on torch.amp lists both).
FLOAT32_OPERATORS = (
    "layer_norm",
    "softmax.int",
    "log_softmax.int",
    "pow.Tensor_Scalar",
    "rsqrt",
    "exp",
    "log",
    "cumsum",
)


class Mode(FakeTensorMode):
    """Makes fake tensors. DDP asks for the device cpu:0, which a fake tensor does not know."""

    keeps_values = False  # if True, what is computed of real tensors alone stays real, such as the sizes of images

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if kwargs and getattr(kwargs.get("device"), "index", None) is not None:
            kwargs = {**kwargs, "device": torch.device(kwargs["device"].type)}
        if func is torch.ops.aten.nonzero.default:  # it selects everything, as a boolean mask does
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
        if self.keeps_values:
            tensors = tensors_in((*args, *(kwargs or {}).values()))
            if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
                return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


class Fakes:
    """The replacements for one simulation, counted in `ledger`. Without `cuda` the CPU's own kernels stay, for a comparison."""

    def __init__(self, ledger: Ledger, cuda: bool = True) -> None:
        self.ledger = ledger
        self.mode = Mode(allow_non_fake_inputs=True)
        give_fake_tensors_values(self.mode)
        convert_modules_in_place()
        count_moves(ledger)
        load_models_from_config(self)
        make_fake_adapters(self)
        count_offload(ledger)
        count_offloaded_activations(ledger)
        count_data_parallel(ledger)
        ignore_shape_propagation(ledger)
        if cuda:
            self.library = use_operators_of_cuda(ledger)  # it must be kept: its destructor removes the kernels
            use_triton_loss(ledger)

    @contextlib.contextmanager
    def here(self, **labels: str) -> Iterator[None]:
        """Every tensor that is made within this block is fake, and is counted."""
        with self.mode, self.ledger, self.ledger.within(**labels):
            yield

    def join_processes(self, processes: int, per_node: int) -> None:
        join_fake_processes(processes, per_node)

    def fake(self, value: Any) -> Any:
        return self.mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


@changes("transformers:Trainer._prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint)")
def count_wrapping(trainer: Any, ledger: Ledger, fakes: Any) -> None:
    """Counts what is allocated while accelerate wraps the model: the shards of FSDP, or the buckets of DDP.

    Upstream: no issue: it is not a fault of transformers.
    Checked with: transformers 5.23.0.
    Remove when: never.
    """
    prepare = trainer._prepare_for_training

    def prepare_counted(*args: Any) -> Any:
        if not trainer.is_fsdp_enabled:
            with fakes.here(holder="gradients"):  # DDP makes its buckets now
                return prepare(*args)
        # FSDP's device meshes need real tensors.
        with ledger, ledger.within(holder="weights", place="host"):
            return prepare(*args)

    trainer._prepare_for_training = prepare_counted


@changes("transformers:Trainer._clip_grad_norm(self, model)")
def install_steps(trainer: Any, run_backward: Callable, run_optimizer: Callable) -> None:
    """Makes a trainer whose optimizer exists pass backward, clipping and the optimizer's step to these functions.

    Upstream: no issue: it is not a fault of transformers.
    Checked with: transformers 5.23.0.
    Remove when: never.
    """
    optimizer = trainer.optimizer.optimizer
    trainer.accelerator.backward = functools.partial(run_backward, trainer.accelerator.backward)
    trainer._clip_grad_norm = functools.partial(run_optimizer, trainer._clip_grad_norm)
    optimizer.step = functools.partial(run_optimizer, optimizer.step)


@changes("torch.testing._internal.distributed.fake_pg:FakeStore")
def join_fake_processes(processes: int, per_node: int) -> None:
    """Makes this process the first of many that do not exist.

    Upstream: no issue: the "fake" backend is made for tests.
    Checked with: torch 2.13.0.
    Remove when: the backend has a public store.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": per_node}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)


@changes("torch.amp:GradScaler._maybe_opt_step(self, optimizer, optimizer_state, args, kwargs)")
def give_fake_tensors_values(mode: Mode) -> None:
    """Makes every number that is read from a fake tensor 1, and a boolean mask select everything; no gradient overflows.

    A fake tensor raises an error when its value is read. Training reads a few: token counts, the gradient norm, the scale.
    Upstream: no issue: a fake tensor has no values.
    Checked with: torch 2.13.0.
    Remove when: never.
    """
    kind = type(mode.from_tensor(torch.empty(1)))
    original_item = torch.Tensor.item
    original_getitem = torch.Tensor.__getitem__

    def value_of(tensor: torch.Tensor) -> bool | int | float:
        if tensor.dtype is torch.bool:
            return True
        if tensor.is_floating_point():
            return 1.0
        return 1

    def item(tensor: torch.Tensor) -> bool | int | float:
        return value_of(tensor) if type(tensor) is kind else original_item(tensor)

    def getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        if type(index) is kind and index.dtype is torch.bool:  # the largest possible result
            return original_getitem(tensor.flatten(0, index.dim() - 1), torch.arange(index.numel(), device=tensor.device))
        return original_getitem(tensor, index)

    def converting(name: str, convert: Callable) -> Callable:
        original = getattr(torch.Tensor, name)
        return lambda tensor: convert(value_of(tensor)) if type(tensor) is kind else original(tensor)

    def step(scaler: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    torch.Tensor.item = item
    torch.Tensor.__getitem__ = getitem
    for name, convert in (("__bool__", bool), ("__int__", int), ("__float__", float), ("__index__", int)):
        setattr(torch.Tensor, name, converting(name, convert))
    torch.amp.GradScaler._maybe_opt_step = step


@changes("torch.nn:Module._apply(self, fn, recurse)")
def convert_modules_in_place() -> None:
    """Makes `module.to(…)` set `weight.data` in this process. Gradients stay as they are.

    torch swaps a weight that is a tensor subclass with its converted version, which fails if anything refers to it.
    Upstream: pytorch/pytorch#148977 with the open pull request #184976.
    Checked with: torch 2.13.0.
    Remove when: swapping works for fake tensors.
    """

    def apply(module: torch.nn.Module, fn: Callable, recurse: bool = True) -> torch.nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for weight in module._parameters.values():
            if weight is not None and (converted := fn(weight)) is not weight:
                weight.data = converted
        module._buffers.update({name: fn(value) for name, value in module._buffers.items() if value is not None})
        return module

    torch.nn.Module._apply = apply


@changes("torch.nn:Module.to", "torch.nn:Module.cpu")
def count_moves(ledger: Ledger) -> None:
    """Counts a module on the GPU after `module.to(device)`, and on the host after `.cpu()` or `.to("cpu")`.

    Both are the CPU here: a device is the training's, and so the GPU, unless it is named by the text "cpu".
    Upstream: no issue: it is not a fault of torch.
    Checked with: torch 2.13.0.
    Remove when: fake CUDA tensors run a backward pass on a machine without a GPU.
    """
    to = torch.nn.Module.to
    cpu = torch.nn.Module.cpu

    def place(module: torch.nn.Module, where: str) -> torch.nn.Module:
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                ledger.see(local_tensor(tensor), "weights")
                ledger.mark(local_tensor(tensor), place=where)
        return module

    def move(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        moved = to(module, *args, **kwargs)
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, str | torch.device):
            place(moved, "host" if device == "cpu" else "gpu")
        return moved

    torch.nn.Module.to = move
    torch.nn.Module.cpu = lambda module: place(cpu(module), "host")


def load_models_from_config(fakes: Fakes) -> None:
    """Makes `from_pretrained` build a model of fake weights, as large as what it would load, and where it would load it."""

    def build(
        load: Callable,
        model_class: type,
        name: str,
        config: Any = None,
        revision: str | None = None,
        dtype: Any = None,
        attn_implementation: str | None = None,
        quantization_config: Any = None,
        device_map: Any = None,
        **options: Any,
    ) -> Any:
        place = "gpu"
        is_moved_later = device_map is None and quantization_config is None
        if is_moved_later or device_map is HOST_MEMORY:  # that of a teacher is equal: the training's device is the CPU here
            place = "host"
        with fakes.mode:
            model = build_from_config(model_class, name, None, config, revision, dtype, attn_implementation)
            if quantization_config is not None:
                if isinstance(quantization_config, dict):
                    quantization_config = BitsAndBytesConfig.from_dict(quantization_config)
                quantize(model, quantization_config, fakes.ledger)
        for tensor in (*model.parameters(), *model.buffers()):
            fakes.ledger.mark(tensor, "weights", place)
        return model

    load_models_with(build)


@changes("peft:get_peft_model", "trl.trainer.sft_trainer:get_peft_model")
def make_fake_adapters(fakes: Fakes) -> None:
    """Makes the weights of adapters fake, and counts them.

    Upstream: no issue: it is not a fault of PEFT.
    Checked with: peft 0.21.2, trl 1.16.0.
    Remove when: never.
    """
    import peft
    from trl.trainer import sft_trainer

    original = peft.get_peft_model

    def get_peft_model(*args: Any, **kwargs: Any) -> Any:
        with no_init_weights(), fakes.here(holder="weights", place="host"):  # fake weights have no values
            return original(*args, **kwargs)

    peft.get_peft_model = sft_trainer.get_peft_model = get_peft_model


@changes(
    "torch.distributed.fsdp._fully_shard._fsdp_init:_move_states_to_device(params, buffers, device)",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.all_gather_inputs",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._init_sharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:foreach_reduce",
)
def count_offload(ledger: Ledger) -> None:
    """Counts what FSDP2 copies between host and GPU with offload. Both are the CPU here, so a copy would do nothing.

    Upstream: no issue: it is not a fault of torch.
    Checked with: torch 2.13.0.
    Remove when: fake CUDA tensors run a backward pass on a machine without a GPU.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group

    param_class = _fsdp_param.FSDPParam
    inputs = param_class.all_gather_inputs.fget
    init = param_class._init_sharded_param
    reduce = _fsdp_param_group.foreach_reduce

    def move_to_gpu(params: Any, buffers: Any, device: Any) -> None:
        """Weights that are not offloaded, and buffers: copied to the GPU once."""
        for tensor in (*params, *buffers):
            with torch.no_grad(), ledger.within(place="gpu"):
                tensor.data = tensor.data.clone()
                ledger.see(tensor.data, "weights")

    def init_sharded_param(param: Any, *args: Any) -> None:
        """The shard that a process keeps: in pinned host memory if it is offloaded, copied from one on the GPU."""
        with ledger.within(place="host" if param.offload_to_cpu else "gpu"):
            init(param, *args)
            ledger.see(param._sharded_param_data, "weights")  # of a second model, which is wrapped when the trainer is built
        if param.offload_to_cpu:
            ledger.spike(param._sharded_param_data.nbytes, "weights")
            ledger.pin(param._sharded_param_data)

    def all_gather_inputs(param: Any) -> Any:
        """An offloaded shard is copied to the GPU before each all-gather."""
        shard = param._sharded_param_data
        if param.offload_to_cpu:
            param._sharded_param_data = shard.clone()
            ledger.mark(param._sharded_param_data, "gathered")
            ledger.moved["to_gpu"] += shard.nbytes
        try:
            return inputs(param)
        finally:
            param._sharded_param_data = shard

    def reduce_to_host(params: Any, *args: Any, **kwargs: Any) -> Any:
        """A reduced gradient is copied to the host, and added there if an earlier micro-batch left one."""
        had_gradient = [param.sharded_param.grad is not None for param in params]
        result = reduce(params, *args, **kwargs)
        for param, had in zip(params, had_gradient, strict=True):
            if param.offload_to_cpu and param.sharded_param.grad is not None:
                gradient = param.sharded_param.grad._local_tensor
                ledger.moved["to_host"] += gradient.nbytes
                if had:
                    ledger.moved["added_on_host"] += gradient.nbytes
                else:
                    ledger.mark(gradient, "gradients", "host")
                    ledger.pin(gradient)
        return result

    _fsdp_init._move_states_to_device = move_to_gpu
    param_class._init_sharded_param = init_sharded_param
    param_class.all_gather_inputs = property(all_gather_inputs)
    _fsdp_param_group.foreach_reduce = reduce_to_host


@changes("transformers.modeling_utils:save_on_cpu", "torch.autograd.graph:save_on_cpu(pin_memory, device_type)")
def count_offloaded_activations(ledger: Ledger) -> None:
    """Counts what `activation_checkpointing_enable(offload=True)` copies to the host and back. Both are the CPU here.

    Upstream: no issue: it is not a fault of transformers.
    Checked with: transformers 5.23.0.
    Remove when: fake CUDA tensors run a backward pass on a machine without a GPU.
    """
    from transformers import modeling_utils

    def copy_to(place: str, tensor: torch.Tensor) -> torch.Tensor:
        ledger.moved["activations"] += tensor.nbytes
        with torch.no_grad(), ledger.within(place=place, holder="activations"):
            copy = tensor.clone()
        if place == "host":
            ledger.pin(copy)
        return copy

    def save_on_host(pin_memory: bool = False, device_type: str = "cpu") -> Any:
        pack = functools.partial(copy_to, "host")
        unpack = functools.partial(copy_to, "gpu")
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    modeling_utils.save_on_cpu = save_on_host


@changes(
    "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
    "torch.nn.parallel.distributed:_sync_module_states",
)
def count_data_parallel(ledger: Ledger) -> None:
    """Makes DDP skip what it asks of its other processes, and counts the buckets that it all-reduces, which are made in C++.

    Upstream: no issue: it is not a fault of torch.
    Checked with: torch 2.13.0.
    Remove when: never.
    """
    from torch.nn.parallel import distributed

    def all_reduce(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ledger.moved["all_reduced"] += bucket.buffer().nbytes
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    original = distributed.DistributedDataParallel.__init__

    def init(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        model.register_comm_hook(None, all_reduce)

    def skip(*args: Any, **kwargs: Any) -> None:
        pass

    distributed._verify_param_shape_across_processes = distributed._sync_module_states = skip
    distributed.DistributedDataParallel.__init__ = init


@changes("torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached(self, op_schema)")
def ignore_shape_propagation(ledger: Ledger) -> None:
    """Does not count the tensors with which DTensor finds the shape of a result: it runs the operator on unsharded fakes.

    Upstream: no issue: it is not a fault of torch.
    Checked with: torch 2.13.0.
    Remove when: never.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_uncounted(*args: Any) -> Any:
        was_paused = ledger.paused
        ledger.paused = True
        try:
            return propagate(*args)
        finally:
            ledger.paused = was_paused

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate_uncounted


@changes(
    "torch.optim.optimizer:_get_foreach_kernels_supported_devices",
    "torch.utils._foreach_utils:_get_foreach_kernels_supported_devices",
    "torch.utils._foreach_utils:_foreach_supported_types",
    "torch._ops:OpOverloadPacket",
    "torch._C:_ExcludeDispatchKeyGuard",
    "torch:ops.aten._scaled_dot_product_flash_attention",
    "torch:ops.aten._scaled_dot_product_efficient_attention",
    "torch:ops.aten._scaled_dot_product_flash_attention_backward",
    "torch.nn.attention.varlen:_varlen_attn_backward",
)
def use_operators_of_cuda(ledger: Ledger) -> torch.library.Library:
    """Makes the CPU run the operators that CUDA would run, where its own keep other tensors for the backward pass.

    The caller must hold on to the library that this returns: its destructor removes the operators.
    Upstream: no issue: it is not a fault of torch.
    Checked with: torch 2.13.0.
    Remove when: fake CUDA tensors run a backward pass on a machine without a GPU.
    """
    functional = torch.nn.functional
    aten = torch.ops.aten
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        # Optimizers take the path for lists of tensors (foreach), as they do on CUDA.
        importlib.import_module(module)._get_foreach_kernels_supported_devices = lambda: ["cpu", "cuda"]
    torch.utils._foreach_utils._foreach_supported_types.append(FakeTensor)  # the norm of the gradients takes it too

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input

    functional.dropout = dropout
    functional.scaled_dot_product_attention = attention_as_on_cuda
    is_enabled = torch.is_autocast_enabled

    def is_autocast_enabled(device_type: str = "cpu") -> bool:
        return is_enabled(device_type)

    # Without an argument torch answers for CUDA. PEFT asks so, and converts an adapter's input to float32 if it is off.
    torch.is_autocast_enabled = is_autocast_enabled

    def workspace_of_sdpa(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any) -> int:
        return flash_workspace(query, key, documents=len(query))

    def workspace_of_varlen(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any) -> int:
        ends = rest[3]  # after the values, the output and the logarithms of the sums
        return flash_workspace(query, key, documents=len(ends) - 1)

    ledger.workspaces[aten._scaled_dot_product_flash_attention_backward] = workspace_of_sdpa
    ledger.workspaces[VARLEN_BACKWARD] = workspace_of_varlen
    library = torch.library.Library("aten", "IMPL")
    for name in FLOAT32_OPERATORS:  # "softmax.int" names an overload; of "layer_norm" the default one is meant
        operator = functools.reduce(getattr, name.split("."), aten)
        operator = operator.default if isinstance(operator, torch._ops.OpOverloadPacket) else operator
        library.impl(name, functools.partial(_run_in_float32, operator), "AutocastCPU")
    return library


def _run_in_float32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        low = (torch.bfloat16, torch.float16)
        args = [arg.float() if isinstance(arg, torch.Tensor) and arg.dtype in low else arg for arg in args]
        return operator(*args, **kwargs)


def attention_as_on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` by the operator that CUDA chooses: flash without a mask, memory-efficient with one."""
    aten = torch.ops.aten
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        length = attn_mask.shape[-1]
        if any(stride % 8 for stride in attn_mask.stride()[:-1]):
            padded = torch.nn.functional.pad(attn_mask, (0, 8 - length % 8))
            attn_mask = padded[..., :length]
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    keeps_logsumexp = torch.is_grad_enabled() and query.requires_grad
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, keeps_logsumexp, dropout_p, is_causal, scale=scale)[0]


@changes(
    "trl.kernels.chunked_logprob:_use_triton(device)",
    "trl.kernels.chunked_logprob:_TRITON_AVAILABLE",
    "trl.kernels.chunked_logprob:_forward_kernel",
    "trl.kernels.chunked_logprob:_backward_kernel",
    "trl.kernels.chunked_logprob:_addmm_fp32",
    "trl.kernels.chunked_logprob:ChunkedLogProbFunction.forward",
    "trl.kernels.chunked_logprob:ChunkedLogProbFunction.backward",
    "trl.kernels.chunked_divergence:_stats_kernel",
    "trl.kernels.chunked_divergence:_jsd_kernel",
    "trl.kernels.chunked_divergence:_backward_kernel",
    "trl.kernels.chunked_divergence:_project(tile, hidden_chunk, weight, bias, start, end, dtype)",
    "trl.kernels.chunked_divergence:ChunkedDivergenceFunction.forward",
    "trl.kernels.chunked_divergence:ChunkedDivergenceFunction.backward",
    "trl.trainer.distillation_trainer:_use_triton(device)",
    "trl.trainer.utils:_use_triton(device)",
)
def use_triton_loss(ledger: Ledger) -> None:
    """Makes TRL take its path for Triton on fake tensors, with kernels that do nothing: the real ones allocate nothing.

    `compute_loss_without_triton`, if it is called later, switches to TRL's PyTorch code.

    Upstream: no issue: it is not a fault of TRL.
    Checked with: trl 1.16.0.
    Remove when: never.
    """
    from trl.kernels import chunked_divergence, chunked_logprob
    from trl.trainer import distillation_trainer, utils

    class Kernel:
        def __getitem__(self, grid: Any) -> Callable:
            return lambda *args, **kwargs: None

    def count_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        # On the CPU, TRL would make float32 copies of the factors.
        ledger.flops[str(a.dtype)] += 2 * a.shape[0] * a.shape[1] * b.shape[1]

    def count_projection(tile: torch.Tensor, hidden: torch.Tensor, *args: Any) -> None:
        ledger.flops[str(hidden.dtype)] += 2 * tile.numel() * hidden.shape[1]

    def use_triton(device: torch.device) -> bool:
        return chunked_logprob._TRITON_AVAILABLE  # read at each call: `compute_loss_without_triton` sets it to False

    def within_loss(method: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            with ledger.within(holder="loss"):
                return method(*args, **kwargs)

        return call

    chunked_logprob._TRITON_AVAILABLE = True
    utils._use_triton = distillation_trainer._use_triton = use_triton
    chunked_logprob._forward_kernel = chunked_divergence._stats_kernel = chunked_divergence._jsd_kernel = Kernel()
    chunked_divergence._project = count_projection
    for module in (chunked_logprob, chunked_divergence):
        module._use_triton = use_triton
        module._backward_kernel = Kernel()
        module._addmm_fp32 = count_product
        module.triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    for function in (chunked_logprob.ChunkedLogProbFunction, chunked_divergence.ChunkedDivergenceFunction):
        function.forward = staticmethod(within_loss(function.forward))
        function.backward = staticmethod(within_loss(function.backward))
