"""How much host memory the weights take while several processes load a model."""

import json

from harness.rehearsal import tiny

from conftest import ROOT, read
from transformers import Qwen2Config, Qwen2ForCausalLM


def test_one_copy_of_the_weights_in_host_memory(fork_launch, tmp_path):
    """Four processes load a model of half a GB. Together they gain less than twice its size."""
    tokenizer = tiny.make_tokenizer(tiny.family_of("Qwen/Qwen2-0.5B"))
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer)))
    gigabytes = model.num_parameters() * 4 / 1e9
    assert gigabytes > 0.45
    model.bfloat16().save_pretrained(tmp_path / "model")  # trained in float32, so that no process can map the file itself
    tokenizer.save_pretrained(tmp_path / "model")
    del model
    rows = [json.dumps({"text": f"row {row}: some words to train on"}) for row in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    recipe, run = ROOT / "tests/model/measure_memory.py", tmp_path / "run"
    flags = ["--model_name_or_path", tmp_path / "model", "--dataset_name", tmp_path / "rows.jsonl", "--output_dir", run]
    process = fork_launch(recipe, "4gpu_full_shard", "--use_cpu", *flags)
    assert process.returncode == 0, process.stderr
    ranks = [read(run, f"rank{rank}.json") for rank in range(4)]
    assert all(rank["fsdp_enabled"] for rank in ranks)
    assert ranks[0]["gained"] > 0.9 * gigabytes and sum(rank["gained"] for rank in ranks) < 2 * gigabytes, ranks
