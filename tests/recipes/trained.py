"""What was trained: the text in the loss, the model a run left, its loss by the plain model."""

import torch
from conftest import read
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM


def in_the_loss(trainer, row) -> list[str]:
    """The text whose tokens enter the loss, for every document of a packed row."""
    pieces, start = [], 0
    for length in row["seq_lengths"]:
        part = slice(start, start + length)
        pieces.append([t for t, label in zip(row["input_ids"][part], row["labels"][part], strict=True) if label != -100])
        start += length
    return [trainer.processing_class.decode(piece) for piece in pieces]


def held_out_loss(model, rows) -> float:
    """The mean over packed rows of nats per trained token: every document alone, by the plain model, without TRL."""
    means = []
    for row in rows:
        total, count, start = 0.0, 0, 0
        labels = row.get("labels", row["input_ids"])
        for length in row["seq_lengths"]:
            part = slice(start, start + length)
            ids, wanted = torch.tensor([row["input_ids"][part]]), torch.tensor(labels[part])[1:]
            start, trained = start + length, wanted != -100
            with torch.no_grad():
                chances = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)[trained]
            total -= chances.gather(1, wanted[trained, None]).sum().item()
            count += int(trained.sum())
        means.append(total / count)
    return sum(means) / len(means)


def reload(run, workplace):
    """The model a run left, in float32, as a user loads it; a 4-bit adapter on the 4-bit weights it was trained on."""
    if not (run / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(run).float().eval()
    if not read(run)["load_in_4bit"]:
        return AutoPeftModelForCausalLM.from_pretrained(run, dtype=torch.float32).eval()
    folder = next((workplace / "outputs/tiny/.quantized").glob(f"{read(run)['model'].replace('/', '--')}*/"))
    base = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, dtype=torch.bfloat16)
    return PeftModel.from_pretrained(base, run).eval()
