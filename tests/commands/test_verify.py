"""`--verify` compares what was trained with what is saved, merged, quantized or served; a difference has exit code 1."""

import json
import shutil
import subprocess
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from harness.commands import chat, merge, verify
from harness.run import outputs

import pytest
import torch
import trl
from conftest import assert_one_error, free_port, read, wait_until
from transformers import AutoTokenizer

CHAT = ("qwen2_chat", "4gpu_shard_grad_op")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
# OpenAI's example of a call, its result, and the answer.
TURNS = [
    {"role": "system", "content": "You know the weather."},
    {"role": "user", "content": "How is Oslo?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}]},
    {"role": "tool", "content": "cold"},
    {"role": "assistant", "content": "Cold."},
]


@pytest.fixture
def table(capsys):
    """Calls --verify; returns its exit code, the rows of its table by model and check, and its last line."""

    def call(*words):
        capsys.readouterr()
        code = verify.main(*map(str, words))
        *lines, _, last = capsys.readouterr().out.splitlines()
        rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")][1:]
        return code, {(Path(row[0]).name, row[1]): row[-1] for row in rows}, last

    return call


@pytest.fixture
def copied(rehearse, tmp_path):
    """A copy of a run that can be changed."""

    def copy(*pair) -> Path:
        return Path(shutil.copytree(rehearse(*pair), tmp_path / "run"))

    return copy


@pytest.fixture
def tool_run(copied):
    """A run with a template for tools, whose only conversation has a system turn, tools, a call and its result."""
    run = copied(*CHAT)
    shutil.copyfile(TEMPLATES / "qwen2_5.jinja", run / "chat_template.jinja")
    tokenizer = AutoTokenizer.from_pretrained(run)
    ids = tokenizer.apply_chat_template(TURNS, tools=TOOLS)["input_ids"]
    expected = read(run, "expected.json") | {
        "conversations": [{"messages": TURNS, "tools": TOOLS, "input_ids": ids}],
        "tokenizer": outputs.describe_tokenizer(tokenizer),
    }
    (run / "expected.json").write_text(json.dumps(expected))
    return run


def failed(rows: dict) -> list[str]:
    return sorted(what for (_, what), result in rows.items() if result == "FAILED")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "model"),
        ("held_out.parquet", "file"),
        ("expected.json", "expected.json is damaged"),
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
    code, rows, last = table(run)
    assert code == 0 and not failed(rows) and last == f"{len(rows)} of {len(rows)} checks passed."
    assert {"prompts with the trained tokens", "output layer", "generation config"} < {what for _, what in rows}
    expected, evaluated = verify.read_expectations(run)
    assert expected["eval_losses"] == {"": read(run)["eval_loss"]} and len(expected["conversations"]) == 16
    losses = verify.measure(chat.load_model(run), evaluated, "")
    found = verify.mean_as_logged(losses, expected["batch_size"], expected["processes"])
    assert found == pytest.approx(read(run)["eval_loss"], abs=0.005)
    # Every document of the 4 conversations below is in the rows, so these are the tokens that were evaluated.
    documents = [ids for row in evaluated for ids, _ in row.documents]
    for conversation in expected["conversations"][:4]:
        ids = conversation["input_ids"]
        assert any(ids[: len(document)] == document for document in documents if len(document) > 8)


def test_changed_chat_template_fails(copied, table):
    run = copied(*CHAT)
    template = run / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> ", 1))
    code, rows, last = table(run)
    assert code == 1 and failed(rows) == ["chat template (checksum)", "prompts with the trained tokens"]
    assert last == f"{len(rows) - 2} of {len(rows)} checks passed."


def test_changed_generation_and_end_token_fail(copied, table):
    run = copied(*CHAT)
    settings = read(run, "generation_config.json") | {"eos_token_id": 5, "do_sample": True, "temperature": 0.1}
    (run / "generation_config.json").write_text(json.dumps(settings))
    code, rows, _ = table(run)
    assert code == 1 and failed(rows) == ["generation config", "tokens that end an answer"]


