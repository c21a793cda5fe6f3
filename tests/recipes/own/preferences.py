"""DPO on columns of its own, with a second copy of the model as reference, or with --use_peft."""

from harness import load, parse, train

from trl import DPOConfig, DPOTrainer, get_peft_config


def main():
    script_args, training_args, model_args = parse(
        DPOConfig,
        model_name_or_path="Qwen/Qwen2-0.5B",
        lora_target_modules=["all-linear"],
        eval_strategy="steps",
        per_device_train_batch_size=2,
        beta=0.2,
    )
    train_dataset, eval_dataset = load(script_args)

    def compare(row):
        return {"prompt": "Say it:", "chosen": f" {row['text']}", "rejected": f" {row['text'][:20]}"}

    columns = train_dataset.column_names
    trainer = DPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset.map(compare, remove_columns=columns),
        eval_dataset=eval_dataset.map(compare, remove_columns=columns),
        peft_config=get_peft_config(model_args),
    )
    train(trainer)


if __name__ == "__main__":
    main()
