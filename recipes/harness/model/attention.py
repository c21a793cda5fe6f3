"""Which attention a run uses, and why."""

import re
from collections.abc import Collection
from typing import NamedTuple

from harness.batches import is_packed, length_of_rows
from harness.compat.transformers import supports_flash_attention_2, takes_other_attention
from harness.contexts import Context
from harness.hub import check_model_exists
from harness.messages import UserError, print_once
from harness.model.gpu_features import FLASH, VARLEN, problem_of_flash_attn
from harness.model.varlen import MAX_HEAD_SIZE, register_varlen
from harness.rehearsal import tiny

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import ModelConfig


class Facts(NamedTuple):
    """What the choice depends on."""

    has_documents: bool  # a batch is one row of documents, of which the model gets the lengths
    computes_in: str  # dtype
    place: str  # "gpu", "cpu" (a rehearsal), or "plan"
    usable: Collection[str]  # implementations that run on the GPUs of this machine, besides those of transformers
    config: PreTrainedConfig | None  # None if it cannot be read, which `check_model` explains
    model_class: type | None


def set_attention(training_args: TrainingArguments, model_args: ModelConfig, context: Context) -> None:
    """Sets the attention implementation unless a flag has, and raises UserError for a flag that cannot work."""
    given, facts = model_args.attn_implementation, facts_of_run(training_args, model_args, context)
    if given is None or (facts.place == "plan" and "flash" in given):  # a plan simulates any FlashAttention as PyTorch's
        model_args.attn_implementation, _ = choose_attention(facts)
    else:
        check_attention(given, facts)
    if model_args.attn_implementation == VARLEN:
        register_varlen()


def check_attention(given: str, facts: Facts) -> None:
    """Raises UserError for a value of --attn_implementation that cannot work."""
    if "/" not in given and given not in (known := ["eager", VARLEN, *ALL_ATTENTION_FUNCTIONS.valid_keys()]):
        raise UserError(f"--attn_implementation {given} is unknown: pass {', '.join(known)} or a kernel of the Hub")
    if given == VARLEN and (reason := why_not_varlen(facts)):
        raise UserError(f"--attn_implementation {VARLEN}: {reason}: leave out the flag")
    if given == FLASH and (problem := problem_of_flash_attn()):
        raise UserError(f"--attn_implementation {FLASH}: {problem}: install flash-attn again, or leave out the flag")
    if given == FLASH and facts.config and (size := max(head_sizes(facts.config))) > MAX_HEAD_SIZE:
        raise UserError(
            f"--attn_implementation {FLASH}: it takes head sizes up to {MAX_HEAD_SIZE}, and this model has {size}: leave out "
            "the flag"
        )


def facts_of_run(training_args: TrainingArguments, model_args: ModelConfig, context: Context) -> Facts:
    return Facts(
        has_documents(training_args),
        "float16" if training_args.fp16 else "bfloat16" if training_args.bf16 else str(model_args.dtype),
        "plan" if context.is_simulated else "cpu" if context.on_cpu else "gpu",
        context.attention,
        *config_and_class(model_args, context.tiny),
    )


def has_documents(training_args: TrainingArguments) -> bool:
    """Whether a batch is one row of documents, of which the model gets the lengths."""
    keeps_lengths = is_packed(training_args) and training_args.packing_strategy in ("bfd", "bfd_split")
    return keeps_lengths or getattr(training_args, "padding_free", False)


def config_and_class(model_args: ModelConfig, is_tiny: bool) -> tuple[PreTrainedConfig | None, type | None]:
    """Config and class of the model, (None, None) if the config cannot be read. For a rehearsal, those of the original."""
    name, revision = model_args.model_name_or_path, model_args.model_revision
    if not name:  # the recipe makes its model itself
        return None, None
    known = tiny.family_of(name) if is_tiny else None
    try:
        if not known:
            check_model_exists(name, revision)  # fails at once if the Hub is unreachable; `from_pretrained` tries for 20 seconds
        config = AutoConfig.for_model(**known["config"]) if known else AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError, UserError):
        return None, None
    return config, MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def choose_attention(facts: Facts) -> tuple[str | None, str]:
    """The attention implementation, None to leave it to transformers, and the reason why it is not the first choice."""
    reason = why_not_varlen(facts)
    if not reason:
        return VARLEN, ""
    can_run = FLASH in facts.usable and facts.place == "gpu" and facts.computes_in in ("bfloat16", "float16")
    fits = facts.config is None or max(head_sizes(facts.config)) <= MAX_HEAD_SIZE
    return FLASH if can_run and fits and supports_flash_attention_2(facts.model_class) else None, reason


