"""Distillation of Qwen3-8B (4-bit) into Qwen3-4B with LoRA, on answers that Qwen3-4B writes.

    ./launch.sh qwen3_distill 1x3090
    ./launch.sh qwen3_distill 4gpu_ddp
    ./launch.sh qwen3_distill 1x3090 --dataset_name my.jsonl
    ./launch.sh qwen3_distill 1x3090 --model_name_or_path my-org/my-4b --teacher_model_name_or_path my-org/my-8b

Rows: conversations with an answer, of which only the turns before it are used, without tools. In each step the student (Qwen3-4B)
answers 16 of these prompts, and learns to give each token of its answers the probability that the teacher (Qwen3-8B) gives it.
The loss, also in evaluations, is the distance between the two in nats per token: 0 if they are equal. Both need the same
vocabulary. Under FSDP (4gpu_full_shard), each GPU would receive all weights of the student again for every token it writes.
"""

from harness import load, load_tokenizer, parse, train

from trl import DistillationConfig, DistillationTrainer, get_peft_config, get_quantization_config

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
LONGEST_PROMPT = 4000  # characters; no argument of the trainer limits the memory for prompts


def prompt_of(row):
    if row.get("prompt"):
        return row["prompt"]
    roles = [turn["role"] for turn in row["messages"]]
    return row["messages"][: roles.index("assistant")]


def as_prompt(row):
    return {"prompt": prompt_of(row)}


def is_usable(row):
    has_question = any(turn["role"] == "user" for turn in row["prompt"])
    return has_question and sum(len(turn["content"]) for turn in row["prompt"]) <= LONGEST_PROMPT


def main():
    script_args, training_args, model_args = parse(
        DistillationConfig,
        # This project's arguments
        dataset_formats="messages",
        global_batch_size=16,  # answers per optimizer step on all GPUs together
        max_eval_samples=64,
        # trl.ScriptArguments: the dataset
        dataset_name="trl-lib/Capybara",
        # trl.ModelConfig: the student
        model_name_or_path="Qwen/Qwen3-4B",
        dtype="bfloat16",
        use_peft=True,
        lora_r=16,
        lora_alpha=32,
        lora_dropout=0.0,
        lora_target_modules=["all-linear"],
        # trl.DistillationConfig: the training
        teacher_model_name_or_path="Qwen/Qwen3-8B",  # each GPU has all of it, also under FSDP
        # The dtype is that of what is not quantized. A flag replaces all of it: without quantization_config, 8B in 16 or 32 bits.
        teacher_model_init_kwargs={"dtype": "bfloat16", "quantization_config": FOUR_BITS},
        chat_template_kwargs={"enable_thinking": False},  # thoughts would not end within max_completion_length
        beta=1.0,  # reverse KL: the student gives up what the teacher would not write; 0 is forward KL
        max_completion_length=256,  # tokens of an answer; what follows is not compared
        max_steps=200,
        per_device_train_batch_size=4,
        activation_checkpointing=True,
        learning_rate=1e-4,
        warmup_steps=0.05,
        lr_scheduler_type="cosine",
        logging_steps=1,
        eval_strategy="steps",
        eval_on_start=True,  # the distance before the training, to compare with
        eval_steps=0.25,
        save_steps=0.25,
    )
    train_dataset, eval_dataset = load(script_args)
    trainer = DistillationTrainer(
        model=model_args.model_name_or_path,
        teacher_model=training_args.teacher_model_name_or_path,
        args=training_args,
        train_dataset=train_dataset.map(as_prompt, remove_columns=train_dataset.column_names).filter(is_usable),
        eval_dataset=eval_dataset.map(as_prompt, remove_columns=eval_dataset.column_names).filter(is_usable),
        processing_class=load_tokenizer(model_args, training_args),
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    train(trainer)


if __name__ == "__main__":
    main()
