"""Says of every token whether it is a number: a token classifier, whose model ignores the number of tokens."""

from harness import load, parse, train

from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)


def main():
    script_args, training_args, model_args = parse(
        TrainingArguments, model_name_or_path="Qwen/Qwen2-0.5B", eval_strategy="steps", per_device_train_batch_size=2
    )
    train_dataset, eval_dataset = load(script_args)
    name = model_args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name)

    def tag(row):
        ids = tokenizer(row["text"])["input_ids"]
        return {"input_ids": ids, "labels": [int(any(map(str.isdigit, tokenizer.decode(token)))) for token in ids]}

    model = AutoModelForTokenClassification.from_pretrained(name, num_labels=2, dtype="float32")
    model.dropout.p = 0.0  # so that runs can be compared
    columns = train_dataset.column_names
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset.map(tag, remove_columns=columns),
        eval_dataset=eval_dataset.map(tag, remove_columns=columns),
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
    )
    train(trainer)


if __name__ == "__main__":
    main()
