"""The stand-ins: same architecture, same special tokens, same columns; real text; the same on every machine."""

import copy
import json
import re
import shutil
import types
from pathlib import Path

from harness.data import DataArguments
from harness.rehearsal import stand_ins, tiny_data, tiny_model

import pytest
import torch
from conftest import losses, read
from datasets import load_dataset
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

# The number of weights and the sum of their absolute values.
GPT2, QWEN2, LLAMA = "openai-community/gpt2", "Qwen/Qwen2-0.5B", "meta-llama/Llama-3.1-8B"
KNOWN = {GPT2: (296704, 55139.7), QWEN2: (205376, 41190.8), LLAMA: (336192, 67342.2)}
# Kinds of models, and what a config of them says that its defaults do not.
KINDS = "qwen3 qwen3_moe gpt_oss falcon mamba mistral mixtral gemma3_text gemma4_text opt gpt_neo gpt_neox olmo2 granite smollm3"
OTHERS = {kind: {} for kind in [*KINDS.split(), "qwen3_next"]} | {
    "bloom": {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
    "deepseek_v3": {"rope_scaling": {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}},
    "granitemoehybrid": {"layer_types": (["mamba"] * 9 + ["attention"]) * 4, "num_hidden_layers": 40},
    "lfm2": {"full_attn_idxs": [2, 5, 8]},
    "phi3": {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}},
}
TWO_KINDS = {
    "deepseek_v3": ("first_k_dense_replace", 1),
    "gemma3_text": ("layer_types", ["sliding_attention", "full_attention"]),
    "lfm2": ("full_attn_idxs", [1]),
    "qwen3_next": ("layer_types", ["linear_attention", "full_attention"]),
    "smollm3": ("no_rope_layers", [1, 0]),
}


def model(name):
    return types.SimpleNamespace(model_name_or_path=name, model_revision="main", attn_implementation=None)


def data(name, config=None):
    return DataArguments(dataset_name=name, dataset_config=config)


FINEWEB = data("HuggingFaceFW/fineweb-edu", "sample-10BT")
QWEN = model(QWEN2)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes stand-ins in an empty folder; returns the folders of model and data."""
    monkeypatch.chdir(tmp_path)

    def call(the_data=FINEWEB, the_model=QWEN):
        stand_ins.prepare(the_data, the_model)
        args = types.SimpleNamespace(model_init_kwargs={"dtype": "float32"}, max_steps=30, max_length=9)
        stand_ins.announce(the_data, args, the_model)
        the_data, the_model = copy.copy(the_data), types.SimpleNamespace(**vars(the_model))
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


def test_a_chat_model_ends_its_turns():
    ends = [tiny_model.make_tokenizer(tiny_model.family_of(f"Qwen/Qwen2-0.5B{kind}")).eos_token for kind in ("", "-Instruct")]
    assert ends == ["<|endoftext|>", "<|im_end|>"] and tiny_model.family_of("Qwen/Qwen3-0.6B") is None


def test_stand_ins_are_made_anew_when_what_makes_them_changes(monkeypatch, tmp_path):
    room = shutil.copytree(Path(stand_ins.__file__).parent, tmp_path / "rehearsal")
    monkeypatch.setattr(stand_ins, "__file__", str(room / "stand_ins.py"))
    for name in ("tiny_model.yaml", "tiny_data.yaml", "tiny_model.py"):
        before = stand_ins.model_folder(QWEN)
        (room / name).write_text((room / name).read_text() + "\n# another\n")
        assert stand_ins.model_folder(QWEN) != before


@pytest.fixture
def theirs(tmp_path):
    """A model folder as the hub has it, without weights: the config that a family has by default, and a tokenizer."""

    def call(kind):
        tiny_model.make_tokenizer(tiny_model.family_of("Qwen/Qwen2-0.5B")).save_pretrained(tmp_path / kind)
        AutoConfig.for_model(kind, **OTHERS.get(kind, {})).save_pretrained(tmp_path / kind)
        return model(str(tmp_path / kind))

    return call


@pytest.mark.parametrize("name", KNOWN)
def test_the_weights_of_the_recipes_own_families_stay(made, name):
    """A rehearsal's losses can be compared from one version of the project to the next."""
    weights = load_file(f"{made(the_model=model(name))[0]}/model.safetensors")
    every = torch.cat([weight.double().abs().flatten() for weight in weights.values()])
    assert (len(every), round(every.sum().item(), 1)) == KNOWN[name]


