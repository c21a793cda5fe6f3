"""Changes to TRL."""

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from harness.compat.guards import changes


@changes("trl.trainer.sft_trainer:get_training_chat_template(processing_class, tokenizer)")
def install_training_template(template: Callable[[Any], str | None]) -> None:
    """Makes SFTTrainer ask `template(tokenizer)` for the chat template that marks the tokens of the loss.

    TRL has marked copies of some families' templates and refuses all others, although any template can be marked. Passing a
    marked template as `chat_template_path` would save it with the model.
    Upstream: huggingface/trl#4879; its pull request #4900 was closed.
    Checked with: trl 1.16.0.
    Remove when: SFTConfig accepts a template for training only.
    """
    from trl.trainer import sft_trainer

    @functools.wraps(sft_trainer.get_training_chat_template)  # keeps its signature, for the guard of a second call
    def get_training_chat_template(processing_class: Any) -> str | None:
        return template(processing_class)

    sft_trainer.get_training_chat_template = get_training_chat_template


@changes("trl.trainer.sft_trainer:pack_dataset(dataset, seq_length, strategy, map_kwargs)")
def pack_streams_in_batches(documents: Callable[[Any, int, str], int]) -> None:
    """Makes SFTTrainer pack `documents(stream, max_length, packing_strategy)` documents of a stream at once.

    It packs 1,000 at once, and SFTConfig has no option for `batch_size` of `map`. A stream that is read in parts would tokenize
    1,000 documents of each part before the first step.
    Upstream: no issue found.
    Checked with: trl 1.16.0.
    Remove when: SFTConfig has arguments for `map`.
    """
    from datasets import IterableDataset
    from trl.trainer import sft_trainer

    pack = getattr(sft_trainer.pack_dataset, "__wrapped__", sft_trainer.pack_dataset)  # not twice in one process

    @functools.wraps(pack)
    def pack_dataset(dataset: Any, seq_length: int, strategy: str = "bfd", map_kwargs: dict | None = None) -> Any:
        if isinstance(dataset, IterableDataset):
            map_kwargs = (map_kwargs or {}) | {"batch_size": documents(dataset, seq_length, strategy)}
        return pack(dataset, seq_length, strategy, map_kwargs)

    sft_trainer.pack_dataset = pack_dataset


@changes("trl.trainer.sft_trainer:AutoProcessor", "trl.trainer.dpo_trainer:AutoProcessor")
def load_tokenizers_only() -> None:
    """Makes SFTTrainer and DPOTrainer load the tokenizer of a model that reads images too, not its processor.

    With a processor they prepare every row as one that has images, and loading it needs torchvision.
    Upstream: no issue: a recipe can pass `processing_class`.
    Checked with: trl 1.16.0.
    Remove when: the trainers look at the rows to choose.
    """
    from transformers import AutoTokenizer
    from trl.trainer import dpo_trainer, sft_trainer

    sft_trainer.AutoProcessor = dpo_trainer.AutoProcessor = AutoTokenizer


@changes(
    "trl.kernels.chunked_logprob:_TRITON_AVAILABLE",
    "trl.trainer.utils:_CHUNKED_LOGPROB_CHUNK_SIZE",
)
def compute_loss_without_triton() -> None:
    """Computes TRL's loss in PyTorch, in tiles of 4,096 words of the vocabulary.

    TRL takes its Triton kernel whenever Triton is installed. It fails where Triton cannot compile (no C compiler) and on GPUs
    it does not support (T4). Its PyTorch code has tiles of 32,768 words, of which float32 keeps seven at a time: 2 x 256
    tokens of GPT-2 XL would need 470 MB, smaller tiles need 59 MB.
    Upstream: triton-lang/triton#10918 for the T4; no issue found for an option in TRL.
    Checked with: trl 1.16.0.
    Remove when: TRL has an option for it.
    """
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    chunked_logprob._TRITON_AVAILABLE = False
    utils._CHUNKED_LOGPROB_CHUNK_SIZE = 4096


@changes(
    "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, "
    "dataset_name)"
)
def prepare_rows_in_two_steps(finish: Callable[..., Any]) -> None:
    """Makes SFTTrainer only tokenize rows, and then use the rows that `finish` returns.

    `finish(trainer, split, rows, tokenized, tokenizer, args, packing, truncate_and_pack)` gets the rows, the same tokenized, and
    a function that truncates and packs tokenized rows as SFTTrainer does. `split` is "train", "eval" or a name of one of
    several evaluation sets. Rows that the recipe has tokenized itself are prepared as before.
    What is cut off, which rows are dropped and where the conversations are, is not to be seen in the packed rows, and SFTTrainer
    does not say it; nor has it a step for tokens that the tokenizer adds, such as a second EOS token.
    Upstream: no issue found.
    Checked with: trl 1.16.0.
    Remove when: SFTTrainer has methods for the steps of its preparation.
    """
    from trl.data_utils import get_dataset_column_names
    from trl.trainer.sft_trainer import SFTTrainer

    prepare = getattr(SFTTrainer._prepare_dataset, "in_one_step", SFTTrainer._prepare_dataset)  # not twice in one process

    @functools.wraps(prepare)
    def prepare_dataset(
        trainer: Any, dataset: Any, tokenizer: Any, args: Any, packing: bool, formatting_func: Any, name: str
    ) -> Any:
        def truncate_and_pack(rows: Any) -> Any:
            return prepare(trainer, rows, tokenizer, args, packing, None, name)

        if "input_ids" in get_dataset_column_names(dataset):
            return prepare(trainer, dataset, tokenizer, args, packing, formatting_func, name)
        untruncated = copy.copy(args)
        untruncated.max_length, untruncated.shuffle_dataset = None, False
        tokenized = prepare(trainer, dataset, tokenizer, untruncated, False, formatting_func, name)
        return finish(trainer, name, dataset, tokenized, tokenizer, args, packing, truncate_and_pack)

    prepare_dataset.in_one_step = prepare
    SFTTrainer._prepare_dataset = prepare_dataset


@changes("trl.models.utils:disable_gradient_checkpointing(model, gradient_checkpointing_kwargs)")
def keep_activation_checkpointing() -> None:
    """Makes trainers leave activation checkpointing as it is while they compute without gradients, where it saves nothing anyway.

    DPOTrainer, and three others, turn it off for the reference model and on again, in every micro-batch. Each time the model
    gets one more hook on its embedding, of which none is removed, and `offload` and `every_n_layers` of
    --activation_checkpointing_kwargs are passed to torch's function, which does not know them.
    Upstream: no issue found.
    Checked with: trl 1.16.0.
    Remove when: `disable_gradient_checkpointing` restores what it found.
    """

    @contextlib.contextmanager
    def disable_gradient_checkpointing(model: Any, gradient_checkpointing_kwargs: dict | None = None) -> Iterator[None]:
        yield

    for module in [module for name, module in sys.modules.items() if name.startswith("trl.trainer.")]:
        if "disable_gradient_checkpointing" in vars(module):
            module.disable_gradient_checkpointing = disable_gradient_checkpointing


@changes("trl:SFTTrainer.log(self, logs, start_time)", "trl:DPOTrainer.log(self, logs, start_time)")
def logged_metrics(trainer: Any) -> dict[str, dict[str, list[float]]]:
    """The metrics of a trainer of TRL since its last log, by "train" and "eval": a value for each batch. {} of other trainers.

    It logs the mean of these values, in which the tokens of a short batch count more.
    Upstream: no issue found for the metrics.
    Checked with: trl 1.16.0.
    Remove when: the trainers log means over tokens and pairs.
    """
    return getattr(trainer, "_metrics", {})
