"""Continued pretraining of Qwen2-0.5B on FineWeb-Edu, streamed.

    ./launch.sh qwen2_fineweb_edu 1x3090
    ./launch.sh qwen2_fineweb_edu 1x3090_offload
    ./launch.sh qwen2_fineweb_edu 4gpu_full_shard --max_tokens 1_000_000_000
    ./launch.sh qwen2_fineweb_edu 1x3090 --use_peft --learning_rate 2e-4
    ./launch.sh qwen2_fineweb_edu 1x3090 --dataset_name my.jsonl

Takes texts: a column `text`, or --dataset_text_field.
Needs one 24 GB GPU; a forecast, not yet measured: 13.1 GB and 10,000 tokens/s on 1x3090.
"""

from harness import parse, train

from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    data, args, model = parse(
        SFTConfig,
        takes="text",
        model_name_or_path="Qwen/Qwen2-0.5B",
        dataset_name="HuggingFaceFW/fineweb-edu",
        dataset_config="sample-10BT",  # also sample-100BT, sample-350BT, or one crawl: CC-MAIN-2024-10
        dataset_streaming=True,  # the sample is 28 GB; a stream starts at once and fills no disk
        dataset_text_field="text",
        max_steps=1_000,  # a stream has no length: say how far to go, here or with --max_tokens
        max_length=1024,
        packing=True,  # every token of a batch trains; padding would waste about half
        packing_strategy="bfd_split",  # long documents go on in the next sequence, nothing is cut off
        per_device_train_batch_size=2,
        global_batch_size=16,  # 16,384 tokens a step, on one GPU or on four
        activation_checkpointing=False,  # the configs that need the memory turn it on
        optim="adamw_torch_fused",
        learning_rate=2e-5,  # with --use_peft ten times as much
        weight_decay=0.01,
        warmup_steps=0.05,  # below 1: a share of all steps
        lr_scheduler_type="cosine",
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=200,
        save_steps=200,
        lora_target_modules=["all-linear"],
    )
    train_set, test_set = data.load()
    trainer = SFTTrainer(
        model=model.model_name_or_path,
        args=args,
        train_dataset=train_set,
        eval_dataset=test_set,
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
    )
    train(trainer)


if __name__ == "__main__":
    main()
