"""Which attention a run uses."""

import re

from harness.compat.transformers import supports_flash_attention_2, takes_other_attention
from harness.hub import check_model_exists
from harness.messages import UserError
from harness.model.gpu_features import FLASH, VARLEN
from harness.model.packing import has_documents, keeps_documents_apart
from harness.model.varlen import MAX_HEAD_SIZE, register_varlen
from harness.rehearsal import tiny
from harness.runs import Run

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, TrainingArguments
from trl import ModelConfig


def set_attention(training_args: TrainingArguments, model_args: ModelConfig, run: Run) -> None:
    """Sets the attention implementation unless a flag has. Raises UserError for an impossible `varlen`."""
    given = model_args.attn_implementation
    chosen = choose_attention(training_args, model_args, run)
    if given == VARLEN and chosen != VARLEN:
        raise UserError(f"--attn_implementation {VARLEN} is not for these rows, flags, model, dtype or GPU: leave it out")
    if given is None:
        model_args.attn_implementation = chosen
    if model_args.attn_implementation == VARLEN:
        register_varlen()


def choose_attention(training_args: TrainingArguments, model_args: ModelConfig, run: Run) -> str | None:
    """The attention implementation: `varlen` or FlashAttention-2 if possible, None to leave it to transformers.

    A rehearsal on CPU can do what a GPU can. If the config cannot be read, `check_model` says so. TRL's selective activation
    checkpointing does not know `varlen`: it would compute it a second time, as without the option.
    """
    config = config_of(model_args, run.tiny)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    in_16_bit = dtype_of_products(training_args, str(model_args.dtype)) in ("bfloat16", "float16")
    is_selective = (training_args.activation_checkpointing_kwargs or {}).get("selective")
    has_kernel = not is_selective and (run.on_cpu or (VARLEN in run.gpu.attention and in_16_bit))
    if has_kernel and has_documents(training_args) and (config is None or can_use_varlen(config, model_class)):
        return VARLEN
    has_flash = FLASH in run.gpu.attention and not run.on_cpu and in_16_bit
    fits = config is None or max(head_sizes(config)) <= MAX_HEAD_SIZE
    if has_flash and fits and supports_flash_attention_2(model_class):
        return FLASH
    return None


def dtype_of_products(training_args: TrainingArguments, otherwise: str) -> str:
    """The dtype of mixed precision, `otherwise` if it is off."""
    if training_args.bf16:
        return "bfloat16"
    if training_args.fp16:
        return "float16"
    return otherwise


def config_of(model_args: ModelConfig, is_tiny: bool) -> PreTrainedConfig | None:
    """The config of the model, None if it cannot be read, or the recipe makes its model itself. `is_tiny`: a rehearsal."""
    name = model_args.model_name_or_path
    revision = model_args.model_revision
    if not name:
        return None
    if is_tiny and (known := tiny.family_of(name)):
        return AutoConfig.for_model(**known["config"])
    try:
        check_model_exists(name, revision)  # fails at once if the Hub is unreachable; `from_pretrained` tries for 20 seconds
        return AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError, UserError):
        return None


def can_use_varlen(config: PreTrainedConfig, model_class: type | None) -> bool:
    """Whether `varlen` computes what this model needs: it has no softcap, no dropout, no sinks, and not all head sizes.

    Some models do not pass the lengths of documents to their attention, whatever their class says, such as Nemotron's.
    """
    values = config.get_text_config().to_dict()
    has_dropout = any(value for name, value in values.items() if re.match("att.*(dropout|pdrop)", name))
    # On consumer GPUs it has no backward pass for sizes up to 224.
    has_sizes = all(size <= MAX_HEAD_SIZE and size % 8 == 0 and not 192 < size <= 224 for size in head_sizes(config))
    if not has_sizes or has_dropout or values.get("attn_logit_softcapping") or not takes_other_attention(model_class):
        return False
    register_varlen()
    return keeps_documents_apart(config, VARLEN) is not False


def head_sizes(config: PreTrainedConfig) -> list[int]:
    """The sizes of the attention heads of a model. Layers can have different ones, as in Gemma 4."""
    text = config.get_text_config()
    sizes = [int(size) for size in re.findall(r'head_dim": (\d+)', text.to_json_string(use_diff=False))]
    # By their usual names, which every config maps to its own: GPT-2's n_embd, GPT-Neo's num_heads.
    return sizes or [getattr(text, "hidden_size", 64) // (getattr(text, "num_attention_heads", None) or 1)]
