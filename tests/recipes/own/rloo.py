"""RLOO, on the rewards and prompts of the GRPO recipe next to it, and of all weights."""

from harness import load, load_tokenizer, parse, train

from trl import RLOOConfig, RLOOTrainer, get_peft_config


def share_of_short_words(completions, **others):
    rewards = []
    for text in completions:
        words = text.split()
        rewards.append(sum(len(word) < 4 for word in words) / max(1, len(words)))
    return rewards


def main():
    script_args, training_args, model_args = parse(
        RLOOConfig,
        model_name_or_path="Qwen/Qwen2-0.5B",
        use_peft=True,
        lora_target_modules=["all-linear"],
        lora_dropout=0.0,
        eval_strategy="steps",
        eval_on_start=True,
    )
    train_dataset, eval_dataset = load(script_args)
    trainer = RLOOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=share_of_short_words,
        args=training_args,
        train_dataset=train_dataset.map(ask, remove_columns=train_dataset.column_names),
        eval_dataset=eval_dataset.map(ask, remove_columns=eval_dataset.column_names),
        processing_class=load_tokenizer(model_args, training_args),
        peft_config=get_peft_config(model_args),
    )
    train(trainer)


def ask(row):
    return {"prompt": " ".join(row["text"].split()[:4])}


if __name__ == "__main__":
    main()
