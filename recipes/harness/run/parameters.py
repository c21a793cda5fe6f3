"""Which parameters of a model are trained, and its quantization."""

import copy
import math
from collections.abc import Iterable
from pathlib import Path

from harness import folder
from harness.messages import UserError, plural
from harness.model.loading import quiet_transformers
from harness.model.quantized import SOURCE
from harness.run.marker import read_marker

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Trained and all parameters. Call it before sharding, after which 4-bit weights do not know their size."""
    if hasattr(model, "get_nb_trainable_parameters"):
        return model.get_nb_trainable_parameters()
    weights = list(model.parameters())
    return sum(weight.numel() for weight in weights if weight.requires_grad), sum(weight.numel() for weight in weights)


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


def is_of_another_library(model: torch.nn.Module) -> bool:
    """Whether a model has a `save_pretrained` that is not that of transformers or PEFT, as a SentenceTransformer has."""
    return config_of(model) is None and hasattr(model, "save_pretrained")


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


Shapes = dict[str, list[int]]  # of weights, by name
SCALES = ("lora_alpha", "alpha_pattern", "use_rslora")  # by which an adapter is multiplied; its shapes have the rank


class WeightsOfModel:
    """The weights that every checkpoint of a model must have. Made before the model is sharded."""

    def __init__(self, model: torch.nn.Module) -> None:
        trained = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
        self.trained = list(trained)  # in the order in which the optimizer gets them
        self.trained_values = sum(trained.values())
        self.is_known = not is_of_another_library(model)  # whose files name weights otherwise
        self.is_of_transformers = isinstance(model, PreTrainedModel)
        self.adapter = model.active_adapters[0] if isinstance(model, PeftModel) else None
        # Of several adapters, the last one writes the file.
        self.scales = {name: getattr(settings, name, None) for settings in adapters_of(model) for name in SCALES}
        state = model.state_dict(keep_vars=True)
        if self.adapter:
            state = get_peft_model_state_dict(model, adapter_name=self.adapter, save_embedding_layers=False)
        self.shapes: Shapes = {name: list(weight.shape) for name, weight in state.items()}
        self.known = {*self.shapes, *dict(model.named_buffers())}  # a buffer may be hidden from the state until it is sharded
        not_saved = getattr(model, "_keys_to_ignore_on_save", None) or ()  # such as the positions of MarianMT, which are computed
        names: dict[int, set[str]] = {}
        for name in state.keys() - {*not_saved}:
            names.setdefault(id(state[name]), set()).add(name)
        self.names = list(names.values())  # of each weight; a tied one has several, and is saved by one of them

    def problem(self, checkpoint: Path) -> str:
        """What is wrong with the weights in a checkpoint, "" for nothing."""
        if (checkpoint / folder.SHARDED).is_dir():
            saved = shapes_of_sharded_files(checkpoint)
        else:  # an adapter of another name has a folder of its own
            saved = shapes_of_files(checkpoint / ("" if self.adapter in (None, "default") else self.adapter))
        if saved is None and self.adapter:
            return "it has no adapter"
        if saved is None or not self.is_known:
            return ""
        if self.is_of_transformers and saved.keys() - self.known:  # see `load_converted`
            values = sum(map(math.prod, saved.values()))
            if values < self.trained_values:
                return f"it has {values:,} values, {self.trained_values:,} are trained"
            return ""
        lacking = [min(names) for names in self.names if not names & saved.keys()]
        if lacking:
            return f"it lacks {first_and_others(lacking)}"
        differing = [name for name in saved if self.shapes.get(name, saved[name]) != saved[name]]
        if differing:
            return f"of another shape: {first_and_others(differing)}"
        return ""


def check_saved_weights(checkpoint: Path, weights: WeightsOfModel) -> None:
    """Raises UserError unless a checkpoint has the weights of the model in the same shapes, scales and trains the same ones.

    Otherwise a run would resume with some weights as they were before the training, or states of the optimizer of others.
    """
    problem = weights.problem(checkpoint)
    if not problem and read_marker(checkpoint)["trained"] != weights.trained:
        problem = "the run trained other ones, or in another order"
    saved = folder.read_json(checkpoint / "adapter_config.json")
    for name, scale in weights.scales.items():
        if saved.get(name) != scale:
            problem = f"their adapter has {name} {saved.get(name)}, this one {scale}"
    if problem:
        raise UserError(
            f"--output_dir: the weights in {checkpoint} are not those of this model: {problem}. Use the recipe, the model and "
            "the versions of the libraries that the run began with, or choose another --output_dir"
        )


def first_and_others(names: Iterable[str]) -> str:
    """The first name, and how many others there are."""
    first, *others = sorted(names)
    if others:
        return f"{first} and {plural(len(others), 'other')}"
    return first


def shapes_of_files(checkpoint: Path) -> Shapes | None:
    """The shapes of the weights in the safetensors files of a folder; None if it has no such file."""
    shapes = None
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            of_file = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 (it is not a dict)
        shapes = (shapes or {}) | of_file
    return shapes


def shapes_of_sharded_files(checkpoint: Path) -> Shapes:
    """The shapes of the weights in a sharded checkpoint, from its metadata."""
    entries = FileSystemReader(checkpoint / folder.SHARDED).read_metadata().state_dict_metadata
    return {name.removeprefix("model."): list(getattr(entry, "size", [])) for name, entry in entries.items()}


def load_converted(model: torch.nn.Module, checkpoint: Path) -> bool:
    """Loads an unsharded checkpoint if `from_pretrained` must convert its names, with which `Trainer` would load nothing.

    `save_pretrained` writes weights as the files on the Hub have them: by older names, or one for each expert.
    Returns whether it did. Raises RuntimeError if the checkpoint lacks weights, or has others.
    """
    if (checkpoint / folder.SHARDED).is_dir() or not isinstance(model, PreTrainedModel):
        return False
    saved = shapes_of_files(checkpoint)
    if not saved or not saved.keys() - model.state_dict().keys():
        return False
    with quiet_transformers():
        loaded, found = type(model).from_pretrained(  # in float32, which holds every dtype that is trained
            checkpoint, config=copy.deepcopy(model.config), dtype=torch.float32, device_map={"": "cpu"}, output_loading_info=True
        )
    if differing := {*found["missing_keys"], *found["unexpected_keys"]}:
        raise RuntimeError(f"{checkpoint} lacks weights of this model, or has others: {first_and_others(differing)}")
    model.load_state_dict(loaded.state_dict())
    return True
