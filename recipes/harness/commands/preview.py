"""What the model will see: the packed rows, which tokens count in the loss, lengths, warnings. launch.sh calls it:

`python -m harness.commands.preview [--tiny] RECIPE.py [--json] [--full [NUMBER]] [--flag value …]`.

The recipe makes the rows itself: it runs until its trainer is built, with a model of two layers and the first rows of each split.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.batches import is_packed, length_of_rows, rows_of_step
from harness.commands import arguments
from harness.commands.documents import IGNORED, Document, documents_of
from harness.messages import UserError, exit_on_user_error, plural, print_once, printable
from harness.runs import Run
from harness.start.environment import hide_library_warnings, set_environment
from harness.start.recipes import build_trainer

BATCHES = 100
BOLD, GREEN, GREY = "1;", "32", "90"  # codes of a terminal
SHOWN_ROWS, SHOWN_DOCUMENTS, SHOWN_START, SHOWN_END = 2, 3, 300, 100  # rows; documents of a row; tokens of a long document


@dataclass
class PreviewRows:
    """The first rows of a recipe's datasets."""

    packed: list[dict]  # as the model sees them
    train: list[Document]  # whole documents to train on
    eval: list[Document]  # whole documents to evaluate on
    kept: list[Document]  # what is kept of the documents in `train`
    is_whole_known: bool  # False: the recipe tokenizes its rows itself, and `train` has what is kept
    is_conversational: bool
    total: int | None  # rows of the training split that can be used, None if nothing says how many there are
    max_samples: int | None
    splits_answers: bool = False  # --split_conversations
    data: dict[str, Any] = dataclasses.field(default_factory=dict)  # what `load` has read and skipped; {} without `load`

    @property
    def unit(self) -> str:
        """What a document is: what a row of the dataset becomes."""
        return "answer" if self.splits_answers else "conversation" if self.is_conversational else "document"

    @property
    def mean_length(self) -> float:
        """Tokens of a packed row."""
        return statistics.mean(len(row["input_ids"]) for row in self.packed)

    def epoch(self) -> tuple[float, float] | tuple[None, None]:
        """Packed rows and tokens of an epoch, estimated from the first rows; None if the number of rows is not known."""
        from harness.data.loading import FIRST_ROWS

        if not self.total:
            return None, None
        documents = min(self.total * len(self.train) / min(self.total, FIRST_ROWS), self.max_samples or math.inf)
        tokens = documents * statistics.mean(len(ids) for ids, _ in self.kept)
        return tokens / self.mean_length, tokens


def main(*words: str) -> None:
    from harness.start.machine import print_untested_versions

    parsed = arguments.preview().read(words)
    set_environment(parsed.tiny)
    messages = sys.stderr if parsed.json else sys.stdout  # stdout is for the JSON alone
    with tempfile.TemporaryDirectory(prefix="preview-") as output_dir, contextlib.redirect_stdout(messages):
        print_untested_versions()
        preview = Preview(str(parsed.recipe), [*parsed.flags, "--output_dir", output_dir], parsed.tiny)
        trainer, (script_args, _, model_args) = preview.trainer, preview.arguments
        if reason := why_no_documents(trainer):
            preview_other_rows(preview, parsed.recipe.stem, reason, sys.__stdout__ if parsed.json else None)
            return
        rows = preview.read_rows()
        batches = list(itertools.islice(trainer.get_train_dataloader(), BATCHES))
        numbers = summarize(trainer.args, rows, batches, script_args) | what_is_trained(trainer.model, model_args)
        numbers |= {"data": rows.data}
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        found = list(find_problems(tokenizer, rows, batches, trainer))
    if parsed.json:
        names = {"recipe": parsed.recipe.stem, "dataset": script_args.data.display_name}
        print(json.dumps({**names, **numbers, "warnings": found}, indent=2))
        return
    if parsed.tiny:
        print_once("\nThis is the preview of a rehearsal: leave out --tiny to see the rows and numbers of the run.")
    if parsed.full:
        print_document(tokenizer, rows, parsed.full)
    else:
        print_rows(tokenizer, rows)
    print_numbers(numbers, rows.unit)
    for problem in found:
        print(f"warning: {problem}", file=sys.stderr)


