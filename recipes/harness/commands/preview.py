"""What the model will see: the packed rows, which tokens count in the loss, lengths, what is truncated. launch.sh calls it:

`python -m harness.commands.preview [--tiny] RECIPE.py [--json] [--full [NUMBER]] [--flag value …]`.

The recipe makes the rows itself: it runs until its trainer is built, with a model of two layers and the first rows of each split.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.batches import IGNORED, is_packed, length_of_rows, rows_of_step, too_few_steps
from harness.commands import arguments
from harness.commands.documents import Document, documents_of
from harness.commands.rewards import print_rewards, score
from harness.data.images import size_of, tokens_of_size, with_one_token_each
from harness.messages import UserError, exit_on_user_error, last_line, plural, print_once
from harness.runs import Run, StartedRecipe
from harness.start.environment import hide_library_warnings, set_environment
from harness.start.recipes import build_trainer

BATCHES = 100
SHOWN_ROWS = 2
SHOWN_DOCUMENTS = 3  # of a row
SHOWN_START = 300  # tokens of a long document
SHOWN_END = 100


def main(*words: str) -> None:
    parsed = arguments.preview().read(words)
    set_environment(parsed.tiny)
    from harness.data.conversion import MAX_LETTERS
    from harness.run import generation
    from harness.run.session import report_dropped_rows

    messages = sys.stderr if parsed.json else sys.stdout  # stdout is for the JSON alone
    with tempfile.TemporaryDirectory(prefix="preview-") as output_dir, contextlib.redirect_stdout(messages):
        preview = Preview(str(parsed.recipe), [*parsed.flags, "--output_dir", output_dir], parsed.tiny)
        if parsed.tiny:
            print_once(
                "\nThis is the preview of a rehearsal, whose dataset is tiny, or has every text cut to "
                f"{MAX_LETTERS} characters: leave out --tiny to see the rows and numbers of the run."
            )
        report_dropped_rows(preview.trainer)
        with rows_of_trainer(parsed.recipe):
            reason = why_no_documents(preview.trainer)
            if generation.writes_answers(preview.trainer) and preview.data.get("is_complete", True):
                generation.check_prompts(preview.trainer)
            if not parsed.json and not reason and parsed.full:
                print_document(preview, parsed.full)
            elif not parsed.json and not reason:
                print_rows(preview)
            numbers = other_rows(preview, reason) if reason else summarize(preview)
        if hasattr(preview.trainer, "reward_funcs"):
            numbers |= score(preview.trainer, parsed.recipe)
        names = {"recipe": parsed.recipe.stem, "dataset": preview.started.run.data.display_name, "data": preview.data}
    if parsed.json:
        print(json.dumps(names | numbers, indent=2))
    elif reason:
        print_other_rows(numbers)
        if "rewards" in numbers:
            print_rewards(numbers["rewards"], numbers["rewards_not_compared"])
    else:
        print_numbers(names | numbers)
    for problem in numbers.get("warnings", []):
        print(f"warning: {problem}", file=sys.stderr)


@contextlib.contextmanager
def rows_of_trainer(recipe: Path) -> Iterator[None]:
    """Raises UserError, in one line, if the trainer's dataset or collator fails, as it would in the first step of a run."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {last_line(error)}"
        raise UserError(
            f"{recipe.name}: the trainer makes no batch of its rows: {reason} (--debug shows the traceback)"
        ) from error


class PreviewedRecipe(StartedRecipe):
    """A recipe that builds its trainer with a model of two layers, and the first rows of each split."""

    def prepare(self, arguments: tuple[Any, Any, Any]) -> None:
        from harness.data.loading import PREVIEWED_ROWS
        from harness.model.loading import load_small_models
        from harness.run.prompts import SeenRows
        from harness.start import preparing

        run = dataclasses.replace(self.run, data=self.run.data.with_each(first_rows=PREVIEWED_ROWS), seen=SeenRows())
        preparing.check_all_arguments(run, arguments)
        preparing.set_model_options(run, arguments)
        preparing.check_model_and_dataset(run, arguments, with_weights=False)
        run = preparing.replace_model_and_dataset(run, arguments)
        self.run = preparing.prepare_process(run, arguments)
        load_small_models()


