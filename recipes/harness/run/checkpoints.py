"""The checkpoints of a run: what each must have, when one is complete, which are deleted, from which one the run resumes."""

import copy
import math
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import folder
from harness.folder import read_json
from harness.messages import UserError, plural, print_once, readable_size
from harness.model.models import quiet_transformers
from harness.run.marker import begin_writing, delete, find_damage, is_incomplete, read_marker, sync_files, write_marker
from harness.run.progress import Progress
from harness.run.sharding import adapters_of, config_of, quantization_of

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

ROWS_OF_STEP = "rows of a step"
RANK_IN_NAME = re.compile(r"_(\d+)(?:_\d+)?\.\w+$")  # rng_state_3.pth, __3_0.distcp: a file that one process writes
SCALES = ("lora_alpha", "alpha_pattern", "use_rslora")  # by which an adapter is multiplied; its shapes have the rank


@dataclass(eq=False)
class Checkpoints(TrainerCallback):
    """Writes the completion marker of a checkpoint once every process has written its part, and deletes old checkpoints.

    transformers deletes old ones by the time of their files, which is wrong when a clock jumps, and after it has written the
    next one. Here there are never more than `save_total_limit` on the disk, and the best one with `metric_for_best_model`.
    """

    trainer: Trainer
    progress: Progress
    weights: "WeightsOfModel"
    limit: int | None  # `save_total_limit`
    original: PreTrainedConfig | None  # see `load_original_config`

    @property
    def output_dir(self) -> Path:
        return Path(self.trainer.args.output_dir)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Mends the state of a resumed run: which checkpoint is the best, and how often this run logs, evaluates and saves.

        The best checkpoint is in the output directory, wherever the state says that it was. transformers would log, evaluate and
        save as often as the run did before.
        """
        state.compute_steps(args, state.max_steps)
        best = folder.best_checkpoint(self.output_dir, state.best_model_checkpoint)
        state.best_model_checkpoint = str(best) if best and best.is_dir() else None
        if args.load_best_model_at_end and not state.best_model_checkpoint:  # the best one from here on takes its place
            state.best_metric = state.best_global_step = None

    def before_save(self, checkpoint: Path) -> None:
        """Deletes old checkpoints, and marks the new one as incomplete. Collective."""
        process = PartialState()
        folder.remove_link(self.output_dir / "README.md")  # TRL writes it with every checkpoint
        # transformers only updates those of the callbacks that the run began with.
        stateful = [*callbacks_with_state(self.trainer), self.trainer.control]
        self.trainer.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        if process.is_main_process:
            self._delete_old(checkpoint)
            begin_writing(checkpoint)
        process.wait_for_everyone()

    def _delete_old(self, next_one: Path) -> None:
        if (self.limit or 0) < 1:
            return
        best = folder.best_checkpoint(self.output_dir, self.trainer.state.best_model_checkpoint)
        old = [path for path in folder.checkpoints(self.output_dir) if path not in (next_one, best)]
        for path in old[max(1, self.limit - 1) :]:
            delete(path)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: torch.nn.Module, **kwargs: object
    ) -> None:
        """Waits until all files of a checkpoint are on the disk, then writes its completion marker."""
        process = PartialState()
        checkpoint = self.output_dir / f"checkpoint-{state.global_step}"
        progress = self.progress.so_far()
        process.wait_for_everyone()
        if process.is_main_process:
            for adapter in adapters_of(model):
                adapter.save_pretrained(checkpoint)
            if (checkpoint / folder.SHARDED).is_dir() and not hasattr(model, "peft_config"):
                self._save_config(model, checkpoint)
            for path in checkpoint.glob("*.safetensors"):
                shutil.copymode(self.output_dir / folder.RUN, path)  # safetensors makes files that only their owner can read
        if problem := broadcast_object_list([self.weights.problem(checkpoint) if process.is_main_process else ""])[0]:
            raise RuntimeError(f"{checkpoint} does not have the weights that were trained: {problem}")
        parts = gather_object([sync_files(checkpoint, lambda name: belongs_to(name, process, process.is_main_process))])
        if process.is_main_process:
            content = {"row_settings": row_settings(args), "progress": progress, "trained": self.weights.trained}
            content |= quantization_of(self.trainer.accelerator.unwrap_model(model))  # for --merge
            files = {name: entry for part in parts for name, entry in part.items()}
            write_marker(checkpoint, content | {"files": files})

    def _save_config(self, model: torch.nn.Module, checkpoint: Path) -> None:
        """Saves what --merge needs besides the weights, which a model that a recipe has made has nowhere else."""
        config = copy.deepcopy(model.config)
        config.dtype = self.original.dtype or torch.float32
        config.use_cache = getattr(self.original, "use_cache", True)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(checkpoint)
        if self.trainer.processing_class:
            self.trainer.processing_class.save_pretrained(checkpoint)


def belongs_to(name: str, process: PartialState, is_first: bool) -> bool:
    """Whether this process handles a file of a checkpoint; files without a rank in their name belong to the first one."""
    rank = RANK_IN_NAME.search(name)
    if rank:
        return int(rank[1]) % process.num_processes == process.process_index
    return is_first


def row_settings(args: TrainingArguments) -> dict[str, Any]:
    """What decides which rows a step has."""
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * PartialState().num_processes
    return {ROWS_OF_STEP: rows} | {name: getattr(args, name, None) for name in ("max_length", "packing", "seed")}


def recover_checkpoints(args: TrainingArguments) -> Path | None:
    """Renames damaged checkpoints and deletes incomplete ones; returns the newest complete one, to resume from. Collective.

    None if there is no checkpoint, or only the first one of the run, if that is incomplete. Raises UserError, and changes
    nothing, if there are others and none is complete.
    """
    output_dir = Path(args.output_dir)
    process = PartialState()
    process.wait_for_everyone()
    found = folder.checkpoints(output_dir)  # the newest first
    # A network file system can show the nodes different folders for a while, so the first process lists them.
    found, incomplete = broadcast_object_list([found, [path for path in found if is_incomplete(path)]])
    damaged = {}
    complete = None
    for path in found:
        if complete or path in incomplete:
            continue
        own_damage = find_damage(path, lambda name: belongs_to(name, process, process.is_local_main_process))
        if damage := max(gather_object([own_damage]), key=len):  # "" if no process has found any
            damaged[path] = damage
        else:
            complete = path
    # The second checkpoint is only begun when the first is complete.
    if complete is None and (damaged or len(incomplete) > 1):
        reasons = "; ".join(f"{path.name}: {damage}" for path, damage in damaged.items()) or "all are incomplete"
        raise UserError(
            f"--output_dir: no checkpoint in {output_dir} is complete ({reasons}). Nothing was deleted: restore one from a copy, "
            f"or start over in another --output_dir, or after rm -r {output_dir}"
        )
    if process.is_main_process:
        for path, damage in damaged.items():
            print_once(f"{path} is damaged: {damage}. It was renamed to {_rename_damaged(path).name}.")
        for path in incomplete:
            print_once(f"{path} is incomplete: the run was killed while it was written. It was deleted.")
            delete(path)
    process.wait_for_everyone()
    return complete


def _rename_damaged(path: Path) -> Path:
    """Renames a checkpoint to a name that nothing deletes."""
    renamed = path.with_name(f"damaged-{path.name}")
    if renamed.exists():
        renamed = path.with_name(f"{renamed.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return Path(shutil.move(path, renamed))  # where folders cannot be renamed, as in a mounted bucket, it copies


def print_changed_rows(checkpoint: Path, args: TrainingArguments, is_stream: bool) -> None:
    """Prints what resuming from a checkpoint changes about the rows, if it changes anything.

    Of rows in memory, transformers skips as many steps as were trained, of the size that they have now; of a stream,
    `StreamPosition` prints it if it cannot be read on where it stopped.
    """
    before = read_marker(checkpoint)["row_settings"]
    changed = {name: now for name, now in row_settings(args).items() if now != before[name]}
    if is_stream:
        changed.pop(ROWS_OF_STEP, None)
    if changed:
        settings = ", ".join(f"{name} {now} (was {before[name]})" for name, now in changed.items())
        print_once(
            f"warning: since {checkpoint}, this changed: {settings}: weights and optimizer resume exactly, but some rows are "
            "trained on twice or never"
        )


def callbacks_with_state(trainer: Trainer) -> list[TrainerCallback]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ExportableState)]


def restore_callbacks(trainer: Trainer, checkpoint: Path) -> None:
    """Gives callbacks that keep a state, such as EarlyStoppingCallback, the state that they had when a checkpoint was written.

    `restore_callback_states_from_checkpoint` would replace them by new ones, after all others, whose order matters.
    """
    trainer.args.restore_callback_states_from_checkpoint = False
    saved = read_json(checkpoint / TRAINER_STATE_NAME).get("stateful_callbacks", {})
    for name, states in saved.items():
        callbacks = [callback for callback in callbacks_with_state(trainer) if type(callback).__name__ == name]
        # Of several callbacks of a class, it is a list.
        for callback, state in zip(callbacks, states if isinstance(states, list) else [states], strict=False):
            vars(callback).update(state.get("attributes", {}))


Shapes = dict[str, list[int]]  # of weights, by name


class WeightsOfModel:
    """The weights that every checkpoint of a model must have. Made before the model is sharded."""

    def __init__(self, model: torch.nn.Module) -> None:
        trained = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
        self.trained = list(trained)  # in the order in which the optimizer gets them
        self.trained_values = sum(trained.values())
        self.is_known = not is_of_another_library(model)  # whose files name weights otherwise
        self.is_of_transformers = isinstance(model, PreTrainedModel)
        self.adapter = model.active_adapters[0] if isinstance(model, PeftModel) else None
        # Of several adapters, the last one writes the file.
        self.scales = {name: getattr(settings, name, None) for settings in adapters_of(model) for name in SCALES}
        state = model.state_dict(keep_vars=True)
        if self.adapter:
            state = get_peft_model_state_dict(model, adapter_name=self.adapter, save_embedding_layers=False)
        self.shapes: Shapes = {name: list(weight.shape) for name, weight in state.items()}
        self.known = {*self.shapes, *dict(model.named_buffers())}  # a buffer may be hidden from the state until it is sharded
        not_saved = getattr(model, "_keys_to_ignore_on_save", None) or ()  # such as the positions of MarianMT, which are computed
        names: dict[int, set[str]] = {}
        for name in state.keys() - {*not_saved}:
            names.setdefault(id(state[name]), set()).add(name)
        self.names = list(names.values())  # of each weight; a tied one has several, and is saved by one of them

    def problem(self, checkpoint: Path) -> str:
        """What is wrong with the weights in a checkpoint, "" for nothing."""
        if (checkpoint / folder.SHARDED).is_dir():
            saved = shapes_of_sharded_files(checkpoint)
        else:  # an adapter of another name has a folder of its own
            saved = shapes_of_files(checkpoint / ("" if self.adapter in (None, "default") else self.adapter))
        if saved is None and self.adapter:
            return "it has no adapter"
        if saved is None or not self.is_known:
            return ""
        if self.is_of_transformers and saved.keys() - self.known:  # see `load_converted`
            values = sum(map(math.prod, saved.values()))
            if values < self.trained_values:
                return f"it has {values:,} values, {self.trained_values:,} are trained"
            return ""
        lacking = [min(names) for names in self.names if not names & saved.keys()]
        if lacking:
            return f"it lacks {first_and_others(lacking)}"
        differing = [name for name in saved if self.shapes.get(name, saved[name]) != saved[name]]
        if differing:
            return f"of another shape: {first_and_others(differing)}"
        return ""


def is_of_another_library(model: torch.nn.Module) -> bool:
    """Whether a model has a `save_pretrained` that is not that of transformers or PEFT, as a SentenceTransformer has."""
    return config_of(model) is None and hasattr(model, "save_pretrained")


def check_saved_weights(checkpoint: Path, weights: WeightsOfModel) -> None:
    """Raises UserError unless a checkpoint has the weights of the model in the same shapes, scales and trains the same ones.

    Otherwise a run would resume with some weights as they were before the training, or states of the optimizer of others.
    """
    problem = weights.problem(checkpoint)
    if not problem and read_marker(checkpoint)["trained"] != weights.trained:
        problem = "the run trained other ones, or in another order"
    saved = folder.read_json(checkpoint / "adapter_config.json")
    for name, scale in weights.scales.items():
        if saved.get(name) != scale:
            problem = f"their adapter has {name} {saved.get(name)}, this one {scale}"
    if problem:
        raise UserError(
            f"--output_dir: the weights in {checkpoint} are not those of this model: {problem}. Use the recipe, the model and "
            "the versions of the libraries that the run began with, or choose another --output_dir"
        )


def first_and_others(names: Iterable[str]) -> str:
    """The first name, and how many others there are."""
    first, *others = sorted(names)
    if others:
        return f"{first} and {plural(len(others), 'other')}"
    return first


def shapes_of_files(checkpoint: Path) -> Shapes | None:
    """The shapes of the weights in the safetensors files of a folder; None if it has no such file."""
    shapes = None
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            of_file = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 (it is not a dict)
        shapes = (shapes or {}) | of_file
    return shapes


def shapes_of_sharded_files(checkpoint: Path) -> Shapes:
    """The shapes of the weights in a sharded checkpoint, from its metadata."""
    entries = FileSystemReader(checkpoint / folder.SHARDED).read_metadata().state_dict_metadata
    return {name.removeprefix("model."): list(getattr(entry, "size", [])) for name, entry in entries.items()}


def load_converted(model: torch.nn.Module, checkpoint: Path) -> bool:
    """Loads an unsharded checkpoint if `from_pretrained` must convert its names, with which `Trainer` would load nothing.

    `save_pretrained` writes weights as the files on the Hub have them: by older names, or one for each expert.
    Returns whether it did. Raises RuntimeError if the checkpoint lacks weights, or has others.
    """
    if (checkpoint / folder.SHARDED).is_dir() or not isinstance(model, PreTrainedModel):
        return False
    saved = shapes_of_files(checkpoint)
    if not saved or not saved.keys() - model.state_dict().keys():
        return False
    with quiet_transformers():
        loaded, found = type(model).from_pretrained(  # in float32, which holds every dtype that is trained
            checkpoint, config=copy.deepcopy(model.config), dtype=torch.float32, device_map={"": "cpu"}, output_loading_info=True
        )
    if differing := {*found["missing_keys"], *found["unexpected_keys"]}:
        raise RuntimeError(f"{checkpoint} lacks weights of this model, or has others: {first_and_others(differing)}")
    model.load_state_dict(loaded.state_dict())
    return True


def check_disk_space(trainer: Any) -> None:
    """Raises UserError unless the disk has space for two checkpoints, for the best one if it is kept besides, and for the model.

    Otherwise the run is lost when the disk is full.
    """
    run = Path(trainer.args.output_dir)
    if not trainer.is_world_process_zero() and not run.is_dir():  # on another node, without checkpoints
        return
    checkpoint_size, model_size = estimated_sizes(trainer)
    wanted = 0
    if trainer.args.save_strategy != "no":
        wanted = 3 if trainer.args.metric_for_best_model else 2
    needed = max(0, wanted - len(folder.checkpoints(run))) * checkpoint_size + model_size
    free = shutil.disk_usage(run).free
    if free < needed:
        raise UserError(
            f"--output_dir: {run} has {readable_size(free)} free, this run needs {readable_size(needed)} for checkpoints and the "
            "model. Free some space, or pass a folder on another disk"
        )


def estimated_sizes(trainer: Any) -> tuple[int, int]:
    """Bytes of a checkpoint and of the final model, at least."""
    is_full_model = isinstance(trainer.model, PreTrainedModel)
    checkpoint = model = 0
    for weight in trainer.model.parameters():
        if weight.requires_grad or is_full_model:
            checkpoint += weight.nbytes
            model += weight.numel() * 2
        if weight.requires_grad and "adam" in trainer.args.optim:
            checkpoint += 2 * weight.numel() * (1 if "8bit" in trainer.args.optim else weight.itemsize)
    return checkpoint, model
