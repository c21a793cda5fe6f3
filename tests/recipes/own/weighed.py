"""A causal language model whose early tokens count more: a loss of its own, divided by the tokens of the step."""

from harness import load, parse, train

from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments


def weighed_loss(outputs, labels, num_items_in_batch):
    each = cross_entropy(outputs.logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none")
    each[:, :4] *= 2
    return each.sum() / num_items_in_batch


def main():
    script_args, training_args, model_args = parse(
        TrainingArguments, model_name_or_path="Qwen/Qwen2-0.5B", eval_strategy="steps", per_device_train_batch_size=2
    )
    train_dataset, eval_dataset = load(script_args)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    columns = train_dataset.column_names
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype="float32"),
        args=training_args,
        train_dataset=train_dataset.map(lambda row: tokenizer(row["text"]), remove_columns=columns),
        eval_dataset=eval_dataset.map(lambda row: tokenizer(row["text"]), remove_columns=columns),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        compute_loss_func=weighed_loss,
    )
    trainer.loss_is_mean_over = "tokens"
    train(trainer)


if __name__ == "__main__":
    main()
