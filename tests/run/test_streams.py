"""Streams whose files end at different times go on for every process as long as the others need."""

import json
import subprocess
import sys
from types import SimpleNamespace

from harness.run import streams

import pytest
import yaml
from conftest import ROOT, read
from datasets import Dataset

RECIPE = "qwen2_fineweb_edu"


def test_streams_never_run_dry(build_trainer):
    """Ranks read files of different length; each goes on as long as the others need."""
    trainer = build_trainer(RECIPE, "--max_length", "4096")
    streams.keep_together(trainer)
    rows = sum(1 for _, _ in zip(trainer.train_dataset, range(200), strict=False))
    assert rows == 200  # the stand-in fills about forty sequences of this length


def test_a_stream_to_evaluate_on_is_refused(capsys):
    stream = Dataset.from_list([{"text": "a"}]).to_iterable_dataset()
    trainer = SimpleNamespace(train_dataset=stream, eval_dataset=stream, args=SimpleNamespace(world_size=2))
    with pytest.raises(SystemExit) as stopped:
        streams.keep_together(trainer)
    assert stopped.value.code == 2 and "Dataset.from_list" in capsys.readouterr().err


def test_processes_whose_files_end_at_different_times_go_on(rehearse, environment, workplace, tmp_path):
    """Three files for two processes, five passes over the shorter share: without help they wait for each other for ever."""
    rehearse(RECIPE, "1x3090")  # makes the stand-ins
    model = next((workplace / "outputs/tiny/.stand-ins").glob("Qwen--Qwen2-0.5B-*"))
    (tmp_path / "data").mkdir()
    for file, rows in enumerate((40, 30, 20)):
        texts = [json.dumps({"text": f"file {file} row {row} " + "of many words " * 20}) for row in range(rows)]
        (tmp_path / f"data/{file}.jsonl").write_text("\n".join(texts))
    settings = yaml.safe_load((ROOT / "accelerate_configs/4gpu_full_shard.yaml").read_text()) | {"num_processes": 2}
    config = tmp_path / "2gpu.yaml"
    config.write_text(yaml.safe_dump(settings))
    launched = {"recipe": RECIPE, "config": str(config), "processes": 2, "on_cpu": True}
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"recipe": RECIPE, "config": "", "model": "", "dataset": "", "tiny": True}))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--num_machines", "1"]
    command += ["--main_process_port", "0", ROOT / f"recipes/{RECIPE}.py", "--output_dir", run, "--max_steps", "40"]
    command += ["--model_name_or_path", model, "--dataset_name", tmp_path / "data", "--dataset_config", "default"]
    command += ["--max_length", "256", "--gradient_accumulation_steps", "1", "--max_eval_samples", "4"]
    command += ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--logging_steps", "10", "--bf16", "false"]
    variables = {"RECIPE_LAUNCH": json.dumps(launched), "PYTHONPATH": str(ROOT / "recipes")}
    process = subprocess.run(
        list(map(str, command)), cwd=tmp_path, env=environment | variables, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert read(run)["global_step"] == 40