class Preview:
    """Runs a recipe until it has built its trainer, with a model of two layers and the first rows of each split."""

    def __init__(self, recipe: str, flags: list[str], tiny: bool = False) -> None:
        """Changes this process."""
        from harness.folder import DATA, read_json

        hide_library_warnings()
        self.started = PreviewedRecipe(Run(recipe, tiny=tiny, any_config=True, on_cpu=True))
        build_trainer(self.started, flags)
        self.trainer = self.started.trainer
        self.whole = self.started.run.seen.tokens  # of any length, before cutting and packing; None: the recipe tokenizes itself
        self.data = read_json(Path(self.trainer.args.output_dir, DATA))  # what `load` has read and skipped; {} without `load`

    @property
    def tokenizer(self) -> Any:
        return getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)

    @functools.cached_property
    def first_rows(self) -> list[dict]:
        """The first rows to train on, as the model sees them."""
        from harness.data.loading import PREVIEWED_ROWS

        return list(itertools.islice(self.trainer.train_dataset, PREVIEWED_ROWS))

    @functools.cached_property
    def documents(self) -> list[Document]:
        """The documents of the first rows to train on, whole ones if the recipe leaves truncating to the trainer."""
        from harness.data.loading import PREVIEWED_ROWS

        documents = []
        for row in self.first_rows if self.whole is None else itertools.islice(self.whole, PREVIEWED_ROWS):
            documents += documents_of(row)
        return documents

    @property
    def has_pairs(self) -> bool:
        """Whether a row is a prompt with answers: the collator writes the prompt in front of each, and cuts them."""
        return "prompt_ids" in self.first_rows[0]

    @property
    def has_images(self) -> bool:
        return "images" in self.first_rows[0]

    @property
    def has_whole_documents(self) -> bool:
        """Whether `documents` are those before truncation."""
        return self.whole is not None or self.has_pairs

    def as_seen(self, row: dict) -> list[Document]:
        """The documents of a row to train on, as the model sees them."""
        length = length_of_rows(self.trainer.args) if self.has_pairs else None
        return [(ids[:length], labels[:length]) for ids, labels in documents_of(row)]

    def cut_tokens(self) -> list[int]:
        """How many tokens --max_length cuts off each document. Other strategies of packing than bfd split documents instead."""
        args = self.trainer.args
        length = length_of_rows(args)
        if not length or not self.has_whole_documents or (is_packed(args) and args.packing_strategy != "bfd"):
            return [0] * len(self.documents)
        if self.has_images:  # such rows are left out
            return [len(ids) if len(ids) > length else 0 for ids, _ in self.documents]
        return [max(0, len(ids) - length) for ids, _ in self.documents]

    def epoch(self) -> tuple[float, float] | tuple[None, None]:
        """Rows and tokens of an epoch, estimated from the first rows; None if nothing says how many rows there are."""
        from harness.data.loading import PREVIEWED_ROWS, count_training_rows
        from harness.data.tokenization import has_loss

        data = self.started.run.data
        documents = self.documents
        is_known = self.data.get("is_complete") and "datasets" not in self.data  # a mixture reads some rows more often
        total = self.data["trained_rows"] if is_known else count_training_rows(data)
        if not total and data.keeps_samples:
            total = data.max_samples
        if not total:
            return None, None
        keeps_start = getattr(self.trainer.args, "truncation_mode", "keep_start") == "keep_start"
        kept = 0
        for (ids, labels), cut in zip(documents, self.cut_tokens(), strict=True):
            seen = labels[: len(ids) - cut] if keeps_start else labels[cut:]
            if self.whole is None or has_loss(seen):  # others are dropped
                kept += len(seen)
        rows = len(self.first_rows) if self.has_pairs else len(documents)
        count = min(total * rows / min(total, PREVIEWED_ROWS), data.max_samples or math.inf)
        tokens = count * kept / rows
        if self.has_pairs:
            return count, tokens
        return tokens / statistics.mean(len(row["input_ids"]) for row in self.first_rows), tokens


def why_no_documents(trainer: Any) -> str:
    """Why a trainer's rows are not documents for a causal language model, "" if they are."""
    from harness.run import generation
    from harness.run.parameters import base_of, can_generate

    model = base_of(trainer.model)
    row = next(iter(trainer.train_dataset), None)
    if row is None:
        raise UserError("--dataset_name: no row is left to train on: see what the recipe drops, or pass a larger --max_length")
    if not can_generate(model) or model.config.is_encoder_decoder:
        return f"{type(model).__name__} is not a causal language model"
    if generation.writes_answers(trainer):
        return "the answers are generated"
    if not {"input_ids", "prompt_ids"} & row.keys():
        return "the rows have no column input_ids"
    return "" if trainer.processing_class else "the trainer has no tokenizer"


