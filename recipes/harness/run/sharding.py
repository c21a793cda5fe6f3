"""Sharding: what accelerate must know before it wraps the model, what FSDP2 does after it, and a check of the result."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.compat.accelerate import give_weights_addresses, hide_saved_buffers
from harness.compat.torch import gather_once_per_step, reduce_each_batch
from harness.compat.transformers import transformer_layers
from harness.configs import AccelerateConfig
from harness.messages import UserError, print_once
from harness.model.quantized import SOURCE

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, convert_to_fp32
from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

SIXTEEN_BIT = (torch.bfloat16, torch.float16)

HiddenBuffers = list[tuple[torch.nn.Module, str]]


def prepare_sharding(trainer: Trainer, config: AccelerateConfig) -> HiddenBuffers:
    """Sets what accelerate reads when it wraps the model; returns the buffers that are hidden while it does."""
    if trainer.is_fsdp_enabled:
        set_mixed_precision(trainer, config.reduce_dtype)
        set_offload(trainer)
        set_layer_classes(trainer)
    train_in_float32(trainer)
    pass_inputs_to_adapters(trainer)
    separate_untied_weights(trainer)
    trainer.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO  # see `compile_layers`
    if trainer.accelerator.ddp_handler:
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True  # otherwise DDP holds the gradients twice
    for other in vars(trainer).values():  # such as a reference model, which is wrapped when the trainer is built
        if isinstance(other, FSDPModule):
            return_float32(other)
    give_weights_addresses(trainer.model)  # after the functions that make other weights
    if trainer.is_fsdp_enabled:
        return hide_saved_buffers(trainer)
    return []


def set_mixed_precision(trainer: Trainer, reduce_dtype: str) -> None:
    """Makes FSDP compute in the config's precision, reduce gradients in `reduce_dtype`, and leave the loss in float32.

    accelerate 1.15 has one dtype for parameters, gradient reduction and outputs, which rounds the loss itself to bf16.
    """
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is None:
        return
    if getattr(trainer.model, "is_loaded_in_4bit", False):
        plugin.mixed_precision_policy = None  # a cast would destroy the packed bits
        return
    compute_dtype = plugin.mixed_precision_policy.param_dtype
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=getattr(torch, reduce_dtype))


def train_in_float32(trainer: Trainer) -> None:
    """Makes trained weights float32 if the run computes in mixed precision, whatever dtype they were loaded in.

    FSDP does the same. A step of the optimizer below 0.4 % of a bf16 weight rounds to nothing, and torch's gradient scaler
    refuses fp16 weights. Prints a warning if mixed precision is off. A sharded 4-bit model computes in bf16 without it; TRL casts
    its adapter to bf16, and Adam's moments with it, whose decay of 0.1 % per step would be rounded away.
    """
    in_4bit = getattr(trainer.model, "is_loaded_in_4bit", False)
    rounded = [weight for weight in trainer.model.parameters() if weight.requires_grad and weight.dtype in SIXTEEN_BIT]
    if rounded and trainer.accelerator.mixed_precision == "no" and not in_4bit:
        print_once(
            f"warning: weights are trained in {rounded[0].dtype}, because mixed precision is off: small steps round to nothing: "
            "pass --dtype float32 or --bf16 true"
        )
        return
    for weight in rounded:
        weight.data = weight.data.float()


def pass_inputs_to_adapters(trainer: Trainer) -> None:
    """Keeps PEFT from casting the input of every adapter to float32 where autocast casts it back to 16 bits, for their product.

    The values are the same. What it saves is memory traffic: 12 bytes for each value, in each of the seven linear modules of a
    layer, in the forward pass and where it is computed again.
    """
    in_4bit = trainer.is_fsdp_enabled and getattr(trainer.model, "is_loaded_in_4bit", False)
    if trainer.accelerator.mixed_precision == "no" and not in_4bit:
        return
    for module in trainer.model.modules():
        if isinstance(module, LoraLayer) and not module.lora_variant:
            module.cast_input_dtype_enabled = False


def set_offload(trainer: Trainer) -> None:
    """Makes the CPU offload of a run without a GPU use ordinary memory: pinned memory is memory that a GPU can reach."""
    plugin = trainer.accelerator.state.fsdp_plugin
    if trainer.args.device.type == "cpu" and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)


def set_layer_classes(trainer: Trainer) -> None:
    """Names the layer classes to wrap. accelerate 1.15 fails for a model that also lists layers it does not have."""
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.transformer_cls_names_to_wrap is None:
        layers = transformer_layers(trainer.model).values()
        trained = [layer for layer in layers if any(weight.requires_grad for weight in layer.parameters())]
        # A frozen part that reads images is gathered with the outermost module: a process whose rows have no images skips its
        # layers, and would not take part in their all-gathers.
        if trained and isinstance(trainer.processing_class, ProcessorMixin):
            layers = trained
        plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in layers})


def separate_untied_weights(trainer: Trainer) -> None:
    """Keeps accelerate from tying embeddings and output layer again that an adapter has untied, because it trains one of them.

    accelerate 1.15 calls `tie_weights` when it shards: the output layer would become the trained copy of the embeddings, unlike
    in an unsharded run, and unlike in the saved adapter. PEFT also keeps the frozen weights that the two shared, and FSDP
    refuses a weight that two of its units have, so each gets its own.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not trainer.is_fsdp_enabled or not isinstance(model, PeftModel) or not model.config.tie_word_embeddings:
        return
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return
    seen = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.tie_word_embeddings = False  # also asked by `tie_weights`, of every part of the model
        for name, weight in module.named_parameters(recurse=False):
            if weight in seen:
                setattr(module, name, torch.nn.Parameter(weight.detach().clone(), weight.requires_grad))
            seen.add(weight)