def test_adapter_and_its_merge(copied, table, capsys):
    """--merge prints the comparison. The original model, which lacks the adapter, fails."""
    run = copied("llama31_8b_lora", "4gpu_full_shard")
    assert merge.main(str(run)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"| {run}/merged | loss of" in printed and "±0.02 | ok |" in printed and "checks passed." in printed
    code, rows, _ = table(run)
    assert code == 0 and {model for model, _ in rows} == {"run", "merged"}
    code, rows, _ = table(run, read(run, "adapter_config.json")["base_model_name_or_path"])
    (what,) = (what for what in failed(rows) if what.startswith("loss"))
    assert code == 1 and rows["run", what] == "ok"
    # A run with label smoothing logs another loss: other models are compared with the saved one.
    (run / "expected.json").write_text(json.dumps(read(run, "expected.json") | {"eval_losses": {}}))
    code, rows, _ = table(run, read(run, "adapter_config.json")["base_model_name_or_path"])
    assert code == 1 and what in failed(rows) and rows["run", what].startswith("not checked")


def test_nothing_to_measure_a_server_with(error_of):
    row = verify.Row("", [([1, 2, 3], [verify.IGNORED] * 3)])
    assert "nothing can be compared" in error_of(verify.documents_for_server, [row])


def test_tolerance(rehearse):
    """An adapter of 4-bit weights is merged into other weights; a model that was quantized later may differ most."""
    run, plain = rehearse("llama31_70b_qlora", "2x3090_qlora"), types.SimpleNamespace(config=types.SimpleNamespace())
    quantized = types.SimpleNamespace(config=types.SimpleNamespace(quantization_config={}))
    assert [verify.tolerance_of(run, model) for model in (plain, quantized)] == [0.05, 0.1]
    assert verify.tolerance_of(rehearse(*CHAT), plain) == 0.02


def test_json(rehearse, capsys):
    assert verify.main(str(rehearse(*CHAT)), "--json") == 0
    checks = json.loads(capsys.readouterr().out)
    assert {"model", "what", "expected", "found", "tolerance", "result"} == checks[0].keys()


class Server:
    """What --verify asks of vLLM, computed from a saved model. `template` is another chat template than the saved one."""

    def __init__(self, run: Path, template: str = ""):
        self.model, self.tokenizer = chat.load_model(run), AutoTokenizer.from_pretrained(run)
        self.tokenizer.chat_template = template or self.tokenizer.chat_template

    def render(self, body):
        turns = json.loads(json.dumps(body["messages"]))
        for call in (call for turn in turns for call in turn.get("tool_calls", [])):
            assert call["id"] and call["type"] == "function"
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return self.tokenizer.apply_chat_template(turns, tools=body.get("tools"), add_generation_prompt=True)["input_ids"]

    def answer(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": "mine", "owned_by": "vllm"}]}
        assert body["model"] == "mine"
        if path == "/tokenize":
            return {"tokens": self.render(body)}
        if path == "/v1/completions":
            assert body["echo"] and body["max_tokens"] == 1
            with torch.no_grad():
                rows = self.model(input_ids=torch.tensor([body["prompt"]])).logits[0].float().log_softmax(-1).tolist()
            values = [row[token] for row, token in zip(rows, body["prompt"][1:], strict=False)]
            return {"choices": [{"logprobs": {"token_logprobs": [None, *values, -1.0]}}]}
        stops = next(iter(body["logit_bias"])) == str(self.tokenizer.eos_token_id)
        return {"choices": [{"finish_reason": "stop" if stops else "length", "message": {"content": ""}}]}


@pytest.fixture
def serve():
    """Serves a `Server` on loopback; returns its address."""
    servers = []

    def start(answers: Server) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self, body=None):
                content = json.dumps(answers.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_POST(self):
                self.do_GET(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *arguments):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()


def test_server_with_log_probabilities(tool_run, serve, table):
    """An imitation of vLLM. One that leaves out the system turn renders other prompts, one with other weights another loss."""
    server = Server(tool_run)
    address = serve(server)
    code, rows, last = table(tool_run, f"{address}/v1/")
    assert code == 0 and last == f"{len(rows)} of {len(rows)} checks passed.", rows
    served = [(model, what) for model, what in rows if model.startswith("127.0.0.1")]
    assert len(served) == 3 and rows[served[0][0], "<|im_end|> ends an answer"] == "ok"
    server.tokenizer.chat_template = server.tokenizer.chat_template.replace("messages[0]['content']", "''", 1)
    with torch.no_grad():
        server.model.lm_head.weight.mul_(1.5)
    code, rows, _ = table(tool_run, address)
    assert code == 1 and failed(rows) == ["loss of 16 evaluation documents", "prompts with the trained tokens"]


def test_transformers_serve(tool_run, serving_python, environment, table, tmp_path):
    """A real server. It gives no log-probabilities, which is a line of its own and no passed check."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [serving_python, "-m", "transformers.cli.transformers", "serve", tool_run, "--port", str(port), "--device", "cpu"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log)
    try:
        wait_until(lambda: "running on" in (tmp_path / "log").read_text(), 120, (tmp_path / "log").read_text)
        code, rows, last = table(tool_run, address)
    finally:
        server.terminate()
        server.wait()
    assert code == 0 and last == f"{len(rows) - 1} of {len(rows) - 1} checks passed, 1 could not be made.", rows
    served = {what: result for (model, what), result in rows.items() if model == f"127.0.0.1:{port}"}
    assert served.pop("loss of 16 evaluation documents").startswith("not checked: the server gives no log-probabilities")
    names = ("first tokens of answers as from the saved model", "prompts with the trained number of tokens")
    assert served == dict.fromkeys([*names, "<|im_end|> ends an answer"], "ok")


def test_gguf_file(tool_run, table, tmp_path, monkeypatch, error_of):
    """An imitation of llama-cpp-python, first with the saved weights and template, then with others."""
    model, tokenizer = chat.load_model(tool_run), AutoTokenizer.from_pretrained(tool_run)
    metadata = {"tokenizer.chat_template": tokenizer.chat_template, "tokenizer.ggml.eos_token_id": str(tokenizer.eos_token_id)}

    class Llama:
        def __init__(self, path, n_ctx, logits_all, verbose):
            assert logits_all
            self.metadata = metadata

        def reset(self):
            self.scores = None

        def eval(self, ids):
            with torch.no_grad():
                self.scores = model(input_ids=torch.tensor([ids])).logits[0].float().numpy()

        def tokenize(self, text, add_bos, special):
            assert special and not add_bos
            return tokenizer(text.decode(), add_special_tokens=False)["input_ids"]

    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert "pip install llama-cpp-python" in error_of(verify.main, str(tool_run), str(file))
    monkeypatch.setitem(sys.modules, "llama_cpp", types.SimpleNamespace(Llama=Llama))
    code, rows, _ = table(tool_run, file)
    assert code == 0 and len([model for model, _ in rows if model == "model.gguf"]) == 3
    metadata |= {"tokenizer.chat_template": "{{ messages[-1]['content'] }}", "tokenizer.ggml.eos_token_id": "7"}
    code, rows, _ = table(tool_run, file)
    assert code == 1 and failed(rows) == ["prompts with the trained tokens", "tokens that end an answer"]


def test_last_batch_of_several_processes():
    """It is completed with the first rows, whose loss is part of its mean."""
    losses = [(1.0, 1), (4.0, 1), (6.0, 1)]
    assert verify.mean_as_logged(losses, 2, 1) == pytest.approx((2.5 + 2.5 + 6) / 3)
    assert verify.mean_as_logged(losses, 2, 2) == pytest.approx((2.5 + 2.5 + 3.5) / 3)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["."], ". has no model and no adapter"),
        (["RUN", "nowhere"], "nowhere is no model: pass a folder"),
        (["RUN", "--jsno"], "unknown flag --jsno"),
        (["RUN", "--served_model_name"], "--served_model_name is missing its value"),
        (["RUN", "--served_model_name", "mine"], "--served_model_name is for a server: pass its address too"),
        (["RUN", "a", "b"], "--verify compares one model, not a and b"),
        (["RUN", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
        (["UNFINISHED"], "has no expected.json and held_out.parquet to compare with"),
    ],
)
def test_mistake_is_one_error(rehearse, tmp_path, error_of, words, part):
    (tmp_path / "config.json").write_text("{}")
    folders = {"RUN": str(rehearse(*CHAT)), "UNFINISHED": str(tmp_path)}
    assert part in error_of(verify.main, *(folders.get(word, word) for word in words))


def test_launcher(launch):
    assert_one_error(launch("--verify"), "--verify needs the folder of a finished run")
