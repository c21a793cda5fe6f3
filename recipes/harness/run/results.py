"""What a run leaves for its reader: train_results.json and loss.png."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import resource
import sys
import time
from pathlib import Path

from harness.folder import MARK, RESULTS, RUN, read_json, write_json
from harness.launched import say

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

PACKAGES = ["torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes", "datasets"]


class Effort:
    """Counts seconds of training and tokens in the loss, over all ranks and all parts of a run that was resumed.

    transformers counts the tokens of every optimizer step anyway, to scale the loss; they are picked up there, without
    waiting for the GPU.
    """

    def __init__(self, trainer, checkpoint: Path | None):
        before = read_json(checkpoint / MARK).get("effort", {}) if checkpoint else {}
        self.tokens, self.seconds, self._began = before.get("tokens", 0), before.get("seconds", 0.0), time.monotonic()
        self._next = trainer.get_batch_samples
        model = trainer.model  # now, for what is sharded no longer says how many parameters 4-bit weights are
        self.parameters = (
            model.get_nb_trainable_parameters()
            if hasattr(model, "get_nb_trainable_parameters")
            else (model.num_parameters(only_trainable=True), model.num_parameters())
        )
        trainer.get_batch_samples = self._get_batch_samples

    def _get_batch_samples(self, *args, **kwargs):
        batches, tokens = self._next(*args, **kwargs)
        self.tokens = self.tokens + (tokens if tokens is not None else 0)
        return batches, tokens

    def so_far(self) -> dict:
        return {"tokens": int(self.tokens), "seconds": round(self.seconds + time.monotonic() - self._began, 3)}


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


def write(trainer, outcome, evaluation: dict, effort: Effort, resumed_from: int) -> dict:
    """Gathers every rank's numbers (collective) and writes them on the first. Memory in GB (1e9 bytes), time in seconds.

    Time and tokens are those of the whole run, also when it was resumed; evaluations and checkpoints are in the time.
    """
    accelerator, state = trainer.accelerator, trainer.state
    unit = 1 if sys.platform == "darwin" else 1024
    gpu = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    reserved = torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
    ranks = gather_object([(os.environ.get("GROUP_RANK", "0"), gpu, host, trainer.is_fsdp_enabled, reserved)])
    hosts = {node: sum(h for n, _, h, *_ in ranks if n == node) for node, *_ in ranks}
    trainable, parameters = effort.parameters
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    seconds = effort.seconds + (outcome.metrics["train_runtime"] if outcome else 0.0)
    results = read_json(Path(trainer.args.output_dir, RUN)) | {
        "fsdp_enabled": all(enabled for *_, enabled, _ in ranks),
        "world_size": accelerator.num_processes,
        "num_nodes": len(hosts),
        "model_params_b": round(parameters / 1e9, 6),
        "trainable_params_b": round(trainable / 1e9, 6),
        "peak_gpu_gb": round(max(g for _, g, *_ in ranks), 3),
        "peak_gpu_reserved_gb": round(max(r for *_, r in ranks), 3),
        "peak_host_gb": round(max(hosts.values()), 3),
        "final_loss": losses[-1] if losses else (outcome.training_loss if outcome else None),
        **{name: evaluation[name] for name in ("eval_loss",) if name in evaluation},
        **({"perplexity": math.exp(min(evaluation["eval_loss"], 700))} if "eval_loss" in evaluation else {}),
        "tokens_per_second": round(int(effort.tokens) / seconds, 1) if seconds else 0.0,
        "train_runtime": round(seconds, 3),
        "tokens": int(effort.tokens),
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held-out", "o--")):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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
