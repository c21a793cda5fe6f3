"""The loss of a step is the mean of its rows, whatever computes it, with gradient accumulation and several processes."""

import functools

from harness.run.loss_scale import set_loss_scale, uses_count

import pytest
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3_5ForConditionalGeneration,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from trl import DPOTrainer, SFTTrainer

ROWS = [{"input_ids": [number, 2 * number, 3], "attention_mask": [1, 1, 1], "labels": number % 2} for number in range(8)]


def mean_loss(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits, labels)


def weighed_loss(outputs, labels, weight, num_items_in_batch=None):
    return torch.nn.CrossEntropyLoss(weight=weight)(outputs.logits, labels)


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class SumOverTokens(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels, reduction="sum") / (num_items_in_batch or 1)
        return (loss, None) if return_outputs else loss


class Penalty(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        return super().compute_loss(model, inputs, **kwargs)


@pytest.mark.parametrize(
    ("trainer_class", "compute_loss_func"),
    [
        (Trainer, None),
        (Trainer, mean_loss),
        (Trainer, functools.partial(weighed_loss, weight=torch.ones(2))),
        (OwnLoss, None),
        (SumOverTokens, None),
        (Penalty, None),
    ],
    ids=["of the model", "function", "partial", "method", "sum", "calls super"],
)
def test_gradient_accumulation_does_not_change_the_loss(tmp_path, trainer_class, compute_loss_func):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = BertConfig(vocab_size=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes)
    args = {"max_steps": 1, "learning_rate": 0, "logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    args |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "save_strategy": "no"}
    rows, model = Dataset.from_list(ROWS), BertForSequenceClassification(config)
    options = {"args": TrainingArguments(tmp_path, **args), "train_dataset": rows, "compute_loss_func": compute_loss_func}
    trainer = trainer_class(model=model, **options)
    set_loss_scale(trainer)
    trainer.train()
    batch = {name: torch.tensor(rows[name]) for name in rows.column_names}
    logged = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert logged == pytest.approx(model(**batch).loss.item(), rel=1e-4)


def test_which_losses_use_the_number_of_tokens():
    assert all(uses_count(model.forward) for model in (LlamaForCausalLM, GPT2LMHeadModel, Qwen3_5ForConditionalGeneration))
    unaware = (BertForSequenceClassification, Qwen2ForSequenceClassification, T5ForConditionalGeneration)
    assert [uses_count(model.forward) for model in unaware] == [False] * 3
    assert uses_count(SFTTrainer.compute_loss) and DPOTrainer.loss_is_scaled_for_ga is False
    assert uses_count(lambda *arguments: 0) is None and uses_count(torch.nn.Linear(2, 2).forward) is None
    assert uses_count(len) is None
