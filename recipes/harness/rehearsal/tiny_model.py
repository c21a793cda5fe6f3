"""The tiny stand-in of a model: two layers of its architecture, its special tokens and chat template, random weights."""

import dataclasses
import fnmatch
import itertools
import re
from pathlib import Path

from harness import hub
from harness.launched import fail, say
from harness.rehearsal.tiny_data import documents

import yaml

VOCABULARY = 2048
_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
FAMILIES, SIZES = _DATA["families"], _DATA["sizes"]


def family_of(name: str) -> dict | None:
    return next((FAMILIES[pattern] for pattern in reversed(FAMILIES) if fnmatch.fnmatchcase(name, pattern)), None)


def make(name: str, revision: str, folder: Path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, set_seed
    from transformers.utils import logging

    if known := family_of(name):
        config, tokenizer = AutoConfig.for_model(**known["config"]), make_tokenizer(known)
    else:
        config, tokenizer = _from_hub(name, revision)
    tokens = {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")}
    processor, kind = tokenizer, AutoModelForCausalLM
    logging.disable_progress_bar()
    try:
        if "ForConditionalGeneration" in str(config.architectures):  # it also sees, and a trainer asks for all of it
            processor, kind = AutoProcessor.from_pretrained(name, revision=revision), AutoModelForImageTextToText
            processor.tokenizer = tokenizer
        config = shrink(config, {"vocab_size": len(tokenizer), **tokens})
        set_seed(0)
        model = kind.from_config(config, dtype=config.dtype or torch.float32)
        words = torch.linspace(0, len(tokenizer) - 1, 16).long()[None]
        model(input_ids=words, use_cache=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        fail(f"no two-layer model of the architecture of {name} can be made for a rehearsal: {reason}"[:400])
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    logging.enable_progress_bar()


def make_tokenizer(family: dict):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

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
    if start := family.get("begins_with"):
        tokenizer.post_processor = processors.TemplateProcessing(f"{start} $A", None, [(start, tokenizer.token_to_id(start))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **family["tokenizer"])


def _from_hub(name: str, revision: str):
    from transformers import AutoConfig, AutoTokenizer

    hub.reachable(name, revision)
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        return config, tokenizer.train_new_from_iterator(documents(), VOCABULARY, show_progress=False)
    except (OSError, ValueError, AttributeError) as error:  # slow tokenizers cannot be trained
        fail(f"the rehearsal needs config.json and the fast tokenizer of {name}: {str(error).splitlines()[0]}")


def shrink(config, own: dict):
    """A config of the same class: two small layers, of two kinds where the model has several, and the values of `own`.

    A size that the class works out of others, as a head's from the hidden size, is left for it to work out again.
    """
    values, attributes = config.to_dict(), config.attribute_map
    fields = {attributes.get(field.name, field.name): field for field in dataclasses.fields(config)}
    given = {name: values[name] for name in fields if name in values}
    optional = [name for name, value in given.items() if type(value) is int and fields[name].default is None]
    derived = type(config)(**{name: value for name, value in given.items() if name not in optional}).to_dict()
    given = {name: value for name, value in given.items() if name not in optional or derived.get(name) != value}
    if "per_layer_config" in values:
        given["per_layer_config"] = {int(layer): sizes for layer, sizes in values["per_layer_config"].items()}
    if (layers := getattr(config, "num_hidden_layers", 0)) > 2:
        given |= _two_layers(given, layers)

    common = {name: standard for standard, name in attributes.items()}
    heads = values.get(attributes.get("num_attention_heads", "num_attention_heads"))
    head = values.get("head_dim") or getattr(config, "hidden_size", 16) // (heads or 1)

    def fit(name: str, value):
        if isinstance(value, dict):
            return {key: fit(str(key), part) for key, part in value.items()}
        if name == "mrope_section":  # the frequencies of a head, in parts
            ends = [sum(value[:count]) * fit("head_dim", head) // head for count in range(len(value) + 1)]
            return [end - start for start, end in itertools.pairwise(ends)]
        if name in ("short_factor", "long_factor"):  # one for each of these frequencies
            return value[: len(value) * fit("head_dim", head) // head]
        if isinstance(value, list | tuple):
            return [fit(name, part) for part in value]
        if type(value) is not int:
            return value
        if value == heads and re.search("kv|key", name):
            name = "num_attention_heads"  # as many stay as many
        most = next((size for pattern, size in SIZES.items() if re.search(pattern, name)), None)
        most = {None: value, "vocabulary": own["vocab_size"]}.get(most, most)
        return min(value, most)

    small = {name: fit(common.get(name, name), value) for name, value in given.items()}
    small |= {name: value for name, value in own.items() if name in given}
    if "initializer_range" in small:
        small["initializer_range"] = 0.25  # strong enough that even an adapter on frozen random weights has something to mend
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return type(config)(**small | {name: shrink(part, own) for name, part in parts.items() if part is not None})


def _two_layers(given: dict, layers: int) -> dict:
    """What `given` says of single layers, for the first of them and the one most unlike it."""
    each, numbers = {}, set()
    for name, value in given.items():
        if name == "per_layer_config":
            each[name] = value
        elif isinstance(value, list | tuple):
            if re.search("layers|idx|ind[ei]|ids", name) and list(value) == sorted(set(value) & set(range(layers))):
                numbers.add(name)
                each[name] = dict.fromkeys(value, True)
            elif len(value) == layers:
                each[name] = dict(enumerate(value))

    rows = [[values.get(layer) for values in each.values()] for layer in range(layers)]
    unlike = [(sum(a != b for a, b in zip(rows[0], row, strict=True)), "full_attention" in row) for row in rows]
    pair = (0, max(range(1, layers), key=unlike.__getitem__))
    for name, values in each.items():
        kept = {new: values[old] for new, old in enumerate(pair) if old in values}
        each[name] = kept if name == "per_layer_config" else list(kept if name in numbers else kept.values())
    return each


def check_packing(folder: Path):
    """Says so when packed documents see each other in this model; fails when it refuses them."""
    import torch
    import transformers
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype="float32")
    words = [*range(16)]
    packed = DataCollatorForLanguageModeling(0, padding_free=True)([{"input_ids": words, "seq_lengths": [8, 8]}])
    try:
        together = model(**packed, use_cache=False).logits[0, 8:]
    except Exception as error:
        fail(f"this architecture cannot be trained on packed documents here, give --packing false: {error}"[:400])
    alone = model(input_ids=torch.tensor([words[8:]]), use_cache=False).logits[0]
    if not torch.allclose(together, alone, atol=0.01 * alone.abs().max().item()):
        say("Without flash attention, packed documents of this architecture see each other: --packing false keeps them apart.")
    transformers.logging.enable_progress_bar()
