"""LoRA of Llama-3.1-8B on Python code instructions, loss on the code only.

    ./launch.sh llama31_8b_lora 4gpu_full_shard
    sbatch --nodes 2 --gpus-per-node 4 launch.sh llama31_8b_lora 2x4gpu_hybrid_shard
    ./launch.sh llama31_8b_lora 4gpu_full_shard --use_peft false --learning_rate 1e-5    # full fine-tune, 80 GB GPUs

Rows: `instruction`, `input` and `output`, or `prompt` and `completion` (or `chosen`) as texts.
Needs four 24 GB GPUs. Forecast, not measured: 7.4 GB per GPU, 3,800 to 14,000 tokens/s on four A100s.
"""

from harness import load, load_tokenizer, parse, tokenize, train

from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        # This project's arguments
        dataset_formats=("instruction", "prompt_completion"),
        global_batch_size=16,  # rows per optimizer step on all GPUs together
        # trl.ScriptArguments: the dataset
        dataset_name="iamtarun/python_code_instructions_18k_alpaca",
        # trl.ModelConfig: the model
        model_name_or_path="meta-llama/Llama-3.1-8B",  # gated: accept its terms, then `.venv/bin/hf auth login`
        dtype="bfloat16",
        use_peft=True,
        lora_r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        lora_target_modules=["all-linear"],
        # trl.SFTConfig: the training
        num_train_epochs=1,
        max_length=2048,
        packing=True,  # several examples per row; they do not attend to each other
        per_device_train_batch_size=1,
        activation_checkpointing=True,  # saves memory for a third more compute; with 80 GB per GPU pass false
        learning_rate=2e-4,
        warmup_steps=0.03,
        lr_scheduler_type="cosine",
        logging_steps=5,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=0.25,
        save_steps=0.25,
    )
    train_dataset, eval_dataset = load(script_args)  # drops rows without an answer, holds 256 rows out for evaluation
    if "instruction" in train_dataset.column_names:
        columns = train_dataset.column_names
        train_dataset = train_dataset.map(to_prompt_completion, remove_columns=columns)
        eval_dataset = eval_dataset.map(to_prompt_completion, remove_columns=columns)
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


def to_prompt_completion(row: dict) -> dict:
    """The loss is on the completion only."""
    task = f"{row['instruction']}\n\n{row['input']}".strip()
    # At the end of the prompt, the line break could become one token with the start of the code.
    return {"prompt": f"### Instruction\n{task}\n\n### Python", "completion": "\n" + row["output"]}


if __name__ == "__main__":
    main()
