"""The results of a run: train_results.json, loss.png, and the summary that is printed."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import resource
import sys
from operator import itemgetter
from pathlib import Path

from harness.compat.transformers import attention_of
from harness.folder import DATA, RESULTS, RUN, draft_of, read_json, write_json
from harness.messages import plural, print_once
from harness.run.failures import only_report
from harness.run.metrics import evaluation_losses, format_metrics, metrics_of, name_of_dataset, own_metrics
from harness.run.parameters import config_of, quantization_of
from harness.run.progress import Progress
from harness.run.trainer import RunTrainer

import torch
from accelerate.utils import gather_object
from datasets import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes", "datasets")


def write_results(
    trainer: RunTrainer,
    output: TrainOutput | None,
    evaluation: dict[str, float],
    parameters: tuple[int, int],
    resumed_from: int,
) -> dict:
    """Gathers the numbers of all processes (collective); the first writes them. Memory in GB (1e9 bytes), time in seconds.

    Time and tokens are those of the whole run, including its parts before a resume. `train_runtime` includes everything,
    `tokens_per_second` only the time of optimizer steps.
    """
    output_dir = Path(trainer.args.output_dir)
    processes = gather_object([measure_process(trainer)])
    by_node = group_by_node(processes)
    data = {}
    with only_report("the report about the data"):
        data = describe_data(trainer)
    results = (
        read_json(output_dir / RUN)
        | describe_model(trainer, processes, parameters)
        | measure_memory(processes, by_node)
        | collect_losses(trainer, output, evaluation)
        | measure_speed(trainer.parts.progress)
        | data
        | stopped_early(trainer)
        | {"global_step": trainer.state.global_step, "epoch": trainer.state.epoch, "resumed_from_step": resumed_from}
        # No texts: there can be a token in one.
        | {"used": {name: value for name, value in trainer.args.to_dict().items() if isinstance(value, int | float)}}
        | {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine(),
            "finished": datetime.datetime.now().isoformat(timespec="seconds"),
            "versions": versions(),
        }
    )
    of_every_node = {key: results[key] for key in ("fsdp_enabled", "world_size", "model_params_b", "final_loss")}
    results["nodes"] = []
    for node, of_node in by_node.items():
        results["nodes"].append({"node": int(node), "peak_gpu_gb": highest(of_node, "gpu"), **of_every_node})
    if trainer.is_world_process_zero():
        with only_report("loss.png"):
            names = filter(None, (results.get("recipe"), results.get("config")))
            unit = " (nats per token)" if trainer.parts.loss.is_cross_entropy else ""
            draw_losses(trainer.state.log_history, " × ".join(names), output_dir / "loss.png", unit)
        write_json(output_dir / RESULTS, results)
    return results


def versions() -> dict[str, str]:
    """Of Python and the packages that are installed: a run without 4-bit weights needs no bitsandbytes."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def stopped_early(trainer: Trainer) -> dict:
    """Of a run that a callback has stopped: what was asked for, so that the same command does not train on."""
    state = trainer.state
    args = trainer.args
    return {"stopped_early_of": [args.max_steps, args.num_train_epochs]} if state.global_step < state.max_steps else {}


def measure_process(trainer: Trainer) -> dict:
    """The numbers of this process. Memory in GB (1e9 bytes)."""
    host_unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    has_gpu = torch.cuda.is_available()
    return {
        "node": os.environ.get("GROUP_RANK", "0"),
        "gpu": torch.cuda.max_memory_allocated() / 1e9 if has_gpu else 0.0,
        "reserved": torch.cuda.max_memory_reserved() / 1e9 if has_gpu else 0.0,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * host_unit / 1e9,
        "fsdp": trainer.is_fsdp_enabled,
    }


def group_by_node(processes: list[dict]) -> dict[str, list[dict]]:
    """What `measure_process` returned, by the number of the node."""
    by_node: dict[str, list[dict]] = {}
    for process in sorted(processes, key=lambda process: int(process["node"])):
        by_node.setdefault(process["node"], []).append(process)
    return by_node


def describe_model(trainer: Trainer, processes: list[dict], parameters: tuple[int, int]) -> dict:
    """How the model was trained and divided. `parameters`: how many are trained, and how many there are."""
    args = trainer.args
    accelerator = trainer.accelerator
    model = accelerator.unwrap_model(trainer.model)
    is_sharded = all(process["fsdp"] for process in processes)
    parallelism = accelerator.parallelism_config
    replicas = accelerator.num_processes
    if is_sharded:
        replicas = parallelism.dp_replicate_size if parallelism else 1
    return {
        "fsdp_enabled": is_sharded,
        "world_size": accelerator.num_processes,
        "global_batch_size": args.train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes,
        "num_nodes": len(group_by_node(processes)),
        "replicas": replicas,  # of the model, each sharded over world_size / replicas processes
        "attention": attention_of(config_of(model)),
        **quantization_of(model),
        "model_params_b": round(parameters[1] / 1e9, 6),
        "trainable_params_b": round(parameters[0] / 1e9, 6),
    }


def measure_memory(processes: list[dict], by_node: dict[str, list[dict]]) -> dict:
    """The largest peaks: of a process on its GPU, and of a node in host memory."""
    hosts = [sum(map(itemgetter("host"), of_node)) for of_node in by_node.values()]
    return {
        "peak_gpu_gb": highest(processes, "gpu"),
        "peak_gpu_reserved_gb": highest(processes, "reserved"),
        "peak_host_gb": round(max(hosts), 3),
    }


def highest(processes: list[dict], name: str) -> float:
    """The largest of these numbers of processes."""
    return round(max(map(itemgetter(name), processes)), 3)


