"""Checkpoints that are whole or not there. transformers writes a checkpoint in pieces and resumes from half of one."""

import shutil
from pathlib import Path

from accelerate import PartialState
from transformers import TrainerCallback

from harness.folder import read_json, write_json
from harness.launched import say

MARK = "complete.json"


class MarkComplete(TrainerCallback):
    """Marks a checkpoint once every rank has written its part."""

    def on_save(self, args, state, control, model=None, **kwargs):
        process = PartialState()
        process.wait_for_everyone()
        if process.is_main_process:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            for adapter in getattr(model, "peft_config", {}).values():
                adapter.save_pretrained(folder)
            write_json(folder / MARK, {"world_size": process.num_processes, "model": model.config.name_or_path})


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`."""
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{MARK}")]
    return max(whole, key=_step, default=None)


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


def newest(folder: Path) -> Path | None:
    """The checkpoint to continue from. Later ones, cut short by a kill, are removed."""
    process, whole = PartialState(), latest(folder)
    process.wait_for_everyone()
    if process.is_main_process:
        for path in folder.glob("checkpoint-*"):
            if not (path / MARK).is_file():
                say(f"{path} was cut short while it was written; removing it.")
                shutil.rmtree(path)
    process.wait_for_everyone()
    if whole is None:
        return None
    processes = read_json(whole / MARK)["world_size"]
    if processes != process.num_processes:
        say(
            f"warning: {whole} was written by {processes} processes, this run has {process.num_processes}: "
            "weights and optimizer continue exactly, the order of the data does not"
        )
    return whole
