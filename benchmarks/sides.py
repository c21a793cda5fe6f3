"""The programs that side_by_side.py compares. Each trains without end, one optimizer step per turn."""

import functools
import itertools
import os
import runpy
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import inputs

RECIPE = inputs.ROOT / "recipes/qwen2_fineweb_edu.py"
IGNORED = -100  # the label of tokens that do not count in the loss


class Turn:
    """Called by a program after each optimizer step: reports the step, and waits for the program's next turn."""

    def __init__(self, connection: Connection, on_gpu: bool) -> None:
        import torch

        self.connection, self.on_gpu = connection, on_gpu
        self.tokens = 0  # useful ones of this step
        # Others may use the CPU too, so the time there is what this process got of one core.
        self.clock = time.perf_counter if on_gpu else time.process_time
        if not on_gpu:
            torch.set_num_threads(1)
        self.began = self.clock()

    def __call__(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()
        self.connection.send((self.tokens, self.clock() - self.began))
        self.tokens = 0
        if not self.connection.recv():
            os._exit(0)
        self.began = self.clock()


def recipe(turn: Turn, settings: dict[str, Any]) -> None:
    """The recipe, without launch.sh."""
    _run_script(turn, str(RECIPE), settings)


def trl_sft(turn: Turn, settings: dict[str, Any]) -> None:
    """`trl sft`."""
    import trl.scripts.sft

    _run_script(turn, trl.scripts.sft.__file__, settings)


def _run_script(turn: Turn, script: str, settings: dict[str, Any]) -> None:
    """Runs a script that trains with transformers' Trainer; every trainer takes turns and counts its tokens."""
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, trainer

    class TakeTurns(TrainerCallback):
        def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            turn()

    count = Trainer._get_num_items_in_batch

    @functools.wraps(count)  # the harness checks the signature
    def count_tokens(self: Trainer, *args: Any) -> Any:
        tokens = count(self, *args)
        turn.tokens += int(tokens)
        return tokens

    Trainer._get_num_items_in_batch = count_tokens
    trainer.DEFAULT_CALLBACKS.append(TakeTurns)
    words = [script]
    for name, value in settings.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    sys.argv = words
    runpy.run_path(script, run_name="__main__")


def _load(settings: dict[str, Any]) -> tuple[Any, Any, Iterable[dict]]:
    """The model on its device, the tokenizer, and an endless stream of documents."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, device = settings["model_name_or_path"], "cuda" if torch.cuda.is_available() else "cpu"
    attention = settings.get("attn_implementation")
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32", attn_implementation=attention).to(device)
    documents = load_dataset(settings["dataset_name"], settings["dataset_config"], split="train", streaming=True)
    return model.train(), AutoTokenizer.from_pretrained(name), documents.repeat(None)


def bare_loop(turn: Turn, settings: dict[str, Any], with_trl_loss: bool = False) -> None:
    """What Trainer does, as a loop: packed rows, loss over the tokens of all micro-batches, clipping, cosine schedule."""
    import torch
    from transformers import get_cosine_schedule_with_warmup
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    from trl.trainer.utils import add_fused_lm_head

    model, tokenizer, documents = _load(settings)
    if with_trl_loss:
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    rows = documents.map(lambda row: {"input_ids": tokenizer(row["text"] + tokenizer.eos_token)["input_ids"]})
    rows = pack_dataset(rows.select_columns("input_ids"), settings["max_length"], settings["packing_strategy"])
    collate = DataCollatorForLanguageModeling(tokenizer.pad_token_id, padding_free=True)
    batches = iter(torch.utils.data.DataLoader(rows, settings["per_device_train_batch_size"], collate_fn=collate))
    rate, decay, steps = settings["learning_rate"], settings["weight_decay"], settings["max_steps"]
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=decay, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, int(settings["warmup_steps"] * steps), steps)
    while micro_batches := list(itertools.islice(batches, settings["gradient_accumulation_steps"])):
        turn.tokens = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in micro_batches)
        for batch in micro_batches:
            batch = {key: value.to(model.device) if hasattr(value, "to") else value for key, value in batch.items()}
            with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.get("bf16", True)):
                if with_trl_loss:
                    loss = -model(**batch, use_cache=False, fused_lm_head=True).log_probs.sum() / turn.tokens
                else:
                    loss = model(**batch, use_cache=False, num_items_in_batch=turn.tokens).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        turn()


def bare_loop_with_trl_loss(turn: Turn, settings: dict[str, Any]) -> None:
    bare_loop(turn, settings, with_trl_loss=True)


def guide(turn: Turn, settings: dict[str, Any]) -> None:
    """The usual loop of guides: each document truncated or padded to the full length, with the padding in the loss.

    Without their activation checkpointing and offload.
    """
    import torch
    from accelerate import Accelerator

    model, tokenizer, documents = _load(settings)
    if settings.get("bf16", True):
        model = model.to(torch.bfloat16)

    def collate(rows: list[dict]) -> dict[str, Any]:
        texts, length = [row["text"] for row in rows], settings["max_length"]
        batch = tokenizer(texts, max_length=length, truncation=True, padding="max_length", return_tensors="pt")
        turn.tokens += int(batch["attention_mask"][:, 1:].sum())
        return {**batch, "labels": batch["input_ids"].clone()}

    loader = torch.utils.data.DataLoader(documents, settings["per_device_train_batch_size"], collate_fn=collate)
    rate, decay = settings["learning_rate"], settings["weight_decay"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    precision = "bf16" if settings.get("bf16", True) else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=model.device.type == "cpu")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        accelerator.backward(loss / settings["gradient_accumulation_steps"])
        if number % settings["gradient_accumulation_steps"] == 0:
            optimizer.step()
            optimizer.zero_grad()
            turn()


PROGRAMS = {program.__name__: program for program in (recipe, bare_loop, bare_loop_with_trl_loss, trl_sft, guide)}


def run_program(name: str, connection: Connection, settings: dict[str, Any], folder: Path) -> None:
    """Runs a program in this process, in its own folder, with its output in a file."""
    folder.mkdir()
    os.chdir(folder)
    with Path("output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    PROGRAMS[name](Turn(connection, on_gpu=not settings.get("use_cpu")), settings)
