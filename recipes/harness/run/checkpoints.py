"""The checkpoints of a run: when one is complete, which old ones are deleted, from which one the run resumes."""

import copy
import platform
import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from harness import folder
from harness.exchange import gather_values, value_of_first
from harness.folder import read_json
from harness.messages import UserError, plural, print_once
from harness.model.weight_files import quiet_transformers
from harness.restarts import before_and_now, changed_settings
from harness.run.marker import begin_writing, delete, find_damage, is_incomplete, read_marker, sync_files, write_marker
from harness.run.parameters import adapters_of, is_of_another_library, quantization_of
from harness.run.progress import Progress

import torch
from accelerate import PartialState
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

# The settings that decide which rows a step has, with the number of processes.
DATA_SETTINGS = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "packing", "seed")
# What decides the shape of an adapter, and how much it adds, in its settings.
ADAPTER = ("peft_type", "r", "lora_alpha", "target_modules", "target_parameters", "modules_to_save", "rank_pattern")
ADAPTER += ("alpha_pattern", "use_rslora", "use_dora", "bias")
RANK_IN_NAME = re.compile(r"_(\d+)(?:_\d+)?\.\w+$")  # rng_state_3.pth, __3_0.distcp: a file that one process writes


class Checkpoints(TrainerCallback):
    """Writes the completion marker of a checkpoint once every process has written its part, and deletes old checkpoints.

    transformers deletes old ones by the time of their files, which is wrong when a clock jumps, and after it has written the
    next one. Here there are never more than `save_total_limit` on the disk, and the best one with `metric_for_best_model`.
    """

    def __init__(self, trainer: Trainer, progress: Progress, original: PreTrainedConfig | None = None) -> None:
        """`original`: see `load_original_config`."""
        self.trainer = trainer
        self.progress = progress
        self.output_dir = Path(trainer.args.output_dir)
        self.original = original
        self.trained = names_of_trained(trainer.model)
        self.limit = trainer.args.save_total_limit
        trainer.args.save_total_limit = None  # so that transformers deletes none

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Mends the state of a resumed run: which checkpoint is the best, and how often this run logs, evaluates and saves.

        The best checkpoint is in the output directory, wherever the state says that it was. transformers would log, evaluate and
        save as often as the run did before. Prints a message if the run gets another length.
        """
        state.compute_steps(args, state.max_steps)
        saved = read_json(self.output_dir / f"checkpoint-{state.global_step}" / TRAINER_STATE_NAME)
        if saved and state.global_step < state.max_steps and state.max_steps != saved["max_steps"]:
            print_once(
                f"The run had {saved['max_steps']:,} steps until now and has {state.max_steps:,} from here on: the learning rate "
                f"follows the schedule of {state.max_steps:,} steps and can jump."
            )
        best = folder.best_checkpoint(self.output_dir, state.best_model_checkpoint)
        state.best_model_checkpoint = str(best) if best and best.is_dir() else None
        is_gone = state.best_global_step and not (self.output_dir / f"checkpoint-{state.best_global_step}").is_dir()
        if args.load_best_model_at_end and is_gone:
            print_once(
                f"warning: the best evaluation was that of step {state.best_global_step}, whose checkpoint is gone: the best one "
                "from here on takes its place"
            )
            state.best_metric = state.best_global_step = None

    def before_save(self, checkpoint: Path) -> None:
        """Deletes old checkpoints, and marks the new one as incomplete. Collective."""
        process = PartialState()
        if not (self.output_dir / folder.RUN).is_file():  # transformers would make the folder again
            raise FileNotFoundError(self.output_dir)
        folder.remove_link(self.output_dir / "README.md")  # TRL writes it with every checkpoint
        # transformers only updates those of the callbacks that the run began with.
        stateful = [*callbacks_with_state(self.trainer), self.trainer.control]
        self.trainer.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        if process.is_main_process:
            self._delete_old(checkpoint)
            begin_writing(checkpoint)
        process.wait_for_everyone()

    def _delete_old(self, next_one: Path) -> None:
        if not self.limit or self.limit < 0:
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
        parts = gather_values(sync_files(checkpoint, lambda name: belongs_to(name, process, process.is_main_process)))
        if process.is_main_process:
            files = {}
            for part in parts:
                files |= part
            how = quantization_of(self.trainer.accelerator.unwrap_model(model))  # for --merge
            content = {"geometry": data_settings(args), "progress": progress, "files": files, "trained": self.trained}
            write_marker(checkpoint, content | how)

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
    return int(rank[1]) % process.num_processes == process.process_index if rank else is_first


def data_settings(args: TrainingArguments) -> dict:
    return {"world_size": PartialState().num_processes} | {name: getattr(args, name, None) for name in DATA_SETTINGS}


class FoundCheckpoints(NamedTuple):
    """The checkpoints of an output directory, the newest first."""

    complete: Path | None  # the newest complete one
    damaged: dict[Path, str]  # those that are newer, and what is wrong with them
    incomplete: list[Path]


def find_checkpoints(output_dir: Path) -> FoundCheckpoints:
    """Looks for the newest complete checkpoint, and for what is wrong with newer ones. The same on all processes; collective."""
    process = PartialState()
    # A network file system can show the nodes different folders for a while, so the first process lists them.
    listed = value_of_first([(path.name, is_incomplete(path)) for path in folder.checkpoints(output_dir)])
    nodes = gather_values(platform.node())
    found = FoundCheckpoints(None, {}, [])
    for name, is_not_complete in listed:
        path = output_dir / name
        if is_not_complete:
            found.incomplete.append(path)
        elif found.complete is None:
            own_damage = find_damage(path, lambda name: belongs_to(name, process, process.is_local_main_process))
            damages = gather_values(own_damage)
            if any(damages):
                damage = next(filter(None, damages))
                seen_by = f" (seen by {nodes[damages.index(damage)]})" if len(set(nodes)) > 1 else ""
                found.damaged[path] = f"{damage}{seen_by}"
            else:
                found = found._replace(complete=path)
    return found


def recover_checkpoints(args: TrainingArguments) -> Path | None:
    """Renames damaged checkpoints and deletes incomplete ones; returns the newest complete one, to resume from. Collective.

    None if there is no checkpoint, or only the first one of the run, if that is incomplete. Raises UserError, and changes
    nothing, if there are others and none is complete.
    """
    output_dir = Path(args.output_dir)
    process = PartialState()
    process.wait_for_everyone()
    found = find_checkpoints(output_dir)
    # The second checkpoint is only begun when the first is complete.
    if found.complete is None and (found.damaged or len(found.incomplete) > 1):
        reasons = "; ".join(f"{path.name}: {damage}" for path, damage in found.damaged.items()) or "all are incomplete"
        raise UserError(
            f"--output_dir: no checkpoint in {output_dir} is complete ({reasons}). Nothing was deleted: restore one from a copy, "
            f"or start over in another --output_dir, or after rm -r {output_dir}"
        )
    if process.is_main_process:
        for path, damage in found.damaged.items():
            print_once(f"{path} is damaged: {damage}. It was renamed to {_rename_damaged(path).name}.")
        for path in found.incomplete:
            print_once(f"{path} is incomplete: the run was killed while it was written. It was deleted.")
            delete(path)
    process.wait_for_everyone()
    return found.complete


def _rename_damaged(path: Path) -> Path:
    """Renames a checkpoint to a name that nothing deletes."""
    renamed = path.with_name(f"damaged-{path.name}")
    if renamed.exists():
        renamed = path.with_name(f"{renamed.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return Path(shutil.move(path, renamed))  # where folders cannot be renamed, as in a mounted bucket, it copies


def print_changed_rows(checkpoint: Path, args: TrainingArguments, is_stream: bool) -> None:
    """Prints what resuming from a checkpoint changes about the rows, if it changes anything.

    The number of processes and the micro-batch change nothing as long as their product with the gradient accumulation stays.
    """
    before = read_marker(checkpoint)["geometry"]
    now = data_settings(args)
    if changes := changed_settings({"settings": before}, {"settings": now}, ("max_length", "packing", "seed")):
        of_checkpoint, of_run = before_and_now(changes)
        print_once(
            f"warning: {checkpoint} was written with {of_checkpoint}, this run has {of_run}: weights and optimizer resume "
            "exactly, but some rows are trained on twice or never"
        )
        return
    old_rows = rows_per_step(before)
    new_rows = rows_per_step(now)
    if old_rows == new_rows:
        return
    outcome = ""  # `StreamPosition` prints it if a stream cannot be read on where it stopped
    if not is_stream:  # transformers skips as many steps as were trained, of the size that they have now
        difference = folder.step_of(checkpoint) * (old_rows - new_rows)
        outcome = f": {abs(difference):,} rows are {'trained on twice' if difference > 0 else 'never trained on'} in this epoch"
    print_once(f"warning: the steps of {checkpoint} had {old_rows} rows, those of this run have {new_rows}{outcome}")


def check_adapter(checkpoint: Path, model: torch.nn.Module) -> None:
    """Raises UserError if the adapter of a checkpoint is not like that of the model, also where a recipe makes its own."""
    saved = read_json(checkpoint / "adapter_config.json")
    for adapter in adapters_of(model) if saved else ():
        now = {name: list(value) if isinstance(value, set) else value for name, value in adapter.to_dict().items()}
        if changes := changed_settings({"settings": saved}, {"settings": now}, ADAPTER):
            of_checkpoint, of_run = before_and_now(changes)
            raise UserError(
                f"--output_dir: the adapter in {checkpoint} has {of_checkpoint}, that of this run has {of_run}: pass the same "
                "values, or choose another --output_dir"
            )


def check_saved_weights(checkpoint: Path, model: torch.nn.Module) -> None:
    """Raises UserError unless a checkpoint has all weights of the model, no others, in the same shapes, and trains the same ones.

    Reads names and shapes only. Call it before the model is sharded.
    """
    trained = names_of_trained(model)
    trained_before = read_marker(checkpoint).get("trained")
    if trained_before is not None and trained != trained_before:  # the states of the optimizer are in this order
        before = first_and_others(trained_before, trained)
        now = first_and_others(trained, trained_before)
        raise UserError(
            f"--output_dir: the run in {checkpoint} trained {before}, this one trains {now}, so the states of the optimizer do "
            "not fit. Train the same weights in the same order, or choose another --output_dir"
        )
    is_sharded = (checkpoint / folder.SHARDED).is_dir()
    is_adapter = isinstance(model, PeftModel)
    saved = shapes_of_sharded_files(checkpoint / folder.SHARDED) if is_sharded else shapes_of_files(checkpoint)
    if not saved or is_of_another_library(model):
        return  # an adapter in a folder of its own; or files that name weights otherwise, which the trainer checks
    state = model.state_dict(keep_vars=True)
    others = {*state, *dict(model.named_buffers())} if is_adapter or is_sharded else set()
    if is_adapter:
        state = get_peft_model_state_dict(model, adapter_name=model.active_adapters[0], save_embedding_layers=False)
    elif not is_sharded and are_converted(model, saved):
        saved = shapes_after_conversion(model, checkpoint)
    present = {id(weight) for name, weight in state.items() if name in saved}  # also by another name, of a weight that is tied
    not_saved = getattr(model, "_keys_to_ignore_on_save", None) or ()  # such as the positions of MarianMT, which are computed
    missing = []
    reshaped = []
    for name, weight in state.items():
        if name in saved:
            if list(weight.shape) != saved[name]:
                reshaped.append(name)
        elif name not in not_saved and id(weight) not in present:
            missing.append(name)
    unexpected = [name for name in saved if name not in state and name not in others]
    problems = [f"it lacks {first_and_others(missing)}"] if missing else []
    problems += [f"the model has no {first_and_others(unexpected)}"] if unexpected else []
    problems += [f"{first_and_others(reshaped)} had another shape"] if reshaped else []
    if problems:
        raise UserError(
            f"--output_dir: the weights in {checkpoint} are not those of this model: {'; '.join(problems)}. Use the recipe, the "
            "model and the versions of the libraries that the run began with, or choose another --output_dir"
        )


def names_of_trained(model: torch.nn.Module) -> list[str]:
    """The names of the weights that are trained, in the order in which the optimizer gets them."""
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def first_and_others(names: list[str], without: Collection[str] = ()) -> str:
    """The first of the names that are not in `without`, and how many others there are."""
    first, *others = [name for name in names if name not in without] or ["none of the others"]
    return f"{first} and {plural(len(others), 'other')}" if others else first


def shapes_of_files(checkpoint: Path) -> dict[str, list[int]]:
    """The shapes of the weights in the safetensors files of a folder, by name."""
    shapes = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            shapes |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 (it is not a dict)
    return shapes


def shapes_of_sharded_files(weights: Path) -> dict[str, list[int]]:
    """The shapes of the weights in a sharded checkpoint, by name, from its metadata."""
    entries = FileSystemReader(weights).read_metadata().state_dict_metadata
    return {name.removeprefix("model."): list(getattr(entry, "size", [])) for name, entry in entries.items()}


def are_converted(model: torch.nn.Module, saved: Collection[str]) -> bool:
    """Whether the files of a model have weights by names that are not its own.

    `save_pretrained` writes them as the files on the Hub have them: older names, or a weight for each expert.
    """
    return isinstance(model, PreTrainedModel) and not set(saved) <= model.state_dict().keys()


def load_converted(model: torch.nn.Module, checkpoint: Path) -> bool:
    """Loads an unsharded checkpoint if `from_pretrained` must convert its names, with which `Trainer` would load nothing."""
    if (checkpoint / folder.SHARDED).is_dir() or not are_converted(model, shapes_of_files(checkpoint)):
        return False
    loaded, _ = convert(model, checkpoint, "cpu")
    model.load_state_dict(loaded.state_dict())
    return True


def shapes_after_conversion(model: PreTrainedModel, checkpoint: Path) -> dict[str, list[int]]:
    """The shapes of the weights in an unsharded checkpoint, by their names in the model."""
    loaded, found = convert(model, checkpoint, "meta")
    shapes = {name: list(weight.shape) for name, weight in loaded.state_dict().items() if name not in found["missing_keys"]}
    shapes |= {name: list(in_file) for name, in_file, _ in found["mismatched_keys"]}
    return shapes | {name: [] for name in found["unexpected_keys"]}


def convert(model: PreTrainedModel, checkpoint: Path, device: str) -> tuple[PreTrainedModel, dict]:
    """The model of a checkpoint, in float32, which holds every dtype that is trained; and what `from_pretrained` has found."""
    options = {"dtype": torch.float32, "device_map": {"": device}, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with quiet_transformers():
        return type(model).from_pretrained(checkpoint, config=copy.deepcopy(model.config), **options)


def callbacks_with_state(trainer: Trainer) -> list[TrainerCallback]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ExportableState)]


def restore_callbacks(trainer: Trainer, checkpoint: Path) -> None:
    """Gives callbacks that keep a state, such as EarlyStoppingCallback, the state that they had when a checkpoint was written.

    `restore_callback_states_from_checkpoint` would replace them by new ones, after all others, whose order matters.
    """
    trainer.args.restore_callback_states_from_checkpoint = False
    saved = read_json(checkpoint / TRAINER_STATE_NAME).get("stateful_callbacks", {})
    for callback in callbacks_with_state(trainer):
        name = type(callback).__name__
        state = saved.pop(name, {})
        if isinstance(state, list):  # of several callbacks of a class
            saved[name] = state[1:]
            state = state[0] if state else {}
        for attribute, value in state.get("attributes", {}).items():
            setattr(callback, attribute, value)


def rows_per_step(settings: dict) -> int:
    """Rows of an optimizer step on all processes, from `data_settings`."""
    return settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] * settings["world_size"]
