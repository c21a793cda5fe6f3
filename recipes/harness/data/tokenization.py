"""`tokenize`: rows of texts and messages become the rows that are trained on, tokens with labels, cut or packed to --max_length.

It takes rows with `messages`, with `prompt` and `completion` (texts or messages), with a text, or with `input_ids`. It returns
rows with `input_ids` and `labels`, which are -100 where a token does not count in the loss; packed with bfd or bfd_split, also
`seq_lengths`. SFTTrainer leaves them as they are.
"""

import itertools
from pathlib import Path
from typing import Any

from harness.batches import IGNORED, is_packed
from harness.data import images
from harness.data.chat_templates import load_bare_tokenizer, options_of, own_template, show_turns, training_template
from harness.data.streams import documents_per_batch
from harness.messages import UserError, print_once
from harness.runs import Run

from datasets import Dataset, IterableDataset
from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.utils import logging
from trl import ModelConfig, SFTConfig, pack_dataset
from trl.chat_template_utils import is_chat_template_stop_token_trained
from trl.data_utils import common_prefix_length

Rows = Dataset | IterableDataset
TOKENS = ["input_ids", "labels"]
IMAGES = "images"  # a column of rows with images, which stay as they are until a batch is made
# The first rows, of which those without a label are counted where packing does not drop them.
COUNTED_ROWS = 2_000
COUNTED_ROWS_OF_STREAM = 100
DROPPING = "Dropping rows without a token in the loss"


