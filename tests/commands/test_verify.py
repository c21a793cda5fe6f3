"""`--verify` compares what was trained with what is saved, merged or quantized; a difference has exit code 1."""

import json
import shutil
from pathlib import Path

from harness.commands import merge, saved, verify

import pytest
from runs import read
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

CHAT = ("qwen2_chat", "4gpu_shard_grad_op")


@pytest.fixture
def table(capsys):
    """Calls --verify; returns its exit code, and the rows of its table by model and check."""

    def call(*words):
        capsys.readouterr()
        code = verify.main(*map(str, words))
        lines = capsys.readouterr().out.splitlines()
        rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")][1:]
        return code, {(Path(row[0]).name, row[1]): row[-1] for row in rows}

    return call


@pytest.fixture
def copied(rehearse, tmp_path):
    """A copy of a run that can be changed."""

    def copy(*pair) -> Path:
        return Path(shutil.copytree(rehearse(*pair), tmp_path / "run"))

    return copy


def failed(rows: dict) -> list[str]:
    return sorted(what for (_, what), result in rows.items() if result == "FAILED")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "model"),
        ("held_out.parquet", "file"),
        ("train_results.json", "train_results.json is damaged"),
    ],
)
def test_damaged_run(rehearse, tmp_path, error_of, name, words):
    run = tmp_path / "run"
    shutil.copytree(rehearse(*CHAT), run, ignore=shutil.ignore_patterns("checkpoint-*"))
    (run / name).write_bytes((run / name).read_bytes()[:100])
    assert words in error_of(verify.main, str(run))


def test_full_run_on_two_processes(rehearse, table):
    """The loss is the one that the processes logged together, to the rounding of weights to bf16."""
    run = rehearse(*CHAT)
    code, rows = table(run)
    assert code == 0 and not failed(rows)
    assert len(rows) == 2 and rows[Path(run).name, "prompts with the trained tokens"] == "ok"
    held_out = verify.read_held_out(run)
    assert len(held_out.conversations) == 16
    losses = verify.measure(saved.load_model(run), held_out, run)
    assert losses[""] == pytest.approx(read(run)["eval_loss"], abs=verify.TOLERANCE)
    # Every document of the 4 conversations below is in the rows, so these are the tokens that were evaluated.
    documents = [ids for ids, *_ in held_out.documents[""]]
    for conversation in held_out.conversations[:4]:
        ids = conversation["input_ids"]
        assert any(ids[: len(document)] == document for document in documents if len(document) > 8)


def test_changed_chat_template_fails(copied, table):
    run = copied(*CHAT)
    template = run / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> ", 1))
    code, rows = table(run)
    assert code == 1 and failed(rows) == ["prompts with the trained tokens"]


CLOCK = "{{ strftime_now('%H:%M:%S') }}{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"


def test_template_that_prints_the_date(fork_launch, tmp_path, table):
    """The date is that of the first start, also when the run resumes, and for --verify."""
    (tmp_path / "clock.jinja").write_text(CLOCK)
    run = tmp_path / "run"
    flags = ["--chat_template_path", tmp_path / "clock.jinja", "--assistant_only_loss", "false", "--output_dir", run]
    found = []
    for steps in ("2", "4"):
        process = fork_launch("--tiny", "qwen2_chat", "1x3090", *flags, "--max_steps", steps, "--save_steps", "2")
        assert process.returncode == 0, process.stderr
        found.append((verify.read_held_out(run).conversations, read(run, "run.json")["date"]))
    assert found[0] == found[1] and read(run)["resumed_from_step"] == 2
    tokenizer = AutoTokenizer.from_pretrained(run)
    assert tokenizer.decode(found[0][0][0]["input_ids"]).startswith(found[0][1].split("T")[1])
    code, rows = table(run)
    assert code == 0 and rows["run", "prompts with the trained tokens"] == "ok"


def test_adapter_and_its_merge(copied, table):
    """The original model, which lacks the adapter, fails."""
    run = copied("llama31_8b_lora", "4gpu_full_shard")
    merge.main(str(run))
    code, rows = table(run)
    assert code == 0 and {model for model, _ in rows} == {"run", "merged"}
    code, rows = table(run, read(run, "adapter_config.json")["base_model_name_or_path"])
    (what,) = (what for what in failed(rows) if what.startswith("loss"))
    assert code == 1 and rows["run", what] == "ok"
    # A run with label smoothing logs another loss: other models are compared with the saved one.
    (run / "train_results.json").write_text(json.dumps(read(run) | {"loss_is_cross_entropy": False}))
    code, rows = table(run, read(run, "adapter_config.json")["base_model_name_or_path"])
    assert code == 1 and what in failed(rows) and rows["run", what] == "not checked"


