"""`--chat` loads the model of a run as it was trained, and answers lines of standard input in the run's chat template."""

import collections
import io
import json
import shutil
import sys
from pathlib import Path

from harness.commands import chat, saved
from harness.run.prompts import describe_rows

import pytest
import torch
import transformers.integrations.accelerate as device_maps
from conftest import ROOT
from datasets import Dataset
from runs import assert_one_error, read
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer

QLORA = ("llama31_70b_qlora", "2x3090_qlora")


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None]).logits


def answer_lines(lines: str, monkeypatch, run, *words: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    chat.main(str(run), *words)


def test_conversation_with_a_4bit_model(rehearse, monkeypatch, capsys):
    """The prompts have the run's template and the earlier turns; answers are what the model says, up to --max_new_tokens."""
    prompts, answers, generate = [], [], chat.generate

    def record(model, tokenizer, inputs, new_tokens):
        prompts.append(tokenizer.decode(inputs["input_ids"][0]))
        answers.append(generate(model, tokenizer, inputs, new_tokens))
        first = logits_of_next(model, inputs).argmax()
        assert answers[-1].startswith(tokenizer.decode(first, skip_special_tokens=True).strip())
        return answers[-1]

    def logits_of_next(model, inputs):
        with torch.no_grad():
            return model(input_ids=inputs["input_ids"]).logits[0, -1]

    monkeypatch.setattr(chat, "generate", record)
    answer_lines("Why?\nHow?\n\nWho?\n", monkeypatch, rehearse(*QLORA), "--max_new_tokens", "4")
    printed = capsys.readouterr().out
    first, second, third = prompts
    assert first == "<|begin_of_text|>### User\nWhy?\n\n### Assistant\n"
    assert second.startswith(first + answers[0]) and second.endswith("### User\nHow?\n\n### Assistant\n")
    assert third == first.replace("Why", "Who"), "an empty line starts a new conversation"
    assert all(answer in printed for answer in answers)


def record_prompts(monkeypatch) -> list[str]:
    """What --chat gives to the model."""
    prompts = []
    generate = chat.generate

    def record(model, tokenizer, inputs, new_tokens):
        prompts.append(tokenizer.decode(inputs["input_ids"][0]))
        return generate(model, tokenizer, inputs, new_tokens)

    monkeypatch.setattr(chat, "generate", record)
    return prompts


def test_run_on_texts_continues_a_text(rehearse, monkeypatch):
    """Qwen2-0.5B has a chat template, which this run has not used."""
    run, prompts = rehearse("qwen2_fineweb_edu", "1x3090"), record_prompts(monkeypatch)
    assert saved.load_saved_tokenizer(run).chat_template
    answer_lines("The sun\\nis\n\n", monkeypatch, run, "--max_new_tokens=3")
    assert prompts == ["The sun\nis"]


def test_system_message_of_the_training_rows():
    def described(*systems):
        rows = [[{"role": "system", "content": text}] if text else [] for text in systems]
        answer = {"role": "assistant", "content": "Yes."}
        return describe_rows(Dataset.from_list([{"messages": [*turns, answer]} for turns in rows]))

    assert described("Be brief.", "Be brief.") == {"rows": "conversations", "system": "Be brief."}
    assert described("Be brief.", "Be kind.")["system"] is described("Be brief.", None)["system"] is None


def test_system_message(rehearse, monkeypatch, tmp_path):
    """A run's own system message is in every prompt, and --system replaces it."""
    run = tmp_path / "run"
    shutil.copytree(rehearse("qwen2_chat", "1x3090"), run)
    (run / "prompt.json").write_text(json.dumps(read(run, "prompt.json") | {"system": "Be brief."}))
    prompts = record_prompts(monkeypatch)
    answer_lines("Why?\n\nHow?\n", monkeypatch, run, "--max_new_tokens=1")
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert [prompt.startswith(start) for prompt in prompts] == [True, True]
    answer_lines("Why?\n", monkeypatch, run, "--max_new_tokens=1", "--system", "Be kind.")
    assert "Be kind." in prompts[-1] and "Be brief." not in prompts[-1]


def test_flags_without_an_effect(rehearse, error_of):
    run = rehearse("qwen2_fineweb_edu", "1x3090")
    assert "--system" in error_of(chat.main, str(run), "--system", "Be brief.")


@pytest.fixture
def copied_run(rehearse, tmp_path):
    """A run whose results can be changed; returns its folder, and a function that writes another place of its weights."""
    folder = tmp_path / "run"
    shutil.copytree(rehearse(*QLORA), folder)

    def write(place: str) -> None:
        (folder / "train_results.json").write_text(json.dumps(read(folder) | {"quantized_weights": place}))

    return folder, write


def test_weights_that_were_quantized_while_loading(rehearse, copied_run):
    """A run without FSDP has no folder of 4-bit weights. Quantizing again gives the same weights."""
    folder, write = copied_run
    write("")
    assert torch.equal(logits(saved.load_model(folder)), logits(saved.load_model(rehearse(*QLORA))))
    results = read(folder)
    results["quantization"]["bnb_4bit_compute_dtype"] = "float32"  # of a run with this --dtype
    (folder / "train_results.json").write_text(json.dumps(results))
    assert saved.load_model(folder).get_input_embeddings().weight.dtype == torch.float32


def test_quantized_weights_of_another_machine(copied_run, monkeypatch, tmp_path, error_of):
    """They are looked for by the name of their folder, which a --prepare with the same flags gives them too."""
    folder, write = copied_run
    known = Path(read(folder)["quantized_weights"])
    name = known.name
    write(f"/on/another/machine/{name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    message = error_of(saved.load_model, folder)
    assert "/on/another/machine" in message and "./launch.sh --prepare llama31_70b_qlora" in message
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized" / name).symlink_to(known)
    assert saved.load_model(folder).eval()


def test_70b_in_4_bits_fits_two_24_gb_gpus(monkeypatch):
    """By transformers' own device map; each GPU keeps 2.5 GB free for the cache of keys and values."""
    config = AutoConfig.from_pretrained(ROOT / "tests/published/models/meta-llama/Llama-3.1-70B", dtype=torch.bfloat16)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "float32"}
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    quantizer.preprocess_model(model, dtype=torch.bfloat16, device_map="auto", checkpoint_files=None)
    free = 24.5e9  # of the 25.4 GB of an RTX 3090
    monkeypatch.setattr(device_maps, "accelerate_max_memory", lambda given: {0: free, 1: free, "cpu": 128e9})
    places = device_maps._get_device_map(model, "auto", None, quantizer)
    used = collections.Counter()
    for name, weight in model.named_parameters():
        place = next(place for module, place in places.items() if name.startswith(f"{module}."))
        # 4 bits a weight, and a byte for the scale of 64 of them; the scales of the scales are 1 % of that.
        used[place] += weight.numel() * (0.5 + 1.02 / 64) if "_proj" in name else weight.nbytes
    assert used.keys() == {0, 1} and all(size < free - 2.5e9 for size in used.values()), used
    assert 39e9 < sum(used.values()) < 41e9


@pytest.mark.parametrize("words", [[], ["nowhere"], [".", "--max_new_tokens", "many"], [".", "--temperature", "1"]])
def test_mistake_is_one_error(launch, words):
    assert_one_error(launch("--chat", *words), *words[1:2])
