"""A run, from the trainer that a recipe has built to the saved model: prepare, train, finish. And what is checked before."""

import datetime
import os
from pathlib import Path
from typing import Any

from harness import folder
from harness.data.chat_templates import describe_rows
from harness.data.streams import fill_last_step, repeat_stream
from harness.launched import end_run, record_end, record_signal, set_signal_handler
from harness.messages import UserError, print_once
from harness.model.quantized import install_byte_check
from harness.run.checkpoints import (
    WeightsOfModel,
    check_disk_space,
    check_saved_weights,
    print_changed_rows,
    recover_checkpoints,
    restore_callbacks,
)
from harness.run.failures import exit_for_known_failure, only_report, only_report_if_all
from harness.run.generation import (
    RewardsOfSteps,
    answer_before,
    check_prompts,
    generate_samples,
    has_held_out,
    save_held_out,
    trains_on_rewards,
    writes_answers,
)
from harness.run.losses import evaluate, prepare_loss, print_best_checkpoint
from harness.run.progress import Profile, replace_progress_bar
from harness.run.results import print_summary, write_results
from harness.run.saving import load_original_config, publish, save_model, set_base_revision, write_model_card
from harness.run.sharded_files import check_sharded_files
from harness.run.sharding import (
    AfterWrapping,
    adapters_of,
    base_of,
    compile_layers,
    config_of,
    count_parameters,
    freeze_unused_parts,
    prepare_gradient_scaler,
    prepare_sharding,
)
from harness.run.stopping import (
    LastStepReached,
    MissedEvaluation,
    StopAtLastStep,
    StopIfUnchanged,
    StopOnNan,
    StoppedInEvaluation,
    make_cpu_group,
)
from harness.run.trainer import RunTrainer, add_parts
from harness.runs import Run, StartedRecipe

import torch
import torch.distributed as dist
from datasets import Dataset, IterableDataset
from torch.distributed import ProcessGroup
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput
from trl import DistillationConfig, DPOConfig, KTOConfig, RewardConfig, SFTTrainer


def run_training(recipe: StartedRecipe) -> None:
    """Resumes or starts, trains, evaluates, saves a model that `from_pretrained` loads, and reports.

    `recipe.trainer`: of transformers or TRL, as built; its `args.output_dir` is the run's folder.

    Raises:
        UserError: for what the user can fix, also if the loss is NaN.
        RuntimeError: if the run is not sharded as its config says, or if sharding changed 4-bit weights.
    """
    trainer = recipe.trainer
    run = recipe.run
    try:
        for_failures = prepare_training(recipe)
        before = answer_before(trainer, run.tiny)
        output = train_steps(trainer)
        finish_training(recipe, output, for_failures, before)
    except UserError:
        raise
    except Exception as error:
        exit_for_known_failure(error, trainer)
        raise


def prepare_training(recipe: StartedRecipe) -> ProcessGroup | None:
    """Makes the trainer, whose model is not sharded yet, a `RunTrainer` with callbacks, ready to start or to resume.

    Returns a group for `all_failed`.
    """
    trainer = recipe.trainer
    run = recipe.run
    args = trainer.args
    report_dropped_rows(trainer)
    check_second_models(trainer)
    check_built_trainer(recipe)
    freeze_unused_parts(trainer)  # before the count, and before the units of FSDP are chosen
    parameters = count_parameters(trainer.model)
    if writes_answers(trainer):
        check_prompts(trainer)

    # The model: all of this before accelerate wraps it, in `trainer.train`.
    compile_layers(trainer)
    prepare_gradient_scaler(trainer)
    hidden = prepare_sharding(trainer, run.config)
    loss = prepare_loss(trainer)
    set_base_revision(trainer)
    original = load_original_config(trainer)
    if trainer.is_fsdp_enabled:
        install_byte_check(trainer.model)

    # The rows: what is added to them depends on the loss.
    repeat_stream(trainer)
    fill_last_step(trainer, with_empty_rows=loss.is_of_library)
    # The default waits, for each tensor of a batch, until the GPU has computed everything that was queued before.
    trainer.accelerator.dataloader_config.non_blocking = True

    # The checkpoint to resume from.
    group = make_cpu_group(args.ddp_timeout)
    if group is not None and dist.get_backend() == "gloo":  # transformers passes `ddp_timeout` to NCCL only
        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=args.ddp_timeout))
    for_failures = make_cpu_group(30)  # not after the training, where it could fail
    weights = WeightsOfModel(trainer.model)
    checkpoint = recover_checkpoints(args)
    if checkpoint:
        check_sharded_files(checkpoint)  # before anything reads them
        check_saved_weights(checkpoint, weights)
        restore_callbacks(trainer, checkpoint)
        print_changed_rows(checkpoint, args, isinstance(trainer.train_dataset, IterableDataset))
        args.eval_on_start = False  # the state of the checkpoint has that evaluation
    check_disk_space(trainer)

    add_parts(trainer, weights, parameters, group, checkpoint, original, loss, hidden)
    trained, total = parameters
    print_once(f"Training {trained:,} of {total:,} parameters ({trained / total:.2%}).")
    set_signal_handler(record_signal)  # until now a signal ends the process: there is nothing to save
    replace_progress_bar(trainer)
    for callback in callbacks_of(trainer, run):
        trainer.add_callback(callback)
    if trainer.is_world_process_zero():
        folder.write_json(Path(args.output_dir, folder.PROMPT), prompt_of(recipe))
    return for_failures


