"""What a rehearsal (--tiny) trains instead of the recipe's model and dataset.

A rehearsal replaces the model by a tiny one (two layers of the original's architecture, its special tokens and chat template,
random weights), and a dataset of tiny_data.yaml by a small one. The first process makes them, once per working directory, below
`outputs/tiny/.made`. Other datasets are not replaced: `load` reads their first rows as in a run, and shortens them.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import inspect
import io
import itertools
import os
import random
import re
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from harness.data.conversion import MAX_LETTERS
from harness.data.images import limit_pixels
from harness.data.loading import REHEARSED_ROWS
from harness.data.sources import DataSettings, Source
from harness.hub import TOKENIZER, hub_errors
from harness.messages import UserError, print_once

import yaml
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, TrainingArguments
from trl import ModelConfig

FOLDER = Path("outputs/tiny/.made")
SHARDS = 8  # Parquet files per split, so that up to eight processes read different ones
DATASETS = yaml.safe_load(Path(__file__).with_name("tiny_data.yaml").read_text("utf-8"))
NOT_PROSE = {"id", "prompt_id", "dump", "url", "file_path", "language", "source", "category", "name"}
VOCABULARY = 2048
IMAGES_OF_ROWS = (1, 2, 0, 1)  # in turn
TINY_PIXELS = 64 * 64  # of an image: four tokens of Qwen's, whose patches have 16 x 16 pixels
_YAML = yaml.safe_load(Path(__file__).with_name("tiny_model.yaml").read_text("utf-8"))
FAMILIES, SIZES = _YAML["families"], _YAML["sizes"]
# The values of a rehearsal, unless a flag says otherwise: the recipe's own are for days on GPUs.
VALUES = {
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


def values_for(config_class: type) -> dict[str, Any]:
    """The values of a rehearsal for a trainer's config. A batch of GRPO has complete groups of answers to a prompt."""
    values = VALUES
    if hasattr(config_class, "max_completion_length"):
        values = values | {"max_completion_length": 16, "per_device_eval_batch_size": 4}
    if hasattr(config_class, "num_generations"):
        values = values | {"num_generations": 2, "num_generations_eval": 1}
    return values


def make_replacements(data: DataSettings, model_args: ModelConfig) -> None:
    """Makes the tiny model and dataset of a rehearsal, unless they exist."""
    import datasets

    datasets.disable_progress_bars()
    name, revision = model_args.model_name_or_path, model_args.model_revision
    if name:
        _make_once(tiny_model_folder(model_args), lambda draft: make_tiny_model(name, revision, draft))
    for source in data.sources:
        if source.name in DATASETS:
            _make_once(tiny_dataset_folder(source), functools.partial(make_dataset, source))


