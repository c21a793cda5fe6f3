"""QLoRA of Qwen3-8B on conversations with reasoning, on one 24 GB GPU.

    ./launch.sh qwen3_8b_qlora 1x3090
    ./launch.sh qwen3_8b_qlora 2x3090_qlora                          # 4-bit weights in host memory: for longer rows
    ./launch.sh qwen3_8b_qlora 1x3090 --dataset_name my.jsonl

Rows: conversations (`messages` with role and content, or ShareGPT's `conversations`), `prompt` and `completion`, or
`instruction`, `input` and `output`. Reasoning is in an answer as <think>…</think>, or under `reasoning_content`,
`thinking` or `reasoning`. If no answer has reasoning: --chat_template_kwargs '{"enable_thinking": false}'.
Preference data (`prompt`, `chosen`, `rejected`): the run trains on `chosen`.
Needs one 24 GB GPU. Forecast for an RTX 3090: 8.1 GB and 460 to 920 tokens/s; 16.8 GB with --max_length 16384. Measured on
one H100 (PCIe, torch 2.11, 2026-11-26): 8.1 GB and 3,100 to 3,500 tokens/s.
"""

from harness import load, load_tokenizer, parse, tokenize, train

from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        # This project's arguments
        dataset_formats="messages",
        global_batch_size=8,  # packed sequences per optimizer step on all GPUs together
        max_eval_samples=64,
        # Qwen3's template drops the reasoning of all answers but the last, as in a chat. One row per answer keeps each.
        split_conversations=True,
        # trl.ScriptArguments: the dataset
        dataset_name="HuggingFaceH4/Multilingual-Thinking",  # 1,000 conversations, reasoning in five languages
        # trl.ModelConfig: the model
        model_name_or_path="Qwen/Qwen3-8B",
        dtype="bfloat16",  # of the arithmetic; adapters are float32
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        use_bnb_nested_quant=True,  # quantizes the scales too: 0.4 GB less
        use_peft=True,
        lora_r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        lora_target_modules=["all-linear"],
        # trl.SFTConfig: the training
        assistant_only_loss=True,  # the reasoning and the answer, with the model's own chat template
        num_train_epochs=2,
        max_length=2048,
        packing=True,
        packing_strategy="bfd_split",  # the rest of a long conversation becomes another sequence
        per_device_train_batch_size=1,
        activation_checkpointing=True,
        learning_rate=2e-4,
        warmup_steps=0.03,
        lr_scheduler_type="cosine",
        logging_steps=5,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=0.25,
        save_steps=0.25,
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