def load_tokenizer(
    model_args: ModelConfig, training_args: TrainingArguments, reads_images: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of the model with --chat_template_path, --eos_token and --pad_token, as it is saved with the model.

    `reads_images`: see `load_bare_tokenizer`.
    """
    tokenizer = load_bare_tokenizer(model_args, reads_images)
    if path := getattr(training_args, "chat_template_path", None):
        tokenizer.chat_template = Path(path).read_text("utf-8")
        training_args.chat_template_path = None  # SFTTrainer would read a file with another ending as the name of a model
    for name in ("eos_token", "pad_token"):
        token = getattr(training_args, name, None)
        if token and token not in tokenizer.get_vocab():
            raise UserError(
                f"--{name}: {token} is not in the vocabulary of {model_args.model_name_or_path}: pass one of its tokens"
            )
        if token:
            setattr(tokenizer, name, token)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def load_processor(script_args: Any, model_args: ModelConfig, training_args: TrainingArguments, run: Run) -> ProcessorMixin:
    """The processor of a model that reads images, with the tokenizer of `load_tokenizer`, for images of at most --max_pixels."""
    name = model_args.model_name_or_path
    tokenizer = load_tokenizer(model_args, training_args, reads_images=True)
    try:
        processor = AutoProcessor.from_pretrained(name, revision=model_args.model_revision)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--model_name_or_path: images cannot be read: {reason[:200]}: install requirements.txt, with ./launch.sh --install"
        ) from error
    if not hasattr(processor, "image_processor"):
        raise UserError(f"--model_name_or_path: {name} reads no images: pass a model that does, or use a recipe for texts")
    if hasattr(training_args, "max_completion_length"):
        tokenizer.padding_side = "left"  # as TRL pads the prompts that it generates from, and their `mm_token_type_ids`
    processor.tokenizer = tokenizer
    processor.chat_template = tokenizer.chat_template
    if not images.limit_pixels(processor, script_args.max_pixels) and "max_pixels" in run.given:
        raise UserError(f"--max_pixels: {name} has its own size of images or of their tiles: leave it out")
    return processor


def tokenize(
    train_dataset: Rows,
    eval_dataset: Rows | dict[str, Rows] | None,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    training_args: SFTConfig,
    run: Run,
) -> tuple[Rows, Rows | dict[str, Rows] | None]:
    """See `harness.tokenize`. Changes `training_args`, so that SFTTrainer takes the rows as they are."""
    if not isinstance(training_args, SFTConfig):
        raise UserError("tokenize() needs an SFTConfig: other trainers tokenize their rows themselves")
    if training_args.truncation_mode not in ("keep_start", "keep_end"):
        raise UserError(f"--truncation_mode is {training_args.truncation_mode}, expected keep_start or keep_end")
    packs = is_packed(training_args)
    train = tokenize_split("train", train_dataset, tokenizer, training_args, packs, run)
    packs = packs if training_args.eval_packing is None else training_args.eval_packing
    evaluated = eval_dataset
    if isinstance(eval_dataset, dict):
        evaluated = {}
        for name, rows in eval_dataset.items():
            evaluated[name] = tokenize_split(f"eval_{name}", rows, tokenizer, training_args, packs, run)
    elif eval_dataset is not None:
        evaluated = tokenize_split("eval", eval_dataset, tokenizer, training_args, packs, run)
    training_args.assistant_only_loss = False  # the labels have it, and SFTTrainer refuses it for tokens
    training_args.dataset_kwargs = {"skip_prepare_dataset": True}
    if isinstance(tokenizer, ProcessorMixin):
        training_args.remove_unused_columns = False  # SFTTrainer would remove the tokens of rows with images
    return train, evaluated


def are_tokenized(training_args: TrainingArguments) -> bool:
    """Whether SFTTrainer takes the rows as they are: `tokenize` has made them, or the recipe itself."""
    return bool((getattr(training_args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"))


def tokenize_split(
    split: str,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    args: SFTConfig,
    packs: bool,
    run: Run,
) -> Rows:
    """The rows of a split as tokens. `split`: "train", "eval", or eval_NAME of one of several evaluation sets."""
    tokens = tokens_of_rows(split, rows, tokenizer, args)
    if run.seen:
        run.seen.record(split, rows, tokens)
    if args.max_length is None and packs:
        raise UserError("--packing needs --max_length: pass how many tokens a packed row has")
    if args.shuffle_dataset and packs:
        tokens = tokens.shuffle(seed=args.seed)
    if packs:
        tokens = pack(split, tokens, args, run)
    elif args.max_length is not None:
        tokens = cut(split, tokens, args, run)
    return tokens.shuffle(seed=args.seed) if args.shuffle_dataset else tokens


def tokens_of_rows(split: str, rows: Rows, tokenizer: PreTrainedTokenizerBase | ProcessorMixin, args: SFTConfig) -> Rows:
    """The rows as tokens with labels, of any length.

    The functions of `map` get plain values, so that all processes of a run, and --prepare, find the same rows in the cache.
    """
    first = next(iter(rows), None)
    if first is None:
        raise UserError(f"the {split} rows are empty: see what the recipe drops, and the rows with --preview")
    columns = rows.column_names or list(first)
    processor = tokenizer
    tokenizer = getattr(processor, "tokenizer", processor)
    if {"assistant_masks", "completion_mask"} & first.keys() and "labels" not in first:
        raise UserError(f"the {split} rows have a mask and no labels: add a column labels, -100 for tokens that do not count")
    if "input_ids" in first:
        settings: dict[str, Any] = {"function": labels_of_tokens}
    elif has_turns(first):
        template = template_of_answers(tokenizer) if args.assistant_only_loss else None
        only_completions = "prompt" in first if args.completion_only_loss is None else args.completion_only_loss
        values = {"processor": processor if IMAGES in first else tokenizer, "template": template}
        settings = {"function": tokens_of_conversation, "fn_kwargs": values | {"only_completions": only_completions}}
    elif args.assistant_only_loss:
        raise UserError("--assistant_only_loss is for conversations, and the rows are texts: leave out the flag")
    elif args.dataset_text_field in first or {"prompt", "completion"} <= first.keys():
        begin, end = added_tokens(tokenizer)
        values = {"tokenizer": tokenizer, "text_field": args.dataset_text_field, "begin": begin, "end": end}
        values["only_completions"] = args.completion_only_loss is not False
        settings = {"function": tokens_of_text, "fn_kwargs": values}
    else:
        raise UserError(
            f"the {split} rows have the columns {', '.join(columns)}: tokenize() needs messages, prompt and completion, "
            f"{args.dataset_text_field} (--dataset_text_field), or input_ids"
        )
    if isinstance(rows, Dataset):
        settings |= {"num_proc": args.dataset_num_proc, "desc": f"Tokenizing {split} dataset"}
    kept = [*TOKENS, IMAGES] if IMAGES in first else TOKENS
    return rows.map(**settings, remove_columns=[name for name in columns if name not in kept]).select_columns(kept)


def template_of_answers(tokenizer: PreTrainedTokenizerBase) -> str:
    """See `training_template`. Prints if it does not mark the tokens that end answers."""
    template = training_template(tokenizer)
    if template == own_template(tokenizer) and not is_chat_template_stop_token_trained(tokenizer):
        print_once(
            "warning: the chat template does not mark the token that ends an answer: the model may not learn to stop. Move it "
            "into {% generation %} in a copy of the template, and pass that with --chat_template_path."
        )
    return template


def has_turns(row: dict) -> bool:
    turns = row.get("messages") or row.get("prompt")
    return isinstance(turns, list)


def labels_of_tokens(row: dict) -> dict[str, list[int]]:
    """Tokens that the recipe has made itself. Without labels, all of them count."""
    return {"input_ids": row["input_ids"], "labels": row.get("labels") or row["input_ids"]}


def tokens_of_conversation(
    row: dict, processor: PreTrainedTokenizerBase | ProcessorMixin, template: str | None, only_completions: bool
) -> dict[str, list[int]]:
    """The tokens of a conversation. `template`: marks the tokens of the answers; None: all tokens count but those of images.

    `processor`: of rows with images; else the tokenizer.
    """
    turns = row.get("messages") or row["prompt"] + row["completion"]
    settings = {"chat_template": template, **options_of(row)}

    def render(turns: list[dict], **options: bool) -> dict[str, list[int]]:
        if IMAGES in row:
            return images.encode_turns(processor, turns, row[IMAGES], **options, **settings)
        return processor.apply_chat_template(turns, return_dict=True, **options, **settings)

    try:
        rendered = render(turns, return_assistant_tokens_mask=template is not None)
        is_prompt_left_out = only_completions and "messages" not in row
        prompt = render(row["prompt"], add_generation_prompt=True)["input_ids"] if is_prompt_left_out else []
    except Exception as error:  # a template is a program: it can fail in any way
        raise UserError(
            f"the chat template fails ({str(error)[:200]}) on the conversation {show_turns(turns)}: change the row, or pass "
            "another template with --chat_template_path"
        ) from error
    ids = rendered["input_ids"]
    of_images = getattr(processor, "image_token_ids", [])
    counts = rendered.get("assistant_masks") or [token not in of_images for token in ids]
    start = length_of_prompt(prompt, ids, processor)
    labels = [token if counted else IGNORED for token, counted in zip(ids, counts, strict=True)]
    return {"input_ids": ids, "labels": [IGNORED] * start + labels[start:]}


def length_of_prompt(prompt: list[int], ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """How many of the tokens of a row are its prompt: those that the prompt alone has too."""
    length = common_prefix_length(prompt, ids)
    if length < len(prompt):
        logging.get_logger("harness").warning_once(
            "warning: a prompt ends differently when its answer follows, so the loss counts from where they differ: "
            f"{tokenizer.decode(prompt[length:])!r}. End prompts with a complete word or line."
        )
    return length


def tokens_of_text(
    row: dict, tokenizer: PreTrainedTokenizerBase, text_field: str, begin: int | None, end: int | None, only_completions: bool
) -> dict[str, list[int]]:
    """The tokens of a text, or of a prompt and a completion, with the EOS token at the end.

    Args:
        begin: the BOS token, if the tokenizer adds it. Some texts begin with it already; then it is there once.
        end: the EOS token, if the tokenizer adds it: likewise.
    """
    is_pair = "prompt" in row and "completion" in row
    text = row["completion"] if is_pair else row[text_field]
    if tokenizer.eos_token and not text.endswith(tokenizer.eos_token):
        text += tokenizer.eos_token
    prompt = []
    if is_pair:
        text = row["prompt"] + text
        prompt = tokenizer(row["prompt"])["input_ids"]
        if end is not None and prompt[-1:] == [end]:
            prompt = prompt[:-1]
    ids = tokenizer(text)["input_ids"]
    start = length_of_prompt(prompt, ids, tokenizer)
    labels = [IGNORED] * start + ids[start:] if only_completions else list(ids)
    first = int(begin is not None and ids[:2] == [begin, begin])
    last = len(ids) - int(end is not None and ids[-2:] == [end, end])
    return {"input_ids": ids[first:last], "labels": labels[first:last]}


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """The BOS token and the EOS token, if the tokenizer itself adds them to a text; else None."""
    tokens = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begin = bos if tokens[:1] == [bos] and bare[:1] != [bos] else None
    end = eos if tokens[-1:] == [eos] and bare[-1:] != [eos] else None
    return begin, end


def cut(split: str, tokens: Rows, args: SFTConfig, run: Run) -> Rows:
    """Rows cut to --max_length. Those without a label are dropped, and their number is printed. Longer rows with images too."""
    if IMAGES in (tokens.column_names or []):
        return drop_long_rows(split, tokens, args, run)
    settings: dict[str, Any] = {"fn_kwargs": {"length": args.max_length, "keeps_start": args.truncation_mode == "keep_start"}}
    if isinstance(tokens, IterableDataset):
        if run.trains:
            count_first_rows_without_loss(split, tokens, args, run)
        return tokens.map(cut_tokens_of_row, **settings).filter(has_loss, input_columns=["labels"])
    settings |= {"num_proc": args.dataset_num_proc, "desc": f"Truncating {split} dataset"}
    kept = tokens.map(cut_tokens_of_row, **settings).filter(
        has_loss, input_columns=["labels"], num_proc=args.dataset_num_proc, desc=DROPPING
    )
    print_dropped_rows(split, len(tokens) - len(kept), len(tokens), "", without_loss(args), run)
    return kept


def drop_long_rows(split: str, tokens: Rows, args: SFTConfig, run: Run) -> Rows:
    """The rows of at most --max_length tokens: a part of an image has no meaning, and what follows it is the answer."""
    settings: dict[str, Any] = {"input_columns": ["input_ids"], "fn_kwargs": {"length": args.max_length}}
    reason = f"with their images they have more than --max_length {args.max_length} tokens"
    if isinstance(tokens, IterableDataset):
        first = list(itertools.islice(tokens, COUNTED_ROWS_OF_STREAM))
        long = sum(len(row["input_ids"]) > args.max_length for row in first)
        print_dropped_rows(split, long, len(first), "first ", reason, run)
        return tokens.filter(has_length, **settings)
    kept = tokens.filter(has_length, **settings, num_proc=args.dataset_num_proc, desc="Dropping long rows")
    print_dropped_rows(split, len(tokens) - len(kept), len(tokens), "", reason, run)
    return kept


def has_length(ids: list[int], length: int) -> bool:
    return len(ids) <= length


def cut_tokens_of_row(row: dict, length: int, keeps_start: bool) -> dict[str, list[int]]:
    part = slice(None, length) if keeps_start else slice(-length, None)
    return {name: row[name][part] for name in TOKENS}


def pack(split: str, tokens: Rows, args: SFTConfig, run: Run) -> Rows:
    """Rows of several documents, which together have at most --max_length tokens. See `trl.pack_dataset`."""
    if args.packing_strategy == "bfd" and run.trains:  # which cuts rows, and drops none
        count_first_rows_without_loss(split, tokens, args, run)
    if isinstance(tokens, IterableDataset):
        # Not 1,000 documents: a stream that is read in parts would tokenize as many of each part before the first step.
        size = documents_per_batch(tokens, args.max_length, args.packing_strategy)
        return pack_dataset(tokens, args.max_length, args.packing_strategy, {"batch_size": size})
    settings = {"num_proc": args.dataset_num_proc, "desc": f"Packing {split} dataset"}
    packed = pack_dataset(tokens, args.max_length, args.packing_strategy, settings)
    # A piece of a long conversation before its answer has no token in the loss. Nothing is learned from it, and in the mean
    # of an evaluation it would count as a loss of 0.
    kept = packed.filter(has_loss, input_columns=["labels"], desc=DROPPING)
    return kept if len(kept) else packed  # a command shows the rows even if nothing counts


def has_loss(labels: list[int]) -> bool:
    return any(label != IGNORED for label in labels)


def count_first_rows_without_loss(split: str, tokens: Rows, args: SFTConfig, run: Run) -> None:
    """Prints how many of the first rows have no token in the loss when they are cut. Raises UserError if all are so."""
    count = COUNTED_ROWS if isinstance(tokens, Dataset) else COUNTED_ROWS_OF_STREAM
    first = list(itertools.islice(tokens, count))
    keeps_start = args.truncation_mode == "keep_start" or is_packed(args)  # "bfd" always does
    without = 0
    for row in first:
        without += not has_loss(cut_tokens_of_row(row, args.max_length, keeps_start)["labels"])
    print_dropped_rows(split, without, len(first), "first " if len(first) == count else "", without_loss(args), run)


def without_loss(args: SFTConfig) -> str:
    return f"no token that counts in the loss is within --max_length {args.max_length}"


def print_dropped_rows(split: str, count: int, of: int, which: str, reason: str, run: Run) -> None:
    """Prints that `count` of `of` rows are not used, and why. Raises UserError if these are all."""
    kind = "training rows" if split == "train" else "evaluation rows"
    if count == of > 0:
        of_rehearsal = " (a rehearsal sets it to a small one)" if run.tiny else ""
        raise UserError(
            f"--max_length: none of the {which}{of:,} {kind} can be used: {reason}: pass a larger --max_length{of_rehearsal}"
        )
    if count:
        print_once(f"warning: {count:,} of the {which}{of:,} {kind} are not used: {reason}.")
