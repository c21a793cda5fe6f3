"""Computes the tables of docs/ on memory, strategies and model sizes. Prints them; needs no package and no GPU.

    python3 benchmarks/paper.py

All of it is a forecast. A parameter has 4 bytes in float32 and 2 in half precision; Adam keeps two moments. With checkpointing,
activations are the inputs of the layers, 2 bytes per value. In a ring of N GPUs, a GPU sends 2 (N-1)/N of the data for an
all-reduce, and (N-1)/N for an all-gather or a reduce-scatter (Rajbhandari et al., ZeRO, arXiv:1910.02054).
"""

BILLIONS, LAYERS, HIDDEN = 7, 32, 4096  # the model of the tables: 7B, in Llama's shape
TOKENS = 2048  # per micro-batch
GPUS, NODES, MICRO_BATCHES = 4, 2, 4


def memory() -> list[list[str]]:
    """GB on one GPU: by the textbook, where activations are as large as the weights, and with this project's settings."""
    checkpoints = 2 * TOKENS * HIDDEN * LAYERS / 1e9
    two_layers = 2 * BILLIONS * 2 / LAYERS  # all-gathered in bf16: the one that computes and the next
    textbook = {"weights": 1, "activations": 1, "gradients": 1, "optimizer": 2}  # multiples of the weights
    float32, half = ({name: share * size * BILLIONS for name, share in textbook.items()} for size in (4, 2))
    here = {"weights": 4 * BILLIONS, "activations": checkpoints, "gradients": 4 * BILLIONS, "optimizer": 8 * BILLIONS}
    sharded = {name: size if name == "activations" else size / GPUS for name, size in here.items()}
    sharded["weights"] += two_layers
    columns = [float32, half, here, sharded]
    rows = [["7B", "fp32", "half precision", "here, one GPU", f"here, sharded over {GPUS}"]]
    rows += [[name, *(f"{column[name]:.1f} GB" for column in columns)] for name in textbook]
    return [*rows, ["total", *(f"{sum(column.values()):.1f} GB" for column in columns)]]


def strategies() -> list[list[str]]:
    """What a GPU keeps with one micro-batch per step, and what it sends per step, in numbers of parameters of any width."""
    ring = (GPUS - 1) / GPUS
    all_reduce = f"{2 * ring:.2f}"
    across = 2 * (NODES - 1) / NODES / GPUS
    everyone = NODES * GPUS
    elsewhere = GPUS * (NODES - 1) / (everyone - 1)  # the share of the other GPUs that are on another node
    sharded_over_all = (4 / everyone, 4 / everyone, 8 / everyone)
    over_all = [3 * count * (everyone - 1) / everyone for count in (1, MICRO_BATCHES)]
    sharded = (4 / GPUS, 4 / GPUS, 8 / GPUS)
    # Per micro-batch an all-gather for forward, one for backward, and a reduce-scatter of the gradients.
    inside = [3 * count * ring for count in (1, MICRO_BATCHES)]
    one, several = (f"{sent:.2f}" for sent in inside)
    table = [  # name; bytes per parameter of weights, gradients and Adam; sent with one and with several micro-batches; config
        ("DDP, ZeRO-0", (4, 4, 8), all_reduce, all_reduce, "`4gpu_ddp`"),
        ("ZeRO-1", (4, 4, 8 / GPUS), all_reduce, all_reduce, "none: ZeRO-2 sends the same and stores less"),
        (
            "ZeRO-2",
            (2 + 4 / GPUS, 4 / GPUS, 8 / GPUS),
            all_reduce,
            all_reduce,
            "`4gpu_shard_grad_op`, `3xt4_shard_grad_op`",
        ),
        ("ZeRO-3", sharded, one, several, "`4gpu_full_shard`, `3xt4_full_shard`"),
        (
            f"ZeRO-3, {NODES} nodes of {GPUS}",
            sharded_over_all,
            *(f"{sent:.2f} ({sent * elsewhere:.2f} of it to the other node)" for sent in over_all),
            f"`4gpu_full_shard` with `--nodes {NODES}`",
        ),
        (
            f"hybrid, {NODES} nodes of {GPUS}",
            sharded,
            *(f"{sent + across:.2f} ({across:.2f} of it to the other node)" for sent in inside),
            "`2x4gpu_hybrid_shard`",
        ),
    ]
    rows = [["strategy", "weights", "gradients", "Adam", "sum", "sent", f"sent, {MICRO_BATCHES} micro-batches", "config"]]
    for name, sizes, *rest in table:
        rows.append([name, *(f"{size * BILLIONS:.1f} GB" for size in (*sizes, sum(sizes))), *rest])
    return rows


def zero() -> list[list[str]]:
    """The example of the ZeRO paper: bytes per parameter 2 + 2 + K in half precision, K = 12 for Adam and float32 weights."""
    parameters, gpus, adam = 7.5, 64, 12
    stages = {"DDP": (1, 1, 1), "ZeRO-1": (1, 1, gpus), "ZeRO-2": (1, gpus, gpus), "ZeRO-3": (gpus, gpus, gpus)}
    formulas = ("(2 + 2 + K) Ψ", "(2 + 2) Ψ + K Ψ / N", "2 Ψ + (2 + K) Ψ / N", "(2 + 2 + K) Ψ / N")
    rows = [["stage", "bytes per GPU", f"Ψ = {parameters}B, N = {gpus}"]]
    for (stage, shards), formula in zip(stages.items(), formulas, strict=True):
        size = sum(cost * parameters / count for cost, count in zip((2, 2, adam), shards, strict=True))
        rows.append([stage, formula, f"{size:.1f} GB"])
    return rows


def largest() -> list[list[str]]:
    """Billions of parameters whose weights, gradients and Adam fill four fifths of some GPUs; the rest is for activations."""
    machines = ((1, 24), (2, 24), (4, 24), (1, 80), (4, 80), (8, 80))  # GPUs, GB of each
    # Bytes per parameter: sharded over all GPUs, and on each of them. The scales of 4-bit weights are not sharded: a byte for 64
    # weights, and a float32 for 256 of these.
    methods = {"full fine-tuning": (16, 0), "LoRA on bf16 weights": (2, 0), "QLoRA, 4-bit weights": (0.5, 1 / 64 + 4 / 64 / 256)}
    rows = [["method", "bytes per parameter", *(f"{gpus} × {size} GB" for gpus, size in machines)]]
    for name, (sharded, on_each) in methods.items():
        sizes = [0.8 * size / (sharded / gpus + on_each) for gpus, size in machines]
        cost = f"{sharded:g} sharded, {on_each:.3f} not sharded" if on_each else f"{sharded:g}"
        rows.append([name, cost, *(f"{billions:.1f}B" if billions < 10 else f"{billions:.0f}B" for billions in sizes)])
    return rows


def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    print("\n\n".join(markdown(table()) for table in (memory, strategies, zero, largest)))