class Preview:
    """Runs a recipe until it has built its trainer, with a model of two layers and the first rows of each split."""

    def __init__(self, recipe: str, flags: list[str], tiny: bool = False) -> None:
        """Changes this process."""
        # Of each split: the tokenized rows before truncation and packing, and whether its rows are conversations.
        self.whole: dict[str, Any] = {}
        self.conversational: list[bool] = []
        hide_library_warnings()
        started = build_trainer(Run(recipe, tiny=tiny, any_config=True, on_cpu=True), flags, self.prepare)
        self.trainer, self.arguments = started.trainer, started.arguments

    def prepare(self, run: Run, arguments: tuple[Any, Any, Any]) -> Run:
        """Called at the end of `parse`."""
        from harness.data.loading import FIRST_ROWS
        from harness.model.loading import load_small_models
        from harness.start import preparing

        arguments[0].data = arguments[0].data.take(FIRST_ROWS)
        preparing.check_all_arguments(run, arguments)
        preparing.set_model_options(run, arguments)
        preparing.check_model_and_dataset(run, arguments, with_weights=False)
        preparing.replace_model_and_dataset(run, arguments)
        preparing.prepare_process(run, arguments, self.record)
        load_small_models()
        return run

    def record(self, trainer: Any, split: str, rows: Any, tokenized: Any) -> None:
        """Keeps the tokenized rows of a split."""
        from trl.data_utils import is_conversational

        self.conversational.append(is_conversational(next(iter(rows))))
        self.whole[split] = tokenized

    def read_rows(self) -> PreviewRows:
        """The first rows of the recipe's datasets."""
        from harness.data.loading import FIRST_ROWS, count_training_rows
        from harness.folder import DATA, read_json

        trainer, whole = self.trainer, self.whole
        script_args = self.arguments[0]
        evaluated = trainer.eval_dataset or []
        evaluated = evaluated if isinstance(evaluated, dict) else {"eval": evaluated}
        packed = list(itertools.islice(trainer.train_dataset, FIRST_ROWS))
        train = documents_of_first_rows(whole.get("train", packed))
        data = read_json(Path(trainer.args.output_dir, DATA))
        is_known = data.get("is_complete") and "datasets" not in data  # of a mixture, some rows are read more often than others
        total = data["trained_rows"] if is_known else count_training_rows(script_args.data)
        if not total and script_args.data.keeps_samples:
            total = script_args.max_samples
        return PreviewRows(
            packed=packed,
            train=train,
            eval=[document for split, used in evaluated.items() for document in documents_of_first_rows(whole.get(split, used))],
            kept=truncate(train, trainer.args) if "train" in whole else train,
            is_whole_known="train" in whole,
            is_conversational=any(self.conversational),
            splits_answers=script_args.split_conversations,
            total=total or None,
            max_samples=script_args.max_samples,
            data=data,
        )


def why_no_documents(trainer: Any) -> str:
    """Why a trainer's rows are not documents for a causal language model, "" if they are."""
    from harness.run.parameters import base_of, generates

    model, row = base_of(trainer.model), next(iter(trainer.train_dataset))
    if not generates(model) or model.config.is_encoder_decoder:
        return f"{type(model).__name__} is not a causal language model"
    if "input_ids" not in row:
        return "the rows have no column input_ids"
    return "" if trainer.processing_class else "the trainer has no tokenizer"


