"""Texts that the model writes: in trainers that learn from them (GRPO, RLOO, distillation), and the samples of a run."""

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.compat.peft import merge_for_generation
from harness.compat.transformers import generate_on
from harness.compat.trl import logged_metrics
from harness.data.images import ImageCollator, with_one_token_each
from harness.data.turns import IGNORED
from harness.folder import HELD_OUT, draft_of
from harness.messages import UserError, print_once
from harness.run.failures import only_report
from harness.run.sharding import base_of, can_generate

import pyarrow
import pyarrow.parquet
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import DistillationConfig
from trl.trainer.utils import RepeatSampler

ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids")  # of DPOTrainer's and KTOTrainer's rows, next to prompt_ids
COUNT = 3
PROMPT_TOKENS = 24  # of the prompt of a row that is one text


def trains_on_rewards(trainer: Trainer) -> bool:
    return hasattr(trainer, "reward_funcs")


def writes_answers(trainer: Trainer) -> bool:
    """Whether a trainer trains on answers that its own model writes: those on rewards, and DistillationTrainer."""
    return trains_on_rewards(trainer) or isinstance(trainer.args, DistillationConfig)


def micro_batches_of_generation(args: TrainingArguments) -> int:
    """How many micro-batches share the answers of a `generate`, and with each of which the loader reads the rows of all."""
    if isinstance(args, DistillationConfig):
        return args.gradient_accumulation_steps
    return getattr(args, "steps_per_generation", None) or 1


def tokens_of_prompt(trainer: Trainer, prompt: str | list[dict]) -> list[int]:
    """The tokens that the answers to a prompt follow."""
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **trainer.args.chat_template_kwargs or {})[
        "input_ids"
    ]


def check_number_of_prompts(rows: float, answers: int, group: int) -> None:
    """Raises UserError for fewer prompts than `answers` at a time need, of which TRL makes no batch: minutes would pass."""
    if rows < answers // group:
        raise UserError(
            f"--global_batch_size: {answers:,} answers at a time are {group} to each of {answers // group:,} prompts, and there "
            f"are only {rows:,}: pass a smaller --global_batch_size"
        )


def check_prompts(trainer: Trainer) -> None:
    """Raises UserError for fewer prompts than a step needs, or if an evaluation would count some twice."""
    args = trainer.args
    answers = args.per_device_train_batch_size * args.world_size * micro_batches_of_generation(args)
    group = getattr(args, "num_generations", 1)
    check_number_of_prompts(len(trainer.train_dataset), answers, group)
    group = getattr(args, "num_generations_eval", 1) or group
    if group > 1 and args.world_size > 1 and trainer.eval_dataset is not None:
        raise UserError(
            f"--num_generations_eval {group}: on several processes, the prompts that complete the last batch would count twice: "
            "pass --num_generations_eval 1"
        )


class PromptsByEpoch(Sampler[int]):
    """TRL's order of the prompts and their groups, which depends on the epoch here.

    There it depends on how many epochs this process has begun, so a run that resumes in the second one would read the order of
    the first one.
    """

    def __init__(self, sampler: RepeatSampler) -> None:
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def order_by_epoch(loader: DataLoader) -> None:
    """Makes accelerate's loader of such a trainer read `PromptsByEpoch`."""
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)  # the former on several processes
    loader.set_sampler(PromptsByEpoch(batches.sampler))


class RewardsOfSteps(TrainerCallback):
    """Ends a run whose reward functions have rated no answer of its first step.

    A function returns None or NaN for an answer that it does not rate: another function can rate it. Warns once if all answers to
    each prompt got the same reward: the model learns nothing from such a step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.has_warned = False
        self.is_first = True

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.is_first = state.global_step == 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        metrics = logged_metrics(self.trainer)["train"]
        rewards = metrics.get("reward")  # means of those that are not NaN
        if self.is_first and rewards and math.isnan(rewards[-1]):
            raise UserError(
                f"{', '.join(self.trainer.reward_func_names)}: in step {state.global_step} no answer got a reward, all are None "
                "or NaN, so nothing can be learned: return a number for each answer, such as 0 for a wrong one"
            )
        self.is_first = False
        shares = metrics.get("frac_reward_zero_std")  # of prompts with equal rewards
        if shares and shares[-1] == 1 and not self.has_warned:
            self.has_warned = True
            print_once(
                f"warning: in step {state.global_step} all answers to each prompt got the same reward, so nothing was learned: "
                "if most steps are so (frac_reward_zero_std in trainer_state.json), the prompts are too hard or too easy"
            )


Document = tuple[list[int], list[int]]  # tokens and labels


def why_no_text(trainer: Trainer) -> str:
    """Why a trainer's model is not asked to continue texts, "" if it is: a classifier, a reward model, an encoder-decoder."""
    model = base_of(trainer.accelerator.unwrap_model(trainer.model))
    if not can_generate(model) or model.config.is_encoder_decoder:
        return f"{type(model).__name__} does not continue texts"
    if not trainer.processing_class:
        return "the trainer has no tokenizer"
    has_tokens = all({"input_ids", "prompt_ids"} & row.keys() for row in first_rows(trainer))
    if has_tokens or writes_answers(trainer):
        return ""
    return "the rows have no column input_ids"


