"""Changes to transformers, and private names of it."""

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator
from datetime import datetime, tzinfo
from typing import Any

from harness.compat.guards import changes

import torch
from transformers import AttentionMaskInterface, AutoConfig, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.image_utils import make_flat_list_of_images


@changes("transformers:PreTrainedModel.from_pretrained")
def load_models_with(load: Callable[..., PreTrainedModel]) -> None:
    """From here on, `from_pretrained` of every model returns `load(original, model_class, name, **options)`.

    `original(name, **options)` is the `from_pretrained` of the class before. For what the caller of `from_pretrained` does not
    decide: which weights a process reads, and where they are. A recipe passes the name of a model to a trainer, which loads it.
    Upstream: no issue: it is not a fault of transformers.
    Checked with: transformers 5.23.0.
    Remove when: recipes pass a model to the trainer.
    """
    before = PreTrainedModel.from_pretrained.__func__

    def from_pretrained(
        cls: type[PreTrainedModel], pretrained_model_name_or_path: str, *args: Any, **options: Any
    ) -> PreTrainedModel:
        return load(functools.partial(before, cls), cls, pretrained_model_name_or_path, *args, **options)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


@changes("transformers:PreTrainedModel._from_config")
def build_from_config(
    model_class: type[PreTrainedModel],
    name: str,
    change: Callable[[PreTrainedConfig], PreTrainedConfig] | None = None,
    config: PreTrainedConfig | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The model that `from_pretrained` would load with these options, with random weights, after `change(config)`.

    Upstream: no issue: `from_config` is a public method of AutoModel, which chooses the class itself.
    Checked with: transformers 5.23.0.
    Remove when: classes of models have it too.
    """
    config = config or AutoConfig.from_pretrained(name, revision=revision or "main")
    config = change(config) if change else config
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, config.dtype)  # "auto" is no attribute of torch
    dtype = dtype or config.dtype or torch.float32
    model = model_class._from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.name_or_path = config.name_or_path = str(name)  # SFTTrainer loads the tokenizer from there
    return model.eval()


@changes("transformers.dynamic_module_utils:TIME_OUT_REMOTE_CODE")
def never_ask_for_code() -> None:
    """From here on, loading a model that brings Python code of its own raises ValueError unless `trust_remote_code` is passed.

    transformers asks "Do you wish to run the custom code?" and reads standard input, which has the messages of --chat, or the
    answers of `yes |`.
    Upstream: no issue found.
    Checked with: transformers 5.23.0.
    Remove when: transformers does not ask without a terminal, or has a setting for it.
    """
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # seconds to wait for an answer


@changes("transformers.core_model_loading:_materialize_copy(tensor, device, dtype)")
def read_no_weights() -> None:
    """In this process `from_pretrained` makes weights on the meta device: FSDP receives them from the first process.

    With `fsdp_cpu_ram_efficient_loading` only the first process should read the weights, but transformers reads them in
    every process, so a node's host memory holds as many copies where the dtype is not that of the file.
    Upstream: huggingface/transformers#43749 with the open pull request #43785.
    Checked with: transformers 5.23.0.
    Remove when: that issue is closed.
    """
    from transformers import core_model_loading

    def make_empty(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape  # of a slice of a file, or of a tensor
        return torch.empty(shape, dtype=dtype, device="meta")

    core_model_loading._materialize_copy = make_empty


@changes(
    "transformers.conversion_mapping:get_model_conversion_mapping(model, key_mapping, hf_quantizer, add_legacy)",
    "transformers.core_model_loading:rename_source_key(source_key, weight_renamings, weight_converters, base_model_prefix, "
    "meta_state_dict, reverse)",
    "transformers.core_model_loading:WeightRenaming",
)
def names_in_model(model: PreTrainedModel | None) -> Callable[[str], str]:
    """The name in a model of a weight by its name in the files. The files of many models that read images have older names.

    `model`: None for quantized files, whose names stay.
    Upstream: no issue: `from_pretrained` renames weights while it loads, and there is no public name for that.
    Checked with: transformers 5.23.0.
    Remove when: there is one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    if model is None:
        return str
    known = model.state_dict()
    renamings = [change for change in get_model_conversion_mapping(model) if isinstance(change, WeightRenaming)]

    def name_in_model(name: str) -> str:
        renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, known)
        if renamed in known:
            return renamed
        return name

    return name_in_model


