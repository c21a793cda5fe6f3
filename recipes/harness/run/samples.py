"""The samples that a run writes: a few evaluation rows, continued or answered by the model."""

import itertools
from pathlib import Path

from harness.compat.transformers import generate_on
from harness.data.images import ImageCollator, with_one_token_each
from harness.folder import draft_of
from harness.messages import print_once
from harness.run import generation
from harness.run.failures import only_report
from harness.run.parameters import base_of, can_generate

import torch
from transformers import PreTrainedTokenizerBase, Trainer

COUNT, PROMPT_TOKENS = 3, 24  # samples; tokens of the prompt of a row that is one text


def why_no_text(trainer: Trainer) -> str:
    """Why a trainer's model is not asked to continue texts, "" if it is: a classifier, a reward model, an encoder-decoder."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not can_generate(model) or base_of(model).config.is_encoder_decoder:
        return f"{type(base_of(model)).__name__} does not continue texts"
    return "" if trainer.processing_class else "the trainer has no tokenizer"


def generate_samples(trainer: Trainer, is_rehearsal: bool) -> None:
    """Continues a few evaluation rows, or answers their prompts; prints the texts and writes them to samples.txt. Collective."""
    rows, reason = choose_rows(trainer)
    if reason:
        print_once(f"No samples: {reason}.")
        return
    processor = trainer.processing_class
    tokenizer = getattr(processor, "tokenizer", processor)  # of a processor, which a model with a vision part has
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    prompts = [_prompt_of(row) for row in rows]
    if "images" in rows[0]:
        inputs = ImageCollator(processor, "left").for_prompts(prompts, [row["images"] for row in rows])
    else:
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        inputs = {"input_ids": ids, "attention_mask": mask}
    new_tokens = 12 if is_rehearsal else getattr(trainer.args, "max_completion_length", 48)
    generated = generate(trainer, inputs, max_new_tokens=new_tokens, pad_token_id=pad)
    if not trainer.is_world_process_zero():
        return
    with only_report("samples.txt"):  # the other processes no longer wait for this one
        texts = []
        for prompt, answer in zip(prompts, generated, strict=True):
            prompt, _ = with_one_token_each(prompt, prompt, processor)
            answer = _decode_answer(answer, trainer.model, tokenizer)
            texts.append(f"--- prompt\n{tokenizer.decode(prompt)}\n--- generated\n{answer}\n")
        note = "; random weights write nonsense" if is_rehearsal else ""
        print_once(f"\nSamples, prompted with evaluation rows (samples.txt{note}):\n\n" + "\n".join(texts))
        with draft_of(Path(trainer.args.output_dir, "samples.txt")) as draft:
            draft.write_text("\n".join(texts), "utf-8")


def choose_rows(trainer: Trainer) -> tuple[list[dict], str]:
    """The first rows of the (first) evaluation dataset, and why they are not continued, "" if they are."""
    if reason := why_no_text(trainer):
        return [], reason
    dataset = trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    rows = list(itertools.islice(dataset, COUNT))
    if generation.writes_answers(trainer):
        rows = [{"prompt_ids": generation.tokens_of_prompt(trainer, row["prompt"])} for row in rows]
    has_tokens = all({"input_ids", "prompt_ids"} & row.keys() for row in rows)
    return rows, "" if has_tokens else "the rows have no column input_ids"


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
    with torch.no_grad(), autocast, trainer.autocast_smart_context_manager(), uncompiled, generate_on(accelerator.device):
        generated = trainer.model.generate(
            **{name: value.to(accelerator.device) for name, value in inputs.items()},
            do_sample=True,
            top_p=0.9,
            use_cache=True,
            synced_gpus=accelerator.num_processes > 1,  # a process that is done continues for the others
            **options,
        )
    return generated[:, inputs["input_ids"].shape[1] :].tolist()


def _decode_answer(tokens: list[int], model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> str:
    """The generated text up to its end token, or with "…" if there is none."""
    ends = end_tokens(model, tokenizer)
    for index, token in enumerate(tokens):
        if token in ends:
            return tokenizer.decode(tokens[: index + 1])
    return f"{tokenizer.decode(tokens)} …"


def end_tokens(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end an answer: those of the generation config and of the tokenizer."""
    eos = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}


def _prompt_of(row: dict) -> list[int]:
    """The tokens of a row before the first one in the loss; its first tokens if all are in the loss. Of a pair the prompt."""
    if "prompt_ids" in row:  # of DPOTrainer, or of a trainer that generates
        return list(row["prompt_ids"])
    ids = row["input_ids"][: row["seq_lengths"][0]] if "seq_lengths" in row else row["input_ids"]
    labels = list(row.get("labels", ids))[: len(ids)]
    masked = next((index for index, label in enumerate(labels) if label != -100), 0)
    return list(ids[: masked if masked > 1 else min(PROMPT_TOKENS, max(1, len(ids) - 1))])  # not the end token of a short text
