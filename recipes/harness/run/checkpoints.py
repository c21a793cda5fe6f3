"""Checkpoints that are whole or not there. transformers writes a checkpoint in pieces and resumes from half of one."""

import shutil
from pathlib import Path

from harness.folder import MARK, latest, read_json, write_json
from harness.launched import say

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

# What decides which data a step sees: a run that goes on with other values sees some data twice or never.
GEOMETRY = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "packing", "seed")


class MarkComplete(TrainerCallback):
    """Marks a checkpoint once every rank has written its part."""

    def __init__(self, progress):
        self.progress = progress

    def on_save(self, args, state, control, model=None, **kwargs):
        process = PartialState()
        progress = self.progress.so_far()
        process.wait_for_everyone()
        if process.is_main_process:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            for adapter in getattr(model, "peft_config", {}).values():
                adapter.save_pretrained(folder)
            geometry = {"world_size": process.num_processes} | {name: getattr(args, name, None) for name in GEOMETRY}
            write_json(folder / MARK, {"model": model.config.name_or_path, "geometry": geometry, "progress": progress})


def newest(args) -> Path | None:
    """The checkpoint to continue from in `args.output_dir`. Later ones, cut short by a kill, are removed."""
    folder, process = Path(args.output_dir), PartialState()
    process.wait_for_everyone()
    whole = broadcast_object_list([latest(folder)])[0]  # a network file system may not yet show every node the same
    if process.is_main_process:
        for path in folder.glob("checkpoint-[0-9]*"):
            if not (path / MARK).is_file():
                say(f"{path} was cut short while it was written; removing it.")
                shutil.rmtree(path)
    process.wait_for_everyone()
    if whole is None:
        return None
    geometry = {"world_size": process.num_processes} | {name: getattr(args, name, None) for name in GEOMETRY}
    for name, before in read_json(whole / MARK)["geometry"].items():
        if before != geometry[name]:
            say(
                f"warning: {whole} was written with {name} {before}, this run has {geometry[name]}: weights and optimizer "
                "continue exactly, but some data is seen twice or never"
            )
    return whole
