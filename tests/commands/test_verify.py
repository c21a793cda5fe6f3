"""`--verify` compares what was trained with what is saved, merged, quantized or served; a difference has exit code 1."""

import functools
import json
import shutil
import subprocess
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from harness.commands import chat, merge, served, verify
from harness.run import expectations

import pytest
import trl
from conftest import free_port, read, wait_until
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
    """Calls --verify; returns its exit code, the rows of its table by model and check, and how many passed."""

    def call(*words):
        capsys.readouterr()
        code = verify.main(*map(str, words))
        lines = capsys.readouterr().out.splitlines()
        (last,) = (line for line in lines if "checks passed" in line)
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
        "tokenizer": expectations.describe_tokenizer(tokenizer),
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
    assert expected.eval_losses == {"": read(run)["eval_loss"]} and len(expected.conversations) == 16
    losses = verify.measure(chat.load_model(run), evaluated, "")
    found = verify.per_token(losses)
    assert found == pytest.approx(read(run)["eval_loss"], abs=0.005)
    # Every document of the 4 conversations below is in the rows, so these are the tokens that were evaluated.
    documents = [ids for row in evaluated for ids, _ in row.documents]
    for conversation in expected.conversations[:4]:
        ids = conversation["input_ids"]
        assert any(ids[: len(document)] == document for document in documents if len(document) > 8)


def test_changed_chat_template_fails(copied, table):
    run = copied(*CHAT)
    template = run / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> ", 1))
    code, rows, last = table(run)
    assert code == 1 and failed(rows) == ["chat template (checksum)", "prompts with the trained tokens"]
    assert last == f"{len(rows) - 2} of {len(rows)} checks passed."


CLOCK = "{{ strftime_now('%H:%M:%S') }}{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"


def test_template_that_prints_the_date(fork_launch, tmp_path, table, monkeypatch):
    """The date is that of the first start, also when the run resumes, and for --verify. A server prints today's."""
    (tmp_path / "clock.jinja").write_text(CLOCK)
    run = tmp_path / "run"
    flags = ["--chat_template_path", tmp_path / "clock.jinja", "--assistant_only_loss", "false", "--output_dir", run]
    found = []
    for steps in ("2", "4"):
        process = fork_launch("--tiny", "qwen2_chat", "1x3090", *flags, "--max_steps", steps, "--save_steps", "2")
        assert process.returncode == 0, process.stderr
        assert "The chat template prints the date. A run always uses the date of its first start." in process.stdout
        found.append((read(run, "expected.json")["conversations"], read(run, "run.json")["date"]))
    assert found[0] == found[1] and read(run)["resumed_from_step"] == 2
    tokenizer = AutoTokenizer.from_pretrained(run)
    assert tokenizer.decode(found[0][0][0]["input_ids"]).startswith(found[0][1].split("T")[1])
    code, rows, _ = table(run)
    assert code == 0 and rows["run", "prompts with the trained tokens"] == "ok"
    expected, _ = verify.read_expectations(run)
    prompts = verify.make_prompts(functools.partial(verify.render, tokenizer), expected)
    assert all(prompt.is_trained for prompt in prompts)
    served_today = verify.render_as_a_server(tokenizer, prompts)
    assert all(prompt.is_trained and prompt.tokens != before.tokens for prompt, before in zip(served_today, prompts, strict=True))


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


def test_tolerance():
    """A model that was quantized later may differ more."""
    plain, quantized = (types.SimpleNamespace(config=types.SimpleNamespace(**how)) for how in ({}, {"quantization_config": {}}))
    assert [verify.tolerance_of(model) for model in (plain, quantized)] == [0.02, 0.1]


def test_json(rehearse, capsys):
    assert verify.main(str(rehearse(*CHAT)), "--json") == 0
    checks = json.loads(capsys.readouterr().out)
    assert {"model", "what", "expected", "found", "tolerance", "result"} == checks[0].keys()


SERVED = {
    "first tokens of answers as from the saved model",
    "prompts with the trained number of tokens",
    "<|im_end|> ends an answer",
}


