"""What a rehearsal (--tiny) trains instead of the recipe's model and dataset.

A rehearsal replaces the model by a tiny one (two layers of the original's architecture, its special tokens and chat template,
random weights), and a dataset that has a folder in `data` by the rows there. The first process makes the model, once per working
directory, below `outputs/tiny/.made`. Other datasets are not replaced: `load` reads their first rows as in a run, and shortens
them. tests/rehearsal/make_files.py has made the files of `data` and `tokenizers`.
"""

import contextlib
import dataclasses
import fnmatch
import hashlib
import inspect
import itertools
import operator
import os
import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from harness.data.conversion import MAX_LETTERS, REHEARSED_ROWS
from harness.data.images import limit_pixels
from harness.data.reading import DataSettings, Source
from harness.hub import TOKENIZER, hub_errors
from harness.messages import print_once

import yaml
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, TrainingArguments
from trl import ModelConfig

FOLDER = Path("outputs/tiny/.made")
# The folders of small datasets, by the names of the datasets that they replace.
DATASETS = {folder.name.replace("--", "/"): folder for folder in sorted(Path(__file__).with_name("data").iterdir())}
VOCABULARY = 2048
TINY_PIXELS = 64 * 64  # of an image: four tokens of Qwen's, whose patches have 16 x 16 pixels
_YAML = yaml.safe_load(Path(__file__).with_name("tiny_model.yaml").read_text("utf-8"))
FAMILIES = _YAML["families"]
SIZES = _YAML["sizes"]
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


