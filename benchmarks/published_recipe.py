"""The recipe of benchmarks/published.py: the plain Trainer, whole logits, rows of one length, as libraries of 2024 had it."""

from dataclasses import dataclass

from harness import parse, train

import peft
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import get_peft_config, get_quantization_config


@dataclass
class Arguments(TrainingArguments):
    max_length: int = 2048
    model_init_kwargs: dict | str | None = None  # what a recipe has that can quantize


def main():
    _, args, model = parse(
        Arguments,
        model_name_or_path="meta-llama/Llama-3.1-8B",
        dataset_name="HuggingFaceFW/fineweb-edu",
        max_steps=100,
        activation_checkpointing=True,
        dtype="bfloat16",
        remove_unused_columns=False,
        lora_target_modules=["all-linear"],
    )
    quantization = get_quantization_config(model)
    base = AutoModelForCausalLM.from_pretrained(
        model.model_name_or_path, quantization_config=quantization, **args.model_init_kwargs
    )
    adapted = peft.get_peft_model(base, get_peft_config(model)) if model.use_peft else base
    row = {"input_ids": [0] * args.max_length, "labels": [0] * args.max_length}
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path)
    rows = Dataset.from_list([row] * 8 * args.per_device_train_batch_size)
    train(Trainer(model=adapted, args=args, train_dataset=rows, processing_class=tokenizer))


if __name__ == "__main__":
    main()
