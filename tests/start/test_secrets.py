"""Tokens and keys of the environment are written nowhere."""

from pathlib import Path

SECRETS = {
    "HF_TOKEN": "hf_secretOfTheHub",
    "WANDB_API_KEY": "secretOfWandb0123456789",
    "AWS_SECRET_ACCESS_KEY": "secretOfTheBucket",
    "OPENAI_API_KEY": "sk-secretOfTheServer",
}


def files_with_secrets(*folders: Path) -> list[str]:
    """Paths and names of variables."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [f"{path}: {name}" for path in files for name, value in SECRETS.items() if value.encode() in path.read_bytes()]


def test_run_and_mirror(fork_launch, tmp_path):
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    arguments = ["qwen2_chat", "1x3090", "--max_steps", "2", "--save_steps", "1", "--eval_strategy", "no"]
    process = fork_launch("--tiny", *arguments, "--output_dir", run, "--mirror", mirror.as_uri(), HARNESS_DEBUG="1", **SECRETS)
    assert process.returncode == 0, process.stderr
    assert (run / "train_results.json").is_file() and list(mirror.rglob("*.safetensors"))
    assert not files_with_secrets(run, mirror)
    assert not any(value in process.stdout + process.stderr for value in SECRETS.values())


def test_traceback_of_an_error(fork_launch, tmp_path):
    process = fork_launch(
        "--tiny", "qwen2_chat", "1x3090", "--max_steps", "0", "--output_dir", tmp_path / "run", HARNESS_DEBUG="1", **SECRETS
    )
    assert process.returncode == 2 and "Traceback" in process.stderr
    assert not any(value in process.stdout + process.stderr for value in SECRETS.values())