@pytest.mark.parametrize("kind", OTHERS)
def test_two_small_layers_of_any_architecture(made, theirs, kind):
    folder, _ = made(the_model=theirs(kind))
    stand_in = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    assert stand_in.config.model_type == kind and stand_in.num_parameters() < 1e6
    assert {match[1] for name in stand_in.state_dict() if (match := re.search(r"\.(\d+)\.", name))} == {"0", "1"}
    assert stand_in.get_input_embeddings().weight.shape == (2048, 64)
    words = torch.arange(2000, 2032)[None]
    loss = stand_in(input_ids=words, labels=words, use_cache=False).loss
    loss.backward()
    assert 5 < loss < 20 and all(weight.grad.isfinite().all() for weight in stand_in.parameters() if weight.grad is not None)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == stand_in.config.eos_token_id


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_layers_of_two_kinds_stay_two_kinds(made, theirs, kind):
    what, kept = TWO_KINDS[kind]
    folder, _ = made(the_model=theirs(kind))
    assert getattr(AutoConfig.from_pretrained(folder), what) == kept


def test_a_model_that_also_sees_is_small_throughout():
    small = tiny_model.shrink(AutoConfig.for_model("qwen3_5"), {"vocab_size": 2048, "pad_token_id": 0})
    assert AutoModelForImageTextToText.from_config(small).num_parameters() < 1e6


@pytest.mark.parametrize(("kind", "mix"), [("qwen3", False), ("gpt_oss", True), ("bloom", True)])
def test_says_when_packed_documents_see_each_other(made, theirs, capsys, kind, mix):
    made(the_model=(the_model := theirs(kind)))
    stand_ins.announce(FINEWEB, types.SimpleNamespace(packing=True), the_model)
    assert ("see each other: --packing false" in capsys.readouterr().out) == mix


@pytest.mark.parametrize(("kind", "said"), [("qwen3_next", "give --packing false"), ("t5", "no two-layer model")])
def test_what_cannot_be_is_one_line(made, theirs, capsys, kind, said):
    the_model = theirs(kind)
    with pytest.raises(SystemExit):
        made(the_model=the_model)
        stand_ins.announce(FINEWEB, types.SimpleNamespace(packing=True), the_model)
    error = capsys.readouterr().err
    assert said in error and error.count("error: ") == error.count("\n") == 1


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "bloom", "deepseek_v3"])
def test_another_architecture_trains_sharded(rehearse, theirs, kind):
    flags = ["--model_name_or_path", theirs(kind).model_name_or_path, "--max_steps", "10"]
    run = rehearse("qwen2_fineweb_edu", "1x3090_offload", *flags)
    assert read(run)["fsdp_enabled"] and read(run, "config.json")["model_type"] == kind
    assert losses(run)[10][0] < losses(run)[1][0]


def test_data_streams_with_the_columns_of_the_original(made):
    _, folder = made()
    stream = load_dataset(folder, "sample-10BT", split="train", streaming=True)
    row = next(iter(stream))
    assert list(row) == list(tiny_data.DATA_SETS["HuggingFaceFW/fineweb-edu"]["columns"])
    assert isinstance(row["score"], float) and isinstance(row["int_score"], int)
    assert stream.num_shards == tiny_data.SHARDS
    assert sorted(row["text"] for row in stream) == sorted(tiny_data.documents())


def test_data_of_a_persons_own_are_its_first_rows(made, tmp_path):
    source = tmp_path / "theirs"
    source.mkdir()
    row = {"conversations": [{"from": "human", "value": "why " * 200}, {"from": "gpt", "value": "so"}], "n": 3}
    (source / "train.jsonl").write_text((json.dumps(row) + "\n") * 600)
    (source / "test.jsonl").write_text(json.dumps(row) + "\n")
    _, folder = made(the_data=data(str(source)))
    loaded = load_dataset(folder)
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 500, "test": 1}
    asked, answered = loaded["train"][0]["conversations"]
    assert (asked["value"], answered) == (("why " * 200)[:150], row["conversations"][1]) and loaded["train"][0]["n"] == 3
    (source / "test.jsonl").write_text(json.dumps(row) * 2)
    assert str(stand_ins.data_folder(data(str(source)))) != folder  # other rows, another stand-in


def test_documents_are_real_text_of_many_lengths():
    texts = tiny_data.documents()
    assert texts == tiny_data.documents() and len(texts) > 400
    assert min(map(len, texts)) < 200 and max(map(len, texts)) > 4000 and any("lambda" in text for text in texts)
