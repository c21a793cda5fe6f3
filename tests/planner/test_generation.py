"""Plans of trainers that generate: the cache of keys and values, the time for a token, and what is scored before the training."""

import json
import shutil

from planner import cards, roofline
from planner.cache import simulation_of
from planner.simulation import Simulation

import pytest
from conftest import ROOT
from runs import tiny_tokenizer

LAYERS = 8
KEYS_AND_VALUES = 2 * 2 * LAYERS * 8 * 128  # bytes of a token in 16 bits, of 8 heads with 128 numbers
ROWS, PROMPT, COMPLETION = 64, 256, 512
EMBEDDING = 151_936 * 1024
CARD = cards.find_card("3090")


@pytest.fixture(scope="module")
def found(simulate, tmp_path_factory) -> list[Simulation]:
    """GRPO of eight of Qwen3-0.6B's layers, on one GPU and sharded; distillation, sharded, from an equal teacher."""
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer("Qwen/Qwen3-4B-Instruct-2507").save_pretrained(folder)
    config = json.loads((ROOT / "tests/published/models/Qwen/Qwen3-0.6B/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS, "max_window_layers": LAYERS}))
    teacher = shutil.copytree(folder, folder.with_name("teacher"))
    flags = ["--model_name_or_path", folder, "--max_completion_length", COMPLETION, "--global_batch_size", ROWS]
    recipe = ROOT / "recipes/qwen3_grpo.py"
    alone, sharded = (ROOT / f"accelerate_configs/{name}.yaml" for name in ("1x3090", "4gpu_full_shard"))
    runs = [
        (recipe, alone, flags, "cuda"),
        (recipe, sharded, flags, "cuda"),
        (ROOT / "recipes/qwen3_distill.py", sharded, [*flags, "--teacher_model_name_or_path", teacher], "cuda"),
    ]
    return [simulation_of(fields) for fields in simulate(runs)]


def test_cache_has_keys_and_values_of_all_texts(found):
    run = found[0]
    assert (run.generated_rows, run.prompt, run.completion) == (ROWS, PROMPT, COMPLETION)
    cache = KEYS_AND_VALUES * ROWS * (PROMPT + COMPLETION)
    assert cache <= run.peaks["generate"].by_holder["cache"] <= (1 + 1 / LAYERS) * cache, "one layer is copied at a time"


def test_token_reads_all_weights(found):
    """And the cache: once to add to it, once for each query head that shares it, and once for attention."""
    simulation = found[0]
    weights = simulation.peaks["generate"].by_holder["weights"]
    cache = KEYS_AND_VALUES * ROWS * (PROMPT + COMPLETION // 2)
    assert weights + cache < simulation.token.touched < 1.5 * weights + 9 * cache
    # 104 with adapters that are not merged, 66 with masks that each layer converts.
    assert 50 * LAYERS < simulation.token.launches < 62 * LAYERS
    assert 1 < simulation.host_peaks["generate"].bytes / (2 * (simulation.parameters - EMBEDDING)) < 1.5
    host = simulation.token.launches * cards.LAUNCH_GENERATING
    memory = simulation.token.touched / CARD.bandwidth / roofline.MEMORY_RATE
    assert roofline.generating_seconds(CARD, simulation) >= COMPLETION * max(host, memory)
    assert roofline.step_seconds(CARD, simulation) > roofline.generating_seconds(CARD, simulation)


def test_sharded_weights_are_gathered_for_each_token(found):
    alone, sharded = found[:2]
    layers = 2 * (alone.parameters - EMBEDDING)  # the embedding and the head remain gathered
    assert sharded.token.moved["gathered"] == pytest.approx(layers, rel=0.1) and not alone.token.moved


def test_teacher_is_whole_on_each_gpu(found):
    """In 4 bits, with a float32 scale for each 64 weights, where the recipe quantizes it; sharded is the model alone."""
    simulation = found[2]
    quantized = simulation.parameters - EMBEDDING
    for moment in ("forward", "backward", "generate"):
        held = simulation.peaks[moment].by_holder
        assert held["teacher_model"] == pytest.approx(quantized * (1 / 2 + 4 / 64) + 2 * EMBEDDING, rel=1e-3), moment
        assert held["weights"] == pytest.approx(2 * simulation.parameters / 4, rel=0.1) and simulation.shards == 4, moment
    assert simulation.copies == 4, "each process reads the teacher, and with it the model, from their files"
