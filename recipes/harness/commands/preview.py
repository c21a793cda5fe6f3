"""What the model will see: the packed rows, which tokens count in the loss, lengths, what is truncated. launch.sh calls it:

`python -m harness.commands.preview [--tiny] RECIPE.py [--json] [--flag value …]`.

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
from pathlib import Path
from typing import Any

from harness.commands import parsers
from harness.messages import UserError, exit_on_user_error, one_message, plural, print_once
from harness.start.environment import hide_library_warnings, set_environment

if __name__ == "__main__":
    with exit_on_user_error():
        set_environment("--tiny" in sys.argv)  # before the libraries are imported, which read it

from harness.commands.prepare import PreparedRecipe
from harness.commands.rewards import print_rewards, score
from harness.data.conversion import MAX_LETTERS
from harness.data.images import size_of, tokens_of_size, with_one_token_each
from harness.data.loading import PREVIEWED_ROWS, count_training_rows
from harness.data.reading import is_packed, length_of_rows
from harness.data.turns import IGNORED
from harness.folder import DATA, read_json
from harness.run import generation
from harness.run.generation import Document, documents_of, end_tokens, why_no_text
from harness.run.training import report_dropped_rows
from harness.runs import Run
from harness.start.recipes import build_trainer

BATCHES = 100
SHOWN_ROWS = 2
SHOWN_DOCUMENTS = 3  # of a row
SHOWN_TOKENS = 400  # of a document


@one_message()
def main(*words: str) -> None:
    parsed = parsers.preview().read(words)
    messages = sys.stderr if parsed.json else sys.stdout  # stdout is for the JSON alone
    with tempfile.TemporaryDirectory(prefix="preview-") as output_dir, contextlib.redirect_stdout(messages):
        preview = Preview(str(parsed.recipe), [*parsed.flags, "--output_dir", output_dir], parsed.tiny)
        trainer = preview.trainer
        if parsed.tiny:
            print_once(
                "\nThis is the preview of a rehearsal, whose dataset is tiny, or has every text cut to "
                f"{MAX_LETTERS} characters: leave out --tiny to see the rows and numbers of the run."
            )
        report_dropped_rows(trainer)
        found = {"recipe": parsed.recipe.stem, "dataset": preview.started.run.data.display_name, "data": preview.data}
        reason = why_no_documents(trainer)
        if generation.writes_answers(trainer) and preview.data.get("is_complete", True):
            generation.check_prompts(trainer)
        if reason:
            found |= {"rows": other_rows(preview), "not_shown": f"which tokens count in the loss, and lengths: {reason}"}
            print_once(f"\nnot shown    {found['not_shown']}")
        else:
            found |= summarize(preview)
            print_rows(preview)
            print_numbers(found)
        if hasattr(trainer, "reward_funcs"):
            found |= score(trainer, parsed.recipe)
            print_rewards(found["rewards"], found["rewards_not_compared"])
    if parsed.json:
        print(json.dumps(found, indent=2))
    for problem in found.get("warnings", []):
        print(f"warning: {problem}", file=sys.stderr)


class PreviewedRecipe(PreparedRecipe):
    """A recipe that builds its trainer with a model of two layers, and the first rows of each split."""

    downloads = False

    def prepare(self) -> None:
        self.run = dataclasses.replace(self.run, data=self.run.data.with_each(first_rows=PREVIEWED_ROWS))
        super().prepare()


class Preview:
    """Runs a recipe until it has built its trainer, with a model of two layers and the first rows of each split."""

    def __init__(self, recipe: str, flags: list[str], tiny: bool = False) -> None:
        """Changes this process."""
        hide_library_warnings()
        self.started = PreviewedRecipe(Run(recipe, tiny=tiny, any_config=True, on_cpu=True))
        build_trainer(self.started, flags)
        self.trainer = self.started.trainer
        self.tokenizer = getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)
        self.whole = self.started.uncut.tokens  # of any length, before cutting and packing; None: the recipe tokenizes itself
        self.data = read_json(Path(self.trainer.args.output_dir, DATA))  # what `load` has read and skipped; {} without `load`

    @functools.cached_property
    def first_rows(self) -> list[dict]:
        """The first rows to train on, as the trainer has them."""
        return list(itertools.islice(self.trainer.train_dataset, PREVIEWED_ROWS))

    @functools.cached_property
    def documents(self) -> list[Document]:
        """The documents of the first rows to train on, whole ones if the recipe leaves truncating to the trainer."""
        documents = []
        for row in self.first_rows if self.whole is None else itertools.islice(self.whole, PREVIEWED_ROWS):
            documents += documents_of(row)
        return documents

    @property
    def has_pairs(self) -> bool:
        """Whether a row is a prompt with answers: the collator writes the prompt in front of each, and cuts them."""
        return "prompt_ids" in self.first_rows[0]

    def as_seen(self, row: dict) -> list[Document]:
        """The documents of a row to train on, as the model sees them."""
        length = length_of_rows(self.trainer.args) if self.has_pairs else None
        return [(ids[:length], labels[:length]) for ids, labels in documents_of(row)]

    def cut_tokens(self) -> list[int]:
        """How many tokens --max_length cuts off each document. Other strategies of packing than bfd split documents instead."""
        args = self.trainer.args
        length = length_of_rows(args)
        if not length or (is_packed(args) and args.packing_strategy != "bfd"):
            return [0] * len(self.documents)
        return [max(0, len(ids) - length) for ids, _ in self.documents]

    def epoch(self) -> tuple[float, float] | tuple[None, None]:
        """Rows and tokens of an epoch, estimated from the first rows; None if nothing says how many rows there are."""
        data = self.started.run.data
        is_known = self.data.get("is_complete") and "datasets" not in self.data  # a mixture reads some rows more often
        total = self.data["trained_rows"] if is_known else count_training_rows(data)
        total = min(filter(None, (total, data.max_samples)), default=None)
        if not total:
            return None, None
        tokens_of_row = statistics.mean(sum(len(ids) for ids, _ in self.as_seen(row)) for row in self.first_rows)
        if "loaded_rows" in self.data:  # --split_conversations makes several of one row
            loaded = self.data["loaded_rows"] if "datasets" in self.data else min(total, PREVIEWED_ROWS)
            rows = len(self.trainer.train_dataset) * total / loaded
        else:  # a stream
            lengths = [len(ids) for ids, _ in self.documents]
            rows = total * (sum(lengths) - sum(self.cut_tokens())) / len(lengths) / tokens_of_row
        return rows, rows * tokens_of_row


def why_no_documents(trainer: Any) -> str:
    """Why a trainer's rows are not documents for a causal language model, "" if they are."""
    if next(iter(trainer.train_dataset), None) is None:
        raise UserError("--dataset_name: no row is left to train on: see what the recipe drops, or pass a larger --max_length")
    if generation.writes_answers(trainer):
        return "the answers are generated"
    return why_no_text(trainer)


