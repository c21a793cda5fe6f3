"""`--preview` shows which tokens count in the loss, summarizes the rows, and warns of what would teach something else."""

import json
import re
import sys
from types import SimpleNamespace

from harness.commands import arguments, preview
from harness.commands.preview import IGNORED, PreviewRows, find_problems, paint
from harness.rehearsal import tiny

import pytest
import torch
from conftest import RECIPES, ROOT, read
from trl import ModelConfig
from trl.trainer.dpo_trainer import DataCollatorForPreference


@pytest.fixture(scope="module")
def preview_tiny(fork_launch):
    """`--preview --tiny` of a recipe with flags, each combination once; returns the finished process."""
    finished = {}

    def call(recipe, *flags):
        if (recipe, *flags) not in finished:
            finished[recipe, *flags] = fork_launch("--preview", "--tiny", recipe, *flags)
        return finished[recipe, *flags]

    return call


@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES])
def test_every_recipe(preview_tiny, recipe):
    unpacked = ["--max_length", "2048"] if recipe == "qwen35_4b_lora" else []  # its rows are cut off there
    process = preview_tiny(recipe, *unpacked)
    assert process.returncode == 0 and "warning" not in process.stderr, process.stderr
    out = process.stdout
    if recipe == "qwen3_dpo":
        assert out.count("--- a row as the trainer gets it") == 2 and "not shown: which tokens count in the loss" in out
        assert (
            "chosen_ids: " in out
            and "batch        input_ids (" in out
            and re.search(r"^truncated +[\d.]+% of the pairs", out, re.M)
        )
        return
    trained = (
        r"^trained +\d+,\d+ of [\d,]+ parameters \([\d.]+%\), in adapters on (q_proj|\d+ out_proj), "
        if "lora" in recipe
        else "^trained +all "
    )
    assert re.search(trained, out, re.MULTILINE)
    assert (
        "This is the preview of a rehearsal" in out
        and "--- a sequence of" in out
        and re.search(r"^the run +[\d,]+ steps", out, re.MULTILINE)
    )
    is_stream = recipe in ("qwen2_fineweb_edu", "llama31_70b_qlora")  # which need not say how many rows it has
    assert re.search(rf"^one epoch +(about [\d,]+ steps|{'unknown' if is_stream else 'about'})", out, re.MULTILINE)
    shares = {name: float(share) for name, share in re.findall(r"^(padding|in the loss) +([\d.]+)%", out, re.MULTILINE)}
    assert shares["padding"] == 0 or unpacked
    is_text = recipe in ("qwen2_fineweb_edu", "gpt2_xl_wikitext")
    assert shares["in the loss"] > 98 if is_text else 5 < shares["in the loss"] < 100


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("length", [3, 6, None])
def test_what_truncation_cuts_off_pairs(mode, length):
    """As many tokens as TRL's collator cuts off."""
    sizes = [(2, 3, 5), (4, 1, 9), (1, 1, 1)]
    rows = [
        {name: [1] * size for name, size in zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, strict=True)} for row in sizes
    ]
    collator = DataCollatorForPreference(pad_token_id=0, max_length=length, truncation_mode=mode)
    found = preview.truncation_of_pairs(SimpleNamespace(data_collator=collator, train_dataset=rows))
    batch, tokens = collator(rows), sum(2 * prompt + chosen + rejected for prompt, chosen, rejected in sizes)
    assert found["truncated_tokens"] == pytest.approx(1 - int(batch["attention_mask"].sum()) / tokens)
    kept = (batch["completion_mask"] * batch["attention_mask"]).sum(1)
    assert found["without_answer"] == int((kept == 0).sum()) // 2
    assert found["truncated_pairs"] == {3: 2 / 3, 6: 2 / 3, None: 0}[length]


def test_tokens_in_the_loss_are_in_brackets(preview_tiny):
    """The answers of the assistant with their end tokens, and nothing else."""
    out = preview_tiny("qwen2_chat").stdout
    rows = out.split("--- a sequence of")[1:]
    assert len(rows) == preview.SHOWN_ROWS
    for text in out.split("The first sequences")[1].split("⟦")[2:]:  # the first bracket is in the explanation
        assert text.count("⟧") == 1 and "<|im_start|>" not in text.split("⟧")[0]
    assert "◆<|im_start|>assistant\n⟦" in out and "◆<|im_end|>⟧" in out


# The keys of --json and their types.
KEYS = {
    "recipe": str,
    "dataset": str,
    "documents": int,
    "lengths": dict,
    "truncated_documents": float,
    "truncated_tokens": float,
    "batches": int,
    "padding": float,
    "in_the_loss": float,
    "rows_per_step": int,
    "is_rows_per_step_for_one_gpu": bool,
    "tokens_per_step": int,
    "steps_per_epoch": int,
    "tokens_per_epoch": int,
    "steps": int,
    "tokens": int,
    "times_seen": float,
    "adapter": dict,
    "trained_parameters": int,
    "parameters": int,
    "data": dict,
    "warnings": list,
}
LENGTHS = ("shortest", "percentile_10", "median", "percentile_90", "longest")


