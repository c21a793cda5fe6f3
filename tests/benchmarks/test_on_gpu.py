"""benchmarks/on_gpu.py: models have their real shapes, one run is measured on the CPU, docs/which-recipe.md has the results."""

import json
import re
import sys

import pytest
from conftest import CONFIGS, RECIPES, ROOT, TABLE, slow
from datasets import load_dataset
from transformers import AutoProcessor

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


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_model_has_its_real_shape(recipe):
    (name,) = re.findall(r'^ *model_name_or_path="(.*?)"', recipe.read_text(), re.MULTILINE)
    tokenizer = tiny_tokenizer(name)
    assert inputs.meta_model(name, tokenizer).num_parameters() == PARAMETERS[name]


def test_model_and_rows_with_images(tmp_path):
    """Of about a megapixel, as in a run: a rehearsal's are small."""
    inputs.make_model("Qwen/Qwen3.5-4B", tmp_path / "model", is_tiny=True)
    assert AutoProcessor.from_pretrained(tmp_path / "model").image_processor.size["longest_edge"] > 10**6
    inputs.make_dataset("davanstrien/iconclass-vlm", None, tmp_path / "rows", 1)
    assert load_dataset(str(tmp_path / "rows"), split="train[:1]")[0]["images"][0].size == (1024, 1024)


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
