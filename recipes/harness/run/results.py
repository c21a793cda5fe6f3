"""The results of a run: train_results.json, loss.png, and the summary that is printed."""

import contextlib
import datetime
import importlib.metadata
import math
import os
import platform
import resource
import sys
from collections import Counter
from pathlib import Path

from harness.compat.transformers import attention_of
from harness.folder import DATA, RESULTS, RUN, draft_of, read_json, write_json
from harness.messages import plural, print_once
from harness.run.failures import only_report
from harness.run.metrics import evaluation_losses, format_metrics, metrics_of, own_metrics
from harness.run.progress import Progress
from harness.run.sharding import config_of, quantization_of

import torch
from accelerate.utils import gather_object
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes", "datasets")


def write_results(trainer: Trainer, output: TrainOutput | None, evaluation: dict[str, float]) -> dict:
    """Gathers the numbers of all processes (collective); the first writes them. Memory in GB (1e9 bytes), time in seconds.

    Time and tokens are those of the whole run, including its parts before a resume. `train_runtime` includes everything,
    `tokens_per_second` only the time of optimizer steps.
    """
    output_dir = Path(trainer.args.output_dir)
    args = trainer.args
    state = trainer.state
    processes = gather_object([measure_process()])
    results = read_json(output_dir / RUN) | {"data": read_json(output_dir / DATA)}
    results |= describe_model(trainer, trainer.parts.parameters)
    results |= measure_memory(processes)
    results |= collect_losses(trainer, output, evaluation)
    results |= measure_speed(trainer.parts.progress)
    if state.global_step < state.max_steps:  # a callback has stopped it: the same command must not train on
        results["stopped_early_of"] = [args.max_steps, args.num_train_epochs]
    results |= {
        "global_step": state.global_step,
        "epoch": state.epoch,
        "resumed_from_step": trainer.parts.resumed_from,
        # No texts: there can be a token in one.
        "used": {name: value for name, value in args.to_dict().items() if isinstance(value, int | float)},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine(),
        "finished": datetime.datetime.now().isoformat(timespec="seconds"),
        "versions": versions(),
    }
    if trainer.is_world_process_zero():
        with only_report("loss.png"):
            title = " × ".join(filter(None, (results.get("recipe"), results.get("config"))))
            draw_losses(state.log_history, title, output_dir / "loss.png")
        write_json(output_dir / RESULTS, results)
    return results


