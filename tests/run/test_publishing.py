"""--push_to_hub, against a Hub on this machine: what is uploaded, what is refused before the training, an upload that fails."""

import shutil
from types import SimpleNamespace

from harness.messages import UserError
from harness.run.saving import Repository, publish
from harness.start.arguments import take_repository
from harness.start.claim import make_repository

import pytest
from huggingface_hub import close_session
from local_hub import serve

TOKEN = "hf_this_is_a_token_of_a_test"
USERS = {
    TOKEN: {"name": "me", "orgs": [{"name": "my-lab"}], "auth": {"accessToken": {"role": "write"}}},
    "hf_reads": {"name": "me", "orgs": [], "auth": {"accessToken": {"role": "read"}}},
}


@pytest.fixture
def hub(tmp_path, hub_port):
    with serve(tmp_path / "hub", hub_port) as server:
        server.users = USERS
        (server.root / "models/me/open").mkdir(parents=True)
        yield server


@pytest.fixture
def use_hub(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    close_session()  # it keeps a connection to the server of the test before
    return lambda token: monkeypatch.setenv("HF_TOKEN", token)


@pytest.mark.parametrize(
    ("token", "name", "is_private", "is_refused"),
    [
        ("", "mine", True, True),
        ("hf_wrong", "mine", True, True),
        ("hf_reads", "mine", True, True),
        ("hf_reads", "me/open", False, True),
        (TOKEN, "another/mine", True, True),
        (TOKEN, "a/b/c", True, True),
        (TOKEN, "me/open", True, True),  # it is public
        (TOKEN, "me/open", False, False),
        (TOKEN, "my-lab/new", True, False),
        (TOKEN, "new", True, False),
    ],
)
def test_repository_is_made_before_the_training(hub, use_hub, token, name, is_private, is_refused):
    use_hub(token)
    if not is_refused:
        make_repository(Repository(name, is_private))
        assert (hub.root / "models" / (name if "/" in name else f"me/{name}") / ".private").exists() == is_private
        return
    with pytest.raises(UserError, match="--push_to_hub: ") as raised:
        make_repository(Repository(name, is_private))
    assert not token or token not in str(raised.value)


def test_trainer_itself_uploads_nothing():
    """transformers would upload every checkpoint, into a public repository."""
    args = SimpleNamespace(push_to_hub=True, hub_model_id=None, hub_private_repo=None, output_dir="outputs/mine")
    assert take_repository(args) == Repository("mine", is_private=True)
    assert args.push_to_hub is False and take_repository(args) is None


def test_run_is_uploaded(hub, use_hub, capsys, rehearse, fork_launch, workdir, tmp_path):
    """A run whose upload fails is finished, and says how to upload it."""
    rehearse("qwen2_fineweb_edu", "1x3090")
    made = next((workdir / "outputs/tiny/.made").glob("Qwen--Qwen2-0.5B-*"))
    model, rows, run = tmp_path / "model", tmp_path / "rows.txt", tmp_path / "run"
    shutil.copytree(made, model)
    rows.write_text("\n".join(f"The number {number} comes before {number + 1}." for number in range(60)))
    command = ["qwen2_fineweb_edu", "1x3090", "--use_cpu", "--max_steps", "2", "--max_length", "64"]
    command += ["--global_batch_size", "2", "--per_device_train_batch_size", "1", "--max_eval_samples", "4"]
    command += ["--model_name_or_path", model, "--dataset_name", rows, "--output_dir", run, "--use_peft"]
    command += ["--push_to_hub", "--hub_model_id", "my-lab/mine"]

    hub.failure = lambda method, path: "403" if "/commit/" in path else None
    process = fork_launch(*command, cwd=tmp_path, HF_TOKEN=TOKEN)
    assert process.returncode == 0 and TOKEN not in process.stdout + process.stderr, process.stdout + process.stderr
    assert "warning: the upload to my-lab/mine failed" in process.stdout and f"hf upload my-lab/mine {run} " in process.stdout
    uploaded = hub.root / "models/my-lab/mine"
    assert [file.name for file in uploaded.iterdir()] == [".private"]
    hub.failure = lambda method, path: None
    use_hub(TOKEN)
    publish(run, Repository("my-lab/mine", is_private=True))
    assert f"Uploaded to {hub.url}/my-lab/mine" in capsys.readouterr().out
    names = {file.relative_to(uploaded).as_posix() for file in uploaded.rglob("*")}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md", "train_results.json"} <= names
    private = ("held_out", "samples", "prompt", "run.json", ".")
    assert {name for name in names if "checkpoint" in name or name.startswith(private)} == {".private"}
    assert (uploaded / "adapter_model.safetensors").read_bytes() == (run / "adapter_model.safetensors").read_bytes()
    for file in [*run.rglob("*"), *uploaded.rglob("*")]:
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file