def prompt_of(recipe: StartedRecipe) -> dict[str, Any]:
    """How a prompt for the trained model looks: the content of prompt.json, which --chat reads."""
    trainer = recipe.trainer
    data = recipe.run.data
    prompt = {"rows": None, "chat_template_kwargs": data.template_arguments if data else None} | recipe.uncut.prompt
    if writes_answers(trainer):
        prompt |= describe_rows(trainer.train_dataset) | {"chat_template_kwargs": trainer.args.chat_template_kwargs}
    return prompt


def callbacks_of(trainer: RunTrainer, run: Run) -> list[TrainerCallback]:
    """The callbacks of a run, in the order in which they get each event."""
    parts = trainer.parts
    # Without a reward, which RewardsOfSteps reports, no weight changes.
    learning = RewardsOfSteps(trainer) if trains_on_rewards(trainer) else StopIfUnchanged()
    callbacks = [
        # First: when the training begins it sets how FSDP computes, and shows the buffers that a checkpoint has.
        AfterWrapping(trainer, run.config, run.processes, parts.hidden, parts.loss.own is not None),
        StopOnNan(),  # before `checkpoints`: a checkpoint with NaN in it gets no completion marker
        learning,  # before `stop`: what is wrong is an error, also if a signal came in the same step
        parts.position,  # before `checkpoints`, whose marker lists its file
        parts.reader,  # before `stop`: both decide at the end of an epoch what is saved, a signal has the last word
        parts.checkpoints,  # before MissedEvaluation, which needs the state that it mends
        parts.stop,  # before `progress`, which logs what is saved because of a signal
        MissedEvaluation(trainer),  # before StopAtLastStep: the evaluation of the last step is made first
        StopAtLastStep(),
        parts.progress,  # after `stop`: it counts the time of a step that is saved or logged because of a signal
    ]
    return [*callbacks, Profile()] if run.profile else callbacks


def train_steps(trainer: RunTrainer) -> TrainOutput | None:
    """Trains to the last step; returns None if there was none left. Ends the process if the run stops earlier."""
    parts = trainer.parts
    output = None
    if parts.checkpoint:
        print_once(f"Resuming from {parts.checkpoint}; rows that were trained on are skipped.")
    try:
        output = trainer.train(resume_from_checkpoint=str(parts.checkpoint) if parts.checkpoint else None)
    except StoppedInEvaluation:
        pass  # `report_stop` has the exit code
    except LastStepReached:
        trainer.is_in_train = False
        trainer.load_best_checkpoint()
    except KeyboardInterrupt:
        print_once(f"\nStopped at step {trainer.state.global_step}. {folder.resume_hint(Path(trainer.args.output_dir))}")
        record_end(130)
        os._exit(130)  # other processes may never reach the end of a collective
    code = parts.reader.report_stop() or parts.stop.report_stop()
    parts.stop.group = parts.reader.group = None  # `Trainer.end` destroys it: what still refers to it would do so again
    if code:
        trainer.end()
        end_run(code)
    return output


