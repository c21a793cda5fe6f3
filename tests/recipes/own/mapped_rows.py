"""A recipe that changes the rows after `load` and hands them to SFTTrainer, as recipes of users do."""

from harness import load, parse, train

from trl import SFTConfig, SFTTrainer


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        dataset_formats="instruction",
        dataset_name="iamtarun/python_code_instructions_18k_alpaca",
        model_name_or_path="Qwen/Qwen2-0.5B",
        eval_strategy="steps",
        per_device_train_batch_size=2,
    )
    train_dataset, eval_dataset = load(script_args)
    columns = train_dataset.column_names
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset.map(ask, remove_columns=columns),
        eval_dataset=eval_dataset.map(ask, remove_columns=columns),
    )
    train(trainer)


def ask(row):
    return {"prompt": f"{row['instruction']}\n", "completion": row["output"]}


if __name__ == "__main__":
    main()
