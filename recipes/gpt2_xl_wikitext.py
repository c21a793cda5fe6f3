"""Full fine-tune of GPT-2 XL (1.5B) in fp16 on WikiText-2, with the plain Trainer.

    NNODES=3 NODE_RANK=0 MASTER_ADDR=host0 ./launch.sh gpt2_xl_wikitext 3xt4_full_shard       # on three machines with a 16 GB T4
    NNODES=3 NODE_RANK=0 MASTER_ADDR=host0 ./launch.sh gpt2_xl_wikitext 3xt4_shard_grad_op    # faster, 0.9 GB free (forecast)

Rows: a column `text`.
Needs three 16 GB GPUs; DDP would need 31.8 GB on each. Forecast, not measured: 10.4 GB per GPU with 3xt4_full_shard, 13.1 GB with
3xt4_shard_grad_op, which all-gathers the weights once per optimizer step. The network limits the speed of both.
"""

from dataclasses import dataclass

from harness import load, parse, train

from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import get_peft_config, pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head


@dataclass
class PackedTrainingArguments(TrainingArguments):
    max_length: int = 256


def main():
    script_args, training_args, model_args = parse(
        PackedTrainingArguments,
        # This project's arguments
        dataset_formats="text",
        global_batch_size=24,  # rows per optimizer step on all GPUs together
        max_samples=2_000,
        # trl.ScriptArguments: the dataset
        dataset_name="Salesforce/wikitext",
        dataset_config="wikitext-2-raw-v1",
        dataset_test_split="validation",
        # trl.ModelConfig: the model
        model_name_or_path="openai-community/gpt2-xl",
        # transformers.TrainingArguments: the training
        num_train_epochs=1,
        max_length=256,
        per_device_train_batch_size=2,
        activation_checkpointing=True,
        optim="adamw_torch",
        learning_rate=2e-5,
        warmup_steps=10,
        logging_steps=5,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=0.25,  # below 1: a share of all steps, about 44
        save_steps=0.25,
        remove_unused_columns=False,  # the collator needs to know where each text ends
    )
    train_texts, eval_texts = load(script_args, keep=lambda row: len(row["text"]) > 50)  # shorter texts are headings

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        dtype=model_args.dtype,
        attn_implementation=model_args.attn_implementation,
    )
    add_fused_lm_head(model)  # computes the loss without the logits of 50,257 words for every token
    if model_args.use_peft:
        model = get_peft_model(model, get_peft_config(model_args))
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.eos_token_id, padding_free=True)
    trainer = Trainer(
        model=model,
        args=training_args,
        data_collator=lambda rows: {**collate(rows), "fused_lm_head": True},
        train_dataset=pack(train_texts, tokenizer, training_args.max_length),
        eval_dataset=pack(eval_texts, tokenizer, training_args.max_length),
        processing_class=tokenizer,
    )
    train(trainer)


def pack(texts: Dataset, tokenizer, max_length: int) -> Dataset:
    """Rows of at most `max_length` tokens without padding."""
    tokens = texts.map(lambda row: {"input_ids": tokenizer(row["text"] + tokenizer.eos_token)["input_ids"]})
    return pack_dataset(tokens.select_columns("input_ids"), max_length, "bfd_split")


if __name__ == "__main__":
    main()
