"""The arithmetic behind the tables of docs/: memory, strategies, speed-up, what fits. Prints them; needs no package, no GPU.

    python3 benchmarks/paper.py

All of it is a forecast. Bytes a parameter: 4 in float32, 2 in half precision; Adam keeps two moments. Activations with
checkpointing are the inputs of the layers, 2 bytes each. What a GPU sends in a ring: an all-reduce 2 (N-1)/N of the
data, a gather or a reduce-scatter (N-1)/N (Rajbhandari et al., ZeRO, arXiv:1910.02054).
"""

BILLIONS, LAYERS, HIDDEN = 7, 32, 4096  # the model of the tables: 7B, in Llama's shape
TOKENS = 2048  # in a micro-batch
GPUS, NODES, MICRO_BATCHES = 4, 2, 4


def memory() -> list[list[str]]:
    """GB on one GPU: the textbook's two columns (activations taken as large as the weights), and what really happens here."""
    checkpoints = 2 * TOKENS * HIDDEN * LAYERS / 1e9
    two_layers = 2 * BILLIONS * 2 / LAYERS  # gathered in bf16: the one that computes and the next
    shares = {"parameters": 1, "activations": 1, "gradients": 1, "optimizer": 2}
    here = {"parameters": 4 * BILLIONS, "activations": checkpoints, "gradients": 4 * BILLIONS, "optimizer": 8 * BILLIONS}
    sharded = {name: size if name == "activations" else size / GPUS for name, size in here.items()}
    sharded["parameters"] += two_layers
    columns = [{name: share * size * BILLIONS for name, share in shares.items()} for size in (4, 2)] + [here, sharded]
    rows = [["7B", "fp32", "half precision", "here, one GPU", f"here, sharded over {GPUS}"]]
    rows += [[name, *(f"{column[name]:.1f} GB" for column in columns)] for name in shares]
    return [*rows, ["total", *(f"{sum(column.values()):.1f} GB" for column in columns)]]


def strategies() -> list[list[str]]:
    """Who keeps what, with one micro-batch a step; what one GPU sends in a step, in model sizes (parameters, of any width)."""
    ring = (GPUS - 1) / GPUS
    across = f"{2 * (NODES - 1) / NODES / GPUS:.2f} across"
    sharded = (4 / GPUS, 4 / GPUS, 8 / GPUS)
    # A gather for the forward and one for the backward pass of each micro-batch, and a reduction of its gradients.
    one, four = f"{3 * ring:.2f}", f"{3 * MICRO_BATCHES * ring:.2f}"
    table = [  # name, bytes of weights, gradients and Adam for each parameter, model sizes sent, config
        ("DDP, ZeRO-0", (4, 4, 8), f"{2 * ring:.2f}", f"{2 * ring:.2f}", "`4gpu_ddp`"),
        ("ZeRO-1", (4, 4, 8 / GPUS), f"{2 * ring:.2f}", f"{2 * ring:.2f}", "none: ZeRO-2 sends no more"),
        (
            "ZeRO-2",
            (2 + 4 / GPUS, 4 / GPUS, 8 / GPUS),
            f"{2 * ring:.2f}",
            f"{2 * ring:.2f}",
            "`4gpu_shard_grad_op`, `3xt4_shard_grad_op`",
        ),
        ("ZeRO-3", sharded, one, four, "`4gpu_full_shard`, `3xt4_full_shard`"),
        (f"hybrid, {NODES} nodes of {GPUS}", sharded, f"{one}, {across}", f"{four}, {across}", "`2x4gpu_hybrid_shard`"),
    ]
    rows = [["strategy", "weights", "gradients", "Adam", "sum", "sent", f"sent, {MICRO_BATCHES} micro-batches", "config"]]
    for name, sizes, *rest in table:
        rows.append([name, *(f"{size * BILLIONS:.1f} GB" for size in (*sizes, sum(sizes))), *rest])
    return rows


def speed_up() -> list[list[str]]:
    """Llama-3.1-8B LoRA on A100s, from the source's time on one GPU: half of peak, NVLink 200 GB/s, 100 Gbit/s between nodes."""
    one_gpu = 3670  # seconds; CINECA's slides, January 2026
    compute = 46e9 * TOKENS / (0.5 * 312e12)  # 46 GFLOP a token with checkpointing
    rows = [["nodes", "GPUs", "training time", "speed-up", "efficiency"]]
    for nodes, gpus in ((1, 1), (1, 2), (1, 4), (2, 8)):
        local = gpus // nodes
        gather = 2 * 16e9 * (local - 1) / local / 200e9  # bf16 weights, twice a micro-batch, behind the arithmetic
        waits = max(0.0, gather - compute) + gather / LAYERS  # the first layer's gather has nothing to hide behind
        reduce = 0.168 / 12.5 * 2 * (nodes - 1) / nodes / MICRO_BATCHES  # 42 M adapter gradients in float32, once a step
        faster = gpus * compute / (compute + waits + reduce)
        rows.append([str(nodes), str(gpus), f"{one_gpu / faster:,.0f} s", f"{faster:.2f}", f"{faster / gpus:.0%}"])
    return rows


def largest() -> list[list[str]]:
    """Billions of parameters whose weights, gradients and Adam fill four fifths of some GPUs; the rest is for activations."""
    machines = ((1, 24), (2, 24), (4, 24), (1, 80), (4, 80), (8, 80))
    methods = {"full fine-tune": 16, "LoRA on bf16 weights": 2, "QLoRA, 4-bit weights": 0.6}  # bytes a parameter
    rows = [["method", "bytes a parameter", *(f"{gpus} × {size} GB" for gpus, size in machines)]]
    for name, cost in methods.items():
        fitting = [0.8 * gpus * size / cost for gpus, size in machines]
        rows.append([name, f"{cost:g}", *(f"{billions:.{int(billions < 10)}f}B" for billions in fitting)])
    return rows


def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    print("\n\n".join(markdown(table()) for table in (memory, strategies, speed_up, largest)))
