"""The tiny model of a rehearsal: two layers of the original's architecture, its special tokens and template, random weights."""

import dataclasses
import fnmatch
import itertools
import random
import re
from pathlib import Path
from typing import Any

from harness.hub import check_model_exists
from harness.launched import UserError, print_once

import yaml
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 2048
_YAML = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
FAMILIES, SIZES = _YAML["families"], _YAML["sizes"]
# For a plan of a model whose family is not known: any tokenizer will do, and any chat template that names the roles.
ANY_FAMILY = {
    "special": ["<|endoftext|>"],
    "tokenizer": {
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "chat_template": "{% for message in messages %}{{ message['role'] + '\n' + message['content'] + '\n' }}{% endfor %}",
    },
}


def family_of(name: str) -> dict | None:
    """The last family of tiny_model.yaml whose pattern matches a model's name, None for a model that is not listed there."""
    patterns = [pattern for pattern in FAMILIES if fnmatch.fnmatchcase(name, pattern)]
    return FAMILIES[patterns[-1]] if patterns else None


def make(name: str, revision: str, folder: Path) -> None:
    """Writes the tiny model and its tokenizer into `folder`."""
    import torch
    from transformers import AutoConfig, AutoProcessor, set_seed
    from transformers.utils import logging

    if known := family_of(name):
        config, tokenizer = AutoConfig.for_model(**known["config"]), make_tokenizer(known)
    else:
        config, tokenizer = _load_config_and_tokenizer(name, revision)
    token_ids = {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")}
    processor = tokenizer
    logging.disable_progress_bar()
    try:
        if has_vision_part(config):
            processor = AutoProcessor.from_pretrained(name, revision=revision)
            processor.tokenizer = tokenizer
        config = shrink(config, {"vocab_size": len(tokenizer), **token_ids})
        set_seed(0)
        model = make_model(config, dtype=config.dtype or torch.float32)
        tokens = torch.linspace(0, len(tokenizer) - 1, 16).long()[None]
        model(input_ids=tokens, use_cache=False)
    except Exception as error:  # any architecture can fail in its own way when its sizes change
        raise UserError(
            f"cannot make a two-layer model of the architecture of {name}: {type(error).__name__}: {error}"[:400]
        ) from error
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    logging.enable_progress_bar()


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
    texts, text, length = [], "", 0
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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **family["tokenizer"])


def config_file(name: str, revision: str) -> Path:
    """The config.json of a model, from a folder or from the Hub."""
    from huggingface_hub import hf_hub_download

    if Path(name).is_dir():
        return Path(name, "config.json")
    return Path(hf_hub_download(name, "config.json", revision=revision))


def _load_config_and_tokenizer(name: str, revision: str) -> tuple[PreTrainedConfig, PreTrainedTokenizerFast]:
    from transformers import AutoConfig, AutoTokenizer

    check_model_exists(name, revision)
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        return config, tokenizer.train_new_from_iterator(documents(), VOCABULARY, show_progress=False)
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: a slow tokenizer cannot be trained
        raise UserError(
            f"--model_name_or_path: a rehearsal needs the config.json and the fast tokenizer of {name}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def shrink(config: PreTrainedConfig, replaced: dict[str, Any]) -> PreTrainedConfig:
    """A config of the same class with two small layers, of two kinds if the model has several, and the values of `replaced`.

    A size that the class derives from others, such as the size of a head from the hidden size, is left out, so that the
    class derives it again.
    """
    values, standard_to_own = config.to_dict(), config.attribute_map
    fields = {standard_to_own.get(field.name, field.name): field for field in dataclasses.fields(config)}
    kept = {name: values[name] for name in fields if name in values}
    optional = [name for name, value in kept.items() if type(value) is int and fields[name].default is None]
    derived = type(config)(**{name: value for name, value in kept.items() if name not in optional}).to_dict()
    kept = {name: value for name, value in kept.items() if name not in optional or derived.get(name) != value}
    if "per_layer_config" in values:
        kept["per_layer_config"] = {int(layer): sizes for layer, sizes in values["per_layer_config"].items()}
    layers = getattr(config, "num_hidden_layers", 0)
    if layers > 2:
        kept |= _values_of_two_layers(kept, layers)

    own_to_standard = {own: standard for standard, own in standard_to_own.items()}
    heads = values.get(standard_to_own.get("num_attention_heads", "num_attention_heads"))
    head_dim = values.get("head_dim") or getattr(config, "hidden_size", 16) // (heads or 1)
    new_head_dim = _limit("head_dim", head_dim, replaced)

    def resize(name: str, value: Any) -> Any:
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

    small = {name: resize(own_to_standard.get(name, name), value) for name, value in kept.items()}
    small |= {name: value for name, value in replaced.items() if name in kept}
    if "initializer_range" in small:
        small["initializer_range"] = 0.25  # large enough for an adapter on frozen random weights to lower the loss
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return type(config)(**small | {name: shrink(part, replaced) for name, part in parts.items() if part is not None})


def _limit(name: str, value: int, replaced: dict[str, Any]) -> int:
    """`value`, at most what tiny_model.yaml says for a size of this name."""
    limit = next((size for pattern, size in SIZES.items() if re.search(pattern, name)), None)
    if limit == "vocabulary":
        limit = replaced["vocab_size"]
    return value if limit is None else min(value, limit)


def _values_of_two_layers(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """The values that list something for each layer, for the first layer and the one that differs most from it."""
    per_layer, layer_numbers = {}, set()
    for name, value in values.items():
        if name == "per_layer_config":
            per_layer[name] = value
        elif isinstance(value, list | tuple):
            if re.search("layers|idx|ind[ei]|ids", name) and list(value) == sorted(set(value) & set(range(layers))):
                layer_numbers.add(name)
                per_layer[name] = dict.fromkeys(value, True)
            elif len(value) == layers:
                per_layer[name] = dict(enumerate(value))

    rows = [[values_of.get(layer) for values_of in per_layer.values()] for layer in range(layers)]

    def difference(layer: int) -> tuple[int, bool]:
        return sum(first != other for first, other in zip(rows[0], rows[layer], strict=True)), "full_attention" in rows[layer]

    chosen = (0, max(range(1, layers), key=difference))
    for name, values_of in per_layer.items():
        kept = {new: values_of[old] for new, old in enumerate(chosen) if old in values_of}
        if name != "per_layer_config":
            kept = list(kept) if name in layer_numbers else list(kept.values())
        per_layer[name] = kept
    return per_layer


def check_packing(folder: Path, attention: str | None) -> None:
    """Prints a message if packed documents of this model change each other. Raises UserError if it refuses packed rows."""
    import torch
    import transformers
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype="float32", attn_implementation=attention)
    tokens = list(range(16))
    packed = DataCollatorForLanguageModeling(0, padding_free=True)([{"input_ids": tokens, "seq_lengths": [8, 8]}])
    try:
        together = model(**packed, use_cache=False).logits[0, 8:]
    except Exception as error:  # any architecture can refuse the collator's arguments in its own way
        raise UserError(f"--packing: this architecture cannot be trained on packed rows, pass false: {error}"[:400]) from error
    alone = model(input_ids=torch.tensor([tokens[8:]]), use_cache=False).logits[0]
    if not torch.allclose(together, alone, atol=0.01 * alone.abs().max().item()):
        print_once("Packed documents of this architecture are not kept apart: pass --packing false.")
    transformers.logging.enable_progress_bar()
