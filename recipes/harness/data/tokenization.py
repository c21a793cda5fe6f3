"""`tokenize`: rows of texts and messages become the rows that are trained on, tokens with labels, cut or packed to --max_length.

It takes rows with `messages`, with `prompt` and `completion` (texts or messages), with a text, or with `input_ids`. It returns
rows with `input_ids` and `labels`, which are -100 where a token does not count in the loss; packed with bfd or bfd_split, also
`seq_lengths`. SFTTrainer leaves them as they are.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from harness import runs
from harness.data import images
from harness.data.chat_templates import (
    keep_uncut,
    load_tokenizer_with_template,
    options_of,
    own_template,
    show_turns,
    training_template,
)
from harness.data.reading import Rows
from harness.data.streams import documents_per_batch
from harness.data.turns import IGNORED
from harness.messages import UserError, print_once
from harness.runs import Run, StartedRecipe, UncutRows

from datasets import Dataset, IterableDataset
from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from trl import ModelConfig, SFTConfig, pack_dataset
from trl.chat_template_utils import is_chat_template_stop_token_trained
from trl.data_utils import common_prefix_length

Tokenizer = PreTrainedTokenizerBase | ProcessorMixin
TOKENS = ["input_ids", "labels"]
IMAGES = "images"  # a column of rows with images, which stay as they are until a batch is made
# The first rows, of which those without a label are counted where packing does not drop them.
COUNTED_ROWS = 2_000
COUNTED_ROWS_OF_STREAM = 100


def load_tokenizer(
    model_args: ModelConfig, training_args: TrainingArguments, reads_images: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of the model with --chat_template_path, --eos_token and --pad_token, as it is saved with the model.

    Pass it to the trainer as `processing_class`. `reads_images`: see `load_bare_tokenizer`.
    """
    tokenizer = load_tokenizer_with_template(model_args, training_args, reads_images)
    if hasattr(training_args, "chat_template_path"):
        training_args.chat_template_path = None  # SFTTrainer would read a file with another ending as the name of a model
    for name in ("eos_token", "pad_token"):
        # The trainer refuses one that is not in the vocabulary.
        setattr(tokenizer, name, getattr(training_args, name, None) or getattr(tokenizer, name))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def load_processor(script_args: Any, model_args: ModelConfig, training_args: TrainingArguments) -> ProcessorMixin:
    """The processor of a model that reads images: the tokenizer of `load_tokenizer`, and what makes tokens of images.

    It shrinks images to --max_pixels, and is saved with the model. Pass it to `tokenize`, `image_collator` and the trainer.
    """
    tokenizer = load_tokenizer(model_args, training_args, reads_images=True)
    if hasattr(training_args, "max_completion_length"):
        tokenizer.padding_side = "left"  # as TRL pads the prompts that it generates from, and their `mm_token_type_ids`
    processor = AutoProcessor.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    images.limit_pixels(processor, script_args.max_pixels)
    processor.tokenizer = tokenizer
    processor.chat_template = tokenizer.chat_template
    return processor


def tokenize(
    train_dataset: Rows,
    eval_dataset: Rows | dict[str, Rows] | None,
    tokenizer: Tokenizer,
    training_args: SFTConfig,
    recipe: StartedRecipe | None = None,
) -> tuple[Rows, Rows | dict[str, Rows] | None]:
    """Tokenizes rows for SFTTrainer: `input_ids` and `labels`, cut or packed to --max_length.

    Args:
        train_dataset: rows with `messages`, `prompt` and `completion`, a text (--dataset_text_field), or `input_ids`.
        eval_dataset: the same; or None, or a dict of several.
        tokenizer: of `load_tokenizer`; of `load_processor` for rows with `images`, which stay, undecoded.
        training_args: an SFTConfig, what `parse` has returned second. It is changed: SFTTrainer takes the rows as they are.
        recipe: None for the one of this process. It keeps what is needed of the rows before they are cut and packed.

    Returns:
        `(train_dataset, eval_dataset)`. A label is -100 where a token does not count in the loss.
    """
    recipe = recipe or runs.started()
    recipe.uncut = UncutRows()
    train = tokenize_split("train", train_dataset, tokenizer, training_args, recipe)
    if not isinstance(eval_dataset, dict):
        eval_dataset = {"": eval_dataset}
    evaluated = {
        name: rows and tokenize_split(f"eval {name}".strip(), rows, tokenizer, training_args, recipe)
        for name, rows in eval_dataset.items()
    }
    training_args.assistant_only_loss = False  # the labels have it, and SFTTrainer refuses it for tokens
    training_args.dataset_kwargs = {"skip_prepare_dataset": True}
    if isinstance(tokenizer, ProcessorMixin):
        training_args.remove_unused_columns = False  # SFTTrainer would remove the tokens of rows with images
    return train, evaluated.get("", evaluated)


