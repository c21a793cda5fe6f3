"""The tiny model and dataset of a rehearsal: architecture, special tokens and columns of the originals, real text."""

import copy
import hashlib
import json
import re
import shutil
import types
from pathlib import Path

from harness.data import conversion, loading
from harness.rehearsal import tiny

import pytest
import torch
from datasets import load_dataset, load_dataset_builder
from runs import data_settings
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Model types, and the values of a published config that are not the defaults of its class.
TYPES = "qwen3 qwen3_moe gpt_oss falcon mamba mistral mixtral gemma3_text gemma4_text opt gpt_neo gpt_neox olmo2 granite smollm3"
CONFIGS = {model_type: {} for model_type in [*TYPES.split(), "qwen3_next"]} | {
    "bloom": {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
    "deepseek_v3": {"rope_scaling": {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}},
    "granitemoehybrid": {"layer_types": (["mamba"] * 9 + ["attention"]) * 4, "num_hidden_layers": 40},
    "lfm2": {"full_attn_idxs": [2, 5, 8]},
    "phi3": {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}},
}
# Models with layers of two kinds: what a tiny config says about its two layers.
TWO_KINDS_OF_LAYERS = {
    "deepseek_v3": ("first_k_dense_replace", 1),
    "gemma3_text": ("layer_types", ["sliding_attention", "full_attention"]),
    "qwen3_next": ("layer_types", ["linear_attention", "full_attention"]),
    "smollm3": ("no_rope_layers", [1, 0]),
}


def model_arguments(name):
    return types.SimpleNamespace(model_name_or_path=name, model_revision="main", attn_implementation=None)


FINEWEB = data_settings("HuggingFaceFW/fineweb-edu", "messages", dataset_config="sample-10BT")
QWEN = model_arguments("Qwen/Qwen2-0.5B")


@pytest.fixture
def make_tiny(tmp_path, monkeypatch):
    """Makes a tiny model in an empty working directory; returns its folder."""
    monkeypatch.chdir(tmp_path)

    def call(model_args=QWEN):
        training_args = types.SimpleNamespace(model_init_kwargs={"dtype": "float32"}, max_steps=30, max_length=9)
        tiny.make_models(training_args, model_args)
        model_args = copy.copy(model_args)
        tiny.use_replacements(FINEWEB, training_args, model_args)
        assert training_args.model_init_kwargs == {"dtype": "float32", "revision": "main"}
        return model_args.model_name_or_path

    return call


def test_tiny_qwen2(make_tiny):
    folder = make_tiny()
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (config.model_type, config.num_hidden_layers, config.tie_word_embeddings) == ("qwen2", 2, True)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|endoftext|>", "<|endoftext|>", None)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ends = [tiny.make_tokenizer(tiny.family_of(f"Qwen/Qwen2-0.5B{kind}")).eos_token for kind in ("", "-Instruct")]
    assert ends == ["<|endoftext|>", "<|im_end|>"] and tiny.family_of("Qwen/Qwen3-0.6B-FP8") is None
    text = "def f(x):\n    return 'ä€'  # 123"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_folder_depends_on_the_code(monkeypatch, tmp_path):
    """A tiny model is made again when a file that makes it has changed."""
    package = shutil.copytree(Path(tiny.__file__).parent, tmp_path / "rehearsal")
    monkeypatch.setattr(tiny, "__file__", str(package / "tiny.py"))
    for name in ("tiny_model.yaml", "tokenizers/qwen2.json", "tiny.py"):
        before = tiny.tiny_model_folder(QWEN)
        (package / name).write_text((package / name).read_text() + "\n# changed\n")
        assert tiny.tiny_model_folder(QWEN) != before


@pytest.fixture
def make_original(tmp_path):
    """Makes a model folder without weights: the default config of a model type, and a tokenizer."""

    def call(model_type):
        tiny.make_tokenizer(tiny.family_of("Qwen/Qwen2-0.5B")).save_pretrained(tmp_path / model_type)
        config = AutoConfig.for_model(model_type, **CONFIGS.get(model_type, {}))
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
        config.save_pretrained(tmp_path / model_type)
        return model_arguments(str(tmp_path / model_type))

    return call


@pytest.mark.parametrize("model_type", CONFIGS)
def test_two_small_layers_of_any_architecture(make_tiny, make_original, model_type):
    folder = make_tiny(make_original(model_type))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    assert model.config.model_type == model_type and model.num_parameters() < 1e6
    assert {match[1] for name in model.state_dict() if (match := re.search(r"\.(\d+)\.", name))} == {"0", "1"}
    assert model.get_input_embeddings().weight.shape == (2048, 64)
    name, value = TWO_KINDS_OF_LAYERS.get(model_type, ("num_hidden_layers", 2))
    assert getattr(model.config, name) == value
    tokens = torch.arange(2000, 2032)[None]
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    assert 5 < loss < 20 and all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.config.eos_token_id


@pytest.mark.parametrize("name", tiny.DATASETS)
def test_small_datasets(name):
    """Each split of each can be streamed by eight processes."""
    folder = str(tiny.DATASETS[name])
    for split in load_dataset_builder(folder).config.data_files:
        stream = load_dataset(folder, split=split, streaming=True)
        assert stream.num_shards == 8 and next(iter(stream))


def test_files_are_read_as_in_a_run_and_shortened(tmp_path):
    """They are not copied: `load` takes the first rows, and cuts texts after it has read them."""
    source = tmp_path / "mine"
    source.mkdir()
    row = {"conversations": [{"from": "human", "value": "why " * 200}, {"from": "gpt", "value": "so"}], "n": 3}
    rows = [row | {"conversations": [{"from": "system", "value": f"{number}"}, *row["conversations"]]} for number in range(900)]
    (source / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (source / "test.jsonl").write_text(json.dumps(row) + "\n")
    data = tiny.use_replacements(data_settings(source, "messages"), types.SimpleNamespace(), copy.copy(QWEN))
    train, test = loading.load_rows(data)
    assert (len(train), len(test)) == (conversion.REHEARSED_ROWS, 1)
    _, question, answer = train[7]["messages"]
    assert (question["content"], answer["content"]) == (("why " * 200)[:150], "so")
    long = "word " * 100
    assert json.loads(conversion.cut_texts(json.dumps({"a": [long, 1]}), 10)) == {"a": ["word word ", 1]}, "JSON stays JSON"
    assert conversion.cut_texts(f"<think>{long}</think>{long}", 4) == "<think>word</think>word"


def test_documents_are_the_same_with_every_python():
    """Losses of rehearsals can be compared."""
    texts = tiny.documents()
    assert hashlib.sha256("".join(texts).encode()).hexdigest()[:8] == "7e4adbbc" and len(texts) == 512
