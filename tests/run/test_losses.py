"""The loss of a step and of an evaluation is the mean over its tokens or rows, whatever computes it, in batches of any size."""

import contextlib
import functools
import math
from types import SimpleNamespace

from harness.data.streams import fill_last_step
from harness.messages import UserError
from harness.run.losses import check_loss_of_pairs, prepare_loss

import pytest
import torch
import transformers
from datasets import Dataset
from runs import add_parts
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.functional import cross_entropy, kl_div
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, KTOConfig

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
# Answers of 1 to 9 tokens, so that a mean of means is far from the mean.
TEXTS = [
    {"input_ids": [5 + number % 3, 3, *range(4, 4 + length)], "labels": [-100, -100, *range(4, 4 + length)]}
    for number, length in enumerate([9, 1, 1, 2, 9, 1, 3, 1])
]
LABELED = [{"input_ids": [number, 2 * number, 3], "labels": int(number > 2)} for number in range(8)]


def pad(rows):
    """Rows as a batch, padded on the right."""
    if isinstance(rows[0]["labels"], int):
        return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows]) for name, value in fill.items()
    }


def language_model():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **SIZES))


def classifier():
    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=32, **dropout, **SIZES))


def encoder_decoder():
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=32, decoder_start_token_id=0, **sizes))


def of_answers(logits, labels):
    """Logits and labels of the tokens with a label, shifted."""
    is_answer = labels[:, 1:] != -100
    return logits[:, :-1][is_answer], labels[:, 1:][is_answer]


def class_loss(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs.logits, labels)


