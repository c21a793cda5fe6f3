"""Tiny stand-ins for a rehearsal: a two-layer model of the same architecture, real text in the same columns.

The text is Python's own documentation (`pydoc_data.topics`), on every machine that has Python. Stand-ins are made
once per working folder, before any process starts, under `outputs/tiny/.stand-ins`.
"""

import contextlib
import hashlib
import os
import shutil
import textwrap
from pathlib import Path

from harness.launched import fail, say
from harness.rehearsal import tiny_data, tiny_model

FOLDER = Path("outputs/tiny/.stand-ins")

# What a rehearsal runs with unless a flag says otherwise: the recipe's own numbers are for days on GPUs.
NUMBERS = {
    "max_steps": 30,
    "max_length": 128,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "global_batch_size": None,  # follows from the two above
    "learning_rate": 1e-2,
    "warmup_steps": 4,
    "logging_first_step": True,
    "logging_steps": 5,
    "eval_steps": 15,
    "save_steps": 15,
    "max_eval_samples": 16,
    "report_to": "none",
}


def prepare(data, model):
    """Makes the stand-ins for `data` and `model`."""
    import datasets

    if set("[]*?") & set(str(FOLDER.absolute())):
        fail(f"`datasets` cannot read files below {Path.cwd()}: it takes [ ] * ? for a pattern; work in another folder")
    datasets.disable_progress_bars()
    for folder, make in (
        (model_folder(model), lambda draft: tiny_model.make(model.model_name_or_path, model.model_revision, draft)),
        (data_folder(data), lambda draft: tiny_data.make(data, draft)),
    ):
        if not folder.is_dir():
            draft = folder.with_name(f"{folder.name}.{os.getpid()}")
            try:
                make(draft)
                with contextlib.suppress(OSError):  # another rehearsal may have been first
                    draft.rename(folder)
            except NotADirectoryError as error:
                fail(f"{FOLDER} cannot be made: {error.filename} is in the way")
            finally:
                shutil.rmtree(draft, ignore_errors=True)


def announce(data, args, model):
    """Says what the stand-ins replace."""
    numbers = [f"{name} {number}" for name, number in NUMBERS.items() if getattr(args, name, ...) == number]
    notice = (
        f"This is a rehearsal. The model is not {model.model_name_or_path} but a two-layer model of its architecture with "
        f"random weights; the data is {tiny_data.what(data.dataset_name)}. "
        f"Numbers that are not the recipe's: {', '.join(numbers)}."
    )
    say(textwrap.fill(notice, 110))
    known = tiny_model.family_of(model.model_name_or_path)
    if not known and getattr(args, "packing", False) and "flash" not in (model.attn_implementation or ""):
        tiny_model.check_packing(model_folder(model))


def substitute(data, args, model):
    """Puts the stand-ins in the place of what the recipe names."""
    model.model_name_or_path, data.dataset_name = str(model_folder(model)), str(data_folder(data))
    model.model_revision = "main"
    if getattr(args, "model_init_kwargs", None):
        args.model_init_kwargs = {**args.model_init_kwargs, "revision": "main"}


def model_folder(model) -> Path:
    return _folder(model.model_name_or_path, model.model_revision)


def data_folder(data) -> Path:
    path = Path(data.dataset_name).expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path] * path.exists()
    return _folder(data.dataset_name, f"{data.dataset_config}{[(file.name, file.stat().st_mtime_ns) for file in files]}")


def _folder(name: str, variant: str | None) -> Path:
    """A folder of its own for every name, variant and version of what makes it."""
    sources = [path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("tiny_*"))]
    digest = hashlib.sha256(f"{name} {variant} {sources}".encode()).hexdigest()
    return FOLDER.absolute() / f"{name.strip('/').replace('/', '--')}-{digest[:8]}"