@pytest.mark.parametrize("options", [["--preview", "--tiny"], ["--tiny", "--preview"]], ids=" ".join)
def test_launcher_passes_tiny_on(launch, tmp_path, options):
    program = tmp_path / "python"  # prints how a module is called
    program.write_text(f'#!/bin/sh\n[ "$1" != -m ] || {{ echo "$@"; exit; }}\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    _, called = launch(*options, "qwen2_chat", "--json", PYTHON=str(program)).stdout.splitlines()
    assert called == f"-m harness.commands.preview --tiny {ROOT}/recipes/qwen2_chat.py --json"


def test_json(preview_tiny):
    process = preview_tiny("qwen2_chat", "--json")
    assert process.returncode == 0, process.stderr
    numbers = json.loads(process.stdout)
    assert {key: type(value) for key, value in numbers.items()} == KEYS
    assert (numbers["recipe"], numbers["dataset"], numbers["warnings"]) == ("qwen2_chat", "trl-lib/Capybara", [])
    lengths = [numbers["lengths"][name] for name in LENGTHS]
    assert len(numbers["lengths"]) == len(LENGTHS) and lengths == sorted(lengths) and lengths[0] > 0
    assert numbers["padding"] == numbers["truncated_documents"] == 0 and 0.05 < numbers["in_the_loss"] < 1
    assert numbers["tokens_per_step"] == pytest.approx(128 * numbers["rows_per_step"], rel=0.1)
    assert numbers["tokens"] == pytest.approx(numbers["steps"] * numbers["tokens_per_step"], rel=0.01)


def test_json_is_alone_on_stdout(preview_tiny):
    """Messages are on stderr: this dataset has no split for evaluation, and the run has a warning."""
    process = preview_tiny("qwen2_fineweb_edu", "--json", "--max_length", "64", "--packing", "false")
    numbers = json.loads(process.stdout)
    assert numbers.keys() == KEYS.keys() and 0 < numbers["truncated_tokens"] < 1 and numbers["truncated_documents"] > 0
    assert "held out for evaluation" in process.stderr


def test_what_is_trained():
    """Of the real model, although the preview builds a trainer with a model of two layers."""
    model_args = ModelConfig(str(ROOT / "tests/published/models/Qwen/Qwen2-0.5B"), lora_target_modules=["all-linear"])
    full = preview.what_is_trained(SimpleNamespace(), model_args)
    assert full == {"adapter": {}, "trained_parameters": 494_032_768, "parameters": 494_032_768}
    model_args.use_peft = True
    small = SimpleNamespace(peft_config={}, named_modules=lambda: [])
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert preview.what_is_trained(small, model_args) == {
        "adapter": dict.fromkeys(names, 24),
        "trained_parameters": 8_798_208,  # as in train_results.json of a run
        "parameters": 502_830_976,
    }
    model_args.use_peft = False
    assert preview.what_is_trained(small, model_args)["parameters"] is None  # an adapter of the recipe's own


def test_json_of_a_recipe_that_truncates_rows_itself(preview_tiny):
    numbers = json.loads(preview_tiny("gpt2_xl_wikitext", "--json").stdout)
    assert numbers.keys() == KEYS.keys() and numbers["truncated_documents"] is numbers["truncated_tokens"] is None


def test_documents_without_a_token_in_the_loss(preview_tiny):
    process = preview_tiny("llama31_8b_lora", "--max_length", "8")
    assert process.returncode == 0 and "documents have no token in the loss" in process.stderr


def test_documents_that_are_trained_on_and_evaluated(preview_tiny, tmp_path):
    for split, letters in (("train", "abcdef"), ("test", "exyz")):
        rows = [{"text": f"A text that begins with {letter}, and continues for some more words. " * 3} for letter in letters]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    process = preview_tiny("qwen2_fineweb_edu", "--dataset_name", str(tmp_path), "--dataset_streaming", "false")
    assert process.returncode == 0 and "1 of 4 documents for evaluation are also trained on" in process.stderr


def test_epochs_of_less_than_a_step(preview_tiny, tmp_path):
    """The last step of an epoch is filled with rows without loss, which do not count."""
    rows = [{"messages": [{"role": role, "content": f"{role} {row}"} for role in ("user", "assistant")]} for row in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--max_length", "2048", "--global_batch_size", "8", "--max_steps", "-1", "--num_train_epochs", "1"]
    numbers = json.loads(preview_tiny("qwen2_chat", "--dataset_name", str(tmp_path / "rows.jsonl"), *flags, "--json").stdout)
    assert (numbers["steps"], numbers["times_seen"]) == (1, 1) and numbers["tokens"] == numbers["tokens_per_epoch"]


def test_data_of_a_preview_and_a_run(preview_tiny, rehearse, tmp_path):
    """Skipped rows with reasons, ignored columns and turns: the same in both. A document is shown complete with --full."""
    thanks = [{"role": "user", "content": "Thanks"}]
    rows = [
        {"id": index, "messages": [{"role": role, "content": f"{role} {index}"} for role in ("user", "assistant")] + thanks}
        for index in range(60)
    ]
    rows += [{"id": 0, "messages": thanks}] * 3 + [{"id": 0, "messages": [*thanks, {"role": "assistant", "content": ""}]}] * 2
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    process = preview_tiny("qwen2_chat", "--dataset_name", str(path), "--json")
    assert process.returncode == 0, process.stderr
    numbers = json.loads(process.stdout)
    data = numbers["data"]
    assert data["skipped"] == {"without an answer": 3, "with a turn that is empty": 2} and data["is_complete"]
    assert (data["rows"], data["held_out"], data["trained_rows"], data["ignored_columns"]) == (65, 6, 54, ["id"])
    assert data["turns"] == {"user": 120, "assistant": 60} and numbers["times_seen"] > 1
    assert (
        "rows skipped: 3 without an answer (the first is row 61), 2 with a turn that is empty (the first is row 64)."
        in process.stderr
    )
    shown = preview_tiny("qwen2_chat", "--dataset_name", str(path), "--full", "2").stdout
    assert "--- conversation 2 of 54" in shown and "shown by" not in shown
    assert "rows         65, 3 skipped without an answer" in shown and "turns        120 user, 60 assistant" in shown
    run = rehearse("qwen2_chat", "1x3090", "--dataset_name", str(path))
    assert read(run)["data"] == data and read(run)["times_seen"] > 0


@pytest.mark.parametrize(
    ("words", "full"), [(["--a", "-1"], None), (["--full", "--a", "-1"], 1), (["--a", "-1", "--full", "7", "--json"], 7)]
)
def test_flags_of_a_preview_and_of_its_recipe(words, full):
    parsed = arguments.preview().read(["recipe.py", *words])
    assert (parsed.full, parsed.flags, parsed.json) == (full, ["--a", "-1"], "--json" in words)


@pytest.fixture
def tokenizer():
    return tiny.make_tokenizer(tiny.family_of("Qwen/Qwen2-0.5B-Instruct"))


def warnings_of(tokenizer, document, batch_labels=None, is_conversational=False) -> str:
    """The warnings about a dataset of one document, (tokens, labels), and a batch with other labels."""
    rows = PreviewRows(
        packed=[],
        train=[document],
        eval=[],
        kept=[document],
        is_whole_known=False,
        is_conversational=is_conversational,
        total=None,
        max_samples=None,
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None)), args=SimpleNamespace(max_length=64)
    )
    batch = {"input_ids": torch.tensor(document[0]), "labels": torch.tensor(batch_labels or document[1])}
    return "\n".join(find_problems(tokenizer, rows, [batch], trainer))


