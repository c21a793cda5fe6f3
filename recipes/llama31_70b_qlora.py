"""QLoRA of Llama-3.1-70B on two 24 GB GPUs: 4-bit weights in host memory, LoRA adapters.

    ./launch.sh --prepare llama31_70b_qlora                     # once: downloads model and data, makes the 4-bit weights
    ./launch.sh llama31_70b_qlora 2x3090_qlora
    ./launch.sh llama31_70b_qlora 1x3090_qlora                  # on one GPU, in twice the time
    ./launch.sh llama31_70b_qlora 2x3090_qlora --dataset_name my.jsonl

Rows: conversations (`messages` with role and content, or ShareGPT's `conversations`), `prompt` and `completion`, or
`instruction`, `input` and `output`; preference data (`prompt`, `chosen`, `rejected`), of which `chosen` is trained on; or
texts: a column `text`, or the one of --dataset_text_field.
Needs two 24 GB GPUs, 47 GB of host memory and 186 GB of disk; or one with 44 GB of host memory. Forecast, not measured: 12.2 GB
per GPU, 70 to 160 s per step of 16,384 tokens, on one GPU 152 to 309 s. If memory runs out: --per_device_train_batch_size 2.
"""

from harness import load, load_tokenizer, parse, tokenize, train

from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        # This project's arguments
        dataset_formats=("messages", "text"),
        global_batch_size=16,  # rows per optimizer step: two micro-batches on each of two GPUs
        max_eval_samples=64,  # an evaluation takes one to three minutes (forecast)
        # trl.ScriptArguments: the dataset
        dataset_name="HuggingFaceH4/ultrachat_200k",
        dataset_train_split="train_sft",
        dataset_test_split="test_sft",
        dataset_streaming=True,  # reads only the rows that are trained on
        # trl.ModelConfig: the model
        model_name_or_path="meta-llama/Llama-3.1-70B",  # gated: accept its terms, then `.venv/bin/hf auth login`
        dtype="bfloat16",
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        use_bnb_nested_quant=True,  # quantizes the scales too: 1.1 GB per GPU instead of 4.3
        use_peft=True,
        lora_r=16,
        lora_alpha=16,
        lora_dropout=0.05,
        lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        # trl.SFTConfig: the training
        max_steps=100,  # two and a half hours (forecast)
        chat_template_path="recipes/headings.jinja",  # a base model has no chat template
        assistant_only_loss=True,  # the answers, and the end-of-text token after each
        max_length=1024,
        packing=True,
        packing_strategy="bfd_split",  # a long conversation continues in the next row
        per_device_train_batch_size=4,  # 8 needs 7.9 GB more and is 2 to 8 % faster (forecast): each moves the model over PCIe
        activation_checkpointing=True,  # 12 GB per GPU instead of 171 (forecast)
        learning_rate=1e-4,
        warmup_steps=0.03,
        lr_scheduler_type="cosine",
        logging_steps=1,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=50,
        save_steps=25,
    )
    train_dataset, eval_dataset = load(script_args)  # converts rows to `messages` or text, drops those without an answer
    if training_args.dataset_text_field in train_dataset.column_names:
        training_args.assistant_only_loss, training_args.chat_template_path = False, None  # texts have no turns
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
