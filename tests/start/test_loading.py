"""Where the weights go while a model is loaded."""

import json
import subprocess
import sys

from harness.launched import Launched

from conftest import ROOT, read
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

# What launch.py does behind its check, for a model that is not tiny.
START = """
import json, sys
from harness import configs
from harness.launched import Launched
from harness.start import launch, processes, server

started = Launched(**json.loads(sys.argv[1]))
server.prepare()
code = processes.run(started.recipe, sys.argv[2:], launch._accelerate(started, configs.read(started.config)))
server.leave(code)
"""


def test_one_copy_of_the_weights_in_host_ram(environment, rehearse, workplace, tmp_path):
    """Four processes load a model of half a GB; what they hold together is less than twice its size."""
    rehearse("qwen2_fineweb_edu", "1x3090")  # makes the tokenizer
    tokenizer = AutoTokenizer.from_pretrained(next((workplace / "outputs/tiny/.stand-ins").glob("Qwen--Qwen2-0.5B-*")))
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer)))
    gigabytes = model.num_parameters() * 4 / 1e9
    assert gigabytes > 0.45
    model.bfloat16().save_pretrained(tmp_path / "model")  # trained in float32, so that no process can use the file itself
    tokenizer.save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"recipe": "", "config": "", "model": "", "dataset": "", "tiny": True}))
    config = ROOT / "accelerate_configs/4gpu_full_shard.yaml"
    started = Launched(str(ROOT / "tests/start/measure_memory.py"), str(config), processes=4, on_cpu=True)
    flags = ["--model_name_or_path", tmp_path / "model", "--output_dir", run, "--use_cpu"]
    command = [sys.executable, "-c", START, started.to_environment()["RECIPE_LAUNCH"], *map(str, flags)]
    variables = environment | {"PYTHONPATH": str(ROOT / "recipes")}
    process = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    ranks = [read(run, f"rank{rank}.json") for rank in range(4)]
    assert all(rank["fsdp_enabled"] for rank in ranks)
    assert ranks[0]["grown"] > 0.9 * gigabytes and sum(rank["grown"] for rank in ranks) < 2 * gigabytes, ranks
