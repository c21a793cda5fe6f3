"""The recipe of benchmarks/published.py: plain Trainer, all logits at once, rows of one length, as in libraries of 2024."""

from dataclasses import dataclass

from harness import parse, train

import peft
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import get_peft_config, get_quantization_config


@dataclass
class Arguments(TrainingArguments):
    max_length: int = 2048
    model_init_kwargs: dict | str | None = None  # a recipe that quantizes must have it


def main():
    _, training_args, model_args = parse(
        Arguments,
        model_name_or_path="meta-llama/Llama-3.1-8B",
        dataset_name="HuggingFaceFW/fineweb-edu",
        max_steps=100,
        activation_checkpointing=True,
        dtype="bfloat16",
        remove_unused_columns=False,
        lora_target_modules=["all-linear"],
    )
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        quantization_config=get_quantization_config(model_args),
        **training_args.model_init_kwargs,
    )
    if model_args.use_peft:
        model = peft.get_peft_model(model, get_peft_config(model_args))
    row = {"input_ids": [0] * training_args.max_length, "labels": [0] * training_args.max_length}
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Dataset.from_list([row] * 8 * training_args.per_device_train_batch_size),
        processing_class=AutoTokenizer.from_pretrained(model_args.model_name_or_path),
    )
    train(trainer)


if __name__ == "__main__":
    main()