def test_warning_about_a_document_without_an_eos_token(tokenizer):
    ids = tokenizer("Some words.")["input_ids"]
    end = [tokenizer.eos_token_id]
    assert not warnings_of(tokenizer, (ids + end, ids + end))
    assert "1 of 1 documents have no EOS token" in warnings_of(tokenizer, (ids, ids))
    behind = tokenizer(" Thanks")["input_ids"]  # a turn behind the last answer
    assert not warnings_of(tokenizer, (ids + end + behind, ids + end + [IGNORED] * len(behind)), ids + end)
    masked = [*ids, IGNORED]
    assert "1 of 1 documents have no EOS token" in warnings_of(tokenizer, (ids + end, masked), ids + end)


def test_warning_about_a_chat_template_without_an_end_token(tokenizer):
    row = [tokenizer.eos_token_id] * 3
    assert not warnings_of(tokenizer, (row, row), is_conversational=True)
    tokenizer.chat_template = "{% for m in messages %}### {{ m['role'] }}\n{{ m['content'] }}\n\n{% endfor %}"
    assert "does not end the assistant's turn" in warnings_of(tokenizer, (row, row), is_conversational=True)


def test_warning_about_padding_that_masks_the_end_token(tokenizer):
    row = [5, 6, tokenizer.eos_token_id]
    collated = [5, 6, IGNORED]  # from a collator that masks every padding token
    assert not warnings_of(tokenizer, (row, row), collated)
    tokenizer.pad_token = tokenizer.eos_token
    assert "--pad_token" in warnings_of(tokenizer, (row, row), collated)
    assert not warnings_of(tokenizer, (row, row))


def test_paint(tokenizer):
    ids = tokenizer("A question<|im_end|> an answer<|im_end|>")["input_ids"]
    labels = [IGNORED] * 2 + ids[2:]
    plain = paint(tokenizer, ids, labels, has_colour=False)
    assert plain.count("⟦") == plain.count("⟧") == 1 and plain.count("◆<|im_end|>") == 2
    colored = paint(tokenizer, ids, labels, has_colour=True)
    assert "\033[90m" in colored and "\033[1;32m<|im_end|>" in colored and "⟦" not in colored
