"""Chat fine-tuning of Qwen2-0.5B-Instruct on conversations, loss on the assistant's turns only.

    ./launch.sh qwen2_chat 1x3090
    ./launch.sh qwen2_chat 4gpu_shard_grad_op
    ./launch.sh qwen2_chat 1x3090 --dataset_name my/conversations    # a Hub ID, a folder, or a file

Rows: conversations (`messages` with role and content, or ShareGPT's `conversations`), `prompt` and `completion`, or
`instruction`, `input` and `output`. Preference data (`prompt`, `chosen`, `rejected`): the run trains on `chosen`.
Needs one 24 GB GPU. Forecast, not measured: 12.7 GB and 5,800 to 12,000 tokens/s on 1x3090.
"""

from harness import load, load_tokenizer, parse, tokenize, train

from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        # This project's arguments
        dataset_formats="messages",
        global_batch_size=8,  # rows per optimizer step on all GPUs together; sets gradient_accumulation_steps
        # trl.ScriptArguments: the dataset
        dataset_name="trl-lib/Capybara",
        # trl.ModelConfig: the model
        model_name_or_path="Qwen/Qwen2-0.5B-Instruct",
        lora_target_modules=["all-linear"],  # only with --use_peft
        # trl.SFTConfig: the training
        assistant_only_loss=True,  # with the model's own chat template
        num_train_epochs=1,
        max_length=2048,
        packing=True,
        packing_strategy="bfd_split",  # a long conversation continues in the next row
        per_device_train_batch_size=1,
        optim="adamw_torch_fused",
        learning_rate=1e-5,
        warmup_steps=0.03,  # below 1: a share of all steps
        lr_scheduler_type="cosine",
        logging_steps=10,
        eval_strategy="steps",
        eval_on_start=True,  # the loss before the training, to compare with
        eval_steps=0.1,  # below 1: a share of all steps
        save_steps=0.1,
    )
    train_dataset, eval_dataset = load(script_args)  # converts rows to `messages`, drops those without an answer
    tokenizer = load_tokenizer(model_args, training_args)
    train_dataset, eval_dataset = tokenize(train_dataset, eval_dataset, tokenizer, training_args)  # tokens and labels, packed
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
