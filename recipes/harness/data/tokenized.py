"""Tokenized rows before a trainer cuts, drops and packs them: ends that are there twice, rows of which nothing would count."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.batches import is_packed
from harness.folder import DATA, read_json
from harness.messages import UserError, print_once

from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer
from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig
from trl.data_utils import is_conversational

Rows = Dataset | IterableDataset
FIRST_ROWS, FIRST_ROWS_OF_STREAM = 2_000, 100  # in which rows without a loss are counted where SFTTrainer does not drop them
IGNORED = -100  # the label of a token that does not count in the loss


def finish_rows(
    record: Callable[[Any, str, Rows, Rows], None] | None,
    is_training_run: bool,
    trainer: Any,
    split: str,
    rows: Rows,
    tokenized: Rows,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    args: SFTConfig,
    is_packed: bool,
    truncate_and_pack: Callable[[Rows], Rows],
) -> Rows:
    """The rows to train on, or to evaluate on. See `prepare_rows_in_two_steps` in compat/trl.py.

    `record(trainer, split, rows, tokenized)` is called with the tokenized rows. Without `is_training_run`, rows without a
    token in the loss are only an error if there are no others.
    """
    if isinstance(tokenizer, ProcessorMixin):  # of a model that reads images too
        tokenizer = tokenizer.tokenizer
    tokenized = without_double_ends(rows, tokenized, tokenizer)
    if record:
        record(trainer, split, rows, tokenized)
    if is_packed and args.packing_strategy == "bfd" and is_training_run:  # which cuts rows, and drops none
        count_first_rows_without_loss(split, tokenized, args)
    prepared = truncate_and_pack(tokenized)
    if is_packed and isinstance(prepared, Dataset):
        prepared = without_rows_without_loss(prepared)
    return prepared


def without_double_ends(rows: Rows, tokenized: Rows, tokenizer: PreTrainedTokenizerBase) -> Rows:
    """Texts have the token that begins a text and the one that ends it once.

    SFTTrainer writes the EOS token behind every text, and some tokenizers add it too. Some texts begin with a BOS token that
    tokenizers add. Conversations are tokenized without such tokens: the chat template has them.
    """
    first, last = added_tokens(tokenizer)
    if (first is None and last is None) or is_conversational(next(iter(rows))):
        return tokenized
    begin = [first, first]
    if last is None and not any(row["input_ids"][:2] == begin for row in tokenized.take(FIRST_ROWS_OF_STREAM)):
        return tokenized  # as most texts are: no pass over all of them is needed
    settings = {"fn_kwargs": {"first": first, "last": last}}
    if isinstance(tokenized, IterableDataset):
        return tokenized.map(_drop_double_ends, **settings)
    with PartialState().main_process_first():
        return tokenized.map(_drop_double_ends, desc="Dropping double end tokens", **settings)


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """The BOS token and the EOS token, if the tokenizer itself adds them to a text; else None."""
    text = "a"
    tokens, bare = tokenizer(text)["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"]
    has_first = tokens[:1] == [tokenizer.bos_token_id] != bare[:1]
    has_last = tokens[-1:] == [tokenizer.eos_token_id] != bare[-1:]
    return tokenizer.bos_token_id if has_first else None, tokenizer.eos_token_id if has_last else None


def _drop_double_ends(row: dict, first: int | None, last: int | None) -> dict:
    ids = row["input_ids"]
    start = int(first is not None and ids[:2] == [first, first])
    end = len(ids) - int(last is not None and ids[-2:] == [last, last])
    return {name: row[name][start:end] for name in ("input_ids", "labels")}


def without_rows_without_loss(packed: Dataset) -> Dataset:
    """The rows that have a token in the loss, all if none has: a piece of a long conversation before its answer has none.

    Nothing is learned from the others, and in the mean of an evaluation each would count as a loss of 0.
    """
    with PartialState().main_process_first():
        kept = packed.filter(_has_loss, input_columns=["labels"], desc="Dropping rows without a token in the loss")
    return kept if len(kept) else packed


def _has_loss(labels: list[int]) -> bool:
    return any(label != IGNORED for label in labels)


def count_first_rows_without_loss(split: str, tokenized: Rows, args: SFTConfig) -> None:
    """Prints how many of the first rows have no token in the loss after truncation. Raises UserError if all are so."""
    count = FIRST_ROWS if isinstance(tokenized, Dataset) else FIRST_ROWS_OF_STREAM
    part = slice(None, args.max_length) if args.truncation_mode == "keep_start" else slice(-args.max_length, None)
    labels = [row["labels"][part] for row in itertools.islice(tokenized.select_columns(["labels"]), count)]
    without = sum(all(label == IGNORED for label in of_row) for of_row in labels)
    print_dropped_rows(
        split,
        without,
        len(labels),
        "first " if len(labels) == count else "",
        f"no token of an answer is within --max_length {args.max_length}",
    )


def print_dropped_rows(split: str, count: int, of: int, which: str, reason: str) -> None:
    """Prints that `count` of `of` rows are not used. Raises UserError if these are all."""
    kind = "training rows" if split == "train" else "evaluation rows"
    if count == of > 0:
        raise UserError(f"--max_length: none of the {which}{of:,} {kind} can be used: {reason}: pass a larger --max_length")
    if count:
        print_once(f"warning: {count:,} of the {which}{of:,} {kind} are not used: {reason}.")


def report_dropped_rows(trainer: Trainer) -> None:
    """Prints how many of the rows that `load` has returned a trainer does not train on, for example because they are too long.

    Only TRL's trainers drop rows. For others a recipe tokenizes, and may make several rows of one, or one of several.
    Raises UserError if these are all.
    """
    loaded, args = read_json(Path(trainer.args.output_dir, DATA)).get("loaded_rows"), trainer.args
    drops_rows = isinstance(args, SFTConfig | DPOConfig | KTOConfig | RewardConfig) and not is_packed(args)
    if not loaded or not drops_rows or not isinstance(trainer.train_dataset, Dataset):
        return
    missing = loaded - len(trainer.train_dataset)
    if missing > 0:
        limit = f" (--max_length {args.max_length})" if getattr(args, "max_length", None) else ""
        reason = f"the recipe or the trainer has dropped them{limit}"
        if missing == loaded:
            raise UserError(
                f"--max_length: none of the {loaded:,} training rows can be used: {reason}: pass a larger --max_length"
            )
        print_once(f"warning: {missing:,} of {loaded:,} training rows are not used: {reason}.")