def first_rows(trainer: Trainer) -> list[dict]:
    """The first rows for evaluation, of several datasets those of the first one; for training if there are none."""
    dataset = trainer.eval_dataset
    if dataset is None:
        dataset = trainer.train_dataset
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    return list(itertools.islice(dataset, COUNT))


def answer_before(trainer: Trainer, is_rehearsal: bool) -> list[str]:
    """What the model writes before a training of one process that is evaluated at its start; [] for another one."""
    args = trainer.args
    is_shared = args.world_size > 1 or trainer.is_fsdp_enabled  # weights would be copied or gathered for each token
    if not args.eval_on_start or is_shared or writes_answers(trainer) or why_no_text(trainer):
        return []
    devices = [args.device] if args.device.type == "cuda" else []  # not all of the machine, on each of which CUDA would start
    with contextlib.suppress(Exception), torch.random.fork_rng(devices):  # an error comes again after the training
        return [answer for _, answer in answer_rows(trainer, is_rehearsal)]
    return []


def generate_samples(trainer: Trainer, is_rehearsal: bool, before: list[str]) -> None:
    """Continues a few evaluation rows, or answers their prompts; prints the texts and writes them to samples.txt. Collective.

    `before`: what `answer_before` has returned.
    """
    if reason := why_no_text(trainer):
        print_once(f"No samples: {reason}.")
        return
    rows = answer_rows(trainer, is_rehearsal)
    if not trainer.is_world_process_zero():
        return
    with only_report("samples.txt"):  # the other processes no longer wait for this one
        texts = []
        for number, (prompt, answer) in enumerate(rows):
            earlier = f"--- before the training\n{before[number]}\n" if before else ""
            texts.append(f"--- prompt\n{prompt}\n{earlier}--- generated\n{answer}\n")
        note = "; random weights write nonsense" if is_rehearsal else ""
        print_once(f"\nSamples, prompted with evaluation rows (samples.txt{note}):\n\n" + "\n".join(texts))
        with draft_of(Path(trainer.args.output_dir, "samples.txt")) as draft:
            draft.write_text("\n".join(texts), "utf-8")


def answer_rows(trainer: Trainer, is_rehearsal: bool) -> list[tuple[str, str]]:
    """The prompts of a few evaluation rows, and what the model writes after each. Collective."""
    rows = first_rows(trainer)
    processor = trainer.processing_class
    tokenizer = getattr(processor, "tokenizer", processor)  # of a processor, which a model with a vision part has
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = tokenizer.eos_token_id
    if writes_answers(trainer):
        prompts = [tokens_of_prompt(trainer, row["prompt"]) for row in rows]
    else:
        prompts = [tokens_before_loss(row) for row in rows]
    if "images" in rows[0]:
        inputs = ImageCollator(processor, "left").for_prompts(prompts, [row["images"] for row in rows])
    else:
        ids = [torch.tensor(prompt) for prompt in prompts]
        mask = [torch.ones_like(tokens) for tokens in ids]
        pad_left = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        inputs = {"input_ids": pad_left(ids, padding_value=pad), "attention_mask": pad_left(mask)}
    ends = end_tokens(trainer.model, tokenizer)
    new_tokens = 12 if is_rehearsal else getattr(trainer.args, "max_completion_length", 48)
    generated = generate(trainer, inputs, max_new_tokens=new_tokens, pad_token_id=pad)
    if "images" in rows[0]:
        prompts = [with_one_token_each(prompt, prompt, processor)[0] for prompt in prompts]
    pairs = []
    for prompt, answer in zip(prompts, generated, strict=True):
        end = next((index for index, token in enumerate(answer) if token in ends), len(answer))
        text = tokenizer.decode(answer[: end + 1])
        if end == len(answer):
            text += " …"
        pairs.append((tokenizer.decode(prompt), text))
    return pairs


