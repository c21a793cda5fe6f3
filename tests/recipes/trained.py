"""Which text of a trainer's rows is in the loss, the model that a run has saved, and its evaluation loss without TRL."""

import torch
from peft import AutoPeftModelForCausalLM
from runs import load_saved, read
from transformers import AutoConfig, AutoModelForCausalLM


def texts_in_loss(trainer, row) -> list[str]:
    """The text whose tokens count in the loss, for every document of a packed row."""
    texts, start = [], 0
    for length in row["seq_lengths"]:
        part = slice(start, start + length)
        tokens = [t for t, label in zip(row["input_ids"][part], row["labels"][part], strict=True) if label != -100]
        texts.append(trainer.processing_class.decode(tokens))
        start += length
    return texts


def held_out_loss(model, rows) -> float:
    """The mean loss per token, from a plain model that gets every document alone."""
    total, count = 0.0, 0
    for row in rows:
        start = 0
        labels = row.get("labels", row["input_ids"])
        for length in row["seq_lengths"]:
            part = slice(start, start + length)
            start += length
            ids, targets = torch.tensor([row["input_ids"][part]]), torch.tensor(labels[part])[1:]
            in_loss = targets != -100
            with torch.no_grad():
                log_probabilities = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)[in_loss]
            total -= log_probabilities.gather(1, targets[in_loss, None]).sum().item()
            count += int(in_loss.sum())
    return total / count


def reload(run, workdir):
    """The saved model in float32, loaded as a user does; a 4-bit adapter with the 4-bit weights that it was trained on."""
    if not (run / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(run).float().eval()
    is_text_model = "ForCausalLM" in str(AutoConfig.from_pretrained(read(run, "adapter_config.json")["base_model_name_or_path"]))
    if not read(run)["load_in_4bit"] and is_text_model:
        return AutoPeftModelForCausalLM.from_pretrained(run, dtype=torch.float32).eval()
    return load_saved(run)  # an adapter of a model that reads images too has the names of the whole model