def tokenize_split(
    split: str,
    rows: Rows,
    tokenizer: Tokenizer,
    args: SFTConfig,
    recipe: StartedRecipe,
) -> Rows:
    """The rows of a split as tokens. `split`: "train", "eval", or "eval NAME" of one of several evaluation sets."""
    packs = args.packing
    if split != "train" and args.eval_packing is not None:
        packs = args.eval_packing
    tokens = tokens_of_rows(split, rows, tokenizer, args)
    keep_uncut(recipe.uncut, split, rows, tokens)
    if packs:
        tokens = pack(split, tokens, args, recipe.run)
    elif args.max_length is not None:
        tokens = cut(split, tokens, args, recipe.run)
    if args.shuffle_dataset:
        return tokens.shuffle(seed=args.seed)
    return tokens


def tokens_of_rows(split: str, rows: Rows, tokenizer: Tokenizer, args: SFTConfig) -> Rows:
    """The rows as tokens with labels, of any length.

    The functions of `map` get plain values, so that all processes of a run, and --prepare, find the same rows in the cache.
    """
    first = next(iter(rows), {})
    has_images = IMAGES in first
    processor = tokenizer
    tokenizer = getattr(processor, "tokenizer", processor)
    only_completions = args.completion_only_loss is not False  # of rows that have a prompt
    if "input_ids" in first:
        function = labels_of_tokens
    elif isinstance(first.get("messages") or first.get("prompt"), list):
        template = template_of_answers(tokenizer) if args.assistant_only_loss else None
        used = processor if has_images else tokenizer
        function = functools.partial(tokens_of_conversation, processor=used, template=template, only_completions=only_completions)
    elif args.assistant_only_loss:  # it would have no effect: all tokens would count
        raise UserError("--assistant_only_loss is for conversations, and the rows are texts: leave out the flag")
    else:
        begin, end = added_tokens(tokenizer)
        function = functools.partial(
            tokens_of_text,
            tokenizer=tokenizer,
            text_field=args.dataset_text_field,
            begin=begin,
            end=end,
            only_completions=only_completions,
        )
    kept = [*TOKENS, IMAGES] if has_images else TOKENS
    removed = [name for name in rows.column_names or first if name not in kept]
    options = options_of_map(rows, args, f"Tokenizing {split} dataset")
    return rows.map(function, remove_columns=removed, **options).select_columns(kept)


def template_of_answers(tokenizer: PreTrainedTokenizerBase) -> str:
    """See `training_template`. Prints if it does not mark the tokens that end answers."""
    template = training_template(tokenizer)
    if template == own_template(tokenizer) and not is_chat_template_stop_token_trained(tokenizer):
        print_once(
            "warning: the chat template does not mark the token that ends an answer: the model may not learn to stop. Move it "
            "into {% generation %} in a copy of the template, and pass that with --chat_template_path."
        )
    return template


def labels_of_tokens(row: dict) -> dict[str, list[int]]:
    """Tokens that the recipe has made itself. Without labels, all of them count that TRL's masks do not leave out."""
    labels = row.get("labels") or row["input_ids"]
    for name in ("completion_mask", "assistant_masks"):
        if row.get(name):
            labels = labels_of_counted(labels, row[name])
    return {"input_ids": row["input_ids"], "labels": labels}


def labels_of_counted(tokens: list[int], counts: list) -> list[int]:
    """The tokens that count in the loss; IGNORED instead of each other one."""
    return [token if counted else IGNORED for token, counted in zip(tokens, counts, strict=True)]


def tokens_of_conversation(row: dict, processor: Tokenizer, template: str | None, only_completions: bool) -> dict[str, list[int]]:
    """The tokens of a conversation. `template`: marks the tokens of the answers; None: all tokens count but those of images.

    `processor`: of rows with images; else the tokenizer.
    """
    turns = row.get("messages") or row["prompt"] + row["completion"]
    options = {**options_of(row), "chat_template": template}
    if row.get(IMAGES) is None:
        render = functools.partial(processor.apply_chat_template, return_dict=True, **options)
    else:
        render = functools.partial(images.encode_turns, processor, images=row[IMAGES], **options)
    start = 0
    try:
        rendered = render(turns, return_assistant_tokens_mask=template is not None)
        ids = rendered["input_ids"]
        if only_completions and "messages" not in row:
            start = common_prefix_length(render(row["prompt"], add_generation_prompt=True)["input_ids"], ids)
    except Exception as error:  # a template is a program: it can fail in any way
        raise UserError(
            f"the chat template fails ({str(error)[:200]}) on the conversation {show_turns(turns)}: change the row, or pass "
            "another template with --chat_template_path"
        ) from error
    of_images = getattr(processor, "image_token_ids", [])
    counts = rendered.get("assistant_masks") or [token not in of_images for token in ids]
    labels = labels_of_counted(ids, counts)
    return {"input_ids": ids, "labels": [IGNORED] * start + labels[start:]}


