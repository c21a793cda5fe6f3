"""KTO: answers that are good or bad, each alone."""

from harness import load, load_tokenizer, parse, train

from trl import KTOConfig, KTOTrainer, get_peft_config


def main():
    script_args, training_args, model_args = parse(
        KTOConfig,
        model_name_or_path="Qwen/Qwen2-0.5B",
        use_peft=True,
        lora_target_modules=["all-linear"],
        lora_dropout=0.0,
        eval_strategy="steps",
    )
    train_dataset, eval_dataset = load(script_args)
    columns = train_dataset.column_names
    trainer = KTOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset.map(rate, with_indices=True, remove_columns=columns),
        eval_dataset=eval_dataset.map(rate, with_indices=True, remove_columns=columns),
        processing_class=load_tokenizer(model_args, training_args),
        peft_config=get_peft_config(model_args),
    )
    train(trainer)


def rate(row, number):
    return {"prompt": "Say it:", "completion": f" {row['text']}", "label": number % 2 == 0}


if __name__ == "__main__":
    main()
