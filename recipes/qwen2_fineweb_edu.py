"""Continued pretraining of Qwen2-0.5B on FineWeb-Edu, streamed.

    ./launch.sh qwen2_fineweb_edu 1x3090
    ./launch.sh qwen2_fineweb_edu 1x3090_offload
    ./launch.sh qwen2_fineweb_edu 4gpu_full_shard --max_tokens 1_000_000_000
    ./launch.sh qwen2_fineweb_edu 1x3090 --use_peft --learning_rate 2e-4
    ./launch.sh qwen2_fineweb_edu 1x3090 --dataset_name my.jsonl

Rows: a column `text`, or the one of --dataset_text_field.
Needs one 24 GB GPU. Forecast for an RTX 3090: 12.7 GB and 6,000 to 12,000 tokens/s. Measured on one H100 (PCIe, torch
2.11, 2026-11-26): 12.8 GB and 15,000 to 19,200 tokens/s; with --per_device_train_batch_size 16 34.0 GB and 74,600.
"""

from harness import load, load_tokenizer, parse, tokenize, train

from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        # This project's arguments
        dataset_formats="text",
        global_batch_size=16,  # rows per optimizer step on all GPUs together
        # trl.ScriptArguments: the dataset
        dataset_name="HuggingFaceFW/fineweb-edu",
        dataset_config="sample-10BT",  # also sample-100BT, sample-350BT, or one crawl: CC-MAIN-2024-10
        dataset_streaming=True,  # the sample is 28 GB; a stream starts at once and needs no disk
        # trl.ModelConfig: the model
        model_name_or_path="Qwen/Qwen2-0.5B",
        lora_target_modules=["all-linear"],  # only with --use_peft
        # trl.SFTConfig: the training
        dataset_text_field="text",
        max_steps=1_000,  # a stream has no length; or pass --max_tokens
        max_length=1024,
        packing=True,  # no padding, which would be about half of every batch
        packing_strategy="bfd_split",  # a long document continues in the next row; nothing is truncated
        per_device_train_batch_size=2,
        optim="adamw_torch_fused",
        learning_rate=2e-5,  # with --use_peft ten times as much
        weight_decay=0.01,
        warmup_steps=0.05,
        lr_scheduler_type="cosine",
        logging_steps=10,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=200,
        save_steps=200,
    )
    train_dataset, eval_dataset = load(script_args)  # drops rows without text, holds 256 rows out for evaluation
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