def make_teacher(training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Makes the tiny teacher of DistillationTrainer, unless it exists: with the vocabulary of the tiny model, which exists."""
    name, revision = training_args.teacher_model_name_or_path, training_args.teacher_model_revision or "main"
    student = tiny_model_folder(model_args)
    _make_once(tiny_teacher_folder(training_args, model_args), lambda draft: make_tiny_model(name, revision, draft, student))


def _make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Makes a folder unless it exists. It appears when it is complete, so several rehearsals may make it at a time."""
    if folder.is_dir():
        return
    draft = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        make(draft)
        with contextlib.suppress(OSError):  # another rehearsal may have been faster
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def print_notice(data: DataSettings, training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Prints what a rehearsal replaces."""
    parts = []
    if model_args.model_name_or_path:
        parts.append(f"a two-layer model with random weights instead of {model_args.model_name_or_path}")
    if teacher := getattr(training_args, "teacher_model_name_or_path", None):
        parts.append(f"another one instead of {teacher}")
    for source in data.sources:
        if source.name in DATASETS:
            parts.append(f"Python's documentation instead of {source.name}")
        else:
            parts.append(f"the first {REHEARSED_ROWS} rows of {source.name}, with every text cut to {MAX_LETTERS} characters")
    print_once(f"This is a rehearsal: {', '.join(parts) or 'model and data are those of the recipe'}.")


def use_replacements(data: DataSettings, training_args: TrainingArguments, model_args: ModelConfig) -> DataSettings:
    """Makes the arguments name the tiny model; returns the settings for the tiny dataset."""
    if getattr(training_args, "teacher_model_name_or_path", None):
        training_args.teacher_model_name_or_path = str(tiny_teacher_folder(training_args, model_args))
        training_args.teacher_model_revision = None
    if model_args.model_name_or_path:
        use_model(training_args, model_args, tiny_model_folder(model_args))
    return data.change_each(lambda source: with_tiny_dataset(source, tiny_dataset_folder(source)))


def use_model(training_args: TrainingArguments, model_args: ModelConfig, name: str | Path, revision: str = "main") -> None:
    """Makes the arguments name another model, or another revision."""
    model_args.model_name_or_path = str(name)
    model_args.model_revision = revision
    if getattr(training_args, "model_init_kwargs", None):
        training_args.model_init_kwargs = {**training_args.model_init_kwargs, "revision": revision}


def with_tiny_dataset(source: Source, folder: Path) -> Source:
    """`folder`: of the tiny dataset, which replaces one of tiny_data.yaml. Of others the first rows are read."""
    if source.name in DATASETS:
        shown = f"the tiny dataset for {source.display_name}"
        return dataclasses.replace(source, name=str(folder), display_name=shown, eval_rows_of_run=0)
    return dataclasses.replace(source, first_rows=source.first_rows or REHEARSED_ROWS, cuts_texts=True)


def tiny_model_folder(model_args: ModelConfig) -> Path:
    return _folder_for(model_args.model_name_or_path, model_args.model_revision)


def tiny_teacher_folder(training_args: TrainingArguments, model_args: ModelConfig) -> Path:
    student = tiny_model_folder(model_args).name
    return _folder_for(training_args.teacher_model_name_or_path, f"{training_args.teacher_model_revision} of {student}")


def tiny_dataset_folder(source: Source) -> Path:
    return _folder_for(source.name, source.config)


def _folder_for(name: str, variant: str | None) -> Path:
    """A folder for every name, variant, and version of the code that makes it."""
    code = [path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("tiny*"))]
    digest = hashlib.sha256(f"{name} {variant} {code}".encode()).hexdigest()
    return FOLDER.absolute() / f"{name.strip('/').replace('/', '--')}-{digest[:8]}"


def make_dataset(source: Source, folder: Path, repeats: int = 1) -> None:
    """Writes the tiny dataset that replaces one of tiny_data.yaml; a benchmark repeats its documents.

    Nine tenths of them are in the first split, the rest in the others.
    """
    from datasets import Dataset, Image, List

    splits = DATASETS[source.name]["splits"]
    columns = DATASETS[source.name]["columns"]
    made = []
    for index, text in enumerate(documents() * repeats):
        made.append({name: _value(name, kind, text, index, columns) for name, kind in columns.items()})
    start = 0
    files = ""
    for place, split in enumerate(splits):
        end = len(made) if split == splits[-1] else int(len(made) * (0.9 + 0.1 * place / (len(splits) - 1)))
        rows = Dataset.from_list(made[start:end])
        if "images" in columns:
            rows = rows.cast_column("images", List(Image()))
        start = end
        (folder / split).mkdir(parents=True)
        for shard in range(SHARDS):
            rows.shard(SHARDS, shard, contiguous=False).to_parquet(str(folder / split / f"{shard:05}.parquet"))
        files += f"  - split: {split}\n    path: {split}/*.parquet\n"
    card = f"---\nconfigs:\n- config_name: {source.config or 'default'}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(card, "utf-8")


def _value(name: str, kind: str, text: str, index: int, columns: dict[str, str]) -> Any:
    """A value for one column of a row that holds `text`."""
    if kind == "messages":
        return _conversation(text)
    if kind in ("chosen messages", "rejected messages"):
        turns = _conversation(text)[:2]
        for turn in turns:
            turn["content"] = turn["content"].strip()
        if kind == "rejected messages":
            turns[1:] = [{"role": "assistant", "content": "I do not know."}]
        return turns
    if kind == "messages with thinking":
        turns = _conversation(text)
        for turn in turns:  # other turns have the key too, as in every row of a Parquet file
            turn["thinking"] = "A short thought." if turn["role"] == "assistant" else None
        return turns
    if kind == "question":
        return text[:100]
    if kind == "answer with a number":
        return f"{text[:50]}\n#### {index}"
    if kind == "messages with images":
        question, answer = _conversation(text)[:2]
        parts = [{"type": "image", "text": None}] * IMAGES_OF_ROWS[index % len(IMAGES_OF_ROWS)]
        question["content"] = [*parts, {"type": "text", "text": question["content"][:100]}]
        answer["content"] = [{"type": "text", "text": answer["content"]}]
        return [question, answer]
    if kind == "images":
        return [_picture(index + number) for number in range(IMAGES_OF_ROWS[index % len(IMAGES_OF_ROWS)])]
    if kind == "int64":
        return index
    if kind == "float64":
        return index / 1000
    if name in NOT_PROSE:
        return f"{name}-{index}"
    prose = [column for column in columns if columns[column] == "string" and column not in NOT_PROSE]
    if len(prose) == 1:
        return text
    words = text[:200].split(" ")  # prompt and completion together stay below a rehearsal's max_length
    position = prose.index(name)
    return " ".join(words[len(words) * position // len(prose) : len(words) * (position + 1) // len(prose)])


def _picture(index: int) -> dict[str, Any]:
    """An image of one colour, as a column of images has it. Images have different sizes."""
    from PIL import Image

    made = io.BytesIO()
    Image.new("RGB", (32 + index % 5 * 16, 48), (index % 256, index * 7 % 256, 90)).save(made, "PNG")
    return {"bytes": made.getvalue(), "path": None}


def _conversation(text: str) -> list[dict[str, str]]:
    """Turns of a user and an assistant. Answers are short, so that even the samples of a rehearsal come to an end."""
    words = text.split(" ")
    size = min(40, len(words))
    question = size * 4 // 5
    turns = []
    for start in range(0, len(words) - size + 1, size):
        part = words[start : start + size]
        asked = " ".join(part[:question])
        answered = " ".join(part[question:])
        if asked.strip() and answered.strip():
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return turns


def family_of(name: str) -> dict | None:
    """The last family of tiny_model.yaml whose pattern matches a model's name, None for a model that is not listed there."""
    found = None
    for pattern, family in FAMILIES.items():
        if fnmatch.fnmatchcase(name, pattern):
            found = family
    return found


def make_tiny_model(name: str, revision: str, folder: Path, student: Path | None = None) -> None:
    """Writes the tiny model and its tokenizer into `folder`. A teacher gets that of its `student`, a folder."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, set_seed
    from transformers.utils import logging

    known = family_of(name)
    if known:
        config = AutoConfig.for_model(**known["config"])
    else:
        with hub_errors(TOKENIZER, name):
            config = AutoConfig.from_pretrained(name, revision=revision)
    if student:
        tokenizer = AutoTokenizer.from_pretrained(student)
    elif known:
        tokenizer = make_tokenizer(known)
    else:
        with hub_errors(TOKENIZER, name):
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        tokenizer = tokenizer.train_new_from_iterator(documents(), VOCABULARY, show_progress=False)
    processor = make_processor(name, revision, known, tokenizer, config) if has_vision_part(config) else None
    replaced = {"vocab_size": len(tokenizer)}
    for name_of_id in ("bos_token_id", "eos_token_id", "pad_token_id"):
        replaced[name_of_id] = getattr(tokenizer, name_of_id)
    for name_of_id in ("video_token_id", "vision_start_token_id", "vision_end_token_id"):
        if hasattr(processor, name_of_id):
            replaced[name_of_id] = getattr(processor, name_of_id)
    if processor:
        replaced |= dict.fromkeys(("image_token_id", "image_token_index"), processor.image_token_ids[0])
    logging.disable_progress_bar()
    set_seed(1 if student else 0)  # other weights than those of a student of the same architecture
    try:
        small = shrink(config, replaced)
        model = make_model(small, dtype=config.dtype or torch.float32)
    except Exception as error:  # any architecture can fail in its own way when its sizes change
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"cannot make a two-layer model of the architecture of {name}: {reason}"[:400]) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if processor:
        processor.save_pretrained(folder)
    logging.enable_progress_bar()


def make_processor(
    name: str, revision: str, known: dict | None, tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig
) -> Any | None:
    """The processor of a model that reads images, for tiny ones; None if it reads none, or a package that it needs is missing.

    `known`: a family of tiny_model.yaml; else the processor is that of the model, with the small tokenizer.
    """
    import transformers

    try:
        if known:
            sizes = {"patch_size": config.vision_config.patch_size, "merge_size": config.vision_config.spatial_merge_size}
            parts = {}
            for part, class_name in known["processor"]["parts"].items():
                parts[part] = getattr(transformers, class_name)(**sizes)
            processor = getattr(transformers, known["processor"]["class"])(
                tokenizer=tokenizer, chat_template=tokenizer.chat_template, **parts
            )
        else:
            processor = transformers.AutoProcessor.from_pretrained(name, revision=revision)
            if not hasattr(processor, "image_processor"):  # a tokenizer: an encoder and a decoder for texts
                return None
            values = {name: getattr(processor, name, None) for name in inspect.signature(type(processor)).parameters}
            values = {name: value for name, value in values.items() if value is not None}
            processor = type(processor)(**values | {"tokenizer": tokenizer})
    except (ImportError, OSError):
        return None
    limit_pixels(processor, TINY_PIXELS)
    return processor


def has_vision_part(config: PreTrainedConfig) -> bool:
    return "ForConditionalGeneration" in str(config.architectures)


def make_model(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A model of the class that a trainer loads for this config, with random weights. A vision part is loaded with the rest."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model_class = AutoModelForImageTextToText if has_vision_part(config) else AutoModelForCausalLM
    return model_class.from_config(config, **options)


def documents() -> list[str]:
    """About 500 documents of 100 to 6,000 characters, from Python's own documentation: always the same in the same order."""
    from pydoc_data.topics import topics

    generator = random.Random(0)
    texts = []
    text = ""
    length = 0
    for paragraph in "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n"):
        if not text:
            length = min(max(generator.lognormvariate(6.2, 0.8), 100), 6000)
        text += paragraph + "\n\n"
        if len(text) >= length:
            texts.append(text.strip())
            text = ""
    texts = list(dict.fromkeys(texts))  # some topics share paragraphs
    generator.shuffle(texts)
    return texts


def make_tokenizer(family: dict) -> PreTrainedTokenizerFast:
    """A small tokenizer, trained on `documents`, with the special tokens of a family."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pieces := family.get("pieces"):
        split = pre_tokenizers.Split(Regex(pieces), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=family["special"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(), trainer)
    if first := family.get("begins_with"):
        tokenizer.post_processor = processors.TemplateProcessing(f"{first} $A", None, [(first, tokenizer.token_to_id(first))])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **family["tokenizer"])
    if name := family.get("chat_template_of_trl"):
        made.chat_template = resources.files("trl").joinpath("chat_templates", f"{name}.jinja").read_text("utf-8")
    return made


def shrink(config: PreTrainedConfig, replaced: dict[str, Any]) -> PreTrainedConfig:
    """A config of the same class with two small layers, of two kinds if the model has several, and the values of `replaced`."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}  # such as the text part of an image model
    kept = {name: value for name, value in config.to_dict().items() if name not in {*parts, "per_layer_config"}}
    kept |= _values_of_two_layers(kept, getattr(config, "num_hidden_layers", 0))
    standard_of = {own: standard for standard, own in config.attribute_map.items()}  # the usual names of a config's own ones
    heads = kept.get(config.attribute_map.get("num_attention_heads", "num_attention_heads"))
    head_dim = kept.get("head_dim") or getattr(config, "hidden_size", 16) // (heads or 1)
    new_head_dim = _limit("head_dim", head_dim, replaced)

    def resize(name: str, value: Any) -> Any:
        """`value` with its numbers, and those of its lists and dictionaries, limited as `_limit` limits `name`."""
        if isinstance(value, dict):
            return {key: resize(str(key), part) for key, part in value.items()}
        if name == "mrope_section":  # the frequencies of a head, in parts
            ends = [sum(value[:count]) * new_head_dim // head_dim for count in range(len(value) + 1)]
            return [end - start for start, end in itertools.pairwise(ends)]
        if name in ("short_factor", "long_factor"):  # one factor for each frequency of a head
            return value[: len(value) * new_head_dim // head_dim]
        if isinstance(value, list | tuple):
            return [resize(name, part) for part in value]
        if type(value) is not int:
            return value
        if value == heads and re.search("kv|key", name):
            name = "num_attention_heads"  # a model without grouped-query attention keeps as many key as query heads
        return _limit(name, value, replaced)

    small = {name: resize(standard_of.get(name, name), value) for name, value in kept.items()}
    for name, value in replaced.items():
        if name in small:
            small[name] = value
    if "initializer_range" in small:
        small["initializer_range"] = 0.25  # large enough for an adapter on frozen random weights to lower the loss
    for name, part in parts.items():
        if part is not None:
            small[name] = shrink(part, replaced).to_dict()
    return type(config).from_dict(small)


def _limit(name: str, value: int, replaced: dict[str, Any]) -> int:
    """`value`, at most what tiny_model.yaml says for a size of this name."""
    for pattern, limit in SIZES.items():
        if re.search(pattern, name):
            if limit == "vocabulary":
                limit = replaced["vocab_size"]
            return value if limit is None else min(value, limit)
    return value


def _values_of_two_layers(values: dict[str, Any], layers: int) -> dict[str, list]:
    """The values that list something for each layer, for the first layer and the one that differs most from it."""
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == layers > 2}
    if not lists:
        return {}

    def difference(layer: int) -> tuple[int, bool]:
        count = 0
        has_full_attention = False
        for value in lists.values():
            count += value[layer] != value[0]
            has_full_attention |= value[layer] == "full_attention"
        return count, has_full_attention

    other = max(range(1, layers), key=difference)
    return {name: [value[0], value[other]] for name, value in lists.items()}
