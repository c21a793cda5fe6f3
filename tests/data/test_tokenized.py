"""What a run does with tokenized rows before SFTTrainer truncates and packs them: double ends, rows that nothing is left of."""

import functools
from types import SimpleNamespace

from harness.compat.trl import prepare_rows_in_two_steps
from harness.data import tokenized
from harness.folder import DATA, write_json

import pytest
from datasets import Dataset
from runs import tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, TrainingArguments
from trl import DPOTrainer, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

FIRST, LAST = "<|begin_of_text|>", "<|end_of_text|>"


@pytest.fixture
def tokenizer():
    return tiny_tokenizer("meta-llama/Llama-3.1-8B")


@pytest.fixture
def prepare(tokenizer, tmp_path, monkeypatch):
    """The rows that SFTTrainer trains on, of rows of a dataset."""
    for trainer in (SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer):
        monkeypatch.setattr(trainer, "_prepare_dataset", trainer._prepare_dataset)  # restored afterwards
    prepare_rows_in_two_steps(functools.partial(tokenized.finish_rows, lambda *what: None, True))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, num_labels=1, pad_token_id=0, **sizes)

    def call(rows, streams=False, trainer=SFTTrainer, config_of=SFTConfig, **settings):
        settings = {"max_length": 64, "use_cpu": True, "bf16": False, "max_steps": 1} | settings
        args = config_of(output_dir=str(tmp_path), **settings)
        model = (Qwen2ForSequenceClassification if trainer is RewardTrainer else Qwen2ForCausalLM)(config)
        model.save_pretrained(tmp_path / "model")  # for the reference model
        model = model.from_pretrained(tmp_path / "model")
        dataset = Dataset.from_list(rows)
        dataset = dataset.to_iterable_dataset() if streams else dataset
        return list(trainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer).train_dataset)

    return call


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("adds", ["nothing", "first", "last", "both"])
def test_ends_are_there_once(tokenizer, prepare, adds, streams):
    """Some tokenizers add the EOS token that SFTTrainer writes too, or a BOS token that the text has."""
    sequence = f"{FIRST if adds in ('first', 'both') else ''} $A {LAST if adds in ('last', 'both') else ''}".strip()
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (FIRST, LAST)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(sequence, None, [end for end in ends if end[0] in sequence])
    texts = ["One text.", f"{FIRST}Another text.{LAST}", f"{LAST} in the middle{LAST}"]
    found = [tokenizer.decode(row["labels"]) for row in prepare([{"text": text} for text in texts], streams)]
    first = FIRST if FIRST in sequence else ""
    assert found == [f"{first}One text.{LAST}", f"{FIRST}Another text.{LAST}", f"{first}{LAST} in the middle{LAST}"]
    (row,) = prepare([{"prompt": "How?\n", "completion": "So."}], streams)
    assert tokenizer.decode(row["input_ids"]) == f"{first}How?\nSo.{LAST}"
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == f"So.{LAST}"


SHORT, LONG = {"prompt": "How? ", "completion": "So."}, {"prompt": "How? " * 99, "completion": "So."}


@pytest.mark.parametrize("streams", [False, True])
def test_rows_that_are_cut_to_nothing(prepare, capsys, error_of, streams):
    settings = {"packing": True, "packing_strategy": "bfd"}
    prepare([SHORT, LONG] * 10, streams, **settings)
    assert "warning: 10 of the 20 training rows are not used" in capsys.readouterr().out
    assert "--max_length: none of the 20 training rows" in error_of(prepare, [LONG] * 20, streams, **settings)
    prepare([SHORT] * 20, streams, **settings)
    prepare([SHORT, LONG] * 10, streams, **settings | {"max_length": 400})
    prepare([SHORT, LONG] * 10, streams, packing=True, packing_strategy="bfd_split")
    assert "not used" not in capsys.readouterr().out


@pytest.mark.parametrize("max_length", [24, 400])
def test_rows_that_a_trainer_drops_are_counted(prepare, tmp_path, capsys, max_length):
    """RewardTrainer drops those that are too long."""
    rows = [{"prompt": "How?" * count, "chosen": " So.", "rejected": " No."} for count in (1, 2, 30, 40)]
    kept = prepare(rows, trainer=RewardTrainer, config_of=RewardConfig, max_length=max_length)
    write_json(tmp_path / DATA, {"loaded_rows": 4})
    args = RewardConfig(str(tmp_path), max_length=max_length, use_cpu=True, bf16=False)
    tokenized.report_dropped_rows(SimpleNamespace(args=args, train_dataset=Dataset.from_list(kept)))
    printed = capsys.readouterr().out
    assert len(kept) == (2 if max_length == 24 else 4)
    assert ("warning: 2 of 4 training rows are not used" in printed) == (max_length == 24)


def test_rows_that_a_recipe_makes_are_not_compared(tmp_path, capsys):
    """Of one row it may make several, or of several one."""
    write_json(tmp_path / DATA, {"loaded_rows": 4})
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    for rows in (2, 8):
        trainer = SimpleNamespace(args=args, train_dataset=Dataset.from_list([{"input_ids": [1]}] * rows))
        tokenized.report_dropped_rows(trainer)
    assert not capsys.readouterr().out
