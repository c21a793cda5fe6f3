"""A recipe for tests: a small model learns from the logits of a teacher, which waits in host memory between its uses."""

import dataclasses

from harness import load_tokenizer, parse, tokenize, train

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer


@dataclasses.dataclass
class DistillationConfig(SFTConfig):
    teacher: str = "Qwen/Qwen3-0.6B"
    teacher_waits: bool = True


class DistillationTrainer(SFTTrainer):
    def __init__(self, teacher: torch.nn.Module, **options):
        super().__init__(**options)
        self.teacher = teacher.eval().to(self.args.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        self.teacher.to(self.args.device)
        with torch.no_grad():
            expected = self.teacher(**inputs, use_cache=False).logits
        if self.args.teacher_waits:
            self.teacher.to("cpu")
        outputs = model(**inputs, use_cache=False)
        loss = torch.nn.functional.mse_loss(outputs.logits[labels != -100], expected[labels != -100])
        return (loss, outputs) if return_outputs else loss


def main():
    _, training_args, model_args = parse(
        DistillationConfig,
        model_name_or_path="Qwen/Qwen2-0.5B",
        dataset_name="HuggingFaceFW/fineweb-edu",
        max_steps=10,
        max_length=128,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    tokenizer = load_tokenizer(model_args, training_args)
    rows = Dataset.from_list([{"text": "words of a text " * 200}] * 64)
    trainer = DistillationTrainer(
        teacher=AutoModelForCausalLM.from_pretrained(training_args.teacher, dtype="bfloat16"),
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=tokenize(rows, None, tokenizer, training_args)[0],
        processing_class=tokenizer,
    )
    train(trainer)


if __name__ == "__main__":
    main()