@pytest.fixture
def verify_served(serving_python, environment, table, tmp_path):
    """Serves a folder with `transformers serve`; returns what `table` does of the run and the server."""

    def call(run, folder):
        port, log = free_port(), tmp_path / f"{folder.name}.log"
        command = [serving_python, "-m", "transformers.cli.transformers", "serve", folder, "--port", str(port), "--device", "cpu"]
        with log.open("w") as file:
            server = subprocess.Popen(command, env=environment | {"HF_HUB_OFFLINE": "1"}, stdout=file, stderr=file)
        try:
            wait_until(lambda: "running on" in log.read_text(), 120, log.read_text)
            return table(run, f"http://127.0.0.1:{port}/v1/")
        finally:
            server.terminate()
            server.wait()

    return call


def test_transformers_serve(tool_run, verify_served, tmp_path):
    """A real server, first with the trained template, then with one that leaves out the system turn."""
    code, rows, last = verify_served(tool_run, tool_run)
    assert code == 0 and last == f"{len(rows)} of {len(rows)} checks passed.", rows
    assert {what for model, what in rows if model.startswith("127.0.0.1")} == SERVED
    other = shutil.copytree(tool_run, tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("messages[0]['content']", "''", 1))
    code, rows, _ = verify_served(tool_run, other)
    assert code == 1 and "prompts with the trained number of tokens" in failed(rows)


def test_redirect_is_an_error_and_gets_no_key(error_of, monkeypatch):
    """The API key is for the address that was passed, and an answer has a limit."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append((self.path, self.headers["Authorization"]))
            if self.path.startswith("/elsewhere"):
                self.send_response(307)
                self.send_header("Location", f"http://localhost:{self.server.server_port}/moved")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"a": "' + b" " * 2000 + b'"}')

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        assert served.ask(address, "/v1", {}, "a") == (200, {"a": " " * 2000})
        monkeypatch.setattr(served, "MOST_BYTES", 1000)
        assert "more than 1,000 bytes" in error_of(served.ask, address, "/v1", {}, {})
        assert f"redirects to http://localhost:{server.server_port}/moved" in error_of(served.ask, address, "/elsewhere", {}, "a")
    finally:
        server.shutdown()
        server.server_close()
    assert seen == [("/v1", "Bearer secret")] * 2 + [("/elsewhere", "Bearer secret")]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["."], ". has no model and no adapter"),
        (["RUN", "nowhere"], "nowhere is no model: pass a folder"),
        ([], "--verify: the following arguments are required: RUN: see ./launch.sh --verify --help"),
        (["RUN", "--jsno"], "unrecognized arguments: --jsno"),
        (["RUN", "--served_model_name"], "--served_model_name/--served-model-name: expected one argument"),
        (["RUN", "--served_model_name", "mine"], "--served_model_name is for a server: pass its address too"),
        (["RUN", "a", "b"], "unrecognized arguments: b"),
        (["RUN", "model.gguf"], "model.gguf is no model: pass a folder"),
        (["RUN", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
        (["UNFINISHED"], "has no expected.json and held_out.parquet to compare with"),
    ],
)
def test_mistake_is_one_error(rehearse, tmp_path, error_of, words, part):
    (tmp_path / "config.json").write_text("{}")
    folders = {"RUN": str(rehearse(*CHAT)), "UNFINISHED": str(tmp_path)}
    assert part in error_of(verify.main, *(folders.get(word, word) for word in words))


def test_answers_that_do_not_count_are_no_prompts():
    """In a row of --split_conversations a template can write earlier answers in another form, without their reasoning."""
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "assistant")]
    turns[1]["train"] = False
    expected = types.SimpleNamespace(conversations=[{"messages": turns, "input_ids": [5, 6, 7, 8]}])
    prompts = verify.make_prompts(lambda turns, tools, options: [5, 6, 7] if len(turns) == 3 else [9], expected)
    assert [(len(prompt.turns), prompt.is_trained) for prompt in prompts] == [(3, True)]