def make_models(training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Makes the tiny model of a rehearsal, and the teacher of DistillationTrainer with its vocabulary, unless they exist."""
    if not model_args.model_name_or_path:
        return
    student = tiny_model_folder(model_args)
    _make_once(student, model_args.model_name_or_path, model_args.model_revision)
    if teacher := getattr(training_args, "teacher_model_name_or_path", None):
        revision = training_args.teacher_model_revision or "main"
        _make_once(tiny_teacher_folder(training_args, model_args), teacher, revision, student)


def _make_once(folder: Path, name: str, revision: str, student: Path | None = None) -> None:
    """Makes a tiny model unless its folder exists. It appears when it is complete: several rehearsals may make it at a time."""
    if folder.is_dir():
        return
    draft = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        make_tiny_model(name, revision, draft, student)
        with contextlib.suppress(OSError):  # another rehearsal may have been faster
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def print_notice(data: DataSettings, training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Prints what a rehearsal replaces."""
    models = [model_args.model_name_or_path, getattr(training_args, "teacher_model_name_or_path", None)]
    parts = [f"a two-layer model with random weights instead of {name}" for name in models if name]
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
    return dataclasses.replace(data, sources=tuple(map(with_tiny_dataset, data.sources)))


def use_model(training_args: TrainingArguments, model_args: ModelConfig, name: str | Path, revision: str = "main") -> None:
    """Makes the arguments name another model, or another revision."""
    model_args.model_name_or_path = str(name)
    model_args.model_revision = revision
    if getattr(training_args, "model_init_kwargs", None):
        training_args.model_init_kwargs = {**training_args.model_init_kwargs, "revision": revision}


def with_tiny_dataset(source: Source) -> Source:
    """The source with the small dataset that replaces it. Of a dataset without one, the first rows are read."""
    if folder := DATASETS.get(source.name):
        shown = f"the tiny dataset for {source.display_name}"
        return dataclasses.replace(source, name=str(folder), config=None, display_name=shown, eval_rows_of_run=0)
    return dataclasses.replace(source, first_rows=source.first_rows or REHEARSED_ROWS, cuts_texts=True)


def tiny_model_folder(model_args: ModelConfig) -> Path:
    return _folder_for(model_args.model_name_or_path, model_args.model_revision)


def tiny_teacher_folder(training_args: TrainingArguments, model_args: ModelConfig) -> Path:
    student = tiny_model_folder(model_args).name
    return _folder_for(training_args.teacher_model_name_or_path, f"{training_args.teacher_model_revision} of {student}")


def _folder_for(name: str, variant: str | None) -> Path:
    """A folder for every name, variant, and version of the files that make it."""
    digest = hashlib.sha256(f"{name} {variant}".encode())
    here = Path(__file__).parent
    for file in sorted([*here.glob("tokenizers/*"), *here.glob("tiny*")]):
        digest.update(file.read_bytes())
    return FOLDER.absolute() / f"{name.strip('/').replace('/', '--')}-{digest.hexdigest()[:8]}"


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
    with hub_errors(TOKENIZER, name):
        config = AutoConfig.for_model(**known["config"]) if known else AutoConfig.from_pretrained(name, revision=revision)
        if student:
            tokenizer = AutoTokenizer.from_pretrained(student)
        elif known:
            tokenizer = make_tokenizer(known)
        else:
            original = AutoTokenizer.from_pretrained(name, revision=revision)
            tokenizer = original.train_new_from_iterator(documents(), VOCABULARY, show_progress=False)
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
    model = make_model(shrink(config, replaced), dtype=config.dtype or torch.float32)
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
            values = {"chat_template": tokenizer.chat_template}
            for part, class_name in known["processor"]["parts"].items():
                values[part] = getattr(transformers, class_name)(**sizes)
            processor_class = getattr(transformers, known["processor"]["class"])
        else:
            original = transformers.AutoProcessor.from_pretrained(name, revision=revision)
            if not hasattr(original, "image_processor"):  # a tokenizer: an encoder and a decoder for texts
                return None
            processor_class = type(original)
            values = {}
            for argument in inspect.signature(processor_class).parameters:
                if getattr(original, argument, None) is not None:
                    values[argument] = getattr(original, argument)
        processor = processor_class(**values | {"tokenizer": tokenizer})
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
    """About 500 documents of 100 to 6,000 characters, always in the same order."""
    from pyarrow import parquet

    rows = parquet.read_table(DATASETS["HuggingFaceFW/fineweb-edu"] / "train", columns=["text", "int_score"])
    return rows.sort_by("int_score")["text"].to_pylist()


def make_tokenizer(family: dict) -> PreTrainedTokenizerFast:
    """The small tokenizer of a family: 2,048 tokens, with the special tokens of its models."""
    file = Path(__file__).with_name("tokenizers") / f"{family['tokenizer_file']}.json"
    made = PreTrainedTokenizerFast(tokenizer_file=str(file), **family["tokenizer"])
    if name := family.get("chat_template_of_trl"):
        made.chat_template = resources.files("trl").joinpath("chat_templates", f"{name}.jinja").read_text("utf-8")
    return made


def shrink(config: PreTrainedConfig, replaced: dict[str, Any]) -> PreTrainedConfig:
    """A config of the same class with two small layers, of two kinds if the model has several, and the values of `replaced`."""
    kept = config.to_dict()
    for name in (*config.sub_configs, "per_layer_config"):
        kept.pop(name, None)
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

    small = {
        name: replaced[name] if name in replaced else resize(standard_of.get(name, name), value) for name, value in kept.items()
    }
    if "initializer_range" in small:
        small["initializer_range"] = 0.25  # large enough for an adapter on frozen random weights to lower the loss
    for name in config.sub_configs:  # such as the text part of an image model
        if part := getattr(config, name, None):
            small[name] = shrink(part, replaced).to_dict()
    return type(config).from_dict(small)


def _limit(name: str, value: int, replaced: dict[str, Any]) -> int:
    """`value`, at most what tiny_model.yaml says for a size of this name."""
    for pattern, limit in SIZES.items():
        if re.search(pattern, name):
            if limit == "vocabulary":
                limit = replaced["vocab_size"]
            if limit is None:
                return value
            return min(value, limit)
    return value


def _values_of_two_layers(values: dict[str, Any], layers: int) -> dict[str, list]:
    """The values that list something for each layer, for the first layer and the one that differs most from it."""
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == layers > 2}
    if not lists:
        return {}
    first, *others = zip(*lists.values(), strict=True)  # the values of each layer

    def difference(layer: tuple) -> tuple[int, bool]:
        return sum(map(operator.ne, layer, first)), "full_attention" in layer

    other = max(others, key=difference)
    return {name: [ours, theirs] for name, ours, theirs in zip(lists, first, other, strict=True)}
