"""A recipe for tests: any model folder, texts of one length."""

from harness import parse, train

from datasets import Dataset
from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    _, args, model = parse(
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
    rows = Dataset.from_list([{"text": "words of a text " * 100}] * 64)
    trainer = SFTTrainer(
        model=model.model_name_or_path,
        args=args,
        train_dataset=rows,
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
    )
    train(trainer)


if __name__ == "__main__":
    main()
