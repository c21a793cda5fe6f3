"""The sides of side_by_side.py: each trains for ever, and takes an optimizer step when it is its turn."""

import itertools
import os
import runpy
import sys
import time
from pathlib import Path

import material

RECIPE = material.ROOT / "recipes/qwen2_fineweb_edu.py"


class Turn:
    """One side's end of the line: called after each optimizer step."""

    def __init__(self, line, on_gpu: bool):
        import torch

        self.line, self.tokens, self.wait = line, 0, torch.cuda.synchronize if on_gpu else lambda: None
        # On a CPU that others use as well, the seconds that this process had of one core.
        self.clock = time.perf_counter if on_gpu else time.process_time
        torch.set_num_threads(torch.get_num_threads() if on_gpu else 1)
        self.began = self.clock()

    def __call__(self):
        self.wait()
        self.line.send((self.tokens, self.clock() - self.began))
        self.tokens = 0
        if not self.line.recv():
            os._exit(0)
        self.began = self.clock()


def recipe(turn: Turn, numbers: dict):
    _with_trainer(turn, str(RECIPE), numbers)


def trl_sft(turn: Turn, numbers: dict):
    import trl.scripts.sft

    _with_trainer(turn, trl.scripts.sft.__file__, numbers)


def _with_trainer(turn: Turn, script: str, numbers: dict):
    """Runs a script that trains with transformers' Trainer; every trainer takes turns and tells its tokens."""
    from transformers import Trainer, TrainerCallback, trainer

    class TakeTurns(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            turn()

    def counting(self, *args, **kwargs):
        batches, tokens = take(self, *args, **kwargs)
        turn.tokens += int(tokens)
        return batches, tokens

    take, Trainer.get_batch_samples = Trainer.get_batch_samples, counting
    trainer.DEFAULT_CALLBACKS.append(TakeTurns)
    words = {name: value if isinstance(value, list) else [value] for name, value in numbers.items()}
    sys.argv = [script, *(str(word) for name in words for word in (f"--{name}", *words[name]))]
    runpy.run_path(script, run_name="__main__")


def _load(numbers: dict):
    """The model, on its device, the tokenizer and the endless stream of documents."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, device = numbers["model_name_or_path"], "cuda" if torch.cuda.is_available() else "cpu"
    attention = numbers.get("attn_implementation")
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32", attn_implementation=attention).to(device)
    documents = load_dataset(numbers["dataset_name"], numbers["dataset_config"], split="train", streaming=True)
    return model.train(), AutoTokenizer.from_pretrained(name), documents.repeat(None)


def bare_loop(turn: Turn, numbers: dict, with_trl_loss: bool = False):
    """What the Trainer does, written out: packed rows, loss over the tokens of all micro-batches, clipping, cosine."""
    import torch
    from transformers import get_cosine_schedule_with_warmup
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    from trl.trainer.utils import add_fused_lm_head

    model, tokenizer, documents = _load(numbers)
    if with_trl_loss:
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    rows = documents.map(lambda row: {"input_ids": tokenizer(row["text"] + tokenizer.eos_token)["input_ids"]})
    rows = pack_dataset(rows.select_columns("input_ids"), numbers["max_length"], numbers["packing_strategy"])
    collate = DataCollatorForLanguageModeling(tokenizer.pad_token_id, padding_free=True)
    batches = iter(torch.utils.data.DataLoader(rows, numbers["per_device_train_batch_size"], collate_fn=collate))
    rate, decay, steps = numbers["learning_rate"], numbers["weight_decay"], numbers["max_steps"]
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=decay, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, int(numbers["warmup_steps"] * steps), steps)
    while micro_batches := list(itertools.islice(batches, numbers["gradient_accumulation_steps"])):
        turn.tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
        for batch in micro_batches:
            batch = {key: value.to(model.device) if hasattr(value, "to") else value for key, value in batch.items()}
            with torch.autocast(model.device.type, torch.bfloat16, enabled=numbers.get("bf16", True)):
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


def guide(turn: Turn, numbers: dict):
    """Tokenized as it comes, cut at or padded to the full length, padding in the loss; without its checkpointing and offload."""
    import torch
    from accelerate import Accelerator

    model, tokenizer, documents = _load(numbers)
    if numbers.get("bf16", True):
        model = model.to(torch.bfloat16)

    def collate(rows: list[dict]):
        texts, length = [row["text"] for row in rows], numbers["max_length"]
        batch = tokenizer(texts, max_length=length, truncation=True, padding="max_length", return_tensors="pt")
        turn.tokens += int(batch["attention_mask"][:, 1:].sum())
        return {**batch, "labels": batch["input_ids"].clone()}

    loader = torch.utils.data.DataLoader(documents, numbers["per_device_train_batch_size"], collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=numbers["learning_rate"], weight_decay=numbers["weight_decay"])
    accelerator = Accelerator(mixed_precision="bf16" if numbers.get("bf16", True) else "no", cpu=model.device.type == "cpu")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        accelerator.backward(loss / numbers["gradient_accumulation_steps"])
        if number % numbers["gradient_accumulation_steps"] == 0:
            optimizer.step()
            optimizer.zero_grad()
            turn()


def bare_loop_with_trl_loss(turn: Turn, numbers: dict):
    bare_loop(turn, numbers, with_trl_loss=True)


SIDES = {side.__name__: side for side in (recipe, bare_loop, bare_loop_with_trl_loss, trl_sft, guide)}


def begin(name: str, line, numbers: dict, folder: Path):
    """The first lines of each side's process: its output goes into a file."""
    folder.mkdir()
    os.chdir(folder)
    with Path("output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    SIDES[name](Turn(line, on_gpu=not numbers.get("use_cpu")), numbers)
