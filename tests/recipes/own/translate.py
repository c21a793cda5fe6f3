"""An encoder-decoder that the recipe makes itself, trained with Seq2SeqTrainer on columns of its own."""

from harness import load, parse, train

from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)


def main():
    script_args, training_args, model_args = parse(
        Seq2SeqTrainingArguments,
        model_name_or_path="Qwen/Qwen2-0.5B",  # for its tokenizer
        eval_strategy="steps",
        predict_with_generate=True,
        per_device_train_batch_size=2,
    )
    train_dataset, eval_dataset = load(script_args)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes))

    def encode(row):
        return tokenizer(row["text"], text_target=row["text"][::-1])

    columns = train_dataset.column_names
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset.map(encode, remove_columns=columns),
        eval_dataset=eval_dataset.map(encode, remove_columns=columns),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
    )
    train(trainer)


if __name__ == "__main__":
    main()
