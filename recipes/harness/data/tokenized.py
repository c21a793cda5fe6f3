"""Tokenized rows before SFTTrainer truncates and packs them: ends that are there twice, and rows of which nothing would count."""

import itertools
from collections.abc import Callable
from typing import Any

from harness.messages import UserError, print_once

from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl import SFTConfig
from trl.data_utils import is_conversational

Rows = Dataset | IterableDataset
FIRST_ROWS = 2_000  # in which rows without a loss are counted where SFTTrainer does not drop them
FIRST_ROWS_OF_STREAM = 100
IGNORED = -100  # the label of a token that does not count in the loss


def finish_rows(
    record: Callable[[Any, str, Rows, Rows], None],
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
    record(trainer, split, rows, tokenized)
    cuts = args.max_length is not None and not (is_packed and args.packing_strategy != "bfd")
    if cuts and is_training_run and (isinstance(tokenized, IterableDataset) or is_packed):
        count_first_rows_without_loss(split, tokenized, args)
    prepared = truncate_and_pack(tokenized)
    if is_packed and isinstance(prepared, Dataset):
        prepared = without_rows_without_loss(prepared)
    if cuts and isinstance(tokenized, Dataset) and not is_packed and (is_training_run or not len(prepared)):
        report_rows_without_loss(split, len(tokenized) - len(prepared), len(tokenized), "", args)
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
    report_rows_without_loss(split, without, len(labels), "first " if len(labels) == count else "", args)


def report_rows_without_loss(split: str, count: int, of: int, which: str, args: SFTConfig) -> None:
    """Prints that `count` of `of` rows have no token in the loss. Raises UserError if these are all."""
    kind = "training rows" if split == "train" else "evaluation rows"
    if count == of > 0:
        raise UserError(
            f"--max_length: none of the {which}{of:,} {kind} has a token in the loss within {args.max_length} tokens: the "
            "answers begin later: pass a larger --max_length. ./launch.sh --preview shows how long the rows are"
        )
    if count:
        print_once(
            f"warning: {count:,} of the {which}{of:,} {kind} are not used: no token within --max_length {args.max_length} counts "
            "in the loss, because the answer begins later."
        )
