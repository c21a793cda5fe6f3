"""A classifier that the recipe makes from a config of its own: it has no name, and its rows are no file."""

from harness import parse, train

from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Trainer, TrainingArguments


def main():
    _, training_args, _ = parse(TrainingArguments, eval_strategy="steps", per_device_train_batch_size=4)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen2ForSequenceClassification(Qwen2Config(vocab_size=64, intermediate_size=32, pad_token_id=0, **sizes))
    rows = Dataset.from_list([{"input_ids": [1 + number % 9, 2, 3], "labels": number % 2} for number in range(40)])
    trainer = Trainer(
        model=model, args=training_args, train_dataset=rows.select(range(32)), eval_dataset=rows.select(range(32, 40))
    )
    train(trainer)


if __name__ == "__main__":
    main()