@changes("transformers.tokenization_utils_base:is_offline_mode")
def load_tokenizers_as_offline() -> None:
    """Makes tokenizers that come from the Hub equal to those that come from the cache.

    A tokenizer stores whether it was loaded offline. `datasets` computes the name of a cached dataset from the tokenizer, so
    data that was tokenized with internet would not be found again without it.
    Upstream: no issue found.
    Checked with: transformers 5.23.0, datasets 5.2.0.
    Remove when: the tokenizer no longer stores it.
    """
    from transformers import tokenization_utils_base

    tokenization_utils_base.is_offline_mode = lambda: True


@changes("transformers.utils.chat_template_utils:datetime")
def set_date_of_chat_templates(moment: datetime | None) -> None:
    """From here on, `strftime_now` in chat templates gives `moment`; None: the current date, as without this function.

    The templates of Llama 3.2, gpt-oss and others print the date, so a run that resumes on another day, and --verify, would get
    other tokens than the run had.
    Upstream: no issue: it is not a fault of transformers.
    Checked with: transformers 5.23.0.
    Remove when: `apply_chat_template` has an argument for it.
    """
    from transformers.utils import chat_template_utils

    class FixedDate(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return moment

    chat_template_utils.datetime = FixedDate if moment else datetime


@changes("transformers:PreTrainedModel._no_split_modules")
def transformer_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The transformer layers of a model by name, wrapped by FSDP or not.

    The names of the classes are private; FSDP's auto wrap policy in accelerate reads the same attribute.
    Upstream: no issue: there is no public name.
    Checked with: transformers 5.23.0.
    Remove when: there is one.
    """
    names = set(getattr(model, "_no_split_modules", None) or [])  # a module that is none of transformers has no such names
    return {name: module for name, module in model.named_modules() if names & {cls.__name__ for cls in type(module).__mro__}}


@changes(
    "transformers:PreTrainedModel._supports_flash_attn",
    "transformers:PreTrainedModel._compatible_flash_implementations",
    "transformers:PreTrainedConfig._attn_implementation",
)
def supports_flash_attention_2(model_class: type | None) -> bool:
    """Whether a model's class can use FlashAttention-2.

    For a class without FlashAttention, `from_pretrained` raises an error. For one that has a list of its own, such as gpt_oss,
    it downloads another kernel, which may not run on this GPU.
    Upstream: no issue: there is no public name.
    Checked with: transformers 5.23.0.
    Remove when: there is one.
    """
    listed = getattr(model_class, "_compatible_flash_implementations", None)
    return getattr(model_class, "_supports_flash_attn", False) and (listed is None or "flash_attention_2" in listed)


@changes(
    "transformers:PreTrainedModel._supports_flash_attn",
    "transformers:PreTrainedModel._supports_sdpa",
    "transformers:PreTrainedModel._supports_attention_backend",
)
def takes_other_attention(model_class: type | None) -> bool:
    """Whether a model's class calls a function of `AttentionInterface`, and passes it the lengths of packed documents.

    It does if it can use any such function, FlashAttention, and SDPA. A class without SDPA adds something to the scores
    (attention sinks, a softcap), one without FlashAttention needs its own mask.
    Upstream: no issue: there is no public name.
    Checked with: transformers 5.23.0.
    Remove when: there is one.
    """
    names = ("_supports_flash_attn", "_supports_sdpa", "_supports_attention_backend")
    return all(getattr(model_class, name, False) for name in names)


@changes("transformers:PreTrainedModel._is_stateful")
def is_stateful(model_class: type | None) -> bool:
    """Whether a model's layers carry a state from token to token, as Mamba and linear attention do.

    Upstream: no issue: there is no public name.
    Checked with: transformers 5.23.0.
    Remove when: there is one.
    """
    return getattr(model_class, "_is_stateful", False)


@changes(
    "transformers.integrations.hub_kernels:is_torchdynamo_exporting()",
    "transformers.integrations.hub_kernels:use_kernel_func_from_hub_with_fallback(func_name, package, internal_path)",
)
def use_no_gpu_kernels() -> contextlib.ExitStack:
    """From here on, or in a `with` block, layers with a state compute in PyTorch, whatever kernels for GPUs are installed.

    transformers calls these kernels (fla, causal_conv1d, mamba_ssm) for tensors of every device, and on a CPU they fail. While a
    model is exported it does not call them.
    Upstream: no issue found.
    Checked with: transformers 5.23.0.
    Remove when: transformers looks at the device.
    """
    from transformers.integrations import hub_kernels

    def is_other(record: logging.LogRecord) -> bool:
        return "reference PyTorch implementation" not in record.getMessage()

    logger = logging.getLogger("transformers.integrations.hub_kernels")
    undo = contextlib.ExitStack()  # does nothing unless it is used as a context
    undo.callback(setattr, hub_kernels, "is_torchdynamo_exporting", hub_kernels.is_torchdynamo_exporting)
    undo.callback(logger.removeFilter, is_other)
    logger.addFilter(is_other)  # each process would print a line for each of these functions
    hub_kernels.is_torchdynamo_exporting = lambda: True
    return undo


@changes("transformers:PreTrainedConfig._attn_implementation")
def attention_of(config: Any) -> str | None:
    """The attention implementation that a loaded model uses, as `--attn_implementation` names it.

    Upstream: no issue: there is no public name.
    Checked with: transformers 5.23.0.
    Remove when: there is one.
    """
    return getattr(config, "_attn_implementation", None)


@changes("transformers:PreTrainedModel.device", "transformers.generation.utils:move_to_device(value, device)")
@contextlib.contextmanager
def generate_on(device: torch.device) -> Iterator[None]:
    """In this context models say that their weights are on `device`, so `generate` leaves the inputs there.

    With `fsdp_offload_params` the weights are in host memory until FSDP copies them to the GPU, so `generate` moves all inputs
    to the CPU. FSDP moves back those of its outermost module only. That is the PeftModel, whose `generate` does not call it: the
    positions stay on the CPU, and the first layer fails.
    Upstream: no issue found.
    Checked with: transformers 5.23.0, peft 0.21.2.
    Remove when: `generate` moves no inputs of a model whose parameters are DTensors.
    """
    from transformers import PreTrainedModel

    original = PreTrainedModel.device
    PreTrainedModel.device = property(lambda self: device)
    try:
        yield
    finally:
        PreTrainedModel.device = original


@changes("transformers:AttentionMaskInterface.register(key, value)")
@contextlib.contextmanager
def convert_masks_once() -> Iterator[None]:
    """In this context masks for SDPA are numbers to add. It would convert a boolean one in each layer, which takes four kernels.

    Rows begin at multiples of 8 numbers: otherwise attention on a GPU copies them in each layer.
    Upstream: no issue found.
    Checked with: transformers 5.23.0, torch 2.13.0.
    Remove when: transformers makes such masks.
    """
    make_mask = AttentionMaskInterface()["sdpa"]

    def make_numbers(dtype: torch.dtype, **options: Any) -> torch.Tensor | None:
        mask = make_mask(dtype=dtype, **options)
        if mask is None:
            return None
        length = mask.shape[-1]
        numbers = mask.new_full((*mask.shape[:-1], length + -length % 8), -torch.inf, dtype=dtype)
        return numbers[..., :length].masked_fill_(mask, 0)

    AttentionMaskInterface.register("sdpa", make_numbers)
    try:
        yield
    finally:
        AttentionMaskInterface.register("sdpa", make_mask)


@changes("transformers:ProcessorMixin._process_images(self, images, kwargs)")
@functools.cache
def without_pixels(processor: ProcessorMixin) -> ProcessorMixin:
    """A copy of a processor that makes the tokens of texts with images, and no pixels: an image of each size is processed once.

    The tokens are those of the processor itself, with all that it checks. The pixels of a row are made with its batch.
    Upstream: no issue found; `_get_num_multimodal_tokens` of vLLM gives numbers, not the text around the tokens.
    Checked with: transformers 5.23.0.
    Remove when: a processor makes tokens of the sizes of images.
    """
    texts: dict[tuple[int, int], list[str]] = {}

    def texts_of_images(images: Any, **options: Any) -> tuple[dict, list[str]]:
        found = []
        for image in make_flat_list_of_images(images):
            if image.size not in texts:
                texts[image.size] = processor._process_images([[image]], **options)[1]
            found += texts[image.size]
        return {}, found

    changed = copy.copy(processor)
    changed._process_images = texts_of_images
    return changed
