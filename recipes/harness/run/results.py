"""What a run leaves for its reader: train_results.json and loss.png."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import resource
import sys
from pathlib import Path

from harness.folder import RESULTS, RUN, read_json, write_json
from harness.launched import say
from harness.run.progress import Progress

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

PACKAGES = ["torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes", "datasets"]


def parameters(model) -> tuple[int, int]:
    """Trained and all; to be asked before sharding, after which 4-bit weights no longer say how many they are."""
    if hasattr(model, "get_nb_trainable_parameters"):
        return model.get_nb_trainable_parameters()
    return model.num_parameters(only_trainable=True), model.num_parameters()


class NothingLeft(Exception):
    """The checkpoint a run continues from is its last one."""


class StopAtTheEnd(TrainerCallback):
    """transformers looks whether it is done only after a step; a run that was killed after its last one would get one more."""

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:
            raise NothingLeft


class StopOnNan(TrainerCallback):
    """Ends a run whose loss or weights are no numbers any more, before the checkpoint counts as whole."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not math.isfinite((logs or {}).get("loss", 0.0)):
            self._stop(f"the loss is {logs['loss']}", state)

    def on_save(self, args, state, control, model=None, **kwargs):
        trained = (weight.detach() for weight in model.parameters() if weight.requires_grad)
        finite = all(bool(getattr(weight, "_local_tensor", weight).isfinite().all()) for weight in trained)
        if not all(gather_object([finite])):
            self._stop("some trained weights are no finite numbers", state)

    def _stop(self, what: str, state):
        raise RuntimeError(
            f"{what} at step {state.global_step}: try a lower --learning_rate or a longer --warmup_steps, in a new --output_dir"
        )


def write(trainer, outcome, evaluation: dict, progress: Progress, counts: tuple[int, int], resumed_from: int) -> dict:
    """Gathers every rank's numbers (collective) and writes them on the first. Memory in GB (1e9 bytes), time in seconds.

    Time and tokens are those of the whole run, also when it was resumed. `train_runtime` is all of it; a second of
    `tokens_per_second` is one of optimizer steps, without the start, evaluations and checkpoints.
    """
    accelerator, state = trainer.accelerator, trainer.state
    unit = 1 if sys.platform == "darwin" else 1024
    gpu = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    reserved = torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
    seen = progress.gpus.of_the_run()
    ranks = gather_object([(os.environ.get("GROUP_RANK", "0"), gpu, host, trainer.is_fsdp_enabled, reserved, seen)])
    hosts = {node: sum(h for n, _, h, *_ in ranks if n == node) for node, *_ in ranks}
    effort, args = progress.so_far(), trainer.args
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    seconds = effort["seconds"] or 1  # of a run that had no step left
    results = read_json(Path(trainer.args.output_dir, RUN)) | {
        "fsdp_enabled": all(enabled for _, _, _, enabled, *_ in ranks),
        "world_size": accelerator.num_processes,
        "global_batch_size": args.train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes,
        "num_nodes": len(hosts),
        "attention": getattr(trainer.accelerator.unwrap_model(trainer.model).config, "_attn_implementation", None),
        "model_params_b": round(counts[1] / 1e9, 6),
        "trainable_params_b": round(counts[0] / 1e9, 6),
        "peak_gpu_gb": round(max(g for _, g, *_ in ranks), 3),
        "peak_gpu_reserved_gb": round(max(r for *_, r, _ in ranks), 3),
        "gpu_utilization": [percent for *_, gpus in ranks for percent, _ in gpus],
        "gpu_memory_gb": [used for *_, gpus in ranks for _, used in gpus],
        "peak_host_gb": round(max(hosts.values()), 3),
        "final_loss": losses[-1] if losses else (outcome.training_loss if outcome else None),
        **{name: evaluation[name] for name in ("eval_loss",) if name in evaluation},
        **({"perplexity": math.exp(min(evaluation["eval_loss"], 700))} if "eval_loss" in evaluation else {}),
        "tokens_per_second": round(effort["tokens"] / seconds, 1),
        "loss_tokens_per_second": round(effort["loss_tokens"] / seconds, 1),
        "train_runtime": effort["runtime"],
        "tokens": effort["tokens"],
        "loss_tokens": effort["loss_tokens"],
        "global_step": state.global_step,
        "epoch": state.epoch,
        "resumed_from_step": resumed_from,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine(),
        "finished": datetime.datetime.now().isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in PACKAGES},
    }
    shown = ("fsdp_enabled", "world_size", "model_params_b", "final_loss")
    results["nodes"] = [
        {"node": int(node), "peak_gpu_gb": round(max(g for n, g, *_ in ranks if n == node), 3)} | {k: results[k] for k in shown}
        for node in sorted(hosts, key=int)
    ]
    if trainer.is_world_process_zero():
        title = f"{results.get('recipe', '')} × {results.get('config', '')}".strip("× ")
        draw(state.log_history, title, Path(trainer.args.output_dir, "loss.png"))
        write_json(Path(trainer.args.output_dir, RESULTS), results)
    return results


def draw(log_history: list[dict], title: str, path: Path):
    """Draws training and evaluation loss over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held-out", "o--")):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def summary(results: dict, folder: str):
    """Prints the few numbers a person looks for first."""
    evaluation = ""
    if "eval_loss" in results:
        evaluation = f", held-out loss {results['eval_loss']:.4f} (perplexity {results['perplexity']:.1f})"
    gpu = f"{results['peak_gpu_gb']:.1f} GB a GPU, " if results["peak_gpu_gb"] else ""
    processes = f"{results['world_size']} process{'es' * (results['world_size'] > 1)}"
    if results["num_nodes"] > 1:
        say("\n".join(json.dumps(report) for report in results["nodes"]))
    say(
        f"{'FSDP' if results['fsdp_enabled'] else 'Unsharded'} on {processes}, "
        f"{results['global_step']} steps: loss {results['final_loss']:.4f}{evaluation}\n"
        f"{results['tokens_per_second']:,.0f} tokens/s, peak memory "
        f"{gpu}{results['peak_host_gb']:.1f} GB host\n"
        f"The model, train_results.json and loss.png are in {folder}"
    )
