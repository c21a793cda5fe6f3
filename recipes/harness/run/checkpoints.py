"""Checkpoints that are whole or not there. transformers writes a checkpoint in pieces and resumes from half of one."""

import platform
import re
from pathlib import Path

from harness import folder, marks
from harness.folder import MARK, read_json
from harness.launched import fail, say

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback

# What decides which data a step sees: a run that goes on with other values sees some data twice or never.
GEOMETRY = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "packing", "seed")
# What a process writes for itself has its number in its name: rng_state_3.pth, __3_0.distcp.
NUMBER = re.compile(r"_(\d+)(?:_\d+)?\.\w+$")


class Checkpoints(TrainerCallback):
    """Marks a checkpoint once every process has written its part, and deletes old ones by their step.

    transformers deletes by the time of their files, which a clock that jumps turns round, and after it has written the next:
    here no more than `save_total_limit` are on the disk at any time.
    """

    def __init__(self, trainer, progress):
        self.trainer, self.progress, self.folder = trainer, progress, Path(trainer.args.output_dir)
        self.limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        self._write, trainer._save_checkpoint = trainer._save_checkpoint, self._save

    def _save(self, *arguments):
        process, checkpoint = PartialState(), self.folder / f"checkpoint-{self.trainer.state.global_step}"
        if not (self.folder / folder.RUN).is_file():  # transformers would make it anew
            raise FileNotFoundError(self.folder)
        if process.is_main_process:
            self._make_room(checkpoint)
            marks.begin(checkpoint)
        process.wait_for_everyone()
        self._write(*arguments)

    def _make_room(self, coming: Path):
        best = self.trainer.state.best_model_checkpoint
        old = [path for path in folder.checkpoints(self.folder) if path != coming and path.name != Path(best or "").name]
        for path in old[max(1, self.limit - 1) :] if self.limit else []:
            marks.remove(path)

    def on_save(self, args, state, control, model=None, **kwargs):
        process, checkpoint = PartialState(), self.folder / f"checkpoint-{state.global_step}"
        progress = self.progress.so_far()
        process.wait_for_everyone()
        if process.is_main_process:
            for adapter in getattr(model, "peft_config", {}).values():
                adapter.save_pretrained(checkpoint)
        parts = gather_object([marks.seal(checkpoint, lambda name: _is_of(name, process, process.is_main_process))])
        if process.is_main_process:
            files = {name: entry for part in parts for name, entry in part.items()}
            content = {"model": model.config.name_or_path, "geometry": _geometry(args), "progress": progress}
            marks.end(checkpoint, content | {"files": files})


def _is_of(name: str, process: PartialState, is_first: bool) -> bool:
    """Whether a file of a checkpoint is for this process to seal or to look through; what has no number is for the first."""
    number = NUMBER.search(name)
    return int(number[1]) % process.num_processes == process.process_index if number else is_first


def _geometry(args) -> dict:
    return {"world_size": PartialState().num_processes} | {name: getattr(args, name, None) for name in GEOMETRY}


def newest(args) -> Path | None:
    """The newest whole checkpoint in `args.output_dir`, the same on all processes. Collective.

    Damaged ones are renamed; what a kill cut short while it was written is removed. Ends the process with one line, and
    touches nothing, when there are checkpoints and none is whole.
    """
    run, process = Path(args.output_dir), PartialState()
    process.wait_for_everyone()
    there = [(path, marks.is_cut_short(path)) for path in folder.checkpoints(run)]
    there = broadcast_object_list([there])[0]  # a network file system may not yet show every node the same
    whole, damaged, cut_short = None, {}, [path for path, is_cut_short in there if is_cut_short]
    for path in (path for path, is_cut_short in there if not is_cut_short):
        fault = marks.fault(path, lambda name: _is_of(name, process, process.is_local_main_process))
        seen = gather_object([(fault, platform.node())])
        if not any(what for what, _ in seen):
            whole = path
            break
        what, where = next(one for one in seen if one[0])
        damaged[path] = what + f" (seen by {where})" * (len({node for _, node in seen}) > 1)
    if whole is None and (damaged or len(cut_short) > 1):  # the second is only begun when the first is whole
        found = "; ".join(f"{path.name}: {what}" for path, what in damaged.items()) or "all were cut short"
        fail(
            f"no checkpoint in {run} is whole ({found}). Nothing was deleted: bring one back from a copy, or start over in "
            f"another --output_dir, or after rm -r {run}"
        )
    if process.is_main_process:
        for path, what in damaged.items():
            say(f"{path} is damaged: {what}. It is kept as {_set_aside(path).name}.")
        for path in cut_short:
            say(f"{path} was cut short while it was written; removing it.")
            marks.remove(path)
    process.wait_for_everyone()
    if whole is None:
        return None
    geometry = _geometry(args)
    for name, before in read_json(whole / MARK)["geometry"].items():
        if before != geometry[name]:
            say(
                f"warning: {whole} was written with {name} {before}, this run has {geometry[name]}: weights and optimizer "
                "continue exactly, but some data is seen twice or never"
            )
    return whole


def _set_aside(path: Path) -> Path:
    """Renames a folder to one that is no checkpoint's, and that nothing deletes."""
    names = (f"damaged-{path.name}{f'.{n}' * (n > 1)}" for n in range(1, 1000))
    return path.rename(next(aside for name in names if not (aside := path.with_name(name)).exists()))
