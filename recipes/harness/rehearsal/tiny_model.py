"""The tiny stand-in of a model: two layers of its architecture, its special tokens and chat template, random weights."""

import fnmatch
from pathlib import Path

from harness import hub
from harness.launched import fail
from harness.rehearsal.tiny_data import documents

import yaml

VOCABULARY = 2048
FAMILIES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


def family_of(name: str) -> dict | None:
    return next((FAMILIES[pattern] for pattern in reversed(FAMILIES) if fnmatch.fnmatchcase(name, pattern)), None)


def make(name: str, revision: str, folder: Path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed
    from transformers.utils import logging

    if known := family_of(name):
        config, tokenizer = AutoConfig.for_model(**known["config"]), make_tokenizer(known)
    else:
        config, tokenizer = _from_hub(name, revision)
    _shrink(config.get_text_config(), len(tokenizer))
    for token in ("bos", "eos", "pad"):
        setattr(config, f"{token}_token_id", getattr(tokenizer, f"{token}_token_id"))
    set_seed(0)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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
    except (OSError, ValueError) as error:
        fail(f"the rehearsal needs config.json and the tokenizer of {name}: {str(error).splitlines()[0]}")
    return config, tokenizer.train_new_from_iterator(documents(), VOCABULARY, show_progress=False)


def _shrink(config, vocabulary: int):
    """Two small layers, whatever the architecture calls its sizes."""
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_local_experts": 4,
        "moe_intermediate_size": 32,
        "vocab_size": vocabulary,
        "initializer_range": 0.25,  # strong enough that even an adapter on frozen random weights has something to mend
    }
    for name, size in sizes.items():
        if isinstance(getattr(config, name, None), int | float):
            setattr(config, name, size)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