def preview_other_rows(preview: Preview, recipe: str, reason: str, json_file: Any) -> None:
    """Shows the first rows as the trainer gets them, the first micro-batch, and what truncation cuts off pairs of answers.

    `json_file`: where to print JSON, else None.
    """
    from harness.folder import DATA, read_json

    trainer = preview.trainer
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    first = [
        {name: value_as_text(name, value, tokenizer) for name, value in row.items()}
        for row in itertools.islice(trainer.train_dataset, SHOWN_ROWS)
    ]
    batch = next(iter(trainer.get_train_dataloader()))
    shapes = (
        {name: list(value.shape) for name, value in batch.items() if hasattr(value, "shape")} if hasattr(batch, "items") else {}
    )
    data = read_json(Path(trainer.args.output_dir, DATA))
    cut = truncation_of_pairs(trainer)
    unknown = ["which tokens count in the loss", "lengths", *([] if cut else ["what is truncated"]), "the length of the run"]
    cannot = f"not shown: {', '.join(unknown)}: {reason}"
    found = []
    if cut and cut["without_answer"]:
        found = [f"{cut['without_answer']} of {cut['pairs']} pairs keep no token of an answer: pass a larger --max_length"]
    if json_file:
        names = {"recipe": recipe, "dataset": preview.arguments[0].data.display_name}
        content = {**names, "rows": first, "batch": shapes, "data": data, "not_shown": cannot, "warnings": found}
        print(json.dumps(content | ({"truncation": cut} if cut else {}), indent=2), file=json_file)
        return
    for row in first:
        print_once("\n--- a row as the trainer gets it")
        for name, text in row.items():
            print_once(f"{name}: {text}")
    print_once("")
    print_data(data)
    if shapes:
        print_once(f"batch        {', '.join(f'{name} {tuple(shape)}' for name, shape in shapes.items())}")
    if cut:
        print_once(f"truncated    {cut['truncated_pairs']:.1%} of the pairs, {cut['truncated_tokens']:.1%} of the tokens")
    print_once(cannot)
    for problem in found:
        print(f"warning: {problem}", file=sys.stderr)


def truncation_of_pairs(trainer: Any) -> dict[str, Any] | None:
    """What the collator of DPOTrainer cuts off the first pairs of answers, None for other rows. Shares are from 0 to 1."""
    from harness.data.loading import FIRST_ROWS

    from trl.trainer.dpo_trainer import DataCollatorForPreference

    collator = trainer.data_collator
    if not isinstance(collator, DataCollatorForPreference):
        return None
    limit = collator.max_length or math.inf
    rows = list(itertools.islice(trainer.train_dataset, FIRST_ROWS))
    pairs = [[len(row["prompt_ids"]) + len(row[answer]) for answer in ("chosen_ids", "rejected_ids")] for row in rows]
    cut = [[max(0, length - limit) for length in pair] for pair in pairs]
    keeps_start = collator.truncation_mode == "keep_start"
    return {
        "pairs": len(rows),
        "truncated_pairs": sum(map(any, cut)) / len(rows),
        "truncated_tokens": sum(map(sum, cut)) / sum(map(sum, pairs)),
        "without_answer": sum(len(row["prompt_ids"]) >= limit for row in rows) if keeps_start else 0,
    }


def value_as_text(name: str, value: Any, tokenizer: Any) -> str:
    """A value of a row for a person: tokens as text, a long value without its end."""
    is_tokens = name.endswith(("ids", "labels")) and isinstance(value, list) and all(type(token) is int for token in value)
    if is_tokens and tokenizer is not None and hasattr(tokenizer, "decode"):
        return f"{len(value):,} tokens: {textwrap.shorten(tokenizer.decode([t for t in value if t >= 0]), 640)}"
    return textwrap.shorten(str(value), 160)


def documents_of_first_rows(rows: Iterable[dict]) -> list[Document]:
    """The documents of the first rows."""
    from harness.data.loading import FIRST_ROWS

    return [document for row in itertools.islice(rows, FIRST_ROWS) for document in documents_of(row)]


def truncate(documents: list[Document], args: Any) -> list[Document]:
    """What the trainer keeps of documents that are longer than --max_length: other strategies of packing than bfd split them."""
    length = length_of_rows(args)
    if not length or (is_packed(args) and args.packing_strategy != "bfd"):
        return documents
    return [(ids[:length], labels[:length]) for ids, labels in documents]


def what_is_trained(small_model: Any, model_args: Any) -> dict[str, Any]:
    """The modules that get an adapter, and the parameters of the real model. The trainer has a model of two layers."""
    from harness.model.loading import build_adapter_on_meta, build_on_meta
    from harness.run.parameters import count_parameters, modules_with_adapter

    if hasattr(small_model, "peft_config") and not model_args.use_peft:  # an adapter of the recipe's own
        return {"adapter": modules_with_adapter(small_model), "trained_parameters": None, "parameters": None}
    name = model_args.model_name_or_path
    model = build_adapter_on_meta(model_args, name) if model_args.use_peft else build_on_meta(model_args)
    trained, total = count_parameters(model)
    return {"adapter": modules_with_adapter(model), "trained_parameters": trained, "parameters": total}


