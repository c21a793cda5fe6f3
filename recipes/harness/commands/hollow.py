"""A recipe that only runs up to its trainer: its model is made of two small layers and reads no weights."""

import atexit
import contextlib
import shutil
import tempfile

from harness.rehearsal import tiny_model


def enter(args):
    """From here on in this process, models are loaded hollow, and what a trainer writes goes into a folder that is deleted."""
    from transformers import AutoConfig, GenerationConfig, PreTrainedModel

    def from_pretrained(cls, name, *inputs, config=None, revision="main", dtype=None, **kwargs):
        config = config or AutoConfig.from_pretrained(name, revision=revision)
        vocabulary = config.get_text_config().vocab_size
        small = tiny_model.shrink(config, {"vocab_size": vocabulary})
        small.name_or_path = str(name)  # where a trainer looks for the tokenizer
        model = cls._from_config(small, **({"dtype": dtype} if dtype else {}))
        with contextlib.suppress(OSError):  # not every model has one
            model.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
        return model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    args.output_dir = tempfile.mkdtemp(prefix="recipe-")
    atexit.register(shutil.rmtree, args.output_dir, ignore_errors=True)
