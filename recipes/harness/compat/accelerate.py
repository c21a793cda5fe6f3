"""Changes to accelerate."""

import functools
import os
from typing import Any

from harness.compat.guards import changes


@changes(
    "accelerate.commands.launch:_validate_launch_command(args)",
    "accelerate.commands.launch:launch_command_parser",
    "accelerate.utils.launch:prepare_multi_gpu_env(args)",
)
def launch_environment(config: str, processes: int, nodes: int, script: str) -> dict[str, str]:
    """The environment variables that `accelerate launch --config_file CONFIG` sets for the processes of `script`.

    launch.sh starts processes itself: `accelerate launch` ends them 30 s after a signal, and does not pass on their exit codes.
    accelerate has no public function that turns a config file into these variables.
    Upstream: huggingface/accelerate#2891, closed without such a function.
    Checked with: accelerate 1.15.0.
    Remove when: accelerate has such a function.
    """
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", config, "--num_processes", str(processes), "--num_machines", str(nodes)]
    words += ["--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port", "0", "--same_network"]
    words += ["--gpu_ids", "all", script]  # of the visible ones: the launcher has read the config's gpu_ids
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    return prepare_multi_gpu_env(args)


@changes(
    "accelerate.state:PartialState.__init__(self, cpu, kwargs)",
    "accelerate.state:PartialState._prepare_backend(self, cpu, sagemaker_dp, backend)",
)
def allow_fsdp_on_cpu() -> None:
    """Lets accelerate shard on CPU over gloo. Call it before the first PartialState; training arguments need use_cpu=True.

    accelerate shards on accelerators only. On CPU the same YAML gives DDP, or nothing, without an error, although FSDP2
    itself runs there. transformers asks for `cpu=True` and for a backend, which both lead to DDP, so these are dropped, and
    the backend is reported as that of several GPUs whose device is the CPU.
    Upstream: no issue found.
    Checked with: accelerate 1.15.0.
    Remove when: accelerate accepts distributed_type FSDP together with use_cpu.
    """
    from accelerate.state import DistributedType, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    initialize = PartialState.__init__

    def initialize_without_cpu(self: PartialState, cpu: bool = False, backend: str | None = None, **kwargs: Any) -> None:
        initialize(self, **kwargs)

    def prepare_backend(self: PartialState, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    PartialState.__init__ = initialize_without_cpu
    PartialState._prepare_backend = prepare_backend


@changes(
    "accelerate.accelerator:Accelerator._get_named_parameters",
    "accelerate.utils.fsdp_utils:fsdp2_switch_optimizer_parameters(optimizer, mapping)",
)
def give_weights_addresses(model: Any) -> None:
    """Gives every weight without memory, on the meta device or in a simulation, an address of its own.

    accelerate finds the optimizer's parameters again by `data_ptr()` after sharding. Weights that only the first process
    has read are on the meta device in the others, where every address is 0: they would all be taken for one parameter,
    and the rest would not be trained. The fake tensors of a simulation raise an error.
    Upstream: no issue found; huggingface/accelerate#3930 is about the same models.
    Checked with: accelerate 1.15.0.
    Remove when: accelerate maps parameters by name.
    """
    for weight in model.parameters():
        if weight.is_meta or hasattr(weight, "fake_mode"):
            weight.data_ptr = functools.partial(int, id(weight))  # a reference to the weight would keep its memory


@changes("accelerate.utils.fsdp_utils:fsdp2_load_full_state_dict(accelerator, model, full_sd, cpu_offload)")
def hide_saved_buffers(trainer: Any) -> list[tuple[Any, str]]:
    """Makes saved buffers, such as the bias that balances experts, non-persistent while accelerate shards.

    Returns them, as modules and names, for `show_saved_buffers`. Collective.

    accelerate broadcasts the state dict as if it held sharded parameters only, and fails at a buffer. What is not in the
    state dict it leaves on every process as it is, so the buffers are broadcast here.
    Upstream: huggingface/accelerate#3898, closed without a fix.
    Checked with: accelerate 1.15.0.
    Remove when: accelerate broadcasts buffers.
    """
    import torch

    saved = trainer.model.state_dict().keys()
    hidden = []
    for prefix, module in trainer.model.named_modules():
        for name, value in list(module.named_buffers(recurse=False)):
            if f"{prefix}.{name}".removeprefix(".") in saved:
                on_device = (
                    torch.empty_like(value, device=trainer.args.device) if value.is_meta else value.to(trainer.args.device)
                )
                torch.distributed.broadcast(on_device, 0)  # only the first process has read the model
                module.register_buffer(name, on_device.cpu(), persistent=False)  # the weights are on the CPU as well
                hidden.append((module, name))
    return hidden
