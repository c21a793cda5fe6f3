"""How much host memory the weights take while several processes load a model."""

import json

import pytest
from conftest import ROOT, slow
from runs import read, tiny_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM


@pytest.fixture
def load_model(fork_launch, tmp_path):
    """Loads a model of these sizes with a config; returns the number of its parameters, and what every process measured."""

    def call(config, processes, *flags, **sizes):
        tokenizer = tiny_tokenizer("Qwen/Qwen2-0.5B")
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer)))
        parameters = model.num_parameters()
        model.bfloat16().save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        del model
        rows = [json.dumps({"text": f"row {row}: some words to train on"}) for row in range(200)]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        files = ["--model_name_or_path", tmp_path / "model", "--dataset_name", tmp_path / "rows.jsonl"]
        recipe, run = ROOT / "tests/model/measure_memory.py", tmp_path / "run"
        process = fork_launch(recipe, config, "--use_cpu", *files, "--output_dir", run, *flags)
        assert process.returncode == 0, process.stderr
        ranks = [read(run, f"rank{rank}.json") for rank in range(processes)]
        assert all(rank["fsdp_enabled"] for rank in ranks)
        return parameters, [rank["gained"] for rank in ranks]

    return call


def test_one_copy_of_the_weights_in_host_memory(load_model):
    """Four processes load a model of half a GB. Together they gain less than twice its size."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8}
    # Trained in float32, so that no process can map the file itself.
    parameters, gained = load_model("4gpu_full_shard", 4, **sizes)
    gigabytes = parameters * 4 / 1e9
    assert gigabytes > 0.45
    assert gained[0] > 0.9 * gigabytes and sum(gained) < 2 * gigabytes, gained


@slow
def test_4bit_weights_are_mapped(load_model):
    """Their file is read when FSDP shards them: until then no process has a copy, as `needed_host_memory` assumes."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 8}
    flags = ["--use_peft", "--load_in_4bit", "--dtype", "bfloat16", "--bf16", "false"]
    parameters, gained = load_model("2x3090_qlora", 2, *flags, **sizes)
    gigabytes = parameters / 2 / 1e9
    assert gigabytes > 0.2 and max(gained) < gigabytes / 2, (gigabytes, gained)