def tokens_of_text(
    row: dict, tokenizer: PreTrainedTokenizerBase, text_field: str, begin: list[int], end: list[int], only_completions: bool
) -> dict[str, list[int]]:
    """The tokens of a text, or of a prompt and a completion, with the EOS token at the end.

    Args:
        begin: what the tokenizer adds in front, such as a BOS token. Some texts begin with it already; then it is there once.
        end: what it adds at the end: likewise.
    """
    is_pair = "prompt" in row and "completion" in row
    prompt = row["prompt"] if is_pair else ""
    text = row["completion" if is_pair else text_field]
    eos = tokenizer.eos_token or ""
    ids = tokenizer(prompt + text.removesuffix(eos) + eos, add_special_tokens=False)["input_ids"]
    if ids[:1] == begin:
        begin = []
    if ids[-1:] == end:
        end = []
    start = 0
    if is_pair and only_completions:
        start = len(begin) + common_prefix_length(tokenizer(prompt, add_special_tokens=False)["input_ids"], ids)
    ids = begin + ids + end
    return {"input_ids": ids, "labels": [IGNORED] * start + ids[start:]}


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer itself adds in front of a text, and at its end."""
    ids = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    start = ids.index(bare[0])
    return ids[:start], ids[start + len(bare) :]


def options_of_map(rows: Rows, args: SFTConfig, text: str) -> dict[str, Any]:
    """Of `map` and `filter`, which have none for streams."""
    if isinstance(rows, Dataset):
        return {"num_proc": args.dataset_num_proc, "desc": text}
    return {}


def cut(split: str, tokens: Rows, args: SFTConfig, run: Run) -> Rows:
    """Rows cut to --max_length, without those of which no token counts then; their number is printed. See `has_loss`."""
    has_images = IMAGES in next(iter(tokens), {})  # a stream has no names of columns
    part = {"keep_start": slice(args.max_length), "keep_end": slice(-args.max_length, None)}[args.truncation_mode]
    used = functools.partial(has_loss, part=part, most=args.max_length if has_images else math.inf)
    options = options_of_map(tokens, args, f"Truncating {split} dataset")
    kept = tokens.filter(used, input_columns="labels", **options)
    if isinstance(tokens, Dataset):
        report_unused(split, len(tokens) - len(kept), len(tokens), "", args)
    else:
        report_first_rows(split, tokens, used, args, run)
    if has_images:
        return kept
    return kept.map(lambda row: {name: row[name][part] for name in TOKENS}, **options)


def has_loss(labels: list[int], part: slice = slice(None), most: float = math.inf) -> bool:
    """Whether a token counts in the loss in the part of a row that is kept.

    `most`: tokens of a row with images, which is not cut: a part of an image has no meaning, and what follows it is the answer.
    """
    return len(labels) <= most and any(label != IGNORED for label in labels[part])


def pack(split: str, tokens: Rows, args: SFTConfig, run: Run) -> Rows:
    """Rows of several documents, which together have at most --max_length tokens. See `trl.pack_dataset`."""
    if args.max_length is None:
        raise UserError("--packing needs a --max_length")
    if args.shuffle_dataset:
        tokens = tokens.shuffle(seed=args.seed)
    if args.packing_strategy == "bfd":  # which cuts rows, and drops none
        report_first_rows(split, tokens, functools.partial(has_loss, part=slice(args.max_length)), args, run)
    options = options_of_map(tokens, args, f"Packing {split} dataset")
    if isinstance(tokens, IterableDataset):
        # Not 1,000 documents: a stream that is read in parts would tokenize as many of each part before the first step.
        options = {"batch_size": documents_per_batch(tokens, args.max_length, args.packing_strategy)}
    packed = pack_dataset(tokens, args.max_length, args.packing_strategy, options)
    if isinstance(packed, IterableDataset):
        return packed
    # A piece of a long conversation before its answer has no token in the loss. Nothing is learned from it, and in the mean
    # of an evaluation it would count as a loss of 0.
    kept = packed.filter(has_loss, input_columns=["labels"], desc="Dropping rows without a token in the loss")
    return kept or packed  # a command shows the rows even if nothing counts


def report_first_rows(split: str, tokens: Rows, used: Callable[..., bool], args: SFTConfig, run: Run) -> None:
    """Does for the first rows of a run what `report_unused` does for all."""
    if run.trains:
        count = COUNTED_ROWS if isinstance(tokens, Dataset) else COUNTED_ROWS_OF_STREAM
        found = [used(labels) for labels in tokens.take(count)["labels"]]
        report_unused(split, found.count(False), len(found), "first " if len(found) == count else "", args)


def report_unused(split: str, count: int, of: int, which: str, args: SFTConfig) -> None:
    """Prints that `count` of `of` rows are not used, and why. Raises UserError if these are all: nothing would be trained."""
    rows = f"{which}{of:,} {'training' if split == 'train' else 'evaluation'} rows"
    reason = f"within --max_length {args.max_length} they have no token that counts in the loss, or a part of an image"
    if count == of > 0:
        raise UserError(f"--max_length: none of the {rows} can be used: {reason}: pass a larger --max_length")
    if count:
        print_once(f"warning: {count:,} of the {rows} are not used: {reason}.")
