"""`train`: everything between a built trainer and a finished run."""

import os
from pathlib import Path

from harness import configs
from harness.commands import preview
from harness.folder import MARK, latest, lock, read_json
from harness.launched import Checked, Launched, say
from harness.nodes import network
from harness.run import checkpoints, disk, export, first_batch, four_bit, preemption, profile, results, sharding, streams
from harness.run.progress import Progress


def train(trainer):
    """Resumes or starts, trains, evaluates, saves a model that `from_pretrained` loads, and reports.

    Args:
        trainer: a `transformers.Trainer` or `trl.SFTTrainer`, as built; its `args.output_dir` is the run's folder.

    Raises:
        RuntimeError: when the run is not sharded as its config says, 4-bit weights did not survive sharding, or the loss
            is no number any more.
    """
    if command := Launched.from_environment().command:
        if command == "preview":
            preview.show(trainer)
        say("All that this run needs is here: the same flags train without internet.")
        raise Checked(trainer.args)
    try:
        _train(trainer)
    except Exception as error:
        disk.explain(error, trainer)
        if isinstance(error, RuntimeError):
            network.explain(error, trainer.state.global_step, latest(Path(trainer.args.output_dir)))
        raise


def prepare(trainer, config: dict):
    """What accelerate is to know before it wraps the model."""
    sharding.set_precision(trainer, config.get("fsdp_config", {}).get("fsdp_reduce_dtype", "float32"))
    sharding.name_layers(trainer)
    four_bit.prepare(trainer)
    sharding.tell_apart(trainer.model)
    if trainer.accelerator.ddp_handler:
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True  # or DDP would hold the gradients twice


def _train(trainer):
    launched, folder = Launched.from_environment(), Path(trainer.args.output_dir)
    held = lock(folder) if trainer.is_world_process_zero() and not launched.recipe else None  # else the launcher has
    config = configs.read(launched.config)
    prepare(trainer, config)
    four_bit.BytesCheck(trainer.model)
    streams.keep_together(trainer)
    checkpoint = checkpoints.newest(trainer.args)
    disk.check(trainer, checkpoint)
    resumed_from = int(checkpoint.name.split("-")[1]) if checkpoint else 0
    parameters = results.parameters(trainer.model)
    first_batch.check(trainer)
    progress = Progress(trainer, read_json(checkpoint / MARK).get("progress", {}) if checkpoint else {})
    stop = preemption.StopTogether(trainer.args.ddp_timeout)
    place = streams.Place(trainer, checkpoint, stop.group)
    for callback in (
        sharding.AfterWrapping(trainer, config, launched.processes),
        results.StopOnNan(),
        place,
        checkpoints.Checkpoints(trainer, progress),
        results.StopAtTheEnd(),
        stop,
        progress,
        *([profile.Profile(trainer.args)] if getattr(trainer.args, "profile", False) else []),
    ):
        trainer.add_callback(callback)
    if checkpoint:
        say(f"Continuing from {checkpoint}; data already seen is skipped.")
    try:
        outcome = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except results.NothingLeft:
        outcome, trainer.is_in_train = None, False
    except KeyboardInterrupt:
        kept = latest(folder)
        going_on = f"The same command goes on from {kept}." if kept else "No checkpoint was written yet."
        say(f"\nStopped at step {trainer.state.global_step}. {going_on}")
        os._exit(130)  # other ranks may wait in a collective for ever
    place.leave()
    stop.leave(trainer)

    evaluation = {}
    if trainer.eval_dataset is not None:
        logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        is_fresh = logged and logged[-1]["step"] == trainer.state.global_step and not trainer.args.load_best_model_at_end
        evaluation = logged[-1] if is_fresh else trainer.evaluate()
    trainer.save_state()
    export.save(trainer)
    written = results.write(trainer, outcome, evaluation, progress, parameters, resumed_from)
    export.sample(trainer, launched.tiny)
    results.summary(written, str(folder))
    stop.close(trainer)
    if held:
        held.release()