def finish_training(
    recipe: StartedRecipe, output: TrainOutput | None, for_failures: ProcessGroup | None, before: list[str]
) -> None:
    """Saves the model; then evaluates it, and writes and prints the results: an error there makes no run fail."""
    trainer = recipe.trainer
    run = recipe.run
    output_dir = Path(trainer.args.output_dir)
    is_first = trainer.is_world_process_zero()
    print_best_checkpoint(trainer)
    save_model(trainer, trainer.parts.checkpoints.original)
    evaluation: dict[str, float] = {}
    with only_report_if_all("the last evaluation", for_failures):
        evaluation = evaluate(trainer)
    folder.remove_link(output_dir / TRAINER_STATE_NAME)
    trainer.save_state()
    with only_report("what --verify compares with"):
        if is_first and has_held_out(trainer):
            save_held_out(trainer, recipe.uncut.conversations)
    results = write_results(trainer, output, evaluation)
    with only_report("README.md"):
        write_model_card(trainer)
    with only_report_if_all("samples.txt", for_failures):
        generate_samples(trainer, run.tiny, before)
    with only_report("the summary"):
        print_summary(results, str(output_dir))
    if run.repository and is_first:
        publish(output_dir, run.repository)  # meanwhile, no other process waits for this one
    if run.lock:
        run.lock.release()


def report_dropped_rows(trainer: Trainer) -> None:
    """Prints how many of the rows that `load` has returned a trainer does not use, for example because they are too long.

    TRL's trainers for pairs drop rows, and so do recipes with DistillationTrainer. For others a recipe tokenizes, and may make
    several rows of one, or one of several.
    """
    args = trainer.args
    if not isinstance(args, DPOConfig | KTOConfig | RewardConfig | DistillationConfig):
        return
    summary = folder.read_json(Path(args.output_dir, folder.DATA))
    for kind, rows, key in (
        ("training", trainer.train_dataset, "loaded_rows"),
        ("evaluation", trainer.eval_dataset, "loaded_eval_rows"),
    ):
        missing = summary.get(key, 0) - len(rows) if isinstance(rows, Dataset) else 0
        if missing > 0:
            print_once(
                f"warning: {missing:,} of {summary[key]:,} {kind} rows are not used: the recipe or the trainer has dropped them "
                "(see --max_length)."
            )


def check_second_models(trainer: Trainer) -> None:
    """Raises UserError for a second model, such as a reference model or a recipe's own teacher, whose weights are not loaded."""
    for name, other in vars(trainer).items():
        is_other = isinstance(other, torch.nn.Module) and name not in ("model", "model_wrapped")
        if is_other and any(weight.is_meta for weight in other.parameters()):
            raise UserError(
                f"only the first process has the weights of {name}: set fsdp_cpu_ram_efficient_loading: false in a copy of the "
                "config"
            )


def check_built_trainer(recipe: StartedRecipe) -> None:
    """Raises UserError for a trainer that the recipe has built without arguments of the model."""
    model_args = recipe.arguments[2]
    check_rows_of_trl(recipe.trainer)
    model = recipe.trainer.model
    given = recipe.run.given
    adapters = adapters_of(model)
    is_quantized = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    advice = {}
    if model_args.use_peft and not adapters:
        advice["use_peft"] = "pass peft_config=get_peft_config(model_args) to TRL's trainer, or its result to get_peft_model"
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not is_quantized:
        advice["load_in_4bit"] = "pass quantization_config=get_quantization_config(model_args) to the trainer"
    for name in given & {"lora_r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"}:
        name_of_peft = "r" if name == "lora_r" else name
        if adapters and getattr(adapters[0], name_of_peft, None) != getattr(model_args, name):
            advice[name] = "make the settings of the adapter with get_peft_config(model_args)"
    asked = getattr(torch, model_args.dtype or "", None)
    config = config_of(base_of(model))
    if "dtype" in given and asked and config and not is_quantized and config.dtype not in (None, asked):
        advice["dtype"] = "pass dtype=model_args.dtype to from_pretrained"
    for name, change in advice.items():
        raise UserError(f"--{name} is not what the recipe builds: {change} there (functions of trl), or leave out the flag")


def check_rows_of_trl(trainer: Trainer) -> None:
    """Prints that SFTTrainer makes tokens of the rows of a recipe without `tokenize`.

    Raises UserError for a stream: the run would resume at another row, and train on some rows twice.
    """
    if not isinstance(trainer, SFTTrainer) or (trainer.args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        return
    if isinstance(trainer.train_dataset, IterableDataset):
        raise UserError("--dataset_streaming: a stream resumes only if the recipe calls tokenize() before SFTTrainer: call it")
    print_once("SFTTrainer tokenizes the rows: the recipe does not call tokenize().")