def prepare_gradient_scaler(trainer: Trainer) -> None:
    """Makes the gradient scaler of an fp16 run ready, also on a CPU, so that a rehearsal trains and resumes as GPUs do.

    accelerate 1.15 has neither scaler nor autocast for fp16 on a CPU. And transformers 5.23 loads FSDP's optimizer before the
    scaler: torch steps an optimizer to make its states, and a scaler without a scale refuses the step.
    """
    accelerator = trainer.accelerator
    device = trainer.args.device
    if accelerator.mixed_precision != "fp16":
        return
    if device.type == "cpu":
        settings = accelerator.scaler_handler.to_kwargs() if accelerator.scaler_handler else {}
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", **settings)
    accelerator.scaler.scale(torch.zeros((), device=device))  # makes the scale


def compile_layers(trainer: Trainer) -> None:
    """With --torch_compile, compiles every transformer layer in place, which keeps the model and its names as they are.

    accelerate would compile the whole model: under FSDP2 that was 2.4 times as slow as no compilation
    (huggingface/accelerate#4022), and what it returns is not the model that a run saves.
    """
    if trainer.args.torch_compile:
        for layer in transformer_layers(trainer.model).values():
            layer.compile(backend=trainer.args.torch_compile_backend, mode=trainer.args.torch_compile_mode)


def show_saved_buffers(hidden: list[tuple[Any, str]]) -> None:
    """Makes hidden buffers persistent again: before a checkpoint is loaded, because then they are part of it."""
    for module, name in hidden:
        module.register_buffer(name, getattr(module, name), persistent=True)


