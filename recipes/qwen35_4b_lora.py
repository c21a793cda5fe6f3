"""LoRA of Qwen3.5-4B, which has linear and full attention, on conversations with reasoning, on one GPU.

    ./launch.sh qwen35_4b_lora 1x3090
    ./launch.sh qwen35_4b_lora 4gpu_full_shard                     # four GPUs: for longer rows
    ./launch.sh qwen35_4b_lora 1x3090 --dataset_name my.jsonl

Rows: conversations (`messages` with role and content, or ShareGPT's `conversations`), `prompt` and `completion`, or
`instruction`, `input` and `output`. Reasoning is in an answer as <think>…</think>, or under `reasoning_content`,
`thinking` or `reasoning`. If no answer has reasoning: --chat_template_kwargs '{"enable_thinking": false}'.
Preference data (`prompt`, `chosen`, `rejected`): the run trains on `chosen`.
Only the text part is trained; the part that reads images stays as it is.
Needs one 16 GB GPU with bf16. Forecast, not measured: 11.1 GB and 430 to 960 tokens/s on an RTX 3090. Linear attention is
faster if flash-linear-attention and causal-conv1d are installed.
"""

from harness import load, load_tokenizer, parse, tokenize, train

from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        # This project's arguments
        dataset_formats="messages",
        global_batch_size=16,  # rows per optimizer step on all GPUs together
        max_eval_samples=64,
        # The template drops the reasoning of all answers but the last. With one row per answer, every answer is the last.
        split_conversations=True,
        # trl.ScriptArguments: the dataset
        dataset_name="HuggingFaceH4/Multilingual-Thinking",  # 1,000 conversations, reasoning in five languages
        # trl.ModelConfig: the model
        model_name_or_path="Qwen/Qwen3.5-4B",
        dtype="bfloat16",
        use_peft=True,
        lora_r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        lora_target_modules=[
            "in_proj_qkv",  # these three are in the 24 layers with linear attention
            "in_proj_z",
            "out_proj",
            "q_proj",  # these four in the 8 layers with full attention
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",  # these three in all layers
            "up_proj",
            "down_proj",
        ],
        # trl.SFTConfig: the training
        assistant_only_loss=True,  # the reasoning and the answer, with the model's own chat template
        num_train_epochs=2,
        max_length=2048,
        # Linear attention carries a state from one token to the next, also into the next document of a packed row.
        packing=False,
        per_device_train_batch_size=1,
        activation_checkpointing=True,
        learning_rate=1e-4,
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