def versions() -> dict[str, str]:
    """Of Python and the packages that are installed: a run without 4-bit weights needs no bitsandbytes."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def measure_process() -> dict[str, float]:
    """The node of this process, and its peaks of memory in bytes; 0 without a GPU."""
    return {
        "node": int(os.environ.get("GROUP_RANK", "0")),
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "gpu": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def measure_memory(processes: list[dict[str, float]]) -> dict[str, float]:
    """The largest peaks: of a process on its GPU, and of a node in host memory. `processes`: of `measure_process`."""
    of_nodes = Counter()
    for process in processes:
        of_nodes[process["node"]] += process["host"]
    return {
        "num_nodes": len(of_nodes),
        "peak_gpu_gb": round(max(process["gpu"] for process in processes) / 1e9, 3),
        "peak_gpu_reserved_gb": round(max(process["reserved"] for process in processes) / 1e9, 3),
        "peak_host_gb": round(max(of_nodes.values()) / 1e9, 3),
    }


def describe_model(trainer: Trainer, parameters: tuple[int, int]) -> dict:
    """How the model was trained and divided. `parameters`: how many are trained, and how many there are."""
    args = trainer.args
    processes = args.world_size
    model = trainer.accelerator.unwrap_model(trainer.model)
    parallelism = trainer.accelerator.parallelism_config
    replicas = processes
    if trainer.is_fsdp_enabled:
        replicas = parallelism.dp_replicate_size if parallelism else 1
    return {
        "fsdp_enabled": trainer.is_fsdp_enabled,
        "world_size": processes,
        "global_batch_size": args.train_batch_size * args.gradient_accumulation_steps * processes,
        "replicas": replicas,  # of the model, each sharded over world_size / replicas processes
        "attention": attention_of(config_of(model)),
        **quantization_of(model),
        "model_params_b": round(parameters[1] / 1e9, 6),
        "trainable_params_b": round(parameters[0] / 1e9, 6),
    }


def collect_losses(trainer: Trainer, output: TrainOutput | None, evaluation: dict[str, float]) -> dict:
    """The losses of training, and the losses and metrics of evaluation (of each dataset), at the start and at the end.

    `loss_is_mean_over` says what a loss is the mean over, "tokens" or "rows", and `loss_is_cross_entropy` whether it is the
    negative log-likelihood of tokens and nothing else.
    """
    log_history = trainer.state.log_history
    loss = trainer.parts.loss
    logged = [entry["loss"] for entry in log_history if "loss" in entry] or ([output.training_loss] if output else [None])
    found = {"final_loss": logged[-1], "train_loss": mean_loss(log_history)}
    for entry in log_history:
        if entry["step"] == 0:
            found |= {f"{name}_on_start": value for name, value in (evaluation_losses(entry) | own_metrics(entry)).items()}
    found |= evaluation_losses(evaluation) | own_metrics(evaluation)
    if "eval_loss" in evaluation and loss.is_cross_entropy:
        found["perplexity"] = math.exp(min(evaluation["eval_loss"], 700))
    return found | {"loss_is_mean_over": f"{loss.unit}s", "loss_is_cross_entropy": loss.is_cross_entropy}


def measure_speed(progress: Progress) -> dict:
    """Tokens, seconds, and tokens per second of all processes together; rows per second of rows without tokens."""
    counted = progress.so_far()
    found = {"train_runtime": counted["runtime"], "tokens": counted["tokens"], "loss_tokens": counted["loss_tokens"]}
    for name in ("tokens", "loss_tokens", *([] if counted["tokens"] else ["rows"])):
        found[f"{name}_per_second"] = round(counted[name] / (counted["seconds"] or 1), 1)  # 0 s if the run had no step left
    return found


def mean_loss(log_history: list[dict]) -> float | None:
    """The mean training loss of all steps, also of those before a resume; None if none was logged."""
    total = 0.0
    logged = 0
    for entry in log_history:
        if "loss" in entry:  # the mean since the last log
            total += entry["loss"] * (entry["step"] - logged)
            logged = entry["step"]
    if logged:
        return total / logged
    return None


def draw_losses(log_history: list[dict], title: str, path: Path) -> None:
    """Draws training and evaluation loss over steps, or the reward of a run that trains on rewards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    logged = set().union(*log_history)
    names = ["reward", "eval_reward"] if "reward" in logged else ["loss", *sorted(evaluation_losses(dict.fromkeys(logged)))]
    for name in names:
        points = [(entry["step"], entry[name]) for entry in log_history if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), "o--" if name.startswith("eval_") else "-", label=name)
    axes.set(xlabel="step", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with draft_of(path) as draft:
        figure.savefig(draft, dpi=120)


def print_summary(results: dict, output_dir: str) -> None:
    """Prints the numbers that a person looks for first."""
    losses = {}
    for name in ("final_loss", "train_loss", "perplexity", *evaluation_losses(results), *metrics_of(results)):
        for key in (f"{name}_on_start", name):
            if results.get(key) is not None:
                losses[key] = results[key]
    processes = plural(results["world_size"], "process")
    if 1 < results["replicas"] < results["world_size"]:
        processes += f" ({results['replicas']} replicas of {results['world_size'] // results['replicas']})"
    unit = "rows" if "rows_per_second" in results else "tokens"
    gpu = f"{results['peak_gpu_gb']:.1f} GB per GPU, " if results["peak_gpu_gb"] else ""
    print_once(
        f"{'FSDP' if results['fsdp_enabled'] else 'Unsharded'} on {processes}, {results['global_step']} steps\n"
        f"{format_metrics(losses)}\n"
        f"{results[f'{unit}_per_second']:,.0f} {unit}/s, peak memory {gpu}{results['peak_host_gb']:.1f} GB host\n"
        f"The model, train_results.json and loss.png are in {output_dir}"
    )
