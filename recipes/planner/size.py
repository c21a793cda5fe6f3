"""The model and dataset that a plan simulates: of full size, and without the weights and the rows."""

import dataclasses
import shutil
import tempfile
from pathlib import Path

from harness.data.reading import DataSettings
from harness.folder import write_json
from harness.hub import TOKENIZER, find_commit, hub_errors
from harness.messages import UserError
from harness.rehearsal import tiny

from huggingface_hub import hf_hub_download
from transformers import AutoConfig, AutoTokenizer, TrainingArguments
from trl import ModelConfig

PLANNED = "planned.json"  # next to the config.json: the name of the model that a plan is about
# For a plan of a model whose family is not known, any tokenizer will do; without a chat template, any that names the roles.
ANY_FAMILY = {"tokenizer_file": "gpt2", "tokenizer": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}}
ANY_TEMPLATE = "{% for message in messages %}{{ message['role'] + '\n' + message['content'] + '\n' }}{% endfor %}"


def use_planned_size(data: DataSettings, training_args: TrainingArguments, model_args: ModelConfig) -> DataSettings:
    """Makes the arguments name a folder with the model's own config.json and a small tokenizer; returns a small dataset.

    Neither the weights nor the texts change memory or time, so nothing else is asked of the Hub. The folders are below the
    run's output directory, which is a temporary one.
    """
    name = model_args.model_name_or_path
    revision = model_args.model_revision
    find_commit(name, revision)
    folder = Path(tempfile.mkdtemp(prefix="model", dir=training_args.output_dir))
    family = tiny.family_of(name)
    shutil.copy(config_file(name, revision), folder / "config.json")
    config = AutoConfig.from_pretrained(folder)
    reads_images = tiny.has_vision_part(config) and (not data.formats or "images" in data.formats)
    if reads_images and not family:  # a processor needs the tokens of its own tokenizer
        with hub_errors(TOKENIZER, name):
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    else:
        tokenizer = tiny.make_tokenizer(family or ANY_FAMILY)
    tokenizer.chat_template = tokenizer.chat_template or ANY_TEMPLATE
    tokenizer.save_pretrained(folder)
    processor = tiny.make_processor(name, revision, family, tokenizer, config) if reads_images else None
    if processor:
        processor.save_pretrained(folder)
    elif data.formats == ("images",):
        raise UserError(f"--model_name_or_path: {name} reads no images: pass a model that does, or use a recipe for texts")
    write_json(folder / PLANNED, {"model": name})
    tiny.use_model(training_args, model_args, folder)

    sources = data.with_each(eval_rows_of_run=data.max_eval_samples).sources
    return dataclasses.replace(
        data, sources=tuple(map(tiny.with_tiny_dataset, sources)), max_eval_samples=min(data.max_eval_samples, 16)
    )


def config_file(name: str, revision: str) -> Path:
    """The config.json of a model, from a folder or from the Hub."""
    if Path(name).is_dir():
        return Path(name, "config.json")
    return Path(hf_hub_download(name, "config.json", revision=revision))
