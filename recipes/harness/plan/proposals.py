"""What would make a run fit that does not: each change is tried by a simulation, the cheapest first, until one does."""

from pathlib import Path

from harness import configs
from harness.plan import cards


def tried(plan: dict, found: dict, config: str, run) -> list[dict]:
    """`{"change", "needs", "fits", "card"}` of every change that was simulated; none where the run fits already.

    Aimed at is the card that the config is for: a T4 where it says fp16, else one of 24 GB. `run(config, flags)` simulates, or
    says why it does not. A change that saves memory is kept, and the next one comes on top of it.
    """
    card = "T4" if configs.read(config).get("mixed_precision") == "fp16" else "RTX 3090"
    if plan["fits"][card]:
        return []
    kept, rows, best = [], [], plan["peak_gpu_gb"] + plan["reserve_gb"]
    for other, flags in changes(found, config):
        simulated = run(other or config, [*kept, *flags])
        if "refused" in simulated:
            continue
        result = cards.plan(simulated)
        needs, fits = result["peak_gpu_gb"] + result["reserve_gb"], result["fits"][card]
        words = ([Path(other).stem] if other else [Path(config).stem]) + kept + flags
        rows.append({"change": " ".join(words), "needs": needs, "fits": "yes" if fits else "no", "card": card})
        if fits:
            break
        if needs < 0.98 * best:
            kept, best, config = [*kept, *flags], needs, other or config
    return rows


def changes(found: dict, config: str) -> list[tuple[str, list[str]]]:
    """Another config ("" for the same) and flags; the dearest last: first what costs time, then what is learnt less of."""
    batch, length, possible = found["micro_batch"], found["max_length"], []
    if not found["checkpointing"]:
        possible.append(("", ["--activation_checkpointing", "true"]))
    if batch > 1:
        rows = str(batch * found["accumulation"])
        as_many = [] if found["global_batch_size"] else ["--gradient_accumulation_steps", rows]  # rows in a step as before
        possible.append(("", ["--per_device_train_batch_size", "1", *as_many]))
    possible += [(other, []) for other in _relatives(config)]
    if not found["adapter"]:
        possible.append(("", ["--use_peft", "true"]))
    if not found["packed"]:
        possible.append(("", [*([] if found["adapter"] else ["--use_peft", "true"]), "--load_in_4bit", "true"]))
    if length and length >= 2048:
        possible.append(("", ["--max_length", str(length // 2)]))
    return possible


def _relatives(config: str) -> list[str]:
    """Configs of the same machines and precision that keep less on a GPU: sharded for whole, offloaded for sharded."""
    own = configs.read(config)
    relatives = []
    for path in sorted(Path(config).parent.glob("*.yaml")):
        other = configs.read(str(path))
        same = all(other.get(key) == own.get(key) for key in ("num_processes", "num_machines", "mixed_precision"))
        if same and _thrift(other) > _thrift(own) and configs.mesh(other) == configs.mesh(own):
            relatives.append((_thrift(other), str(path)))
    return [path for _, path in sorted(relatives)]


def _thrift(config: dict) -> int:
    fsdp = config["fsdp_config"]
    return 0 if not fsdp else 1 + bool(fsdp.get("fsdp_reshard_after_forward")) + 2 * bool(fsdp.get("fsdp_offload_params"))
