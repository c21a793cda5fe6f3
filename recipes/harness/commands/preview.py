"""What the model will see: rows as they are packed, what of them trains, how long they are. For `launch.sh --preview RECIPE`.

The recipe's own lines make the rows, up to its trainer, of the first of each split.
"""

import itertools
import os
import sys

from harness.commands import first_rows
from harness.launched import Checked, say

BATCHES = 100
SHOWN, PIECES, HEAD, TAIL = 2, 3, 160, 40  # rows; documents of a row; tokens of a document's beginning and end
IGNORED = -100  # the label of a token that is not trained on


def show(trainer):
    """Prints rows, numbers and warnings; ends the process, with exit code 1 when there are warnings."""
    args, tokenizer = trainer.args, getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    packed, splits, seen = first_rows.look(trainer)
    batches = list(itertools.islice(trainer.get_train_dataloader(), BATCHES))

    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    key = "green trains, grey does not" if colour else "⟦ ⟧ trains, the rest does not"
    say(f"\nThe first rows as the model will see them: {key}; special tokens are {'bold' if colour else 'marked ◆'}.")
    for row in packed[:SHOWN]:
        parts = first_rows.documents(row)
        say(f"\n--- a row of {len(row['input_ids']):,} tokens, {len(parts)} document{'s' * (len(parts) > 1)}")
        say("\n---\n".join(painted(tokenizer, *part, colour) for part in parts[:PIECES]))
        if len(parts) > PIECES:
            say(f"--- {len(parts) - PIECES} documents more")
    say("")
    _numbers(args, splits["train"], seen, packed, batches)
    warnings = list(_warnings(tokenizer, splits, seen, batches, trainer))
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if warnings:
        sys.exit(1)
    raise Checked(args)


def painted(tokenizer, ids: list[int], labels: list[int], colour: bool) -> str:
    """A document as text, its middle left out when it is long."""
    if len(ids) > 2 * (HEAD + TAIL):
        left_out = f"\n… {len(ids) - HEAD - TAIL:,} tokens …\n"
        ends = painted(tokenizer, ids[:HEAD], labels[:HEAD], colour), painted(tokenizer, ids[-TAIL:], labels[-TAIL:], colour)
        return left_out.join(ends)
    specials = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    text = ""
    for trains, run in itertools.groupby(zip(ids, labels, strict=True), lambda pair: pair[1] != IGNORED):
        part = ""
        for is_special, tokens in itertools.groupby(run, lambda pair: pair[0] in specials):
            tokens = [token for token, _ in tokens]
            if colour:
                part += f"\033[{'1;' * is_special}{32 if trains else 90}m{tokenizer.decode(tokens)}\033[0m"
            else:
                part += "".join(f"◆{tokenizer.decode(token)}" for token in tokens) if is_special else tokenizer.decode(tokens)
        text += f"⟦{part}⟧" if trains and not colour else part
    return text


def _numbers(args, whole: list, seen: list, packed: list, batches: list):
    lengths = sorted(len(ids) for ids, _ in whole)
    tenths = [lengths[len(lengths) * tenth // 10] for tenth in (1, 5, 9)]
    cut = [len(ids) - len(kept) for (ids, _), (kept, _) in zip(whole, seen, strict=True)]
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    padding = sum(int((batch["attention_mask"] == 0).sum()) for batch in batches if batch.get("attention_mask") is not None)
    share = f"{sum(map(bool, cut)) / len(cut):.1%} of the documents, {sum(cut) / sum(lengths):.1%} of the tokens"
    trained = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    say(
        f"lengths    {lengths[0]:,} to {lengths[-1]:,} tokens; a tenth below {tenths[0]:,}, half below {tenths[1]:,}, "
        f"nine tenths below {tenths[2]:,} ({len(lengths)} documents)\n"
        f"cut off    {share if 'train' in first_rows.found.whole else 'not known: the recipe itself cuts and packs its rows'}\n"
        f"padding    {padding / tokens:.1%} of the tokens of {len(batches)} batches\n"
        f"trains     {trained / tokens:.1%} of them"
    )
    data, a_row = first_rows.found.data, first_rows.mean_length(packed)
    rows = data.global_batch_size or args.per_device_train_batch_size * args.gradient_accumulation_steps
    where = f"a step is {rows} rows{'' if data.global_batch_size else ' on one GPU'}, {rows * a_row:,.0f} tokens"
    of_epoch, tokens = first_rows.epoch(whole, seen, packed)
    steps = max(1, of_epoch / rows) if of_epoch else 0
    if steps:
        say(f"an epoch   about {steps:,.0f} steps, {tokens:,.0f} tokens; {where}")
    else:
        say(f"an epoch   unknown: nobody says how many rows there are; {where}")
    steps = args.max_steps if args.max_steps > 0 else steps * args.num_train_epochs
    if steps:
        say(f"the run    {steps:,.0f} steps, {steps * rows * a_row:,.0f} tokens")


def _warnings(tokenizer, splits: dict, seen: list, batches: list, trainer):
    """One line for each thing that would train without complaint and teach something else."""
    ends = {tokenizer.eos_token_id, *_list(trainer.model.generation_config.eos_token_id)} - {None}
    train, held_out = splits["train"], splits["eval"]
    ending = [
        any(i in ends and label != IGNORED for i, label in zip(ids[-3:], labels[-3:], strict=True)) for ids, labels in train
    ]
    has_whole = "train" in first_rows.found.whole
    endless = sum(
        not ends_well and (has_whole or len(ids) < (getattr(trainer.args, "max_length", None) or sys.maxsize))
        for ends_well, (ids, _) in zip(ending, train, strict=True)
    )
    if endless:
        yield f"{endless} of {len(train)} documents have no end token that is trained on: the model does not learn to stop there"
    if nothing := sum(all(label == IGNORED for label in labels) for _, labels in seen):
        yield f"in {nothing} of {len(seen)} documents nothing trains: what is to be learnt is cut off, or not marked as an answer"
    texts = {tuple(ids) for ids, _ in train if len(ids) > 8}
    if known := sum(tuple(ids) in texts for ids, _ in held_out):
        yield f"{known} of {len(held_out)} documents for evaluation are trained on as well: the held-out loss will flatter"
    if first_rows.found.is_chat and (after := _after_an_answer(tokenizer)) is not None and not ends & set(after):
        yield (
            f"the chat template does not end the assistant's turn with {tokenizer.convert_ids_to_tokens(sorted(ends))} but with "
            f"{tokenizer.decode(after)!r}: a server will not know where an answer stops"
        )
    if tokenizer.pad_token_id == tokenizer.eos_token_id and _never_trains(batches, tokenizer.eos_token_id):
        yield f"{tokenizer.eos_token} is padding and the end, and the loss is on neither: give another --pad_token"


def _after_an_answer(tokenizer) -> list[int] | None:
    """The tokens that the template writes after what an assistant says, None when it cannot write such a turn."""
    answer = "An answer."
    try:
        turns = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # whatever a template raises
        return None
    return tokenizer(text[text.rindex(answer) + len(answer) :], add_special_tokens=False)["input_ids"]


def _never_trains(batches: list, token: int) -> bool:
    """Whether a token is in the batches, as no padding, and its label in none of them."""
    there = [batch["input_ids"] == token for batch in batches]
    there = [places & (batch.get("attention_mask", places) != 0) for places, batch in zip(there, batches, strict=True)]
    return any(bool(places.any()) for places in there) and not any(bool((batch["labels"] == token).any()) for batch in batches)


def _list(value) -> list:
    return value if isinstance(value, list) else [value]
