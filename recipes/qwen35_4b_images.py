"""LoRA of Qwen3.5-4B on conversations about images.

    ./launch.sh qwen35_4b_images 1x3090
    ./launch.sh qwen35_4b_images 4gpu_ddp
    ./launch.sh qwen35_4b_images 4gpu_full_shard                    # for longer rows
    ./launch.sh qwen35_4b_images 1x3090 --dataset_name my.jsonl     # docs/your-data.md has the rows

Rows: `messages` with a part of the type image where an image is, and `images`, paths relative to the file. A row can have
several images or none. If answers have reasoning: --chat_template_kwargs '{"enable_thinking": true}'.
The default rows ask for the Iconclass codes of works of art: a system that museums describe pictures with.
Only the text part is trained; the part that reads images stays as it is.
Needs one 24 GB GPU with bf16.
"""

from harness import image_collator, load, load_processor, parse, tokenize, train

from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        # This project's arguments
        dataset_formats="images",
        global_batch_size=16,  # rows per optimizer step on all GPUs together
        max_eval_samples=64,
        # Of an image; a token has 32 x 32 pixels. A photo of 12 megapixels would have 12,000 tokens, and is shrunk to 970.
        max_pixels=1_000_000,
        # The template renders the last answer of a conversation differently. With one row per answer, every answer is the last.
        split_conversations=True,
        chat_template_kwargs={"enable_thinking": False},  # the answers have no reasoning
        # trl.ScriptArguments: the dataset
        dataset_name="davanstrien/iconclass-vlm",  # made of biglam/brill_iconclass
        dataset_config="sft",
        # trl.ModelConfig: the model
        model_name_or_path="Qwen/Qwen3.5-4B",
        dtype="bfloat16",
        use_peft=True,
        lora_r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        lora_target_modules=[  # of the text part
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
        assistant_only_loss=True,  # with the model's own chat template
        num_train_epochs=1,
        max_length=4096,  # longer rows are left out: a part of an image has no meaning
        packing=False,  # rows with images cannot be packed
        per_device_train_batch_size=2,  # padded to the longer row
        dataloader_num_workers=2,  # they decode and shrink the next images while the GPU computes
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
    train_dataset, eval_dataset = load(script_args)  # finds the images of all rows, skips rows whose images cannot be read
    processor = load_processor(script_args, model_args, training_args)
    # Tokens and labels. Images stay files: they are decoded when a batch is made.
    train_dataset, eval_dataset = tokenize(train_dataset, eval_dataset, processor, training_args)
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=image_collator(processor),
        processing_class=processor,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    train(trainer)


if __name__ == "__main__":
    main()
