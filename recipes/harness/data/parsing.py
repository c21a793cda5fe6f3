"""From the arguments of a run to its DataSettings: which datasets there are, with which configs and weights."""

import math

from harness.data import reading
from harness.data.formats import DESCRIPTIONS
from harness.data.script_arguments import ScriptArguments
from harness.data.sources import DataSettings, Source
from harness.messages import UserError

from transformers import TrainingArguments


def settings_of_data(
    script_args: ScriptArguments,
    training_args: TrainingArguments,
    formats: tuple[str, ...] | str = (),
    given: frozenset[str] = frozenset(),
) -> DataSettings:
    """What the arguments of a run say about its data. Raises UserError for datasets that do not belong together.

    `formats`: see DataSettings. `given`: names of the arguments that the user passed.
    """
    formats = tuple(filter(None, [formats] if isinstance(formats, str) else formats))
    for name in formats:
        if name not in DESCRIPTIONS:
            raise UserError(f"dataset_formats: {name!r} is no format: use one or several of {', '.join(DESCRIPTIONS)}")
    has_own = hasattr(training_args, "chat_template_kwargs")  # GRPOTrainer renders the prompts itself
    return DataSettings(
        sources=tuple(sources_of(script_args)),
        formats=formats,
        streaming=script_args.dataset_streaming,
        max_samples=script_args.max_samples,
        max_eval_samples=script_args.max_eval_samples,
        column_map=script_args.column_map,
        template_arguments=None if has_own else script_args.chat_template_kwargs,
        split_conversations=script_args.split_conversations,
        text_field=getattr(training_args, "dataset_text_field", "text"),
        seed=training_args.seed,
        output_dir=training_args.output_dir,
        keeps_samples=bool(script_args.max_samples) and training_args.max_steps <= 0,
        needs_test_split="dataset_test_split" in given,
        is_read_in_order=getattr(type(training_args), "train_sampling_strategy", "") == "sequential",
    )


def sources_of(script_args: ScriptArguments) -> list[Source]:
    """The datasets that the arguments name. Raises UserError for names, configs and weights that do not belong together."""
    names = script_args.dataset_name
    configs = script_args.dataset_config
    weights = script_args.dataset_weights
    if not names:
        return []
    if isinstance(names, list):
        _check_mixture(names, configs, weights)
    elif weights:
        raise UserError("--dataset_weights is for several datasets: pass a --dataset_name for each weight, or leave it out")
    elif isinstance(configs, list):
        raise UserError(f"--dataset_config has {len(configs)} values, and --dataset_name names one dataset: pass one")
    else:
        names = [names]
        configs = [configs]
        weights = [1]
    sources = []
    for index, name in enumerate(names):
        config = configs[index] if configs and configs[index] != "default" else None
        is_text = bool(script_args.text_rows) and reading.is_text(name, config)
        source = Source(
            name,
            config,
            train_split=script_args.dataset_train_split,
            test_split=script_args.dataset_test_split,
            text_rows=script_args.text_rows if is_text else None,
            display_name=f"{name} {config}" if config and len(names) > 1 else name,
            weight=weights[index] / sum(weights),
        )
        sources.append(source)
    if script_args.text_rows and not any(source.text_rows for source in sources):
        raise UserError("--text_rows is for text files on this machine, and no dataset is one: leave out the flag")
    return sources


def _check_mixture(names: list[str], configs: str | list[str] | None, weights: list[float] | None) -> None:
    """Raises UserError unless there is a weight, and if any a config, for each of several different datasets."""
    if not weights:
        example = " ".join(["1"] * len(names))
        raise UserError(
            f"--dataset_name names {len(names)} datasets ({', '.join(names)}): files of one dataset are a folder, or a glob in "
            f"quotes; for several datasets pass the share that each has of the rows, for equal ones --dataset_weights {example}"
        )
    if len(weights) != len(names):
        raise UserError(f"--dataset_weights has {len(weights)} values for {len(names)} datasets: pass one for each")
    if not all(0 < weight < math.inf for weight in weights):
        raise UserError(f"--dataset_weights is {' '.join(map(str, weights))}, expected numbers above 0")
    if configs is not None and (not isinstance(configs, list) or len(configs) != len(names)):
        raise UserError(
            f"--dataset_config: pass one config for each of the {len(names)} datasets, and `default` for those without"
        )
