"""Full fine-tune of GPT-2 XL (1.5B) in fp16 on WikiText-2, with the plain Trainer.

    NNODES=3 NODE_RANK=0 MASTER_ADDR=host0 ./launch.sh gpt2_xl_wikitext 3xt4_shard_grad_op    # on three machines with a 16 GB T4
    sky jobs launch cloud/gpt2_xl_wikitext.yaml --env BUCKET=a-name-of-your-own            # on three spot machines

Takes texts: a column `text`.
Needs 3 x 16 GB, where DDP would need 25 GB on each; a forecast, not yet measured: 10.4 or 13.1 GB a GPU. The network is what
limits it: the config gathers weights and reduces gradients once an optimizer step, whatever the accumulation.
"""

from dataclasses import dataclass

from harness import parse, train

from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import get_peft_config, pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head


@dataclass
class Arguments(TrainingArguments):
    max_length: int = 256


def main():
    data, args, model = parse(
        Arguments,
        takes="text",
        model_name_or_path="openai-community/gpt2-xl",
        dataset_name="Salesforce/wikitext",
        dataset_config="wikitext-2-raw-v1",
        dataset_test_split="validation",
        max_samples=2_000,  # texts of more than 50 characters; the rest are headings
        num_train_epochs=1,
        max_length=256,
        per_device_train_batch_size=2,
        global_batch_size=24,  # rows of an optimizer step over all GPUs; how many micro-batches follows
        activation_checkpointing=True,  # non-reentrant; keeps the dropout of the first pass
        optim="adamw_torch",
        learning_rate=2e-5,
        warmup_steps=10,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=0.25,  # below 1: a share of all steps, which are about 44
        save_steps=0.25,
        remove_unused_columns=False,  # the collator wants to know where each text ends
    )
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision)

    def packed(rows):
        """Rows of at most max_length tokens: no padding, so none enters the loss."""
        rows = rows.map(lambda row: {"input_ids": tokenizer(row["text"] + tokenizer.eos_token)["input_ids"]})
        return pack_dataset(rows.select_columns("input_ids"), args.max_length, "bfd_split")

    train_set, test_set = data.load(keep=lambda row: len(row["text"]) > 50)
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.eos_token_id, padding_free=True)
    kwargs = {"revision": model.model_revision, "dtype": model.dtype, "attn_implementation": model.attn_implementation}
    gpt2 = AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **kwargs)
    add_fused_lm_head(gpt2)  # the loss without the logits of 50,257 words for every token
    if model.use_peft:
        gpt2 = get_peft_model(gpt2, get_peft_config(model))
    trainer = Trainer(
        model=gpt2,
        args=args,
        data_collator=lambda rows: {**collate(rows), "fused_lm_head": True},
        train_dataset=packed(train_set),
        eval_dataset=packed(test_set),
        processing_class=tokenizer,
    )
    train(trainer)


if __name__ == "__main__":
    main()
