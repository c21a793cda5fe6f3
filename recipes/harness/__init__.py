"""The functions that a recipe calls: `parse`, `load`, `load_tokenizer`, `tokenize` and `train`,
and for images `load_processor` and `image_collator`.

Importing this package is cheap: torch and the other libraries are imported by the first call.
"""

import logging
from collections.abc import Callable
from typing import Any

from harness import launched, torchvision_operators
from harness.messages import exit_on_user_error

launched.begin()
torchvision_operators.install()  # in an environment that launch.sh has not made
# On a CPU with bf16 arithmetic, bitsandbytes logs in every process that it misses a package that training does not use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# Offline, `kernels` reports that it did not check the publisher of a kernel; it did when the kernel was downloaded.
logging.getLogger("kernels.hf_hub").addFilter(lambda record: "offline mode" not in record.getMessage())


def parse(config_class: type, dataset_formats: tuple[str, ...] | str = (), **defaults: Any) -> tuple[Any, Any, Any]:
    """Turns the values of a recipe and the command line into the three argument objects of TRL's scripts.

    docs/your-recipe.md has a complete recipe, and what each function expects.

    Args:
        config_class: the class of the trainer's arguments, such as `trl.SFTConfig`, `transformers.TrainingArguments`, or a
            dataclass that inherits from one. Its fields are flags.
        dataset_formats: the formats to which `load` converts rows, the first choice first: "text", "messages",
            "prompt_completion", "instruction", "question_answer", "preference", "images". Empty: rows keep their columns.
        **defaults: the values of the recipe, by the names of the fields of `config_class`, `trl.ModelConfig` and
            `ScriptArguments`. Flags override them.

    Returns:
        `(script_args, training_args, model_args)`. In a rehearsal `model_args` names a tiny model, and `load` reads a tiny
        dataset.
    """
    with exit_on_user_error():
        from harness.start.recipes import parse

        return parse(config_class, dataset_formats, **defaults)


def load(script_args: Any, keep: Callable[[dict], bool] | None = None) -> tuple[Any, Any]:
    """Loads the rows that --dataset_name and the other flags choose, converted to a format of `parse`.

    Args:
        script_args: what `parse` has returned first.
        keep: a function of a row, with the columns of the dataset after --column_map. Rows for which it returns False are not
            used. Without it, all rows are.

    Returns:
        `(train_dataset, eval_dataset)`. Without a test split, rows are held out of the training split.
    """
    with exit_on_user_error():
        from harness import runs
        from harness.data.loading import load

        return load(runs.started().run.data, keep)


def load_tokenizer(model_args: Any, training_args: Any) -> Any:
    """The tokenizer of the model, with --chat_template_path, --eos_token and --pad_token, as it is saved with the model.

    Pass it to the trainer as `processing_class`.
    """
    with exit_on_user_error():
        from harness.data.tokenization import load_tokenizer

        return load_tokenizer(model_args, training_args)


def load_processor(script_args: Any, model_args: Any, training_args: Any) -> Any:
    """The processor of a model that reads images: the tokenizer of `load_tokenizer`, and what makes tokens of images.

    It shrinks images to --max_pixels, and is saved with the model. Pass it to `tokenize`, `image_collator` and the trainer.
    """
    with exit_on_user_error():
        from harness.data.tokenization import load_processor

        return load_processor(script_args, model_args, training_args)


def image_collator(processor: Any) -> Any:
    """The `data_collator` of rows with images: decodes the images of a batch, and pads its tokens."""
    from harness.data.images import ImageCollator

    return ImageCollator(processor)


def tokenize(train_dataset: Any, eval_dataset: Any, tokenizer: Any, training_args: Any) -> tuple[Any, Any]:
    """Tokenizes rows for SFTTrainer: `input_ids` and `labels`, cut or packed to --max_length.

    Args:
        train_dataset: rows with `messages`, `prompt` and `completion`, a text (--dataset_text_field), or `input_ids`.
        eval_dataset: the same; or None, or a dict of several.
        tokenizer: of `load_tokenizer`; of `load_processor` for rows with `images`, which stay, undecoded.
        training_args: an SFTConfig, what `parse` has returned second. It is changed: SFTTrainer takes the rows as they are.

    Returns:
        `(train_dataset, eval_dataset)`. A label is -100 where a token does not count in the loss.
    """
    with exit_on_user_error():
        from harness import runs
        from harness.data.tokenization import tokenize

        return tokenize(train_dataset, eval_dataset, tokenizer, training_args, runs.started().run)


def train(trainer: Any) -> None:
    """Resumes or starts, trains, evaluates, saves the model and writes the results. A recipe calls it once, at its end.

    Args:
        trainer: a `transformers.Trainer` of any class, built with the `training_args` that `parse` has returned. What it has no
            use for, such as samples of a classifier, is left out.
    """
    with exit_on_user_error():
        from harness import runs
        from harness.start.arguments import check_built_trainer

        started = runs.started()
        started.trainer = trainer
        check_built_trainer(started)
        started.train(trainer)


__all__ = ["image_collator", "load", "load_processor", "load_tokenizer", "parse", "tokenize", "train"]
