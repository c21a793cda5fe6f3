"""`tokenize`: rows become tokens; ends are there once; rows that nothing is left of; rows that it does not take."""

from types import SimpleNamespace

from harness.data.tokenization import load_tokenizer, tokenize
from harness.folder import DATA, write_json
from harness.run.training import report_dropped_rows
from harness.runs import Run, StartedRecipe

import pytest
from datasets import Dataset
from runs import tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import Qwen2Config, Qwen2ForSequenceClassification, TrainingArguments
from trl import ModelConfig, RewardConfig, RewardTrainer, SFTConfig

FIRST, LAST = "<|begin_of_text|>", "<|end_of_text|>"


@pytest.fixture
def tokenizer():
    return tiny_tokenizer("meta-llama/Llama-3.1-8B")


@pytest.fixture
def prepare(tokenizer, tmp_path):
    """The rows that SFTTrainer trains on, of rows of a dataset."""

    def call(rows, streams=False, **settings):
        args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, max_steps=1, **{"max_length": 64} | settings)
        dataset = Dataset.from_list(rows)
        dataset = dataset.to_iterable_dataset() if streams else dataset
        return list(tokenize(dataset, None, tokenizer, args, StartedRecipe(Run("recipe.py", trains=True)))[0])

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


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_rows_are_cut(prepare, capsys, streams, mode):
    """Without packing a row keeps its first or last tokens; one of which nothing counts any more is dropped."""
    (whole,) = prepare([LONG], max_length=None)
    found = prepare([SHORT, LONG], streams, truncation_mode=mode)
    printed = capsys.readouterr().out
    assert ("1 of the 2 training rows are not used" in printed) == (mode == "keep_start")
    assert len(found) == (1 if mode == "keep_start" else 2)
    if mode == "keep_end":
        assert (found[1]["input_ids"], found[1]["labels"]) == (whole["input_ids"][-64:], whole["labels"][-64:])


def test_tokens_of_the_recipe(prepare):
    """Rows with `input_ids` are cut and packed too. Without labels, all tokens count."""
    rows = [{"input_ids": [1, 2, 3], "other": "x"}, {"input_ids": [4, 5], "other": "y"}]
    assert prepare(rows, max_length=2) == [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    marked = [row | {"labels": [-100, *row["input_ids"][1:]]} for row in rows]
    (packed,) = prepare(marked, packing=True)
    assert packed == {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, -100, 5], "seq_lengths": [3, 2]}
    (masked,) = prepare([{"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}])
    assert masked["labels"] == [-100, 2, -100]


def test_flags_that_need_others(prepare, error_of):
    assert "--assistant_only_loss" in error_of(prepare, [SHORT], assistant_only_loss=True)
    assert "--max_length" in error_of(prepare, [SHORT], packing=True, max_length=None)


def test_prompt_and_completion_next_to_a_text(prepare):
    assert prepare([SHORT | {"text": "Something else."}]) == prepare([SHORT])


def test_evaluation_rows(tokenizer, tmp_path):
    """Several sets; not packed if --eval_packing says so; their first conversations are kept with their tokens."""
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] + eos_token }}{% endfor %}"
    rows = Dataset.from_list([{"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]}] * 20)
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, packing=True, eval_packing=False, assistant_only_loss=True)
    recipe = StartedRecipe(Run("recipe.py"))
    train, evaluated = tokenize(rows, {"one": rows, "two": rows}, tokenizer, args, recipe)
    assert len(train) == 1 and {name: len(rows) for name, rows in evaluated.items()} == {"one": 20, "two": 20}
    assert tokenizer.decode([label for label in evaluated["two"][0]["labels"] if label != -100]) == f"assistant: So.{LAST}"
    assert len(recipe.uncut.conversations) == 32
    assert recipe.uncut.conversations[0] == rows[0] | {"input_ids": evaluated["one"][0]["input_ids"]}
    assert not args.assistant_only_loss  # SFTTrainer refuses it for tokens


def test_load_tokenizer(tokenizer, tmp_path):
    """What is saved with the model: its template, its EOS token and its padding token."""
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    template = tmp_path / "mine.txt"
    template.write_text("{{ messages[0]['content'] }}")
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, chat_template_path=str(template), eos_token=FIRST)
    found = load_tokenizer(ModelConfig(model_name_or_path=str(tmp_path / "model")), args)
    assert (found.chat_template, found.eos_token, found.pad_token) == (template.read_text(), FIRST, FIRST)


@pytest.mark.parametrize("max_length", [24, 400])
def test_rows_that_a_trainer_drops_are_counted(tokenizer, tmp_path, capsys, max_length):
    """RewardTrainer drops those that are too long."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Qwen2ForSequenceClassification(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, num_labels=1, **sizes))
    rows = [{"prompt": "How?" * count, "chosen": " So.", "rejected": " No."} for count in (1, 2, 30, 40)]
    args = RewardConfig(str(tmp_path), max_length=max_length, use_cpu=True, bf16=False)
    datasets = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[1:])}
    trainer = RewardTrainer(model=model, args=args, **datasets, processing_class=tokenizer)
    write_json(tmp_path / DATA, {"loaded_rows": 4, "loaded_eval_rows": 3})
    report_dropped_rows(trainer)
    printed = capsys.readouterr().out
    assert len(trainer.train_dataset) == (2 if max_length == 24 else 4)
    assert ("2 of 4 training rows are not used" in printed) == ("2 of 3 evaluation rows" in printed) == (max_length == 24)


def test_rows_that_a_recipe_makes_are_not_compared(tmp_path, capsys):
    """Of one row it may make several, or of several one."""
    write_json(tmp_path / DATA, {"loaded_rows": 4})
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    for rows in (2, 8):
        trainer = SimpleNamespace(args=args, train_dataset=Dataset.from_list([{"input_ids": [1]}] * rows))
        report_dropped_rows(trainer)
    assert not capsys.readouterr().out
