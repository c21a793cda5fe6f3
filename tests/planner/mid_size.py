"""A recipe for tests: any model folder, texts of equal length."""

from harness import load_tokenizer, parse, tokenize, train

from datasets import Dataset
from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    _, training_args, model_args = parse(
        SFTConfig,
        model_name_or_path="Qwen/Qwen2-0.5B",
        dataset_name="HuggingFaceFW/fineweb-edu",
        max_steps=10,
        max_length=512,
        packing=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        activation_checkpointing=False,
        lora_target_modules=["all-linear"],
    )
    tokenizer = load_tokenizer(model_args, training_args)
    rows = Dataset.from_list([{"text": "words of a text " * 100}] * 64)
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=tokenize(rows, None, tokenizer, training_args)[0],
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    train(trainer)


if __name__ == "__main__":
    main()
