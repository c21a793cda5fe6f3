"""Chat fine-tuning of SmolLM2-135M-Instruct on your own conversations, on a laptop's CPU or any GPU.

    ./launch.sh smollm2_chat cpu --dataset_name my.jsonl
    ./launch.sh smollm2_chat 1x3090 --dataset_name my.jsonl

Rows: those of qwen2_chat. Needs 4 GB of memory. From 100 rows the model learns a form (JSON, a label, a tone), but hardly any
facts. On a CPU a run takes as long as it has tokens: lower max_samples, num_train_epochs or max_length if it is too slow.
"""

from harness import load, load_tokenizer, parse, tokenize, train

from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        # This project's arguments
        dataset_formats="messages",
        global_batch_size=8,  # rows per optimizer step on all GPUs together
        # trl.ScriptArguments: the dataset
        dataset_name="trl-lib/Capybara",
        # trl.ModelConfig: the model
        model_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct",
        lora_target_modules=["all-linear"],  # only with --use_peft
        # trl.SFTConfig: the training
        assistant_only_loss=True,  # with the model's own chat template
        num_train_epochs=3,  # 90 rows are 12 steps per epoch
        max_length=512,  # a CPU trains on some 50 tokens per second and core; what is longer is cut off
        per_device_train_batch_size=8,  # all rows of a step at once, padded to the longest of them
        optim="adamw_torch_fused",
        learning_rate=1e-4,  # ten times that of a model of 0.5B: few rows, few steps
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        logging_steps=1,
        eval_strategy="steps",
        eval_on_start=True,  # loss and samples before the training, to compare with
        eval_steps=0.25,
        save_steps=0.5,
    )
    train_dataset, eval_dataset = load(script_args)  # converts rows to `messages`, drops those without an answer
    tokenizer = load_tokenizer(model_args, training_args)
    train_dataset, eval_dataset = tokenize(train_dataset, eval_dataset, tokenizer, training_args)  # tokens and labels
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    train(trainer)


if __name__ == "__main__":
    main()
