"""The Hub: what its errors mean, and how a run waits for it. The real libraries use a local Hub."""

import json
import re
import shutil

from harness import configs
from harness.data.reading import open_splits
from harness.hub import find_commit, is_reachable
from harness.messages import HubLost, UserError
from harness.model.models import check_weights
from harness.model.quantized import quantized_folder
from harness.start.claim import use_commits

import datasets
import huggingface_hub
import pyarrow
import pytest
from conftest import ROOT
from local_hub import serve
from pyarrow import parquet
from runs import check_run, losses, read, tiny_model, write_rows
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM
from trl import ModelConfig, SFTConfig

ROWS = [{"text": f"row {row} " + "of many words " * (row % 40)} for row in range(400)]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that this process uses, with an empty cache."""
    with serve(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        values = {"ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DOWNLOAD_TIMEOUT": 1}
        for name, value in (values | {"HUGGINGFACE_CO_URL_TEMPLATE": template}).items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
        huggingface_hub.close_session()  # its connections to the Hub of another test, which can have had this port
        yield server


def test_models_that_cannot_be_read(hub, error_of, tmp_path):
    """A model in the cache needs no Hub."""
    for name in ("locked", "open"):
        (hub.root / f"models/{name}/model").mkdir(parents=True)
    (hub.root / "models/locked/model/.gated").touch()
    (hub.root / "models/open/model/config.json").write_text('{"model_type": "llama"}')
    assert "gated repo" in error_of(find_commit, "locked/model", "main")
    for name in ("no/such-model", "a b", "./nowhere", str(tmp_path)):
        assert f"model {name}: " in error_of(find_commit, name, "main")
    find_commit("open/model", "main")
    assert is_reachable(1)
    hub.shutdown()
    hub.server_close()
    huggingface_hub.close_session()  # its connections are answered still
    assert not is_reachable(1)
    find_commit("open/model", "main")
    assert "--prepare" in error_of(find_commit, "no/network", "main")


def test_adapter_is_no_model(error_of, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "its/base"}')
    message = error_of(find_commit, str(tmp_path), "main")
    assert "its/base" in message and "--merge" in message


def test_branch_is_resolved_to_a_commit(hub):
    """4-bit weights that were made of an earlier commit are not those of the model."""
    tiny_model("meta-llama/Llama-3.1-8B", hub.root / "models/some/llama")
    model_args = ModelConfig("some/llama", load_in_4bit=True)
    training_args = SFTConfig(use_cpu=True, bf16=False, model_init_kwargs={"revision": "main"})
    folders = set()
    for commit in ("1" * 40, "2" * 40):
        hub.commit, model_args.model_revision = commit, "main"
        AutoConfig.from_pretrained("some/llama", revision="main")
        assert find_commit("some/llama", "main") == commit
        use_commits((None, training_args, model_args), commit)
        assert model_args.model_revision == commit == training_args.model_init_kwargs["revision"]
        folders.add(quantized_folder(model_args))
        training_args.model_init_kwargs["revision"] = "main"
    assert len(folders) == 2
    assert find_commit(str(hub.root / "models/some/llama"), "main") == "main"


def test_run_resumes_with_its_commit(session_hub, fork_launch, tmp_path):
    """An adapter that was trained on a commit resumes on it, and names it, although the branch has another one now."""
    tiny_model("meta-llama/Llama-3.1-8B", session_hub.root / "models/some/llama")
    flags = ["--model_name_or_path", "some/llama", "--use_cpu", "--bf16", "false", "--eval_strategy", "no", "--save_steps", "1"]
    flags += ["--dataset_name", write_rows(tmp_path / "rows.jsonl", [{"text": f"row {n}"} for n in range(20)]), "--use_peft"]
    for steps, commit in ((1, "1" * 40), (2, "2" * 40)):
        session_hub.commit = commit
        command = ["qwen2_fineweb_edu", "1x3090", *flags, "--max_steps", str(steps), "--output_dir", tmp_path / "run"]
        process = fork_launch(*command)
        assert process.returncode == 0, process.stdout + process.stderr
        assert read(tmp_path / "run", "run.json")["commit"] == "1" * 40
        assert read(tmp_path / "run", "adapter_config.json")["revision"] == "1" * 40
    assert read(tmp_path / "run")["resumed_from_step"] == 1


def test_run_resumes_with_the_commit_of_its_teacher(hub, tmp_path, monkeypatch):
    for name in ("student", "teacher"):
        tiny_model("Qwen/Qwen3-4B", hub.root / f"models/some/{name}")
    turns = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": "An answer."}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": turns}] * 9)
    flags = ["--model_name_or_path", "some/student", "--teacher_model_name_or_path", "some/teacher", "--use_cpu"]
    flags += ["--bf16", "false", "--dataset_name", str(rows), "--output_dir", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", ["qwen3_distill.py", *flags])
    config = configs.read(str(ROOT / "accelerate_configs/1x3090.yaml"))
    for hub.commit in ("1" * 40, "2" * 40):
        assert check_run(ROOT / "recipes/qwen3_distill.py", config, 1)
        assert read(tmp_path / "run", "run.json")["teacher_commit"] == "1" * 40
        (tmp_path / "run/checkpoint-1").mkdir(exist_ok=True)
        (tmp_path / "run/checkpoint-1/complete.json").touch()


@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one file", "several files"])
def test_weights_on_the_hub_are_compared_with_the_config(hub, error_of, size):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=2, tie_word_embeddings=False))
    folder = hub.root / "models/my/model"
    model.save_pretrained(folder, max_shard_size=size)
    check_weights("my/model")
    config = json.loads((folder / "config.json").read_text())
    changes = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (folder / "config.json").write_text(json.dumps(config | changes))
    shutil.rmtree(folder.parents[3] / "cache")
    assert "12 weights of my/model" in error_of(check_weights, "my/model")


@pytest.fixture
def stream(hub, monkeypatch):
    """A function that streams a dataset of two files, `some/rows`. A block is tried three times again, a request only once."""
    folder = hub.root / "datasets/some/rows"
    folder.mkdir(parents=True)
    for file in (0, 1):
        parquet.write_table(pyarrow.Table.from_pylist(ROWS[file::2]), folder / f"{file}.parquet", row_group_size=50)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    monkeypatch.setattr("datasets.config.STREAMING_READ_MAX_RETRIES", 3)
    monkeypatch.setattr("datasets.config.STREAMING_READ_RETRY_INTERVAL", 0.1)
    monkeypatch.setitem(huggingface_hub.utils.http_backoff.__kwdefaults__, "max_retries", 0)
    datasets.disable_progress_bars()
    yield lambda: (row["text"] for row in open_splits("some/rows", None, streaming=True)["train"])
    huggingface_hub.HfFileSystem.clear_instance_cache()


def second_file(hub):
    return hub.root / "datasets/some/rows/1.parquet"


@pytest.mark.parametrize("failure", ["500", "503", "429", "incomplete", "silent"])
def test_failure_that_ends(hub, stream, monkeypatch, failure):
    """Requests fail in the middle of a block, more of them than it is tried again: every row is read once."""
    monkeypatch.setattr("harness.data.stream_rows.BLOCKS_PER_FILE", 1)
    rows, failures = stream(), iter([None, None, None, failure, failure, *[None] * 4, failure, failure])
    texts = [next(rows) for _ in range(7)]
    hub.failure = lambda method, path: next(failures, None) if path.endswith("1.parquet") else None
    assert sorted([*texts, *rows]) == sorted(row["text"] for row in ROWS) and next(failures, None) is None


def test_failure_that_stays(hub, stream):
    rows, failures = stream(), []
    next(rows)
    hub.failure = lambda method, path: failures.append(path) or "503" if path.endswith("1.parquet") else None
    with pytest.raises(HubLost, match="HTTP status 503"):
        list(rows)
    assert len(failures) == 4


def test_missing_file_is_not_waited_for(hub, stream):
    rows = stream()
    next(rows)
    second_file(hub).unlink()
    before = len(hub.requests)
    with pytest.raises(UserError, match=r"1\.parquet cannot be read: "):
        list(rows)
    assert len(hub.requests) - before < 9


@pytest.fixture
def session_hub(tmp_path, hub_port):
    """The Hub of the runs that `fork_launch` starts."""
    with serve(tmp_path / "hub", hub_port) as server:
        yield server


def test_run_resumes_after_the_hub_was_lost(session_hub, fork_launch, tmp_path):
    """Two processes lose it in the middle. They save a checkpoint, and the same command logs what it would have logged."""
    tiny_model("Qwen/Qwen2-0.5B", tmp_path / "model")
    folder = session_hub.root / "datasets/many/rows"
    folder.mkdir(parents=True)
    for file in range(40):  # each of four parts packs 1,000 rows at a time, which are enough for eight steps
        rows = [{"text": f"{file} {row}"} for row in range(200)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{file:02}.parquet")
    flags = ["--model_name_or_path", tmp_path / "model", "--dataset_name", "many/rows", "--dataset_config", "default"]
    flags += ["--max_steps", "12", "--save_steps", "4", "--logging_steps", "1", "--eval_strategy", "no", "--bf16", "false"]
    flags += ["--max_length", "512", "--global_batch_size", "4", "--max_eval_samples", "4", "--learning_rate", "1e-2"]
    flags += ["--report_to", "none"]

    def train(run):
        recipe = ROOT / "tests/run/impatient.py"
        return fork_launch(recipe, "4gpu_ddp", "--use_cpu", *flags, "--output_dir", run, NPROC_PER_NODE="2")

    requests = []

    def count(method, path):
        requests.extend(re.findall(r"\.parquet$", path))

    session_hub.failure = count
    process = train(tmp_path / "uninterrupted")
    assert process.returncode == 0, process.stderr
    run, needed = tmp_path / "run", len(requests)
    requests.clear()

    def fail_before_the_end(method, path):
        count(method, path)
        return "503" if path.endswith(".parquet") and len(requests) > 0.94 * needed else None

    session_hub.failure = fail_before_the_end
    process = train(run)
    assert process.returncode == 75 and "Traceback" not in process.stderr, process.stdout + process.stderr
    message = r"Stopped at step (\d+): the Hub does not answer: HTTP status 503. The same command resumes from step \1\."
    step = re.search(message, process.stdout)[1]
    session_hub.failure = lambda method, path: None
    process = train(run)
    assert process.returncode == 0, process.stderr
    assert f"Resuming from {run}/checkpoint-{step}" in process.stdout
    assert losses(run) == losses(tmp_path / "uninterrupted") and read(run)["resumed_from_step"] == int(step)
