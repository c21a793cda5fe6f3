"""A model that llama.cpp has converted to a GGUF file, for --verify; reading one needs the package gguf."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.messages import UserError

FLOATS = {"F32", "F16", "BF16"}  # the types of weights that are not quantized


@dataclass
class Check:
    """A row of the table."""

    model: str
    what: str
    expected: str
    found: str
    tolerance: str
    result: str  # "ok", "FAILED" or "not checked"


def compare(model: Path, what: str, expected: object, found: object) -> Check:
    """A check of two things that must be equal."""
    return Check(str(model), what, str(expected), str(found), "equal", "ok" if expected == found else "FAILED")


def read_gguf(file: Path) -> Any:
    """The `gguf.GGUFReader` of a file: its settings and the types of its weights."""
    from gguf import GGUFReader

    return GGUFReader(file)


def value_of(reader: Any, name: str) -> Any:
    """A setting of the tokenizer in a GGUF file, None if it has no such setting."""
    field = reader.fields.get(f"tokenizer.{name}")
    return field.contents() if field else None


def check_vocabulary(file: Path, reader: Any, tokenizer: Any) -> list[Check]:
    """Whether a GGUF file has the vocabulary of the run, and ends an answer with the same token.

    Without the added tokens that are not special, whose blanks llama.cpp's program writes in another way.
    """
    texts = value_of(reader, "ggml.tokens")
    if texts is None:
        return []
    known = tokenizer.get_vocab()
    for token in tokenizer.added_tokens_decoder.values():
        if not token.special:
            del known[token.content]
    equal = sum(index < len(texts) and texts[index] == token for token, index in known.items())
    ends = [value_of(reader, f"ggml.{name}_token_id") for name in ("eos", "eot")]
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
    return [
        compare(file, "tokens of the vocabulary", len(known), equal),
        compare(file, "token that ends an answer", tokenizer.eos_token_id, end),
    ]


def load_gguf(file: Path, trained: Any) -> Any:
    """The model in a GGUF file, its weights in the dtype of `trained`, on the GPUs of this machine or on its CPU.

    `trained`: the config of the model that was trained. The file's settings replace its settings, so that a wrong one changes the
    loss. transformers reads only some: not how positions are scaled, for example.
    """
    from harness.model.models import check_found

    import torch
    from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedConfig

    config = copy.deepcopy(trained.get_text_config())
    vars(config).pop("quantization_config", None)  # after QLoRA
    path = str(file.absolute())
    settings, _ = PreTrainedConfig.get_config_dict(file.parent, gguf_file=path)
    if settings["model_type"] != config.model_type:
        raise UserError(f"{file} has the architecture {settings['model_type']}, but the run has trained {config.model_type}")
    positions = settings.pop("rope_parameters", {})
    if "rope_theta" in settings:
        positions["rope_theta"] = settings.pop("rope_theta")
    config.update(settings)
    if "rope_theta" in (getattr(config, "rope_parameters", None) or {}):
        config.rope_parameters |= positions
    model, found = AutoModelForCausalLM.from_pretrained(
        file.parent,
        config=config,
        dtype=config.dtype,
        output_loading_info=True,
        gguf_file=path,
        quantization_config=GgufConfig(dequantize=True),
        device_map="auto" if torch.cuda.is_available() else {"": "cpu"},
    )
    check_found(found, str(file))
    return model.eval()