def print_rows(tokenizer: Any, rows: PreviewRows) -> None:
    """Prints the first sequences; of a packed one, the first documents."""
    has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    key = "green tokens count in the loss, grey ones do not" if has_colour else "tokens in ⟦ ⟧ count in the loss"
    print_once(f"\nThe first sequences as the model sees them: {key}; special tokens are {'bold' if has_colour else 'marked ◆'}.")
    for row in rows.packed[:SHOWN_ROWS]:
        documents = documents_of(row)
        print_once(f"\n--- a sequence of {len(row['input_ids']):,} tokens, {plural(len(documents), rows.unit)}")
        print_once(
            "\n---\n".join(paint(tokenizer, *document, has_colour) for document in documents[:SHOWN_DOCUMENTS]), is_printable=True
        )
        if len(documents) > SHOWN_DOCUMENTS:
            print_once(f"--- {plural(len(documents) - SHOWN_DOCUMENTS, f'more {rows.unit}')}")
    print_once("")


def print_document(tokenizer: Any, rows: PreviewRows, number: int) -> None:
    """Prints a document completely."""
    if number > len(rows.train):
        raise UserError(f"--full {number}: the preview has {plural(len(rows.train), rows.unit)}")
    ids, labels = rows.train[number - 1]
    has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print_once(f"\n--- {rows.unit} {number} of {len(rows.train)}, {len(ids):,} tokens")
    print_once(f"{paint(tokenizer, ids, labels, has_colour, is_complete=True)}\n", is_printable=True)


def paint(tokenizer: Any, ids: list[int], labels: list[int], has_colour: bool, is_complete: bool = False) -> str:
    """A document as text: tokens in the loss in ⟦ ⟧ and special ones with ◆, or both in colour. A long one without its middle.

    `is_complete`: also the middle.
    """
    if len(ids) > 2 * (SHOWN_START + SHOWN_END) and not is_complete:
        hidden = f"\n… {len(ids) - SHOWN_START - SHOWN_END:,} tokens, shown by --full …\n"
        start = paint(tokenizer, ids[:SHOWN_START], labels[:SHOWN_START], has_colour)
        return start + hidden + paint(tokenizer, ids[-SHOWN_END:], labels[-SHOWN_END:], has_colour)
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special} | set(tokenizer.all_special_ids)
    text = ""
    for is_in_loss, stretch in itertools.groupby(zip(ids, labels, strict=True), lambda pair: pair[1] != IGNORED):
        part = ""
        for is_special, pairs in itertools.groupby(stretch, lambda pair: pair[0] in special):
            tokens = [token for token, _ in pairs]
            if has_colour:
                style = (BOLD if is_special else "") + (GREEN if is_in_loss else GREY)
                part += f"\033[{style}m{printable(tokenizer.decode(tokens))}\033[0m"
            elif is_special:
                part += "".join(f"◆{printable(tokenizer.decode(token))}" for token in tokens)
            else:
                part += printable(tokenizer.decode(tokens))
        text += f"⟦{part}⟧" if is_in_loss and not has_colour else part
    return text


