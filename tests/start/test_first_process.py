"""The process that checks a run is afterwards as the others are: it quantizes, loads configs and makes models meanwhile."""

from conftest import ROOT, read


def test_check_leaves_nothing_behind(fork_launch, tmp_path):
    """In a working directory of its own, so that the tiny model is made and quantized."""
    recipe, run = ROOT / "tests/start/describe_process.py", tmp_path / "run"
    flags = ["--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no", "--output_dir", run]
    process = fork_launch("--tiny", recipe, "2x3090_qlora", *flags, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "Quantizing" in process.stdout
    assert read(run, "process-0.json") == read(run, "process-1.json")