def other_rows(preview: Preview, reason: str) -> dict[str, Any]:
    """The first rows as the trainer gets them, and the shapes of the first micro-batch. `reason`: see `why_no_documents`."""
    from harness.run import generation

    rows = []
    for row in itertools.islice(preview.trainer.train_dataset, SHOWN_ROWS):
        if generation.writes_answers(preview.trainer):
            row = row | {"prompt_ids": generation.tokens_of_prompt(preview.trainer, row["prompt"])}
        rows.append({name: value_as_text(name, value, preview.tokenizer) for name, value in row.items()})
    batch = next(iter(preview.trainer.get_train_dataloader()))
    shapes = {}
    if isinstance(batch, Mapping):  # else the rows themselves, of a trainer that makes its batches later
        for name, value in batch.items():
            if hasattr(value, "shape"):
                shapes[name] = list(value.shape)
    return {
        "rows": rows,
        "batch": shapes,
        "not_shown": f"which tokens count in the loss, lengths and what is truncated: {reason}",
    }


def print_other_rows(numbers: dict[str, Any]) -> None:
    """Prints what `other_rows` has found."""
    for row in numbers["rows"]:
        print_once("\n--- a row as the trainer gets it")
        for name, text in row.items():
            print_once(f"{name}: {text}")
    batch = ", ".join(f"{name} {shape}" for name, shape in numbers["batch"].items())
    print_once(f"\nbatch        {batch or 'of the rows themselves'}")
    print_once(f"not shown    {numbers['not_shown']}")


def value_as_text(name: str, value: Any, tokenizer: Any) -> str:
    """A value of a row for a person: tokens as text, a long value without its end."""
    is_tokens = name.endswith(("ids", "labels")) and isinstance(value, list) and all(type(token) is int for token in value)
    if is_tokens and tokenizer is not None and hasattr(tokenizer, "decode"):
        return f"{len(value):,} tokens: {textwrap.shorten(tokenizer.decode([t for t in value if t >= 0]), 640)}"
    return textwrap.shorten(str(value), 160)


def print_rows(preview: Preview) -> None:
    """Prints the first sequences; of a packed one, the first documents."""
    print_once("\nThe first sequences as the model sees them: tokens in ⟦ ⟧ count in the loss; special tokens are marked ◆.")
    for row in preview.first_rows[:SHOWN_ROWS]:
        documents = preview.as_seen(row)
        title = f"a prompt with {plural(len(documents), 'answer')}"
        if "label" in row:  # of KTO
            title = f"a prompt with a {'good' if row['label'] else 'bad'} answer"
        if not preview.has_pairs:
            title = f"a sequence of {len(row['input_ids']):,} tokens, {plural(len(documents), 'document')}"
        print_once(f"\n--- {title}")
        for image in row.get("images", []):
            width, height = size_of(image)
            tokens = tokens_of_size(preview.trainer.processing_class, width, height)
            print_once(f"image {image['path'] or 'of the dataset'}: {width:,} x {height:,} pixels, {tokens:,} tokens")
        painted = []
        for ids, labels in documents[:SHOWN_DOCUMENTS]:
            ids, labels = with_one_token_each(ids, labels, preview.trainer.processing_class)
            painted.append(paint(preview.tokenizer, ids, labels))
        print_once("\n---\n".join(painted))
    print_once("")


def print_document(preview: Preview, number: int) -> None:
    """Prints a document completely."""
    documents = preview.documents
    if not 0 < number <= len(documents):
        raise UserError(f"--full {number}: the preview has {plural(len(documents), 'document')}")
    ids, labels = documents[number - 1]
    print_once(f"\n--- document {number} of {len(documents)}, {len(ids):,} tokens")
    ids, labels = with_one_token_each(ids, labels, preview.trainer.processing_class)
    print_once(f"{paint(preview.tokenizer, ids, labels, is_complete=True)}\n")


def paint(tokenizer: Any, ids: list[int], labels: list[int], is_complete: bool = False) -> str:
    """A document as text: tokens in the loss in ⟦ ⟧, special ones with ◆. A long one without its middle.

    `is_complete`: also the middle.
    """
    if len(ids) > 2 * (SHOWN_START + SHOWN_END) and not is_complete:
        hidden = f"\n… {len(ids) - SHOWN_START - SHOWN_END:,} tokens, shown by --full …\n"
        start = paint(tokenizer, ids[:SHOWN_START], labels[:SHOWN_START])
        return start + hidden + paint(tokenizer, ids[-SHOWN_END:], labels[-SHOWN_END:])
    special = set(tokenizer.all_special_ids)
    for index, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special.add(index)
    text = ""
    for is_in_loss, stretch in itertools.groupby(zip(ids, labels, strict=True), lambda pair: pair[1] != IGNORED):
        part = ""
        for is_special, pairs in itertools.groupby(stretch, lambda pair: pair[0] in special):
            tokens = [token for token, _ in pairs]
            if is_special:
                part += "".join(f"◆{tokenizer.decode(token)}" for token in tokens)
            else:
                part += tokenizer.decode(tokens)
        text += f"⟦{part}⟧" if is_in_loss else part
    return text