def test_answers_that_do_not_count_are_no_prompts(rehearse):
    """In a row of --split_conversations a template can write earlier answers in another form, without their reasoning."""
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "assistant")]
    turns[1]["train"] = False
    run = rehearse(*CHAT)
    ids = AutoTokenizer.from_pretrained(run).apply_chat_template(turns)["input_ids"]
    held_out = verify.HeldOut({}, [{"messages": turns, "input_ids": ids, "images": None}], read(run))
    (check,) = verify.check_prompts(Path(run), held_out)
    assert (check.expected, check.found, check.result) == ("1 of 1", "1 of 1", "ok")


def write_gguf(run, file, weights, template, theta, kind="F32", architecture="qwen2", end="<|im_end|>", swapped=0):
    """Writes a Qwen2 model as llama.cpp's convert_hf_to_gguf.py does: its metadata, and its weights under llama.cpp's names."""
    import gguf

    config = AutoConfig.from_pretrained(run)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_chat_template(template)
    tokenizer = AutoTokenizer.from_pretrained(run)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens[:swapped] = reversed(tokens[:swapped])
    writer.add_token_list(tokens)
    writer.add_eos_token_id(tokenizer.convert_tokens_to_ids(end))
    for name, weight in weights.items():
        for there, here in NAMES.items():
            name = name.replace(there, here)
        stored = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        values = weight.char().numpy() if stored.name == "I8" else gguf.quantize(weight.float().numpy(), stored)
        writer.add_tensor(name, values, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


# Of weights, in the order in which they are replaced: transformers' names and llama.cpp's.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
}


def test_gguf_file(rehearse, tmp_path, table, error_of, gguf_python, monkeypatch):
    """A file with the weights and settings of the run passes. One with another weight, setting or template fails."""
    run = rehearse(*CHAT)
    weights, config = load_file(run / "model.safetensors"), AutoConfig.from_pretrained(run)
    template, theta = (run / "chat_template.jinja").read_text(), config.rope_parameters["rope_theta"]
    other = tmp_path / "other.gguf"
    monkeypatch.syspath_prepend(*gguf_python.parents[1].glob("lib/python*/site-packages"))

    def write(**values) -> Path:
        settings = {"weights": weights, "template": template, "theta": theta} | values
        return write_gguf(run, tmp_path / "model.gguf", **settings)

    code, rows = table(run, write())
    assert code == 0 and rows["model.gguf", "loss of the evaluation rows"] == "ok"
    assert rows["model.gguf", "prompts with the trained tokens"] == "ok"
    assert table(run, write(kind="Q8_0"))[0] == 0
    name = "model.layers.1.mlp.down_proj.weight"
    assert failed(table(run, write(weights=weights | {name: -weights[name]}))[1]) == ["loss of the evaluation rows"]
    assert failed(table(run, write(theta=theta / 1e4))[1]) == ["loss of the evaluation rows"]
    changed = template.replace("<|im_start|>", "<|im_start|> ", 1)
    assert failed(table(run, write(template=changed))[1]) == ["prompts with the trained tokens"]
    assert failed(table(run, write(end="<|endoftext|>"))[1]) == ["token that ends an answer"]
    assert failed(table(run, write(swapped=2))[1]) == ["tokens of the vocabulary"]
    for values in ({"architecture": "qwen3"}, {"architecture": "nothing"}, {"kind": "I8"}):
        assert error_of(verify.main, str(run), str(write(**values)))
    assert "1 weight of " in error_of(verify.main, str(run), str(write(weights={k: v for k, v in weights.items() if k != name})))
    monkeypatch.delattr(verify, "load_model")  # the file is read first
    for content in (write().read_bytes()[:-100_000], b"nothing"):
        other.write_bytes(content)
        assert error_of(verify.main, str(run), str(other))
    monkeypatch.setattr(verify, "read_held_out", lambda run: verify.HeldOut({}, [{"images": [{}]}], {}))
    assert "images" in error_of(verify.main, str(run), str(write()))