def other_rows(preview: Preview) -> list[dict[str, str]]:
    """Prints and returns the first rows as the trainer gets them, as texts; of a prompt also what its template makes of it."""
    next(iter(preview.trainer.get_train_dataloader()))  # fails as a run would
    rows = []
    for row in preview.first_rows[:SHOWN_ROWS]:
        texts = {name: textwrap.shorten(str(value), 160) for name, value in row.items()}
        if generation.writes_answers(preview.trainer):
            texts["prompt_ids"] = preview.tokenizer.decode(generation.tokens_of_prompt(preview.trainer, row["prompt"]))
        rows.append(texts)
        print_once("\n--- a row as the trainer gets it\n" + "\n".join(f"{name}: {text}" for name, text in texts.items()))
    return rows


def summarize(preview: Preview) -> dict[str, Any]:
    """The numbers of a preview, None for what is not known: lengths in tokens; shares, from 0 to 1, of tokens or documents."""
    lengths = sorted(len(ids) for ids, _ in preview.documents)
    cut = preview.cut_tokens()
    sequences, tokens = preview.epoch()
    is_known = preview.whole is not None or preview.has_pairs
    tokens_of_batches = 0
    tokens_in_loss = 0
    in_loss: set[int] = set()
    for batch in itertools.islice(preview.trainer.get_train_dataloader(), BATCHES):
        labels = batch.get("labels")
        if labels is None:  # of pairs
            labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)
        tokens_in_loss += int((labels != IGNORED).sum())
        in_loss.update(labels.unique().tolist())
        # Only a batch with padding has a mask.
        tokens_of_batches += int(batch["attention_mask"].sum()) if "attention_mask" in batch else labels.numel()
    return {
        "documents": len(lengths),
        "lengths": {
            "shortest": lengths[0],
            "median": lengths[len(lengths) // 2],
            "percentile_90": lengths[len(lengths) * 9 // 10],
            "longest": lengths[-1],
        },
        "truncated_documents": sum(map(bool, cut)) / len(cut) if is_known else None,
        "truncated_tokens": sum(cut) / sum(lengths) if is_known else None,
        "in_the_loss": tokens_in_loss / tokens_of_batches,
        "sequences_per_epoch": sequences and math.ceil(sequences),
        "tokens_per_epoch": tokens and round(tokens),
        "warnings": find_problems(preview, in_loss),
    }


def find_problems(preview: Preview, in_loss: set[int]) -> list[str]:
    """What would train without an error, and teach the model not to stop. `in_loss`: the tokens that count in the loss."""
    ends = end_tokens(preview.trainer.model, preview.tokenizer)
    if ends & in_loss:
        return []
    names = ", ".join(preview.tokenizer.convert_ids_to_tokens(sorted(ends)))
    return [
        f"no EOS token ({names}) counts in the loss: the model does not learn to stop. The chat template may end answers with "
        "another token, the EOS token may also be the padding token, or --max_length may cut it off"
    ]


def print_rows(preview: Preview) -> None:
    """Prints the first sequences; of a packed one, the first documents."""
    processor = preview.trainer.processing_class
    print_once("\nThe first sequences as the model sees them: tokens in ⟦ ⟧ count in the loss; special tokens are marked ◆.")
    for row in preview.first_rows[:SHOWN_ROWS]:
        documents = preview.as_seen(row)
        title = f"a sequence of {len(row.get('input_ids', ())):,} tokens, {plural(len(documents), 'document')}"
        if "label" in row:  # of KTO
            title = f"a prompt with a {'good' if row['label'] else 'bad'} answer"
        elif preview.has_pairs:
            title = f"a prompt with {plural(len(documents), 'answer')}"
        print_once(f"\n--- {title}")
        for image in row.get("images", []):
            width, height = size_of(image)
            tokens = tokens_of_size(processor, width, height)
            print_once(f"image {image['path'] or 'of the dataset'}: {width:,} x {height:,} pixels, {tokens:,} tokens")
        painted = [
            paint(preview.tokenizer, *with_one_token_each(*document, processor)) for document in documents[:SHOWN_DOCUMENTS]
        ]
        print_once("\n---\n".join(painted))


def paint(tokenizer: Any, ids: list[int], labels: list[int]) -> str:
    """A document as text: tokens in the loss in ⟦ ⟧, special ones with ◆. Of a long one the beginning."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    kinds = [(label != IGNORED, token in special) for token, label in zip(ids[:SHOWN_TOKENS], labels, strict=False)]
    text = ""
    for (is_in_loss, is_special), pairs in itertools.groupby(zip(kinds, ids, strict=False), lambda pair: pair[0]):
        tokens = [token for _, token in pairs]
        part = tokenizer.decode(tokens)
        if is_special:
            part = "".join(f"◆{tokenizer.decode(token)}" for token in tokens)
        text += f"⟦{part}⟧" if is_in_loss else part
    hidden = len(ids) - SHOWN_TOKENS
    return text.replace("⟧⟦", "") + (f"\n… {hidden:,} tokens" if hidden > 0 else "")


def print_numbers(found: dict[str, Any]) -> None:
    """Prints which rows `load` has read, and what `summarize` has found, a line for each number."""
    numbers = {name: found["data"].get(name) for name in ("rows", "skipped_rows", "held_out")}
    numbers |= {name: value for name, value in found.items() if isinstance(value, int | float | None)}
    for name, value in (numbers | found["lengths"]).items():
        text = f"{value:.1%}" if isinstance(value, float) else str(value)
        print_once(f"{name.replace('_', ' '):<20} {'unknown' if value is None else text}")


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
