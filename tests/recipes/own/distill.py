"""Learns answers and stays near another model: cross-entropy, and the distance (KL) of the distributions of both."""

from dataclasses import dataclass

from harness import load, load_tokenizer, parse, tokenize, train

import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer


@dataclass
class DistillConfig(SFTConfig):
    kl_weight: float = 0.5


class DistillTrainer(SFTTrainer):
    loss_is_mean_over = "tokens"

    def __init__(self, *args, teacher, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        with torch.no_grad():
            of_teacher = self.teacher(**inputs).logits
        is_answer = labels[:, 1:] != -100
        logits = outputs.logits[:, :-1][is_answer].float()
        of_teacher = of_teacher[:, :-1][is_answer].float()
        distance = kl_div(logits.log_softmax(-1), of_teacher.log_softmax(-1), reduction="batchmean", log_target=True)
        total = cross_entropy(logits, labels[:, 1:][is_answer]) + self.args.kl_weight * distance
        return (total, outputs) if return_outputs else total


def main():
    script_args, training_args, model_args = parse(
        DistillConfig,
        model_name_or_path="Qwen/Qwen2-0.5B",
        dataset_formats="messages",
        max_length=128,
        eval_strategy="steps",
        eval_on_start=True,
        per_device_train_batch_size=2,
    )
    train_dataset, eval_dataset = load(script_args)
    tokenizer = load_tokenizer(model_args, training_args)
    train_dataset, eval_dataset = tokenize(train_dataset, eval_dataset, tokenizer, training_args)
    trainer = DistillTrainer(
        model=model_args.model_name_or_path,
        teacher=AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype="float32"),
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )
    train(trainer)


if __name__ == "__main__":
    main()
