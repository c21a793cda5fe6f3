"""Changes to bitsandbytes."""

import math

from harness.compat.guards import changes

BLOCK = 256  # values that share one scale in bitsandbytes' 8-bit states


@changes("bitsandbytes.nn.modules:has_avx512bf16()")
def keep_4bit_layout() -> None:
    """Keeps 4-bit weights on a CPU in the layout they were loaded in. Call it before 4-bit layers are made.

    On a CPU with AVX512-BF16, bitsandbytes repacks the weights in the first evaluation. Training and FSDP then read the new
    layout as the old one: the loss jumps from 8.0 to 9.0.
    Upstream: no issue found; bitsandbytes-foundation/bitsandbytes#2078 is about the same layout.
    Checked with: bitsandbytes 0.50.2.
    Remove when: repacked weights are unpacked again when the model returns to training.
    """
    from bitsandbytes.nn import modules

    modules.has_avx512bf16 = lambda: False


@changes(
    "bitsandbytes.optim.optimizer:Optimizer8bit.get_config(self, gindex, pindex, group)",
    "bitsandbytes.optim.optimizer:Optimizer2State.init_state(self, group, p, gindex, pindex)",
    "bitsandbytes.optim.optimizer:Optimizer2State.update_step(self, group, p, gindex, pindex)",
)
def sharded_adamw() -> type:
    """bitsandbytes' AdamW for weights that FSDP2 has sharded.

    Its kernels do not know DTensors. It also divides a weight into blocks of 256 values regardless of its rows, so a shard can
    begin within a block, and the blocks' scales cannot be sharded as the weight is. This class pads every row to whole blocks:
    states and scales are sharded by rows as the weight is, and a checkpoint resumes on any number of processes. Weights with rows
    of less than half a block have float32 states, and so have the embeddings (transformers sets that for classes of bitsandbytes,
    which it recognizes by the name of their module).
    Upstream: bitsandbytes-foundation/bitsandbytes#89.
    Checked with: bitsandbytes 0.50.2, torch 2.13.0, transformers 5.23.0.
    Remove when: bitsandbytes' optimizers update DTensors.
    """
    import torch
    from bitsandbytes import functional
    from bitsandbytes.optim import AdamW
    from torch.distributed.tensor import DTensor

    class ShardedAdamW(AdamW):
        def init_state(self, group: dict, p: DTensor, gindex: int, pindex: int) -> None:
            """Makes both moments of a weight: in 8 bits with a scale per block, or in float32."""

            def zeros(columns: int, dtype: torch.dtype) -> DTensor:
                local = torch.zeros(p.to_local().shape[0], columns, dtype=dtype, device=p.device)
                options = {"run_check": False, "shape": torch.Size([p.shape[0], columns]), "stride": (columns, 1)}
                return DTensor.from_local(local, p.device_mesh, p.placements, **options)

            state, columns = self.state[p], math.prod(p.shape[1:])
            state["step"] = 0
            for number in (1, 2):
                if self.get_config(gindex, pindex, group)["optim_bits"] == 32 or columns < BLOCK // 2:
                    state[f"state{number}"] = torch.zeros_like(p, dtype=torch.float32)
                else:
                    blocks = math.ceil(columns / BLOCK)
                    state[f"state{number}"] = zeros(blocks * BLOCK, torch.uint8)
                    state[f"absmax{number}"] = zeros(blocks, torch.float32)

        def update_step(self, group: dict, p: DTensor, gindex: int, pindex: int) -> None:
            """Updates the rows of a weight that this process has, with bitsandbytes' kernel for its states."""
            config, state = self.get_config(gindex, pindex, group), self.state[p]
            state["step"] += 1
            local = {name: value.to_local() for name, value in state.items() if isinstance(value, DTensor)}
            weight, gradient = p.to_local(), p.grad.to_local().contiguous()
            if not weight.numel():  # more processes than rows
                return
            options = {
                "beta1": config["betas"][0],
                "beta2": config["betas"][1],
                "eps": config["eps"],
                "step": state["step"],
                "lr": config["lr"],
                "weight_decay": config["weight_decay"],
                "state1": local["state1"],
                "state2": local["state2"],
            }
            if "absmax1" not in state:
                functional.optimizer_update_32bit("adam", gradient, weight, **options)
                return
            for name in ("dynamic", "udynamic"):
                self.name2qmap[name] = self.name2qmap[name].to(weight.device)
            # The kernel divides what it gets into blocks of 256 values: rows are padded to whole blocks, as the states are.
            rows, columns = weight.shape[0], math.prod(weight.shape[1:])
            padded = [
                torch.nn.functional.pad(value.view(rows, columns), (0, local["state1"].shape[1] - columns))
                for value in (gradient, weight)
            ]
            functional.optimizer_update_8bit_blockwise(
                "adam",
                *padded,
                **options,
                beta3=0.0,
                alpha=0.0,
                qmap1=self.name2qmap["dynamic"],
                qmap2=self.name2qmap["udynamic"],
                absmax1=local["absmax1"].view(-1),
                absmax2=local["absmax2"].view(-1),
            )
            weight.copy_(padded[1][:, :columns].reshape(weight.shape))

    return ShardedAdamW


@changes(
    "bitsandbytes.optim.optimizer:Optimizer8bit.load_state_dict(self, state_dict, move_to_device)",
    "bitsandbytes.optim.optimizer:Optimizer8bit.get_state_buffer(self, p, dtype)",
)
def keep_states_paged() -> None:
    """Makes paged optimizers page their states after a resume too.

    bitsandbytes loads them into ordinary memory of the GPU, where a run that needs paging does not fit. With several processes it
    also takes them for paged ones, because a saved tensor keeps its attributes, and then CUDA refuses to prefetch them.
    Upstream: no issue found.
    Checked with: bitsandbytes 0.50.2, torch 2.13.0.
    Remove when: load_state_dict makes paged buffers.
    """
    import torch
    from bitsandbytes.optim.optimizer import Optimizer8bit

    load = Optimizer8bit.load_state_dict

    def load_state_dict(optimizer: Optimizer8bit, state_dict: dict, move_to_device: bool = True) -> None:
        load(optimizer, state_dict, move_to_device and not optimizer.is_paged)
        if not optimizer.is_paged:
            return
        for weight, state in optimizer.state.items():
            for name, value in state.items():
                if name in ("state1", "state2"):
                    state[name] = optimizer.get_state_buffer(weight, dtype=value.dtype)
                    state[name].copy_(value)
                elif isinstance(value, torch.Tensor):
                    state[name] = value.to(weight.device)

    Optimizer8bit.load_state_dict = load_state_dict