@dataclass(eq=False)
class AfterWrapping(TrainerCallback):
    """Once the model is wrapped: checks the sharding, and sets when weights are all-gathered and gradients are reduced."""

    trainer: Trainer
    config: AccelerateConfig
    processes: int
    hidden: HiddenBuffers  # what `prepare_sharding` has returned
    needs_float32: bool  # the trainer computes the loss of the model's outputs

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: torch.nn.Module, **kwargs: object
    ) -> None:
        """Checks the sharding, which accelerate has just done, and sets what can only be set on a sharded model."""
        if self.config.distributed_type:
            check_sharding(model, self.trainer.accelerator, self.config, self.processes)
        if not self.config.reshard_after_backward:
            gather_once_per_step(model)
        if self.config.reduce_each_batch:
            reduce_each_batch(model)
        if isinstance(model, FSDPModule):
            gather_experts_early(model)
            if self.needs_float32:
                return_float32(model)
            head = model.get_output_embeddings()
            embedding = model.get_input_embeddings()
            if getattr(head, "weight", None) is not embedding.weight:  # tied ones are one FSDP unit
                keep_head_gathered(model, head)
                skip_frozen_embedding_in_backward(embedding)
        show_saved_buffers(self.hidden)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Gives all processes the saved buffers of the first one, as DDP does, before they are evaluated with and saved."""
        for module, name in self.hidden:
            buffer = getattr(module, name)
            on_device = buffer.to(args.device)
            torch.distributed.broadcast(on_device, 0)
            buffer.copy_(on_device)


def return_float32(model: FSDPModule) -> None:
    """Makes a sharded model return float32, as accelerate makes an unsharded one under autocast.

    The loss that a trainer computes of bf16 logits would be rounded to two digits, and with it the difference of the
    log-probabilities of a model and its reference model.
    """
    model.register_forward_hook(lambda module, inputs, outputs: convert_to_fp32(outputs))


def check_sharding(model: torch.nn.Module, accelerator: Accelerator, config: AccelerateConfig, processes: int) -> None:
    """Raises RuntimeError unless FSDP is used if the config has it, on as many processes, and has sharded every layer.

    Such a run would be slower or need more memory than its config says.
    """
    if (accelerator.distributed_type == "FSDP", accelerator.num_processes) != (config.is_fsdp, processes):
        raise RuntimeError(
            f"this run does not have the {processes} processes of {config.name or 'its config'}, or is not sharded as it says: "
            "start it with launch.sh, or with `.venv/bin/accelerate launch --config_file`"
        )
    weights = [weight for layer in transformer_layers(model).values() for weight in layer.parameters()]
    if config.is_fsdp and not (weights and all(isinstance(weight, DTensor) for weight in weights)):
        raise RuntimeError(
            "FSDP left layers unsharded: check fsdp_auto_wrap_policy and fsdp_transformer_layer_cls_to_wrap in the config"
        )


def gather_experts_early(model: FSDPModule) -> None:
    """With a mixture of experts, asks for the weights of the next layer before a layer computes.

    FSDP asks for them when the host comes to the next layer. Usually that is long before the GPU does. But PyTorch 2.13 has a
    kernel for all experts at once only for compute capabilities 9.0 and 10.0; on other GPUs the host waits in every layer, to
    read how many tokens each expert gets, and nothing would be gathered meanwhile. Memory: the same.
    """
    layers = [layer for layer in transformer_layers(model).values() if isinstance(layer, FSDPModule)]
    if any(weight.dim() == 3 for weight in torch.nn.ModuleList(layers).parameters()):  # the weights of all experts are one
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])


def keep_head_gathered(model: FSDPModule, head: torch.nn.Module | None) -> None:
    """All-gathers an output head that is an FSDP unit of its own, before TRL's loss reads its weight without FSDP's hooks.

    A sharded head would be all-gathered for every micro-batch, its gradient would not be reduced, and with offload the loss would
    run on the CPU. A frozen head stays unsharded on every GPU: 2.1 GB for a 70B model. A head that is tied to the embedding, or
    trained without an adapter, is one unit with a module whose hooks run.
    """
    if not isinstance(head, FSDPModule):
        return
    if not head.weight.requires_grad:
        head.set_reshard_after_backward(False)
    elif not isinstance(model, PeftModel):
        return
    model.register_forward_pre_hook(lambda module, inputs: head.unshard())  # does nothing if it is unsharded already


def skip_frozen_embedding_in_backward(embedding: torch.nn.Module) -> None:
    """Does not all-gather a frozen input embedding in backward passes, which do not need its weight.

    FSDP would: for adapters, transformers makes its output require a gradient.
    """
    is_trained = any(weight.requires_grad for weight in embedding.parameters())
    if isinstance(embedding, FSDPModule) and not is_trained:
        embedding.set_unshard_in_backward(False)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor; any other tensor as it is."""
    with torch.no_grad():  # with gradients it would be a new tensor
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        return tensor


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Trained and all parameters. Call it before sharding, after which 4-bit weights do not know their size.

    Raises UserError if none is trained: a run would have losses and reach its end.
    """
    if hasattr(model, "get_nb_trainable_parameters"):
        trained, total = model.get_nb_trainable_parameters()
    else:
        weights = list(model.parameters())
        trained = sum(weight.numel() for weight in weights if weight.requires_grad)
        total = sum(weight.numel() for weight in weights)
    if not trained:
        raise UserError(
            "no parameter of the model is trained: an adapter that PeftModel.from_pretrained loads needs is_trainable=True, and "
            "requires_grad_(False) leaves nothing to train"
        )
    return trained, total


def freeze_unused_parts(trainer: Trainer) -> None:
    """If the rows are texts, freezes the parts that read images or sound: they get no gradients, and DDP would wait for these.

    A trainer with a processor instead of a tokenizer trains all of the model. Rows without images do not use all of it, and some
    models never use the last vision layers, so DDP searches for the weights that get no gradient.
    """
    model = base_of(trainer.accelerator.unwrap_model(trainer.model))
    config = config_of(model)
    if config is None or "text_config" not in config.sub_configs or config.is_encoder_decoder:
        return
    if not isinstance(trainer.processing_class, PreTrainedTokenizerBase):
        if trainer.accelerator.ddp_handler and any(weight.requires_grad for weight in parameters_outside_of_text(model)):
            trainer.accelerator.ddp_handler.find_unused_parameters = True
        return
    head = model.get_output_embeddings()
    if head is None:  # a classifier
        return
    for weight in parameters_outside_of_text(model):
        weight.requires_grad_(False)


def parameters_outside_of_text(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of the parts that read images or sound."""
    head = model.get_output_embeddings()
    used = {*model.get_decoder().parameters(), *([] if head is None else head.parameters())}
    return [weight for weight in model.parameters() if weight not in used]


def config_of(model: torch.nn.Module) -> PreTrainedConfig | None:
    """The config of a model of transformers, None for another module, also for one that holds such a model."""
    if isinstance(base_of(model), PreTrainedModel):
        return model.config
    return None


def base_of(model: torch.nn.Module) -> torch.nn.Module:
    """The model without its adapter."""
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def adapters_of(model: torch.nn.Module) -> list[PeftConfig]:
    """The settings of a model's adapters."""
    return list(getattr(model, "peft_config", {}).values())


def can_generate(model: torch.nn.Module) -> bool:
    """Whether a model continues texts: a classifier does not, nor does a module that is none of transformers."""
    return config_of(model) is not None and model.can_generate()


def quantization_of(model: torch.nn.Module) -> dict:
    """For --chat and --merge: how a model is quantized, {} if it is not, and the folder of its 4-bit weights.

    The folder is "" if the weights were quantized while they were loaded.
    """
    config = config_of(model)
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return {}
    folder = config.name_or_path
    return {
        "quantization": settings if isinstance(settings, dict) else settings.to_dict(),
        "quantized_dtype": str(config.dtype).removeprefix("torch."),
        "quantized_weights": folder if Path(folder, SOURCE).is_file() else "",
    }
