"""A reward model: an adapter and a new head, without one also the model."""

from harness import load, parse, train

from trl import RewardConfig, RewardTrainer, get_peft_config


def main():
    script_args, training_args, model_args = parse(
        RewardConfig,
        model_name_or_path="Qwen/Qwen2-0.5B",
        lora_task_type="SEQ_CLS",
        lora_target_modules=["all-linear"],
        lora_dropout=0.0,
        eval_strategy="steps",
        per_device_train_batch_size=2,
    )
    train_dataset, eval_dataset = load(script_args)

    def compare(row):
        return {"chosen": row["text"], "rejected": row["text"][:20]}

    columns = train_dataset.column_names
    trainer = RewardTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset.map(compare, remove_columns=columns),
        eval_dataset=eval_dataset.map(compare, remove_columns=columns),
        peft_config=get_peft_config(model_args),
    )
    train(trainer)
    trainer.save_metrics("after", trainer.evaluate())  # needs all processes


if __name__ == "__main__":
    main()