def summarize(args: Any, rows: PreviewRows, batches: list[dict], script_args: Any) -> dict[str, Any]:
    """The numbers of a preview. A number that is not known is None.

    Lengths are in tokens. What is truncated, padding or in the loss is a share from 0 to 1.
    """
    lengths = sorted(len(ids) for ids, _ in rows.train)
    cut = [len(ids) - len(kept) for (ids, _), (kept, _) in zip(rows.train, rows.kept, strict=True)]
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    masks = [batch["attention_mask"] for batch in batches if batch.get("attention_mask") is not None]
    rows_per_step = script_args.global_batch_size or rows_of_step(args, processes=1)
    length = measure_run(args, rows, rows_per_step, script_args.dataset_streaming)
    is_mixture = "datasets" in rows.data
    return {
        "documents": len(lengths),
        "lengths": {
            "shortest": lengths[0],
            "percentile_10": lengths[len(lengths) // 10],
            "median": lengths[len(lengths) // 2],
            "percentile_90": lengths[len(lengths) * 9 // 10],
            "longest": lengths[-1],
        },
        "truncated_documents": sum(map(bool, cut)) / len(cut) if rows.is_whole_known else None,
        "truncated_tokens": sum(cut) / sum(lengths) if rows.is_whole_known else None,
        "batches": len(batches),
        "padding": sum(int((mask == 0).sum()) for mask in masks) / tokens,
        "in_the_loss": sum(int((batch["labels"] != IGNORED).sum()) for batch in batches) / tokens,
        "rows_per_step": rows_per_step,
        "is_rows_per_step_for_one_gpu": not script_args.global_batch_size,
        "tokens_per_step": round(rows_per_step * rows.mean_length),
        "steps_per_epoch": rounded(length.steps_per_epoch),
        "tokens_per_epoch": rounded(length.tokens_per_epoch),
        "steps": rounded(length.steps),
        "tokens": rounded(length.tokens),
        # A mixture reads the rows of one dataset more often than those of another.
        "times_seen": None if length.epochs is None or is_mixture else round(length.epochs, 2),
    }


@dataclass
class RunLength:
    """How long a run is; None for what is not known."""

    steps: float | None
    tokens: float | None
    epochs: float | None = None
    steps_per_epoch: float | None = None
    tokens_per_epoch: float | None = None


def measure_run(args: Any, rows: PreviewRows, rows_per_step: int, is_streamed: bool) -> RunLength:
    rows_per_epoch, tokens_per_epoch = rows.epoch()
    max_steps = args.max_steps if args.max_steps > 0 else None
    if rows_per_epoch is None:
        return RunLength(max_steps, None if max_steps is None else max_steps * rows_per_step * rows.mean_length)
    steps_per_epoch = rows_per_epoch / rows_per_step
    if not is_streamed:  # the last step of an epoch is filled with rows without loss
        steps_per_epoch = math.ceil(steps_per_epoch)
    epochs = args.num_train_epochs if max_steps is None else max_steps / steps_per_epoch
    return RunLength(steps_per_epoch * epochs, epochs * tokens_per_epoch, epochs, steps_per_epoch, tokens_per_epoch)


def rounded(number: float | None) -> int | None:
    """A whole number, at least 1."""
    return None if number is None else max(1, round(number))


def print_numbers(numbers: dict[str, Any], unit: str) -> None:
    """Prints what `summarize` and `what_is_trained` have found, a line for each. `unit`: what a document is."""
    from harness.run.parameters import describe_training

    if numbers["parameters"]:
        trained = describe_training(numbers["adapter"], (numbers["trained_parameters"], numbers["parameters"]))
        print_once(f"trained      {trained}")
    else:
        print_once(f"trained      adapters of the recipe's own on {', '.join(numbers['adapter'])}")
    print_data(numbers["data"])
    lengths = numbers["lengths"]
    print_once(
        f"lengths      {lengths['shortest']:,} to {lengths['longest']:,} tokens; 10th percentile {lengths['percentile_10']:,}, "
        f"median {lengths['median']:,}, 90th percentile {lengths['percentile_90']:,} ({plural(numbers['documents'], unit)})"
    )
    if numbers["truncated_documents"] is None:
        print_once("truncated    not known: the recipe truncates and packs its rows itself")
    else:
        print_once(
            f"truncated    {numbers['truncated_documents']:.1%} of the {unit}s, {numbers['truncated_tokens']:.1%} of the tokens"
        )
    print_once(f"padding      {numbers['padding']:.1%} of the tokens of {numbers['batches']} batches")
    print_once(f"in the loss  {numbers['in_the_loss']:.1%} of these tokens")
    one_gpu = " on one GPU" if numbers["is_rows_per_step_for_one_gpu"] else ""
    print_once(f"one step     {numbers['rows_per_step']} sequences{one_gpu}, {numbers['tokens_per_step']:,} tokens")
    if numbers["steps_per_epoch"]:
        print_once(f"one epoch    about {numbers['steps_per_epoch']:,} steps, {numbers['tokens_per_epoch']:,} tokens")
    else:
        print_once("one epoch    unknown: the dataset does not say how many rows it has")
    if numbers["steps"]:
        seen = f"; every row is seen {numbers['times_seen']:g} times" if numbers["times_seen"] else ""
        print_once(f"the run      {numbers['steps']:,} steps, {numbers['tokens']:,} tokens{seen}")


def print_data(data: dict[str, Any]) -> None:
    """Prints which rows, columns and turns `load` has found."""
    if not data:
        return
    first = "" if data["is_complete"] else "of the first "
    first_skipped = {reason: f" (the first is row {row:,})" for reason, row in data.get("first_skipped", {}).items()}
    parts = [f"{number:,} skipped {reason}{first_skipped.get(reason, '')}" for reason, number in data["skipped"].items()]
    parts = [f"{first}{data['rows']:,}", *parts]
    for dataset in data.get("datasets", []):
        print_once(f"dataset      {dataset['name']}: {dataset['rows']:,} rows")
    parts += [f"{number:,} dropped by the trainer ({reason})" for reason, number in data.get("dropped", {}).items()]
    if data["held_out"]:
        parts.append(f"{data['held_out']:,} held out for evaluation")
    print_once(f"rows         {', '.join(parts)}")
    if data["ignored_columns"]:
        print_once(f"ignored      columns {', '.join(data['ignored_columns'])}")
    if data["turns"]:
        turns = ", ".join(f"{number:,} {kind.replace('+', ' with ').replace('_', ' ')}" for kind, number in data["turns"].items())
        print_once(f"turns        {turns}; tools in {data['with_tools']:,} rows")


def find_problems(tokenizer: Any, rows: PreviewRows, batches: list[dict], trainer: Any) -> Iterator[str]:
    """One message for each thing that would train without an error and teach something else."""
    from harness.run.samples import end_tokens

    eos_tokens = end_tokens(trainer.model, tokenizer)
    max_length = length_of_rows(trainer.args)
    endless = 0
    for ids, labels in rows.train:
        # Behind the last answer there can be line breaks, or turns of others.
        last = max((index for index, label in enumerate(labels) if label != IGNORED), default=len(ids) - 1) + 1
        ending = slice(max(0, last - 3), last)
        has_end = any(token in eos_tokens and label != IGNORED for token, label in zip(ids[ending], labels[ending], strict=True))
        is_complete = rows.is_whole_known or max_length is None or len(ids) < max_length
        endless += not has_end and is_complete
    if endless:
        yield f"{endless} of {len(rows.train)} {rows.unit}s have no EOS token in the loss: the model does not learn to stop there"
    without_loss = sum(all(label == IGNORED for label in labels) for _, labels in rows.kept)
    if without_loss:
        yield (
            f"{without_loss} of {len(rows.kept)} {rows.unit}s have no token in the loss: the answer is truncated, or not "
            "marked as an answer"
        )
    trained = {tuple(ids) for ids, _ in rows.train if len(ids) > 8}
    shared = sum(tuple(ids) in trained for ids, _ in rows.eval)
    if shared:
        yield f"{shared} of {len(rows.eval)} {rows.unit}s for evaluation are also trained on: the evaluation loss will be too low"
    if rows.is_conversational:
        end_of_turn = tokens_that_end_a_turn(tokenizer)
        if end_of_turn is not None and not eos_tokens & set(end_of_turn):
            yield (
                f"the chat template does not end the assistant's turn with {tokenizer.convert_ids_to_tokens(sorted(eos_tokens))} "
                f"but with {tokenizer.decode(end_of_turn)!r}: a server will not know where an answer stops"
            )
    if tokenizer.pad_token_id == tokenizer.eos_token_id and is_never_in_the_loss(batches, tokenizer.eos_token_id):
        yield f"{tokenizer.eos_token} is also the padding token, so it never counts in the loss: pass another --pad_token"


def tokens_that_end_a_turn(tokenizer: Any) -> list[int] | None:
    """The tokens with which the chat template ends an answer, None if it cannot render a conversation.

    One of them should be an EOS token, at which generation stops.
    """
    from jinja2 import TemplateError

    answer = "An answer."
    turns = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        return tokenizer(text[text.rindex(answer) + len(answer) :], add_special_tokens=False)["input_ids"]
    except (TemplateError, ValueError, TypeError):
        return None


def is_never_in_the_loss(batches: list[dict], token: int) -> bool:
    """Whether a token occurs in the batches outside of padding, and never with its own label."""
    occurs = False
    for batch in batches:
        places = batch["input_ids"] == token
        if batch.get("attention_mask") is not None:
            places = places & (batch["attention_mask"] != 0)
        occurs = occurs or bool(places.any())
        if bool((batch["labels"] == token).any()):
            return False
    return occurs


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