def generate(trainer: Trainer, inputs: dict[str, torch.Tensor], **options: int) -> list[list[int]]:
    """The tokens that follow each prompt of a batch that is padded on the left. Collective.

    One batch for all: where weights are all-gathered for every token, three texts cost as much as one.
    """
    accelerator = trainer.accelerator
    trainer.model.eval()
    torch.manual_seed(0)  # on every process, so that they generate the same tokens
    # Compiled layers would be compiled again for every layer's part of the cache.
    uncompiled = torch.compiler.set_stance("force_eager")
    # accelerate has put autocast around the forward pass of the outermost module only, and an adapter's `generate` calls another.
    autocast = accelerator.autocast()
    # As while it learns from them. In other runs all weights would be copied to host memory, for three short texts.
    merged = merge_for_generation(trainer.model, accelerator) if writes_answers(trainer) else contextlib.nullcontext()
    with torch.no_grad(), autocast, trainer.autocast_smart_context_manager(), uncompiled, merged, generate_on(accelerator.device):
        generated = trainer.model.generate(
            **{name: value.to(accelerator.device) for name, value in inputs.items()},
            do_sample=True,
            top_p=0.9,
            use_cache=True,
            synced_gpus=accelerator.num_processes > 1,  # a process that is done continues for the others
            **options,
        )
    return generated[:, inputs["input_ids"].shape[1] :].tolist()


def end_tokens(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end an answer: those of the generation config and of the tokenizer."""
    eos = model.generation_config.eos_token_id
    if not isinstance(eos, list):
        eos = [eos]
    return {tokenizer.eos_token_id, *eos} - {None}


def tokens_before_loss(row: dict) -> list[int]:
    """The tokens of a row before the first one in the loss; its first tokens if all are in the loss. Of a pair the prompt."""
    ids, labels = documents_of(row)[0]
    masked = next((index for index, label in enumerate(labels) if label != IGNORED), 0)
    if masked > 1:
        return list(ids[:masked])
    return list(ids[: min(PROMPT_TOKENS, max(1, len(ids) - 1))])  # not the end token of a short text


def documents_of(row: dict) -> list[Document]:
    """The documents of a tokenized row, packed or not; of a pair of answers the prompt with each of them."""
    if "prompt_ids" in row:
        prompt = row["prompt_ids"]
        return [(prompt + row[name], [IGNORED] * len(prompt) + row[name]) for name in ANSWERS if name in row]
    ids = row["input_ids"]
    labels = row.get("labels", ids)
    documents = []
    start = 0
    for length in row.get("seq_lengths") or [len(ids)]:
        documents.append((ids[start : start + length], labels[start : start + length]))
        start += length
    return documents


def has_held_out(trainer: Trainer) -> bool:
    """Whether a trainer has rows that --verify can compute the loss of: tokens for a causal language model."""
    return not why_no_text(trainer) and any(map(len, tokenized_datasets(trainer).values()))


def tokenized_datasets(trainer: Trainer) -> dict[str, Dataset]:
    """The evaluation datasets with tokens, by label; a single one has the label ""."""
    datasets = trainer.eval_dataset
    if not isinstance(datasets, dict):
        datasets = {"": datasets}
    return {label: rows for label, rows in datasets.items() if isinstance(rows, Dataset) and "input_ids" in rows.column_names}


def save_held_out(trainer: Trainer, conversations: list[dict[str, Any]]) -> None:
    """Writes the tokens of all evaluation rows, and the first `conversations` as JSON with their tokens; not collective."""
    rows = [
        {"dataset": name, "conversation": None, **tokens_of_row(trainer, row)}
        for name, dataset in tokenized_datasets(trainer).items()
        for row in dataset
    ]
    columns = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
    for row in conversations:
        text = json.dumps({name: row[name] for name in columns if name in row})
        kept = {"dataset": "", "conversation": text, "input_ids": row["input_ids"], "labels": [], "seq_lengths": []}
        rows.append(kept | {"images": row.get("images")})
    with draft_of(Path(trainer.args.output_dir, HELD_OUT)) as draft:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), draft)


def tokens_of_row(trainer: Trainer, row: dict) -> dict[str, list[int]]:
    """Tokens and labels of a row as the model gets them, and the lengths of its documents."""
    columns = ("input_ids", "labels", "seq_lengths", "attention_mask", "images")
    given = {name: row[name] for name in columns if name in row}
    batch = trainer.data_collator([given])
    ids = batch["input_ids"][0]
    labels = batch["labels"][0]
    if batch.get("attention_mask") is not None:
        is_token = batch["attention_mask"][0].bool()
        ids = ids[is_token]
        labels = labels[is_token]
    lengths = row.get("seq_lengths") or [len(ids)]
    return {"input_ids": ids.tolist(), "labels": labels.tolist(), "seq_lengths": lengths, "images": row.get("images")}
