"""Which parameters of a model are trained, and its quantization."""

from pathlib import Path

from harness.messages import UserError
from harness.model.quantized import SOURCE

import torch
from peft import PeftConfig
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer


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
