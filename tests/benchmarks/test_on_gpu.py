"""benchmarks/on_gpu.py: models have their real shapes, one run is measured on the CPU, docs/which-recipe.md has the results."""

import json
import re
import sys

from conftest import CONFIGS, RECIPES, ROOT, TABLE, slow

sys.path.insert(0, str(ROOT / "benchmarks"))
import inputs
import measuring
import on_gpu

pytestmark = slow

CPU = {"gpus": 0, "device": "CPU", "bytes": 0}


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
    too_large = row(on_gpu.with_measurements(TABLE, [measured(failed="error: CUDA out of memory")]))
    assert too_large.count("out of memory (RTX 3090, 2026-12-24)") == 2


def test_table_has_the_measurements():
    records = [json.loads(path.read_text()) for path in inputs.RESULTS.glob("*.json")]
    assert records
    for record in records:
        assert record["hardware"]["cpu"] and record["versions"]["torch"] and record["command"] and record["commit"]
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", record["date"])
    assert on_gpu.with_measurements(TABLE, records) == TABLE
