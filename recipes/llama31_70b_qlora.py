"""QLoRA of Llama-3.1-70B: 4-bit weights, LoRA adapters, on two 24 GB GPUs.

    ./launch.sh --prepare llama31_70b_qlora                     # once: model, data and 4-bit weights into the caches
    ./launch.sh llama31_70b_qlora 2x3090_qlora
    ./launch.sh llama31_70b_qlora 2x3090_qlora --dataset_name my.jsonl

Takes conversations (`messages` of role and content, or ShareGPT's `conversations`), `prompt` and `completion`, or
`instruction`, `input` and `output`; or texts: a column `text`, or --dataset_text_field.
Needs two 24 GB GPUs, 110 GB of host RAM and 180 GB of disk; a forecast, not yet measured: 20.6 GB a GPU,
80 to 175 s a step of 16,384 tokens. If memory runs out: --per_device_train_batch_size 4.
"""

from harness import parse, train

from trl import SFTConfig, SFTTrainer, get_peft_config, get_quantization_config


def main():
    data, args, model = parse(
        SFTConfig,
        takes=("messages", "text"),
        model_name_or_path="meta-llama/Llama-3.1-70B",  # gated: accept its terms, then `hf auth login`
        dataset_name="HuggingFaceH4/ultrachat_200k",  # conversations; a set with a column `text` works as well
        dataset_train_split="train_sft",
        dataset_test_split="test_sft",
        dataset_streaming=True,  # only the rows that are trained on are read
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        use_bnb_nested_quant=True,  # quantizes the scales too: 1.1 GB a GPU for 4.3
        dtype="bfloat16",
        use_peft=True,
        lora_r=16,
        lora_alpha=16,
        lora_dropout=0.05,
        lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        max_steps=100,  # two to five hours (forecast)
        chat_template_path="recipes/headings.jinja",  # a base model has none: a heading for every turn
        assistant_only_loss=True,  # the answers, and the end-of-text token that ends each
        max_length=1024,
        packing=True,
        packing_strategy="bfd_split",  # long conversations go on in the next row
        per_device_train_batch_size=8,  # a micro-batch moves 77 GB over PCIe whatever its size: few large ones
        global_batch_size=16,  # one micro-batch on each of two GPUs
        learning_rate=1e-4,
        warmup_steps=0.03,
        lr_scheduler_type="cosine",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=50,
        max_eval_samples=64,  # a minute or two an evaluation (forecast)
        save_steps=25,
    )
    train_set, test_set = data.load()
    if args.dataset_text_field in test_set.column_names:
        args.assistant_only_loss, args.chat_template_path = False, None  # texts have no turns
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
