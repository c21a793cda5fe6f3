"""The samples that a run writes: a few evaluation rows, continued or answered by the model."""

import contextlib
import functools
import itertools
from pathlib import Path

from harness.compat.peft import merge_for_generation
from harness.compat.transformers import generate_on
from harness.data.images import ImageCollator, with_one_token_each
from harness.data.turns import IGNORED
from harness.folder import draft_of
from harness.messages import print_once
from harness.run import generation
from harness.run.documents import documents_of
from harness.run.failures import only_report
from harness.run.parameters import base_of, can_generate

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, Trainer

COUNT = 3
PROMPT_TOKENS = 24  # of the prompt of a row that is one text


def why_no_text(trainer: Trainer) -> str:
    """Why a trainer's model is not asked to continue texts, "" if it is: a classifier, a reward model, an encoder-decoder."""
    model = base_of(trainer.accelerator.unwrap_model(trainer.model))
    if not can_generate(model) or model.config.is_encoder_decoder:
        return f"{type(model).__name__} does not continue texts"
    if not trainer.processing_class:
        return "the trainer has no tokenizer"
    has_tokens = all({"input_ids", "prompt_ids"} & row.keys() for row in first_rows(trainer))
    if has_tokens or generation.writes_answers(trainer):
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
    if args.eval_on_start and not is_shared and not generation.writes_answers(trainer):
        with contextlib.suppress(Exception), torch.random.fork_rng():  # an error comes again after the training, and is reported
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
    if generation.writes_answers(trainer):
        prompts = [generation.tokens_of_prompt(trainer, row["prompt"]) for row in rows]
    else:
        prompts = [prompt_of(row) for row in rows]
    if "images" in rows[0]:
        inputs = ImageCollator(processor, "left").for_prompts(prompts, [row["images"] for row in rows])
    else:
        ids = [torch.tensor(prompt) for prompt in prompts]
        mask = [torch.ones_like(tokens) for tokens in ids]
        pad_left = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        inputs = {"input_ids": pad_left(ids, padding_value=pad), "attention_mask": pad_left(mask)}
    new_tokens = 12 if is_rehearsal else getattr(trainer.args, "max_completion_length", 48)
    generated = generate(trainer, inputs, max_new_tokens=new_tokens, pad_token_id=pad)
    ends = end_tokens(trainer.model, tokenizer)
    pairs = []
    for prompt, answer in zip(prompts, generated, strict=True):
        prompt, _ = with_one_token_each(prompt, prompt, processor)
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
    merged = merge_for_generation(accelerator.unwrap_model(trainer.model), accelerator)
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


def prompt_of(row: dict) -> list[int]:
    """The tokens of a row before the first one in the loss; its first tokens if all are in the loss. Of a pair the prompt."""
    ids, labels = documents_of(row)[0]
    masked = next((index for index, label in enumerate(labels) if label != IGNORED), 0)
    if masked > 1:
        return list(ids[:masked])
    return list(ids[: min(PROMPT_TOKENS, max(1, len(ids) - 1))])  # not the end token of a short text
