"""Downloads everything a run needs: model, dataset, 4-bit weights. Afterwards it trains without internet. launch.sh calls it:

`python -m harness.commands.prepare [--tiny] RECIPE.py [--flag value …]`.

At the end it runs the recipe until its trainer is built, so that the recipe's own code opens and tokenizes the data.
"""

import dataclasses
import glob
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.commands import parsers
from harness.hub import hub_errors
from harness.messages import exit_on_user_error, print_once
from harness.runs import Run, StartedRecipe
from harness.start.environment import hide_library_warnings, set_environment

if __name__ == "__main__":
    with exit_on_user_error():
        set_environment("--tiny" in sys.argv)  # before the libraries are imported, which read it

from harness.start.recipes import build_trainer


def main(*words: str) -> None:
    parsed = parsers.prepare().read(words)
    from harness.model.gpu_features import find_gpu_features

    run = Run(str(parsed.recipe), tiny=parsed.tiny, any_config=True, on_cpu=True, gpu=find_gpu_features())
    hide_library_warnings()
    with tempfile.TemporaryDirectory(prefix="prepare-") as output_dir:
        build_trainer(PreparedRecipe(run), [*parsed.flags, "--output_dir", output_dir])
    print_once("Everything this run needs is on this machine: the same flags train without internet.")


class PreparedRecipe(StartedRecipe):
    """A recipe that builds its trainer with a model of two layers, and with everything else that its run needs."""

    downloads = True

    def prepare(self) -> None:
        from harness.compat.transformers import load_models_with, load_tokenizers_as_offline
        from harness.model.attention import check_packing
        from harness.model.models import build_small_model, check_models, set_loading_options
        from harness.model.quantized import quantize_once, use_quantized_weights
        from harness.rehearsal import tiny
        from harness.start.claim import find_commits, use_commits
        from harness.start.recipes import prepare_process

        run = self.run
        arguments = _, training_args, model_args = self.arguments
        name = model_args.model_name_or_path
        teacher = getattr(training_args, "teacher_model_name_or_path", None)
        use_commits(arguments, *find_commits(run, arguments))
        check_models(run, arguments, with_weights=False)
        set_loading_options(training_args, model_args, run)
        if run.tiny:
            run = dataclasses.replace(run, data=tiny.use_replacements(run.data, training_args, model_args))
        if name:
            check_packing(training_args, model_args, name)
        if self.downloads and not run.tiny:
            if name:
                download_model(name, model_args.model_revision)
            if teacher:
                download_model(teacher, training_args.teacher_model_revision)
            if run.data.streaming:  # the recipe itself downloads other datasets
                download_streams(run.data.sources)
        if self.downloads:
            load_tokenizers_as_offline()
            if model_args.load_in_4bit:
                quantize_once(model_args)
                use_quantized_weights(model_args, training_args)
        self.run = prepare_process(run, arguments)
        load_models_with(build_small_model)  # the rows are tokenized for the real model, and loading 70B would take an hour


def download_model(name: str, revision: str) -> None:
    from harness.model.models import FILES_OF_MODEL, check_weights

    from huggingface_hub import snapshot_download

    if not Path(name).is_dir():
        with hub_errors("model", name):
            snapshot_download(name, revision=revision, **FILES_OF_MODEL)
    check_weights(name, revision)


def download_streams(sources: Iterable[Any]) -> None:
    """Downloads the files of streams."""
    from harness.data import reading

    from huggingface_hub import snapshot_download

    for source in sources:
        if not reading.is_local(source.name):
            with hub_errors("dataset", source.name):
                snapshot_download(source.name, repo_type="dataset", allow_patterns=files_of(source))


def files_of(source: Any) -> list[str]:
    """Patterns for the files of the chosen config of a dataset: a dataset can have others, of many terabytes."""
    from datasets import load_dataset_builder

    files = load_dataset_builder(source.name, source.config).config.data_files
    # Of `hf://datasets/OWNER/NAME@REVISION/PATH`. README.md has the configs, by which the files are found without the Hub.
    patterns = ["README.md"]
    for addresses in files.values():
        for address in addresses:
            patterns.append(glob.escape(address.split("@")[1].split("/", 1)[1]))
    return patterns


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