def summarize(preview: Preview) -> dict[str, Any]:
    """The numbers of a preview, None for what is not known: lengths in tokens; shares, from 0 to 1, of tokens or documents."""
    lengths = sorted(len(ids) for ids, _ in preview.documents)
    cut = preview.cut_tokens()
    sequences, tokens = preview.epoch()
    is_known = preview.has_whole_documents
    args = preview.trainer.args
    few = ""
    if sequences and args.max_steps <= 0:
        few = too_few_steps(math.ceil(args.num_train_epochs * sequences / rows_of_step(args, 1)))
    labels = []
    tokens_of_batches = 0
    tokens_in_loss = 0
    for batch in itertools.islice(preview.trainer.get_train_dataloader(), BATCHES):
        labels.append(labels_of(batch))
        tokens_of_batches += count_tokens(batch)
        tokens_in_loss += int((labels[-1] != IGNORED).sum())
    return {
        "documents": len(lengths),
        "has_images": preview.has_images,
        "lengths": {
            "shortest": lengths[0],
            "median": lengths[len(lengths) // 2],
            "percentile_90": lengths[len(lengths) * 9 // 10],
            "longest": lengths[-1],
        },
        "truncated_documents": sum(map(bool, cut)) / len(cut) if is_known else None,
        "truncated_tokens": sum(cut) / sum(lengths) if is_known else None,
        "in_the_loss": tokens_in_loss / tokens_of_batches,
        "unit": "rows" if preview.has_pairs else "sequences",
        "sequences_per_epoch": sequences and math.ceil(sequences),
        "tokens_per_epoch": tokens and round(tokens),
        "warnings": [*find_problems(preview, labels), *filter(None, [few])],
    }


def labels_of(batch: dict[str, Any]) -> Any:
    """The labels of a micro-batch, IGNORED where a token does not count in the loss. A batch of pairs has a mask instead."""
    if "labels" in batch:
        return batch["labels"]
    return batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)


def count_tokens(batch: dict[str, Any]) -> int:
    """The tokens of a micro-batch without its padding, which only a batch with an attention mask has."""
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()


def print_numbers(numbers: dict[str, Any]) -> None:
    """Prints what `summarize` has found, a line for each number, and which rows `load` has read."""
    data = numbers["data"]
    lengths = numbers["lengths"]
    if data:
        rows = f"{'' if data['is_complete'] else 'of the first '}{data['rows']:,}"
        print_once(f"rows         {rows}, {data['skipped_rows']:,} skipped, {data['held_out']:,} held out for evaluation")
    if data and data["ignored_columns"]:
        print_once(f"ignored      columns {', '.join(data['ignored_columns'])}")
    print_once(
        f"lengths      {lengths['shortest']:,} to {lengths['longest']:,} tokens; median {lengths['median']:,}, 90th percentile "
        f"{lengths['percentile_90']:,} ({plural(numbers['documents'], 'document')})"
    )
    if numbers["truncated_documents"] is None:
        print_once("truncated    not known: the recipe truncates and packs its rows itself")
    else:
        what = "left out " if numbers["has_images"] else "truncated"
        print_once(
            f"{what}    {numbers['truncated_documents']:.1%} of the documents, {numbers['truncated_tokens']:.1%} of the tokens"
        )
    print_once(f"in the loss  {numbers['in_the_loss']:.1%} of the tokens")
    if numbers["sequences_per_epoch"]:
        print_once(
            f"one epoch    about {numbers['sequences_per_epoch']:,} {numbers['unit']}, {numbers['tokens_per_epoch']:,} tokens"
        )
    else:
        print_once("one epoch    unknown: the dataset does not say how many rows it has")


def find_problems(preview: Preview, labels: list[Any]) -> list[str]:
    """What would train without an error, and teach the model not to stop. `labels`: of each micro-batch."""
    from harness.run.samples import end_tokens

    ends = end_tokens(preview.trainer.model, preview.tokenizer)
    if any(ends & set(part.unique().tolist()) for part in labels):
        return []
    names = ", ".join(preview.tokenizer.convert_ids_to_tokens(sorted(ends)))
    return [
        f"no EOS token ({names}) counts in the loss: the model does not learn to stop. The chat template may end answers with "
        "another token, the EOS token may also be the padding token, or --max_length may cut it off"
    ]


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
