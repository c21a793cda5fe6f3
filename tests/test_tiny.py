"""The stand-ins: same architecture, same special tokens, same columns; real text; the same on every machine."""

import shutil
import types
from pathlib import Path

from harness.rehearsal import stand_ins, tiny_data, tiny_model

import pytest
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig


def model(name):
    return types.SimpleNamespace(model_name_or_path=name, model_revision="main")


def data(name, config=None, split="train"):
    return types.SimpleNamespace(dataset_name=name, dataset_config=config, dataset_train_split=split)


FINEWEB = data("HuggingFaceFW/fineweb-edu", "sample-10BT")
QWEN = model("Qwen/Qwen2-0.5B")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes stand-ins in an empty folder; returns the folders of model and data."""
    monkeypatch.chdir(tmp_path)

    def call(the_data=FINEWEB, the_model=QWEN):
        stand_ins.prepare(the_data, the_model)
        args = types.SimpleNamespace(model_init_kwargs={"dtype": "float32"}, max_steps=30, max_length=9)
        stand_ins.announce(the_data, args, the_model)
        the_data, the_model = types.SimpleNamespace(**vars(the_data)), types.SimpleNamespace(**vars(the_model))
        stand_ins.substitute(the_data, args, the_model)
        return the_model.model_name_or_path, the_data.dataset_name

    return call


def test_says_what_was_replaced(made, capsys):
    made()
    shown = " ".join(capsys.readouterr().out.split())
    for word in ("rehearsal", "Qwen/Qwen2-0.5B", "HuggingFaceFW/fineweb-edu", "Python's documentation", "max_steps 30"):
        assert word in shown
    assert "max_length" not in shown  # what a flag changed is not listed


def test_qwen2(made):
    folder, _ = made()
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (config.model_type, config.num_hidden_layers, config.tie_word_embeddings) == ("qwen2", 2, True)
    assert str(config.dtype) == "torch.bfloat16"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|endoftext|>", "<|endoftext|>", None)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    text = "def f(x):\n    return 'ä€'  # 123"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(("name", "eos"), [("", "<|endoftext|>"), ("-Instruct", "<|im_end|>")])
def test_a_chat_model_ends_its_turns(name, eos):
    family = tiny_model.family_of(f"Qwen/Qwen2-0.5B{name}")
    assert tiny_model.make_tokenizer(family).eos_token == eos
    assert tiny_model.family_of(f"Qwen/Qwen3-0.6B{name}") is None


def test_stand_ins_are_made_anew_when_what_makes_them_changes(monkeypatch, tmp_path):
    room = shutil.copytree(Path(stand_ins.__file__).parent, tmp_path / "rehearsal")
    monkeypatch.setattr(stand_ins, "__file__", str(room / "stand_ins.py"))
    for name in ("tiny_model.yaml", "tiny_data.yaml", "tiny_model.py"):
        before = stand_ins.model_folder(QWEN)
        (room / name).write_text((room / name).read_text() + "\n# another\n")
        assert stand_ins.model_folder(QWEN) != before


def test_an_architecture_the_project_never_heard_of(made, tmp_path):
    """A folder (or a hub id) with config and tokenizer is enough; the weights are never read."""
    source = tmp_path / "theirs"
    AutoTokenizer.from_pretrained(made()[0]).save_pretrained(source)
    LlamaConfig(num_hidden_layers=30, hidden_size=2048, num_attention_heads=32, vocab_size=32000).save_pretrained(source)
    folder, _ = made(the_model=model(str(source)))
    stand_in = AutoModelForCausalLM.from_pretrained(folder)
    assert type(stand_in).__name__ == "LlamaForCausalLM" and stand_in.num_parameters() < 1e6
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|endoftext|>"


def test_data_streams_with_the_columns_of_the_original(made):
    _, folder = made()
    stream = load_dataset(folder, "sample-10BT", split="train", streaming=True)
    row = next(iter(stream))
    assert list(row) == list(tiny_data.DATA_SETS["HuggingFaceFW/fineweb-edu"]["columns"])
    assert isinstance(row["score"], float) and isinstance(row["int_score"], int)
    assert stream.num_shards == tiny_data.SHARDS
    assert sorted(row["text"] for row in stream) == sorted(tiny_data.documents())


def test_unknown_data_is_described_by_its_first_row(made, tmp_path):
    source = tmp_path / "theirs"
    source.mkdir()
    line = '{"instruction": "do", "output": "done", "messages": [{"role": "user", "content": "Hi"}], "n": 3, "x": 0.5}\n'
    (source / "train.jsonl").write_text(line)
    (source / "test.jsonl").write_text(line)
    _, folder = made(the_data=data(str(source)))
    loaded = load_dataset(folder)
    assert set(loaded) == {"train", "test"} and len(loaded["train"]) > 5 * len(loaded["test"])
    row = loaded["train"][0]
    assert list(row) == ["instruction", "output", "messages", "n", "x"]
    assert [turn["role"] for turn in row["messages"]][:2] == ["user", "assistant"] and len(row["messages"]) % 2 == 0
    assert row["instruction"] and row["output"] and row["instruction"] != row["output"]
    assert isinstance(row["n"], int) and isinstance(row["x"], float)


def test_documents_are_real_text_of_many_lengths():
    texts = tiny_data.documents()
    assert texts == tiny_data.documents() and len(texts) > 400
    assert min(map(len, texts)) < 200 and max(map(len, texts)) > 4000
    assert any("lambda" in text for text in texts)
