"""The process that checks a run is afterwards as the others are: it quantizes, loads configs and makes models meanwhile."""

from conftest import ROOT
from runs import read


def test_check_leaves_nothing_behind(fork_launch, tmp_path):
    """In a working directory of its own, so that the tiny model is made and quantized."""
    recipe, run = ROOT / "tests/start/describe_process.py", tmp_path / "run"
    flags = ["--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no", "--output_dir", run]
    process = fork_launch("--tiny", recipe, "2x3090_qlora", *flags, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "Quantizing" in process.stdout
    assert read(run, "process-0.json") == read(run, "process-1.json")


def test_failure_of_the_first_process_keeps_its_exit_code(fork_launch, tmp_path):
    """Only the first process knows it, so the others must not record another one."""
    recipe = tmp_path / "full.py"
    recipe.write_text(
        "import runpy\nfrom harness.start import claim\nfrom harness.messages import die\n\n"
        "def fail(*args):\n    raise MemoryError\n\n"
        "claim.claim_run = fail\n"
        f"runpy.run_path({str(ROOT / 'recipes/qwen2_chat.py')!r}, run_name='__main__')\n"
    )
    process = fork_launch("--tiny", recipe, ROOT / "accelerate_configs/2x3090_qlora.yaml", cwd=tmp_path)
    assert process.returncode == 12 and "memory" in process.stderr, process.stderr
