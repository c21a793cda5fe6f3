"""benchmarks/on_gpu.py: models have their real shapes, one run is measured on the CPU, docs/which-recipe.md has the results."""

import contextlib
import json
import re
import sys
import time

import datasets
import pytest
import torch
from conftest import CONFIGS, RECIPES, ROOT, TABLE, slow
from safetensors.torch import save_file

sys.path.insert(0, str(ROOT / "benchmarks"))
import inputs
import measuring
import on_gpu
from runs import tiny_tokenizer

pytestmark = slow

PARAMETERS = {  # from each model's page on the Hub
    "Qwen/Qwen2-0.5B": 494_032_768,
    "Qwen/Qwen2-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen3-0.6B": 596_049_920,  # its page counts the embedding twice, which is also the head
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen/Qwen3.5-4B": 4_539_265_536,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "openai-community/gpt2-xl": 1_557_611_200,
}
CPU = {"gpus": 0, "device": "CPU", "bytes": 0}


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A100-PCIE-40GB", "A100 40 GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80 GB"),
        ("NVIDIA H200", "H200"),
        ("x86_64", None),
    ],
)
def test_card_of_a_device(device, card):
    from planner import cards

    assert [one.name for one in cards.CARDS if measuring.words_of(one.name) <= measuring.words_of(device)] == (
        [card] if card else []
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_model_has_its_real_shape(recipe):

    (name,) = re.findall(r'^ *model_name_or_path="(.*?)"', recipe.read_text(), re.MULTILINE)
    tokenizer = tiny_tokenizer(name)
    assert inputs.meta_model(name, tokenizer).num_parameters() == PARAMETERS[name]


def test_every_recipe_is_measured_on_any_number_of_gpus():
    """Every pair that the GPUs can run; if a recipe has none, one of its configs with changes."""
    for gpus in (1, 4, 8):
        for recipe in RECIPES:
            pairs = on_gpu.pairs(recipe.stem, gpus)
            assert pairs
            for config, changes in pairs:
                processes = (measuring.settings_of(config) | changes)["num_processes"]
                assert processes <= gpus and (not changes or len(pairs) == 1)
    assert ("4gpu_full_shard", {"num_machines": 1, "num_processes": 1}) in on_gpu.pairs("llama31_8b_lora", 1)
    assert ("4gpu_full_shard", {}) in on_gpu.pairs("llama31_8b_lora", 4)
    assert {card for card in measuring.CARDS if any(card in config.stem for config in CONFIGS)} == set(measuring.CARDS)


def test_measurement_limits_memory_and_keeps_the_settings_of_the_launcher(monkeypatch, tmp_path):
    environments, environment = [], {}
    monkeypatch.setattr(measuring, "served_inputs", lambda *args, **sizes: contextlib.nullcontext((tmp_path, environment, 1)))
    monkeypatch.setattr(
        measuring, "run", lambda words, folder, environment, deadline: environments.append(environment) or {"failed": ""}
    )
    monkeypatch.setattr(measuring, "find_device_in_process", lambda dtype: {"matrix_tflops": 1})
    measuring.measure("qwen2_fineweb_edu", "1x3090_offload", {}, {"gpus": 1, "device": "any", "bytes": 48e9}, 2)
    settings = environments[0]["PYTORCH_ALLOC_CONF"]
    assert settings == "expandable_segments:True,per_process_memory_fraction:0.5000"


@slow
def test_measurement_on_cpu(monkeypatch):
    """One of the two processes of the 70B recipe and one of its layers, with 4-bit weights and offload, from the local Hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # is not passed on to launch.sh
    record = measuring.measure("llama31_70b_qlora", "2x3090_qlora", {"num_processes": 1}, CPU, 2, num_hidden_layers=1)
    assert "failed" not in record, record["failed"]
    assert record["measurement"] == "llama31_70b_qlora × 2x3090_qlora, 1 of 2 processes, num_hidden_layers 1"
    assert record["world_size"] == 1 and len(record["losses"]) == 2
    assert "7 compared byte for byte" in record["bytes_of_4bit_weights"]
    assert record["tokens_per_second"] > 0 and 0 < record["share_of_matrix_rate"] < 1 and record["seconds_to_first_step"] > 1
    assert json.loads(json.dumps(record)) == record
    assert record["tokens"] == 2 * 4 * 256, "steps x rows x length"
    assert record["forecast"]["tokens_per_step"] == 4 * 256 and record["forecast"]["card"] is None


def test_steps_without_all_their_micro_batches_are_a_failure(monkeypatch, tmp_path):
    results = {
        "tokens": 900_000,
        "global_batch_size": 16,
        "use_peft": False,
        "world_size": 1,
        "tokens_per_second": 1.0,
        "output": "",
        "forecast": None,
        "global_step": 30,
    }
    monkeypatch.setattr(measuring, "run", lambda *arguments: dict(results))
    monkeypatch.setattr(measuring, "find_device_in_process", lambda dtype: {"matrix_tflops": 1.0})
    monkeypatch.setattr(measuring, "served_inputs", lambda *arguments: contextlib.nullcontext((tmp_path, {}, 10)))
    arguments = ("llama31_8b_lora", "4gpu_full_shard", {}, {"gpus": 4, "device": "GPU", "bytes": 1}, 30)
    assert "900,000 tokens in 30 steps, expected 983,040" in measuring.measure(*arguments)["failed"]
    results["tokens"] = 980_000
    assert "failed" not in measuring.measure(*arguments)


def test_text_is_repeated_until_every_step_has_its_micro_batches(tmp_path):
    """Rows with instruction, input and output are short."""
    for name, config, columns in (("iamtarun/python_code_instructions_18k_alpaca", None, 3), ("Salesforce/wikitext", "c", 1)):
        inputs.make_dataset(name, config, tmp_path / name, 200_000)
        rows = datasets.load_dataset(
            "parquet", data_files=f"{tmp_path / name}/train/*.parquet", split="train", cache_dir=tmp_path
        )
        texts = ["".join(str(row[column]) for column in rows.column_names[:columns]) for row in rows]
        tokens = len("".join(texts)) * 0.27  # as a rehearsal's tokenizers make of Python's documentation
        assert 200_000 < tokens < 600_000


def test_gradients_are_compared_one_by_one(tmp_path):
    """A wrong one, one that is missing, and one that is zero in both."""
    gradients = {"a": torch.ones(4), "b": torch.ones(4), "zero": torch.zeros(4)}
    for name, changed in (("first", {}), ("same", {"b": torch.full((4,), 1.001)}), ("wrong", {"b": -torch.ones(4)})):
        (tmp_path / name).mkdir()
        save_file(gradients | changed, tmp_path / name / "1-0.safetensors")
    same = on_gpu.compare_gradients(tmp_path / "first", tmp_path / "same")
    assert (same["gradients"], same["wrong_gradients"]) == (3, 0) and "failed" not in same
    wrong = on_gpu.compare_gradients(tmp_path / "first", tmp_path / "wrong")
    assert wrong["failed"].startswith("1 of 3 gradients differ") and wrong["largest_in"].endswith(" b")
    save_file({"a": gradients["a"]}, tmp_path / "wrong/1-0.safetensors")
    assert on_gpu.compare_gradients(tmp_path / "wrong", tmp_path / "first")["wrong_gradients"] == 2


def test_run_is_stopped_at_the_deadline(monkeypatch, tmp_path):
    """launch.sh is replaced by a program that does not end."""
    (tmp_path / "launch.sh").write_text("#!/bin/sh\nsleep 60\n")
    (tmp_path / "launch.sh").chmod(0o755)
    monkeypatch.setattr(inputs, "ROOT", tmp_path)
    began = time.monotonic()
    assert "not finished after" in measuring.run([], tmp_path / "output", {}, began + 1)["failed"]
    assert time.monotonic() - began < 20


def test_layers_are_extrapolated():
    few = {"sizes": {"num_hidden_layers": 4}, "recipe": "r", "config": "c", "device": "d", "limit_gb": 24.0, "world_size": 1}
    few |= {"seconds_per_step": 3.0, "peak_gpu_gb": 6.0, "peak_gpu_reserved_gb": 7.0, "peak_host_gb": 4.0}
    few |= {"tokens_per_second": 8192 / 3}
    more = few | {"sizes": {"num_hidden_layers": 8}, "seconds_per_step": 5.0, "peak_gpu_gb": 6.5, "tokens_per_second": 8192 / 5}
    full = on_gpu.extrapolate(few, more, 80, 2)
    assert full["extrapolated"] and full["seconds_per_step"] == 41.0 and full["peak_gpu_gb"] == 15.5
    assert full["tokens_per_second"] == round(2 * 8192 / 41, 1) and full["peak_host_gb"] == 4.0


def test_losses_of_two_rehearsals_are_compared_step_by_step():
    assert on_gpu.compare([4.0, 3.0], [4.0, 2.0]) == {"largest_difference": 0.5, "in_step": 2}
    with pytest.raises(ValueError, match="longer"):
        on_gpu.compare([4.0], [4.0, 2.0])


def measured(**changes) -> dict:
    record = {"recipe": "qwen2_chat", "config": "1x3090", "changes": {}, "sizes": {}, "device": "RTX 3090", "limit_gb": None}
    return record | {"date": "2026-12-24", "peak_gpu_gb": 13.21, "tokens_per_second": 9876.5} | changes


def row(table: str) -> str:
    return next(line for line in table.splitlines() if line.startswith("| `qwen2_chat` | `1x3090` |"))


def test_measurement_replaces_its_forecasts():
    older = measured(date="2026-11-30", peak_gpu_gb=12.0)
    written = on_gpu.with_measurements(TABLE, [measured(), older])
    assert row(written).endswith("| 13.2 GB (RTX 3090, 2026-12-24) | 9,876 (RTX 3090, 2026-12-24) |")
    assert written.replace(row(written), "") == TABLE.replace(row(TABLE), "")
    assert on_gpu.with_measurements(written, [measured(), older]) == written
    on_large_card = row(on_gpu.with_measurements(TABLE, [measured(device="NVIDIA H200", limit_gb=24.0)]))
    assert "13.2 GB (NVIDIA H200 limited to 24 GB, 2026-12-24)" in on_large_card
    too_large = row(on_gpu.with_measurements(TABLE, [measured(failed="error: CUDA out of memory")]))
    assert too_large.count("out of memory (RTX 3090, 2026-12-24)") == 2


@pytest.mark.parametrize(
    "changes",
    [{"changes": {"num_processes": 1}}, {"sizes": {"num_hidden_layers": 4}}, {"device": "CPU"}, {"failed": "no space"}],
    ids=["config", "model", "CPU", "failed"],
)
def test_other_measurements_replace_no_forecast(changes):
    assert on_gpu.with_measurements(TABLE, [measured(**changes)]) == TABLE


def test_table_has_the_measurements():
    records = [json.loads(path.read_text()) for path in inputs.RESULTS.glob("*.json")]
    assert records
    for record in records:
        assert record["hardware"]["cpu"] and record["versions"]["torch"] and record["command"] and record["commit"]
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", record["date"])
    assert on_gpu.with_measurements(TABLE, records) == TABLE