def why_not_varlen(facts: Facts) -> str:
    """Why a run cannot use `varlen`, "" if it can. A rehearsal on CPU and a plan can do what a GPU can."""
    if not facts.has_documents:
        return "it is for rows packed with --packing_strategy bfd or bfd_split"
    if facts.place == "plan" and facts.computes_in == "float16":
        return "a plan in fp16 is for T4s, which do not support FlashAttention"
    if facts.place == "gpu" and VARLEN not in facts.usable:
        return "it needs GPUs of compute capability 8.0"
    if facts.place != "cpu" and facts.computes_in not in ("bfloat16", "float16"):
        return "it computes in bf16 or fp16 only"
    return why_model_cannot_use_varlen(facts.config, facts.model_class) if facts.config else ""


def why_model_cannot_use_varlen(config: PreTrainedConfig, model_class: type | None) -> str:
    text = config.get_text_config()
    values, kind = text.to_dict(), text.model_type
    if values.get("attn_logit_softcapping"):
        return f"it has no softcap, and attn_logit_softcapping of {kind} is {values['attn_logit_softcapping']}"
    if not takes_other_attention(model_class):
        return f"the class of {kind} does not support it (attention sinks, position biases, or masks of its own)"
    for size in head_sizes(config):
        if size > MAX_HEAD_SIZE or size % 8 or 192 < size <= 224:  # on consumer GPUs it has no backward pass for sizes up to 224
            return f"it takes head sizes that are multiples of 8, up to 192 or from 232 to 256, and a head of {kind} has {size}"
    for name, value in values.items():
        if re.match("att.*(dropout|pdrop)", name) and value:
            return f"it has no dropout, and {name} of {kind} is {value}"
    return ""


def head_sizes(config: PreTrainedConfig) -> list[int]:
    """The sizes of the attention heads of a model. Layers can have different ones, as in Gemma 4."""
    text = config.get_text_config()
    sizes = [int(size) for size in re.findall(r'head_dim": (\d+)', text.to_json_string(use_diff=False))]
    # By their usual names, which every config maps to its own: GPT-2's n_embd, GPT-Neo's num_heads.
    return sizes or [getattr(text, "hidden_size", 64) // (getattr(text, "num_attention_heads", None) or 1)]


def print_attention(training_args: TrainingArguments, model_args: ModelConfig, context: Context) -> None:
    """Prints which attention a run uses and why, what it costs, and whether the loss runs without Triton."""
    facts = facts_of_run(training_args, model_args, context)
    used, (choice, reason) = model_args.attn_implementation, choose_attention(facts)
    if context.on_cpu and not facts.has_documents:
        return
    if context.no_triton and not context.on_cpu:
        print_once(f"TRL's loss runs in PyTorch instead of Triton, a little slower: {context.no_triton}")
    if context.no_flash and not context.on_cpu:
        print_once(f"warning: {context.no_flash}")
    why = f", not {VARLEN}: {reason}" if reason else ""
    if used != choice:
        why = ", from --attn_implementation"
    elif used == VARLEN:
        why = ", PyTorch's FlashAttention-2: tokens attend to their own document only"
        if context.on_cpu:
            why += " (on a CPU, one SDPA per document)"
    tokens = training_args.per_device_train_batch_size * (length_of_rows(training_args) or 0)
    cost = ""
    has_mask = used in (None, "sdpa", "eager") and facts.has_documents and not context.on_cpu
    if has_mask and tokens and facts.config is not None:
        # Per token and layer: 4 x tokens x hidden_size FLOP of attention, 2 x 12 x hidden_size^2 of the weights.
        share = tokens / 6 / facts.config.get_text_config().hidden_size
        cost = f" With a mask, each token attends to all {tokens:,} of its batch: {share:.0%} of the FLOP of the weights."
    print_once(f"Attention: {used or 'chosen by transformers, SDPA for most models'}{why}.{cost}")
