"""How much host memory the weights take while several processes load a model."""

import json

import pytest
from conftest import ROOT, slow
from runs import read, tiny_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

IN_4_BIT = ["--use_peft", "--load_in_4bit", "--dtype", "bfloat16", "--bf16", "false"]


@pytest.mark.parametrize(
    ("config", "processes", "size", "flags"),
    [("4gpu_full_shard", 4, 1024, []), pytest.param("2x3090_qlora", 2, 2048, IN_4_BIT, marks=slow)],
    ids=["float32", "4 bits"],
)
def test_copies_of_the_weights_in_host_memory(fork_launch, tmp_path, config, processes, size, flags):
    """Four processes that load half a GB gain less than twice its size together: one has a copy, none can map the file.

    4-bit weights are read when FSDP shards them: until then no process has a copy, as `needed_host_memory` assumes.
    """
    tokenizer = tiny_tokenizer("Qwen/Qwen2-0.5B")
    sizes = {"hidden_size": size, "intermediate_size": 4 * size, "num_hidden_layers": 8, "num_attention_heads": 8}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer)))
    gigabytes = model.num_parameters() * (0.5 if flags else 4) / 1e9
    model.bfloat16().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    del model
    rows = [json.dumps({"text": f"row {row}: some words to train on"}) for row in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    flags = [*flags, "--model_name_or_path", tmp_path / "model", "--dataset_name", tmp_path / "rows.jsonl"]
    recipe, run = ROOT / "tests/model/measure_memory.py", tmp_path / "run"
    process = fork_launch(recipe, config, "--use_cpu", "--output_dir", run, *flags)
    assert process.returncode == 0, process.stderr
    ranks = [read(run, f"rank{rank}.json") for rank in range(processes)]
    gained = [rank["gained"] for rank in ranks]
    assert all(rank["fsdp_enabled"] for rank in ranks) and gigabytes > 0.2
    if size == 2048:
        assert max(gained) < gigabytes / 2, (gigabytes, gained)
    else:
        assert gained[0] > 0.9 * gigabytes and sum(gained) < 2 * gigabytes, (gigabytes, gained)