def collect_losses(trainer: RunTrainer, output: TrainOutput | None, evaluation: dict[str, float]) -> dict:
    """The losses of training, and the losses and metrics of evaluation (of each dataset), at the start and at the end.

    `loss_is_mean_over` says what a loss is the mean over, "tokens" or "rows", and `loss_is_cross_entropy` whether it is the
    negative log-likelihood of tokens and nothing else.
    """
    log_history = trainer.state.log_history
    loss = trainer.parts.loss
    logged = [entry["loss"] for entry in log_history if "loss" in entry]
    found = {"final_loss": logged[-1] if logged else None, "train_loss": mean_loss(log_history)}
    if output and not logged:
        found["final_loss"] = output.training_loss
    for entry in log_history:
        if entry["step"] == 0:
            for name, value in (evaluation_losses(entry) | own_metrics(entry)).items():
                found[f"{name}_on_start"] = value
    found |= evaluation_losses(evaluation) | own_metrics(evaluation)
    if "eval_loss" in evaluation and loss.is_cross_entropy:
        found["perplexity"] = math.exp(min(evaluation["eval_loss"], 700))
    return found | {"loss_is_mean_over": f"{loss.unit}s", "loss_is_cross_entropy": loss.is_cross_entropy}


def measure_speed(progress: Progress) -> dict:
    """Tokens, seconds, and tokens per second of all processes together."""
    counted = progress.so_far()
    seconds = counted["seconds"] or 1  # 0 if the run had no step left
    return {
        "tokens_per_second": round(counted["tokens"] / seconds, 1),
        **({} if counted["tokens"] else {"rows_per_second": round(counted["rows"] / seconds, 1)}),
        "loss_tokens_per_second": round(counted["loss_tokens"] / seconds, 1),
        "train_runtime": counted["runtime"],
        "tokens": counted["tokens"],
        "loss_tokens": counted["loss_tokens"],
    }


def describe_data(trainer: Trainer) -> dict:
    """How much of the data was read."""
    data = read_json(Path(trainer.args.output_dir, DATA))
    is_read_in_turn = not isinstance(trainer.train_dataset, IterableDataset) and "datasets" not in data
    return ({"data": data} if data else {}) | ({"times_seen": round(trainer.state.epoch or 0, 2)} if is_read_in_turn else {})


def mean_loss(log_history: list[dict]) -> float | None:
    """The mean training loss of all steps, also of those before a resume; None if none was logged."""
    total = 0.0
    logged = 0
    for entry in log_history:
        if "loss" in entry:  # the mean since the last log
            total += entry["loss"] * (entry["step"] - logged)
            logged = entry["step"]
    return total / logged if logged else None


def draw_losses(log_history: list[dict], title: str, path: Path, unit: str = "") -> None:
    """Draws training and evaluation loss over steps, or the reward of a run that trains on rewards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    names: dict[str, float] = {}
    for entry in log_history:
        names |= evaluation_losses(entry)
    curves = [("loss", "training", "-")]
    if any("reward" in entry for entry in log_history):
        curves = [("reward", "training", "-"), ("eval_reward", "evaluation", "o--")]
        names = {}
    for name in names:
        curves.append((name, f"evaluation{name_of_dataset(name)}", "o--" if name == "eval_loss" else ".:"))
    for key, label, style in curves:
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel=f"{curves[0][0]}{unit}", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with draft_of(path) as draft:
        figure.savefig(draft, dpi=120)


def describe_losses(results: dict) -> str:
    """The losses of the last evaluation, and those of the one before the training, of each set by its name; "" without any.

    Of a run that trains on rewards, the reward, which is higher after a training that worked.
    """
    if "eval_reward" in results:
        before, after = results.get("eval_reward_on_start"), f"{results['eval_reward']:.4f}"
        return f", reward {after}" if before is None else f", reward {before:.4f} before, {after} after"
    words = ""
    for name, loss in evaluation_losses(results).items():
        before = results.get(f"{name}_on_start")
        after = f"{loss:.4f}" if before is None else f"{before:.4f} before, {loss:.4f} after"
        words += f", evaluation loss{name_of_dataset(name)} {after}"
    return words + (f" (perplexity {results['perplexity']:.1f})" if "perplexity" in results else "")


def print_summary(results: dict, output_dir: str) -> None:
    """Prints the numbers that a person looks for first."""
    if results["num_nodes"] > 1:
        print_once("\n".join(json.dumps(report) for report in results["nodes"]))
    kind = "FSDP" if results["fsdp_enabled"] else "Unsharded"
    processes = plural(results["world_size"], "process")
    replicas = results["replicas"]
    if 1 < replicas < results["world_size"]:
        processes += f" ({replicas} replicas of {results['world_size'] // replicas})"
    mean = f" (mean {results['train_loss']:.4f})" if results["train_loss"] is not None else ""
    metrics = format_metrics(metrics_of(results))  # the recipe's own
    evaluation = describe_losses(results) + (f"\n{metrics}" if metrics else "")
    gpu = f"{results['peak_gpu_gb']:.1f} GB per GPU, " if results["peak_gpu_gb"] else ""
    speed = f"{results['tokens_per_second']:,.0f} tokens/s"
    if "rows_per_second" in results:
        speed = f"{results['rows_per_second']:,.0f} rows/s"
    seen = f", every row seen {results['times_seen']:g} times" if "times_seen" in results else ""
    loss = "none logged" if results["final_loss"] is None else f"{results['final_loss']:.4f}"
    print_once(
        f"{kind} on {processes}, {results['global_step']} steps{seen}: loss {loss}{mean}{evaluation}\n"
        f"{speed}, peak memory {gpu}{results['peak_host_gb']:.1f} GB host\n"
        f"The model, train_results.json and loss.png are in {output_dir}"
    )
