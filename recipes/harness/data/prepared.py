"""The files of a stream that --prepare has downloaded: where they are, and whether they are enough for a run."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import NotRequired

from harness.batches import ASSUMED_LENGTH, is_packed, length_of_rows, rows_of_step
from harness.data import reading
from harness.data.sources import DataSettings, Source
from harness.folder import read_json
from harness.json_types import Types
from harness.messages import UserError, print_once

from huggingface_hub.constants import HF_HOME, HF_HUB_OFFLINE
from transformers import TrainingArguments

PREPARED = "stream.json"  # next to the files: for how many tokens, and samples, they are enough
# `samples` is of a run with --max_samples.
PREPARED_TYPES: Types = {"files": int, "of": int, "tokens": float, "packing": bool, "samples": NotRequired[int]}


def tokens_of_run(source: Source, max_tokens: int | None, training_args: TrainingArguments, processes: int) -> int:
    """How many tokens a run reads of a dataset. `max_tokens`: of the run, if this was given."""
    length = length_of_rows(training_args) or ASSUMED_LENGTH
    tokens = max_tokens or training_args.max_steps * rows_of_step(training_args, processes) * length
    return math.ceil(tokens * source.weight)


def prepared_folder(source: Source) -> Path:
    """Where --prepare keeps the files of a stream, in a folder for every number of files."""
    kind = repr([source.name, source.config, source.train_split])
    digest = hashlib.sha256(kind.encode()).hexdigest()[:8]
    return Path(HF_HOME, "streams", f"{source.name.replace('/', '--')[-80:]}-{digest}")


def use_prepared_files(
    data: DataSettings, max_tokens: int | None, training_args: TrainingArguments, processes: int
) -> DataSettings:
    """Settings whose streams are read from the files that --prepare has downloaded, if they are enough for this run."""
    if not data.streaming:
        return data
    return data.change_each(lambda source: _with_prepared_files(data, source, max_tokens, training_args, processes))


def _with_prepared_files(
    data: DataSettings, source: Source, max_tokens: int | None, training_args: TrainingArguments, processes: int
) -> Source:
    if reading.is_local(source.name):
        return source
    prepared = [(read_json(path, PREPARED_TYPES), path.parent) for path in prepared_folder(source).glob(f"*/{PREPARED}")]
    for record, folder in sorted(prepared, key=lambda pair: pair[0]["files"]):
        if data.keeps_samples:
            is_enough = data.samples_of(source) <= record.get("samples", 0)
        else:
            has_tokens = tokens_of_run(source, max_tokens, training_args, processes) <= record["tokens"]
            is_enough = has_tokens and record["packing"] == is_packed(training_args)
        if is_enough or record["files"] == record["of"]:
            print_once(f"{source.name}: using {record['files']} of its {record['of']} files, from --prepare.")
            return replace(source, name=str(folder))
    if HF_HUB_OFFLINE:
        amount = "too few" if prepared else "none"
        raise UserError(
            f"--dataset_name: {source.name} is a stream, {amount} of its files are on this machine, and the Hub cannot be "
            "reached: run ./launch.sh --prepare with the same flags on a machine with internet"
        )
    return source
