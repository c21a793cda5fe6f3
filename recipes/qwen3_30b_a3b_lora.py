"""LoRA of Qwen3-30B-A3B, a mixture of 128 experts, on conversations: adapters on attention and on every expert.

    ./launch.sh qwen3_30b_a3b_lora 4gpu_full_shard
    ./launch.sh qwen3_30b_a3b_lora 4gpu_full_shard --dataset_name my.jsonl

Rows: conversations (`messages` with role and content, or ShareGPT's `conversations`), `prompt` and `completion`, or
`instruction`, `input` and `output`. Preference data (`prompt`, `chosen`, `rejected`): the run trains on `chosen`.
The routers stay frozen; their auxiliary loss is part of the loss (0.001, as in the model's config; --router_aux_loss_coef).
PyTorch computes all experts at once on H100, H200 and B200 only. On others, each is a product of its own, and the GPU waits for
the host in every layer; the forecast does not count this.
Needs four GPUs and 72 GB of host memory. Forecast, not measured: 22.1 GB per GPU, 1,500 to 9,800 tokens/s on four A100s. With
24 GB GPUs, 1.2 GB stay free.
"""

from harness import load, load_tokenizer, parse, tokenize, train

from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        # This project's arguments
        dataset_formats="messages",
        global_batch_size=16,  # packed sequences per optimizer step on all GPUs together
        # trl.ScriptArguments: the dataset
        dataset_name="trl-lib/Capybara",
        # trl.ModelConfig: the model
        model_name_or_path="Qwen/Qwen3-30B-A3B-Instruct-2507",
        dtype="bfloat16",
        use_peft=True,
        lora_r=8,
        lora_alpha=16,
        lora_dropout=0.0,  # PEFT has no dropout for experts
        lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        lora_target_parameters=["experts.gate_up_proj", "experts.down_proj"],  # the weights of all experts of a layer are one
        # trl.SFTConfig: the training
        assistant_only_loss=True,  # with the model's own chat template
        num_train_epochs=1,
        max_length=2048,
        packing=True,
        packing_strategy="bfd_split",  # the rest of a long conversation becomes another sequence
        per_device_train_batch_size=1,
        activation_checkpointing=True,  # saves memory for a third more compute
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
