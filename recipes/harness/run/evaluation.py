"""The evaluation of a run: the last one, the mean of several datasets, and the metric that chooses the best checkpoint."""

from pathlib import Path

from harness import folder
from harness.messages import UserError, print_once

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def evaluate(trainer: Trainer) -> dict[str, float]:
    """The evaluation of the model that is saved, {} without evaluation rows."""
    if trainer.eval_dataset is None:
        return {}
    entries = [entry for entry in trainer.state.log_history if entry["step"] == step_of_saved_model(trainer)]
    logged = {name: value for entry in entries for name, value in entry.items() if name.startswith("eval_")}
    return logged if "eval_loss" in logged else trainer.evaluate()


def step_of_saved_model(trainer: Trainer) -> int:
    """The last step, or that of the best checkpoint with `load_best_model_at_end`."""
    best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    return folder.step_of(Path(best)) if best else trainer.state.global_step


class MeanEvaluation(TrainerCallback):
    """Logs `eval_loss` for several evaluation datasets: the mean of their losses, by the weights of the mixture.

    transformers logs one loss for each, `eval_LABEL_loss`, and the best checkpoint is chosen by `eval_loss`.
    """

    def __init__(self, trainer: Trainer, weights: dict[str, float] | None) -> None:
        self.trainer, self.weights, self.losses = trainer, weights, {}

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict, **kwargs: object
    ) -> None:
        """Logs the mean once the last of the datasets was evaluated."""
        datasets = self.trainer.eval_dataset
        if not isinstance(datasets, dict):
            return
        self.losses |= {label: metrics[f"eval_{label}_loss"] for label in datasets if f"eval_{label}_loss" in metrics}
        if len(self.losses) == len(datasets):
            weights = self.weights or dict.fromkeys(datasets, 1 / len(datasets))
            metrics["eval_loss"] = sum(weights[label] * loss for label, loss in self.losses.items())
            self.trainer.log({"eval_loss": metrics["eval_loss"]})
            self.losses = {}


def print_best_checkpoint(trainer: Trainer) -> None:
    """Prints which evaluation chose the weights that are saved, with `load_best_model_at_end`."""
    state = trainer.state
    if not trainer.args.load_best_model_at_end:
        return
    if state.best_model_checkpoint:
        best = f"eval_{trainer.args.metric_for_best_model.removeprefix('eval_')} {state.best_metric:.4f}"
        print_once(f"The saved model is that of step {step_of_saved_model(trainer)}, the best one: {best}.")
    else:
        print_once("warning: no checkpoint has an evaluation, so the saved model is that of the last step, not the best one")


def check_metric_is_computed(trainer: Trainer) -> None:
    """Raises UserError if no evaluation computes `metric_for_best_model`: transformers would only notice when it saves."""
    name = (trainer.args.metric_for_best_model or "").removeprefix("eval_")
    modules = ("transformers.trainer", "transformers.trainer_seq2seq", "trl.trainer.sft_trainer")
    computes_others = type(trainer).__module__ not in modules  # such as DPOTrainer's rewards/accuracies
    if not name or trainer.compute_metrics or computes_others or trainer.args.eval_strategy == "no":
        return
    labels = [f"{label}_" for label in trainer.eval_dataset] if isinstance(trainer.eval_dataset, dict) else []
    metrics = ("loss", "runtime", "samples_per_second", "steps_per_second")
    known = [f"{label}{metric}" for label in ("", *labels) for metric in metrics]
    if type(trainer).__module__.startswith("trl."):  # SFTTrainer adds metrics without a label
        known += ["mean_token_accuracy", "entropy", "num_tokens", "aux_loss"]
    if name not in known:
        losses = ", ".join(f"eval_{label}loss" for label in ("", *labels))
        raise UserError(f"--metric_for_best_model {trainer.args.metric_for_best_model} is not computed: pass {losses}")
