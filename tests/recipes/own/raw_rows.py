"""A recipe that hands SFTTrainer conversations, as recipes of users do."""

from harness import load, parse, train

from trl import SFTConfig, SFTTrainer, get_peft_config


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        dataset_formats="messages",
        dataset_name="trl-lib/Capybara",
        model_name_or_path="Qwen/Qwen2-0.5B-Instruct",
        packing=True,
        packing_strategy="bfd_split",
        eval_strategy="steps",
        per_device_train_batch_size=2,
    )
    train_dataset, eval_dataset = load(script_args)
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model_args),
    )
    train(trainer)


if __name__ == "__main__":
    main()