class Own(Trainer):
    """With a loss of the outputs, whatever its name."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        mixed = self.mix(outputs.logits, labels, inputs, num_items_in_batch)
        return (mixed, outputs) if return_outputs else mixed

    def mix(self, logits, labels, inputs, count):
        return cross_entropy(logits, labels)


class Distilled(Own):
    @functools.cached_property
    def teacher(self):
        torch.manual_seed(1)
        return language_model().eval()

    def mix(self, logits, labels, inputs, count):
        with torch.no_grad():
            of_teacher, _ = of_answers(self.teacher(**inputs).logits, labels)
        logits, labels = of_answers(logits, labels)
        distance = kl_div(logits.log_softmax(-1), of_teacher.softmax(-1), reduction="batchmean")
        return 0.5 * cross_entropy(logits, labels) + 0.5 * distance


class MeanOfRows(Own):
    """The mean over rows of the mean over the tokens of each."""

    def mix(self, logits, labels, inputs, count):
        each = cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return (each.sum(1) / (labels[:, 1:] != -100).sum(1)).mean()


class Summed(Own):
    def mix(self, logits, labels, inputs, count):
        logits, labels = of_answers(logits, labels)
        return 3 * cross_entropy(logits, labels, reduction="sum") / count


class Super(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        return super().compute_loss(model, inputs, **kwargs)


def of_model(trainer, batch, rows):
    return trainer.model(**batch).loss


def of_trainer(trainer, batch, rows):
    labels = batch.pop("labels")
    return trainer.mix(trainer.model(**batch).logits, labels, batch, (labels[:, 1:] != -100).sum() if labels.dim() > 1 else None)


def of_rows(trainer, batch, rows):
    return sum(cross_entropy(*of_answers(trainer.model(**pad([row])).logits, pad([row])["labels"])) for row in rows) / len(rows)


# A trainer, its compute_loss_func, the model, the loss of all rows in one batch by other means, and `loss_is_mean_over`.
KINDS = {
    "causal model": (Trainer, None, language_model, of_model, None),
    "encoder-decoder": (Trainer, None, encoder_decoder, of_model, None),
    "classifier": (Trainer, None, classifier, of_model, None),
    "function": (Trainer, class_loss, classifier, of_model, None),
    "method": (Own, None, classifier, of_model, None),
    "calls super": (Super, None, language_model, of_model, "tokens"),
    "sum": (Summed, None, language_model, lambda *args: 3 * of_model(*args), "tokens"),
    "teacher": (Distilled, None, language_model, of_trainer, "tokens"),
    "mean of rows": (MeanOfRows, None, language_model, of_rows, "rows"),
}


def tokenizer():
    words = Tokenizer(WordLevel({"<e>": 0} | {f"w{index}": index for index in range(1, 32)}, unk_token="<e>"))
    words.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<e>", eos_token="<e>")


def make_trainer(kind, folder, **arguments):
    trainer_class, function, make_model, _, unit = KINDS[kind]
    torch.manual_seed(0)
    args = {"max_steps": 1, "learning_rate": 0, "logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    args |= {"save_strategy": "no", "max_grad_norm": 1e9, "logging_nan_inf_filter": False} | arguments
    rows = Dataset.from_list(LABELED if make_model is classifier else TEXTS)
    options = {"train_dataset": rows, "eval_dataset": rows, "data_collator": pad, "compute_loss_func": function}
    trainer = trainer_class(make_model(), TrainingArguments(folder, **args), **options)
    if unit:
        trainer.loss_is_mean_over = unit
    return trainer


def prepare(trainer):
    return add_parts(trainer, prepare_loss(trainer)).loss


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_neither_loss_nor_gradients_nor_evaluation(tmp_path, kind):
    for rows, accumulation, eval_rows in ((8, 1, 1), (2, 3, 3), (1, 8, 8)):
        sizes = {"per_device_eval_batch_size": eval_rows, "gradient_accumulation_steps": accumulation}
        trainer = make_trainer(kind, tmp_path, per_device_train_batch_size=rows, **sizes)
        trainer.train_dataset = trainer.train_dataset.select(range(rows * accumulation))
        loss = prepare(trainer)
        trainer.train()  # with a learning rate of 0
        logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
        model, data = trainer.model, trainer.train_dataset
        model.train()
        model.zero_grad()
        expected = KINDS[kind][3](trainer, pad(list(data)), data)
        expected.backward()
        norm = torch.stack([weight.grad.norm() for weight in model.parameters() if weight.grad is not None]).norm()
        assert logged["loss"] == pytest.approx(expected.item(), rel=1e-4)
        assert logged["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert loss.unit == ("row" if KINDS[kind][2] is classifier or kind == "mean of rows" else "token")
        model.eval()
        data = trainer.eval_dataset
        expected = KINDS[kind][3](trainer, pad(list(data)), data)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("unit", [None, "batches"])
def test_loss_of_tokens_that_does_not_say_what_it_is_a_mean_over(tmp_path, unit):
    """It could be a mean over its tokens or its rows, of which other steps follow."""
    trainer = make_trainer("mean of rows", tmp_path)
    trainer.loss_is_mean_over = unit
    prepare(trainer)
    with pytest.raises(UserError, match="loss_is_mean_over"):
        trainer.train()


def test_loss_that_scales_itself_stays(tmp_path, monkeypatch):
    """The class says so with transformers' own attribute."""
    monkeypatch.setattr(Own, "loss_is_scaled_for_ga", False)
    trainer = make_trainer("teacher", tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert prepare(trainer).is_right and trainer.loss_is_scaled_for_ga is False


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (DPOConfig, {"loss_type": ["sft"], "per_device_train_batch_size": 1}, "--loss_type sft"),
        (DPOConfig, {"loss_type": ["sft"], "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}, None),
        (DPOConfig, {"loss_type": ["sigmoid", "hinge"]}, None),
        (DPOConfig, {"loss_type": ["aot"]}, "compares the rows"),
        (KTOConfig, {}, "compares the rows"),
    ],
)
def test_losses_that_depend_on_the_micro_batch(tmp_path, capsys, config, settings, words):
    trainer = SimpleNamespace(args=config(tmp_path, use_cpu=True, bf16=False, report_to="none", **settings))
    is_refused = "sft" in settings.get("loss_type", []) and words
    with pytest.raises(UserError, match=words) if is_refused else contextlib.nullcontext():
        check_loss_of_pairs(trainer)
    printed = capsys.readouterr().out
    assert printed == "" if is_refused or not words else words in printed


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_metrics_of_dpo_are_means_over_pairs_and_tokens(tmp_path, rows):
    """Against the same values of each pair alone, added up here."""
    torch.manual_seed(0)
    pairs = [(row["input_ids"], row["input_ids"][::-1][: 1 + number]) for number, row in enumerate(TEXTS)]

    def words(tokens):
        return "".join(f" w{token}" for token in tokens)

    rows_of_text = [{"prompt": "w5 w6", "chosen": words(chosen), "rejected": words(rejected)} for chosen, rejected in pairs]
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "max_length": None}
    args = DPOConfig(tmp_path, per_device_eval_batch_size=rows, **settings)
    reference, model = language_model(), language_model()
    data = Dataset.from_list(rows_of_text)
    trainer = DPOTrainer(model, reference, args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer())
    add_parts(trainer, prepare_loss(trainer))
    found = trainer.evaluate()

    chosen_tokens = correct = 0
    losses, margins = [], []
    for answers in pairs:
        scores = []
        for answer in answers:
            ids = torch.tensor([[5, 6, *answer, 0]])
            with torch.no_grad():
                of_model, of_reference = (each.eval()(ids).logits[0, 1:-1].log_softmax(-1) for each in (model, reference))
            wanted = ids[0, 2:, None]
            scores.append((of_model.gather(1, wanted) - of_reference.gather(1, wanted)).sum())
            if answer is answers[0]:
                correct += (of_model.argmax(-1) == wanted[:, 0]).sum().item()
                chosen_tokens += len(wanted)
        margins.append(0.1 * (scores[0] - scores[1]))
        losses.append(-torch.nn.functional.logsigmoid(margins[-1]))
    assert found["eval_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert found["eval_rewards/margins"] == pytest.approx(torch.stack(margins).mean().item(), rel=1e-4)
    assert found["eval_rewards/accuracies"] == pytest.approx(sum(margin > 0 for margin in margins) / len(margins))
    assert found["eval_mean_token_accuracy"] == pytest.approx(correct / chosen_tokens)


@pytest.mark.parametrize("without", [(0, 4), (2, 3)], ids=["in both steps", "all of a step"])
@pytest.mark.parametrize("kind", ["causal model", "encoder-decoder", "sum", "teacher"])
def test_micro_batch_without_a_token_in_the_loss(tmp_path, kind, without):
    """Its share is 0, whatever its loss: a mean over no token is NaN. So it is in a step that has no other one."""
    size = 4 if without == (0, 4) else 2
    steps = {"gradient_accumulation_steps": size, "max_steps": 8 // size, "train_sampling_strategy": "sequential"}
    trainer = make_trainer(kind, tmp_path, per_device_train_batch_size=1, **steps)
    rows = [row | {"labels": [-100] * len(row["labels"])} if index in without else row for index, row in enumerate(TEXTS)]
    trainer.train_dataset = Dataset.from_list(rows)
    prepare(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for step, entry in enumerate(logged):
        counted = [TEXTS[index] for index in range(step * size, (step + 1) * size) if index not in without]
        expected = KINDS[kind][3](trainer, pad(counted), counted).item() if counted else 0
        assert entry["loss"] == pytest.approx(expected, rel=1e-4)
        assert math.isfinite(entry["grad_norm"]) and (entry["grad_norm"] > 0) == bool(counted)


@pytest.mark.parametrize(("kind", "rows"), [("encoder-decoder", 6), ("causal model", 6), ("teacher", 8), ("mean of rows", 8)])
def test_rows_that_complete_a_step(tmp_path, kind, rows):
    """Of a loss that is certainly over tokens they have none; of others, rows are read twice."""
    trainer = make_trainer(kind, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=2)
    trainer.train_dataset = trainer.train_dataset.select(range(6))
    fill_last_step(trainer, with_empty_rows=prepare(trainer).is_of_library)
    read = []
    trainer.data_collator = lambda rows: (read.append(rows), pad(rows))[1]
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    counted = []
    for step, loss in enumerate(logged):
        of_step = [row for rows in read[4 * step : 4 * step + 4] for row in rows if max(row["labels"]) > 0]
        assert loss == pytest.approx(KINDS[kind][3](trainer, pad(of_step), of_step).item(), rel=1e-4)
        counted += of_step
    assert len(logged) == 2 and len(read) == 8 and len(counted) == rows
    assert {len(row["labels"]) for row in counted} == {len(row["labels"]) for row in TEXTS[:6]}
