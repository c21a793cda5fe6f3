"""Changes to transformers, and private names of it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.compat.guards import changes

import torch


@changes("transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer.update_device_map(self, device_map)")
def load_4bit_models_on_cpu() -> None:
    """Loads 4-bit models into host memory, so that FSDP can move one layer at a time to the GPU.

    SFTTrainer passes `device_map=None` in every distributed run, and transformers takes None for the current GPU: every
    process would hold the whole 4-bit model on its GPU. A `device_map` in the recipe has no effect, SFTTrainer overwrites it.
    Upstream: no issue found; huggingface/trl#6158 describes how SFTTrainer sets the device map.
    Checked with: transformers 5.23.0, trl 1.16.0.
    Remove when: SFTTrainer leaves a `device_map` alone that the user passed.
    """
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    def update_device_map(self: Bnb4BitHfQuantizer, device_map: Any) -> dict[str, str]:
        return {"": "cpu"}

    Bnb4BitHfQuantizer.update_device_map = update_device_map


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
    "transformers:PreTrainedModel.from_pretrained",
    "transformers:PreTrainedModel._from_config",
)
def load_small_models(shrink: Callable[[Any], Any]) -> None:
    """From here on `from_pretrained` makes a model with random weights and the config `shrink(config)`; it reads no weights.

    For commands that run a recipe only until its trainer is built: the data is tokenized for the real model, and loading
    70B would take an hour. A recipe passes the model's name to the trainer, so the replacement must be in `from_pretrained`.
    Upstream: no issue: it is not a fault of transformers.
    Checked with: transformers 5.23.0.
    Remove when: SFTTrainer can be built without a model.
    """
    from transformers import AutoConfig, GenerationConfig, PreTrainedModel

    def from_pretrained(
        cls: type[PreTrainedModel],
        name: str,
        *args: Any,
        config: Any = None,
        revision: str = "main",
        dtype: Any = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        small = shrink(config or AutoConfig.from_pretrained(name, revision=revision))
        small.name_or_path = str(name)  # SFTTrainer loads the tokenizer from there
        model = cls._from_config(small, **({"dtype": dtype} if dtype else {}))
        with contextlib.suppress(OSError):  # not every model has a generation config
            model.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
        return model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


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


@changes(
    "transformers:Trainer.get_batch_samples(self, epoch_iterator, num_batches, device)",
    "transformers:Trainer._get_num_items_in_batch(self, batch_samples, device)",
)
def install_batch_reader(
    trainer: Any, read: Callable[[Iterator, int], list[dict]], on_count: Callable[[list[dict], Any], None]
) -> None:
    """Replaces how a trainer reads the micro-batches of an optimizer step.

    `read(iterator, count)` returns the batches. If it returns an empty list on one process, it must do so on all, because the
    trainer then gathers the number of tokens in the loss from all of them. `on_count(batches, number)` is called with this
    number. It is the same on all processes, so `on_count` may raise an error.

    transformers lets an exception of the data loader end one process while the others wait in that gather; on NCCL all later
    collectives are off by one. So `read` catches what can happen to one process only, and tells the others.
    Upstream: no issue found.
    Checked with: transformers 5.23.0.
    Remove when: the trainer has a hook between reading the batches and the gather.
    """

    def get_batch_samples(epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list[dict], Any]:
        batches = read(epoch_iterator, num_batches)
        number = trainer._get_num_items_in_batch(batches, device)
        on_count(batches, number)
        return batches, number

    trainer.get_batch_samples = get_batch_samples


@changes("transformers:Trainer._save_checkpoint(self, model, trial)")
def install_before_checkpoint(trainer: Any, before: Callable[[Path], None]) -> None:
    """Calls `before(folder)` on every process before a trainer writes the checkpoint `folder`.

    A callback is called only after the checkpoint was written. It is too late then to mark the folder as incomplete, and
    to delete an old checkpoint first when the disk is nearly full.
    Upstream: no issue found.
    Checked with: transformers 5.23.0.
    Remove when: TrainerCallback has an event before a save.
    """
    write = trainer._save_checkpoint

    def save_checkpoint(model: Any, trial: Any) -> None:
        before(Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}"))
        write(model, trial)

    trainer._save_checkpoint = save_checkpoint


@changes("transformers:Trainer._load_best_model(self)")
def load_best_model(trainer: Any) -> None:
    """Loads the weights of the best checkpoint with `load_best_model_at_end`, as at the end of `Trainer.train`.

    `train` does so only after it has trained a step, which a run that was killed after its last step does not.
    Upstream: no issue found.
    Checked with: transformers 5.23.0.
    Remove when: `Trainer.train` trains no step if the checkpoint is the last step.
    """
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint:
        trainer._load_best_model()


@changes(
    "transformers:Trainer._evaluate(self, trial, ignore_keys_for_eval, skip_scheduler)",
    "transformers:Trainer._determine_best_metric(self, metrics, trial)",
)
def evaluate_step(trainer: Any) -> None:
    """Evaluates as `Trainer.train` does after a step: a scheduler that depends on the loss and the best checkpoint learn of it.

    `Trainer.evaluate` returns and logs the losses only.
    Upstream: no issue found.
    Checked with: transformers 5.23.0.
    Remove when: a run that resumes from a checkpoint without its evaluation makes it up.
    """
    trainer._determine_best_metric(metrics=trainer._evaluate(None, None), trial=None)


@changes("transformers:Trainer.log(self, logs, start_time)")
def install_log_fields(trainer: Any, fields: Callable[[dict], dict]) -> None:
    """Adds `fields(logs)` to everything a trainer logs, before the state and the trackers get it.

    A callback gets the logs after they were written into the state, and after the trackers, which were added first.
    Upstream: the documented way is a subclass of Trainer, but recipes choose the class.
    Checked with: transformers 5.23.0.
    Remove when: callbacks can change logs.
    """
    log = trainer.log

    def log_with_fields(logs: dict, *args: Any, **kwargs: Any) -> None:
        logs.update(fields(logs))  # not a copy: SFTTrainer adds metrics too, by one of which the best checkpoint may be chosen
        log(logs, *args, **kwargs)

    trainer.log = log_with_fields


@changes("transformers:Trainer.get_train_dataloader(self)")
def install_train_dataloader(trainer: Any, change: Callable[[Any], Any]) -> None:
    """Makes a trainer use `change(loader)` in place of the training data loader that it makes.

    Upstream: the documented way is a subclass of Trainer, but recipes choose the class.
    Checked with: transformers 5.23.0.
    Remove when: a Trainer accepts a data loader.
    """
    make = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        return change(make())

    trainer.get_train_dataloader = get_train_dataloader


@changes("transformers:Trainer.autocast_smart_context_manager(self, cache_enabled)")
def install_autocast(trainer: Any, dtype: torch.dtype) -> None:
    """Computes the forward pass of a trainer under autocast in `dtype`, without autocast's cache of weights.

    accelerate enters autocast for bf16, but also makes FSDP cast all weights, which destroys packed 4-bit ones; so bf16 is
    off for these models, and autocast with it. The cache would keep a copy of every gathered adapter until the end of
    the pass.
    Upstream: no issue found.
    Checked with: transformers 5.23.0, accelerate 1.15.0.
    Remove when: accelerate can enter autocast without a mixed precision policy for FSDP.
    """

    def autocast(*args: Any, **kwargs: Any) -> torch.autocast:
        return torch.autocast(trainer.args.device.type, dtype, cache_enabled=False)

    trainer.autocast_smart_context_manager = autocast


@changes("transformers:PreTrainedModel._no_split_modules")
def transformer_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The transformer layers of a model by name, wrapped by FSDP or not.

    The names of the classes are private; FSDP's auto wrap policy in accelerate reads the same attribute.
    Upstream: no issue: there is no public name.
    Checked with: transformers 5.23.0.
    Remove when: there is one.
    """
    names = set(model._no_split_modules or [])
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


@changes("transformers:PreTrainedConfig._attn_implementation")
def attention_of(config: Any) -> str | None:
    """The attention implementation that a loaded model uses, as `--attn_implementation` names it.

    Upstream: no issue: there is no public name.
    Checked with: transformers 5.23.0.
    Remove when: there is one.
    """
    return getattr(config, "_attn_implementation", None)


@changes("transformers.trainer:skip_first_batches", "accelerate.data_loader:skip_first_batches(dataloader, num_batches)")
def install_batch_skipping(skip: Callable[[Any, int], Any]) -> None:
    """Makes trainers call `skip(loader, count)` for a loader without the batches that a resumed run was trained on.

    With `ignore_data_skip` a trainer would count epochs from 0 again, and restore the random state before the data loader
    draws its seed from it, so that dropout on a CPU would differ from that of an uninterrupted run.
    Upstream: no issue found.
    Checked with: transformers 5.23.0.
    Remove when: a Trainer uses `state_dict` and `load_state_dict` of streams.
    """
    from transformers import trainer

    trainer.skip_first_batches = skip


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
