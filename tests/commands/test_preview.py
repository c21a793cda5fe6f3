"""`--preview` shows which tokens count in the loss, summarizes the rows, and warns of what would teach something else."""

import json
import re
from types import SimpleNamespace

from harness.commands import preview

import pytest
from conftest import RECIPES, ROOT
from runs import read, tiny_tokenizer, write_rows


@pytest.fixture(scope="module")
def preview_tiny(fork_launch):
    """`--preview --tiny` of a recipe with flags, each combination once; returns the finished process."""
    finished = {}

    def call(recipe, *flags):
        if (recipe, *flags) not in finished:
            finished[recipe, *flags] = fork_launch("--preview", "--tiny", recipe, *flags)
        return finished[recipe, *flags]

    return call


WRITE_ANSWERS = ("qwen3_grpo", "qwen3_distill")  # their rows are prompts


@pytest.mark.parametrize("recipe", WRITE_ANSWERS)
def test_recipe_whose_model_writes_the_answers(preview_tiny, recipe):
    process = preview_tiny(recipe)
    assert process.returncode == 0 and "warning" not in process.stderr, process.stderr
    assert "prompt_ids: " in process.stdout and ("its own answer" in process.stdout) == (recipe == "qwen3_grpo")


def test_good_and_bad_answers_of_kto(preview_tiny, tmp_path):
    """The recipe rates the first one good, the second one bad."""
    write_rows(tmp_path / "rows.jsonl", [{"text": f"The number {number} is here"} for number in range(20)])
    out = preview_tiny(str(ROOT / "tests/recipes/own/kto.py"), "--dataset_name", str(tmp_path / "rows.jsonl")).stdout
    assert "--- a prompt with a good answer" in out and "--- a prompt with a bad answer" in out


@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES if path.stem not in WRITE_ANSWERS])
def test_every_recipe(preview_tiny, recipe):
    unpacked = ["--max_length", "2048"] if recipe == "qwen35_4b_lora" else []  # its rows are cut off there
    process = preview_tiny(recipe, *unpacked)
    assert process.returncode == 0 and "warning" not in process.stderr, process.stderr
    out = process.stdout
    assert ("--- a prompt with 2 answers" if recipe == "qwen3_dpo" else "--- a sequence of") in out
    is_stream = recipe in ("qwen2_fineweb_edu", "llama31_70b_qlora")  # which need not say how many rows it has
    (sequences,) = re.findall(r"^sequences per epoch +(\d+|unknown)$", out, re.MULTILINE)
    assert is_stream or sequences.isdigit()
    (share,) = re.findall(r"^in the loss +([\d.]+)%", out, re.MULTILINE)
    is_text = recipe in ("qwen2_fineweb_edu", "gpt2_xl_wikitext")
    assert float(share) > 98 if is_text else 5 < float(share) < 100


def test_tokens_in_the_loss_are_in_brackets(preview_tiny):
    """The answers of the assistant with their end tokens, and nothing else."""
    out = preview_tiny("qwen2_chat").stdout
    rows = out.split("--- a sequence of")[1:]
    assert len(rows) == preview.SHOWN_ROWS
    for text in out.split("The first sequences")[1].split("⟦")[2:]:  # the first bracket is in the explanation
        assert text.count("⟧") == 1 and "<|im_start|>" not in text.split("⟧")[0]
    assert "◆<|im_start|>assistant\n⟦" in out and "◆<|im_end|>⟧" in out


def test_json(preview_tiny):
    process = preview_tiny("qwen2_chat", "--json")
    assert process.returncode == 0, process.stderr
    numbers = json.loads(process.stdout)
    assert numbers["recipe"] == "qwen2_chat" and "trl-lib/Capybara" in numbers["dataset"] and not numbers["warnings"]
    lengths = list(numbers["lengths"].values())
    assert lengths == sorted(lengths) and lengths[0] > 0
    assert numbers["truncated_documents"] == 0 and 0.05 < numbers["in_the_loss"] < 1
    assert numbers["tokens_per_epoch"] == pytest.approx(128 * numbers["sequences_per_epoch"], rel=0.1)


def test_epoch_without_dropped_rows(preview_tiny, tmp_path):
    """30 of 60 answers begin after 48 tokens; a tenth of the rows is held out."""
    lengths = [1, 50]
    rows = [[{"role": "user", "content": f"{n} " * lengths[n % 2]}, {"role": "assistant", "content": "one"}] for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    process = preview_tiny(
        "qwen2_chat", "--dataset_name", tmp_path / "rows.jsonl", "--max_length", "48", "--packing", "false", "--json"
    )
    dropped = int(re.search(r"warning: (\d+) of the 54 training rows are not used", process.stdout + process.stderr)[1])
    assert 20 < dropped < 34
    assert json.loads(process.stdout)["sequences_per_epoch"] == pytest.approx(54 - dropped)


def test_pairs_of_answers(preview_tiny, tmp_path):
    """Every prompt with an answer is counted as the model sees it; pairs whose prompt alone is too long are named."""
    length, tokenizer = 40, tiny_tokenizer("Qwen/Qwen3-4B-Instruct-2507")

    def count_tokens(*texts):
        turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=False)]
        return len(tokenizer.apply_chat_template(turns, add_generation_prompt=len(turns) == 1, return_dict=True)["input_ids"])

    rows = [
        {"prompt": "the" + " the" * (5 + 20 * (number % 3)), "chosen": "of" + " it" * (number % 9), "rejected": "no"}
        for number in range(40)
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "test.jsonl", rows[:1])
    flags = ["--dataset_name", str(tmp_path), "--max_length", str(length)]
    prompts, whole = [], []
    for row in rows:
        prompt = count_tokens(row["prompt"])
        if prompt < length:
            for answer in ("chosen", "rejected"):
                prompts.append(prompt)
                whole.append(count_tokens(row["prompt"], row[answer]))
    seen = [min(tokens, length) for tokens in whole]
    assert 0 < len(whole) < 80 and sum(seen) < sum(whole)

    process = preview_tiny("qwen3_dpo", *flags, "--json")
    assert process.returncode == 0, process.stderr
    numbers = json.loads(process.stdout)
    assert f"warning: {40 - len(whole) // 2} of 40 training rows are not used" in process.stderr
    lengths = numbers["lengths"]
    assert (numbers["documents"], lengths["shortest"], lengths["longest"]) == (len(whole), min(whole), max(whole))
    assert numbers["truncated_tokens"] == pytest.approx(1 - sum(seen) / sum(whole))
    assert numbers["in_the_loss"] == pytest.approx(1 - sum(prompts) / sum(seen))
    assert (numbers["sequences_per_epoch"], numbers["tokens_per_epoch"]) == (len(whole) // 2, sum(seen))


def test_data_of_a_preview_and_a_run(preview_tiny, rehearse, tmp_path):
    """Skipped rows with reasons, ignored columns and turns: the same in both."""
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
    assert (
        data["skipped"] == {"without an answer that counts in the loss": 3, "with a turn that is empty": 2}
        and data["is_complete"]
    )
    assert (data["rows"], data["held_out"], data["trained_rows"]) == (65, 6, 54)
    assert "(the first is row 61), 2 with a turn that is empty (the first is row 64)" in process.stderr
    run = rehearse("qwen2_chat", "1x3090", "--dataset_name", str(path))
    assert read(run)["data"] == data


@pytest.fixture
def tokenizer():
    return tiny_tokenizer("Qwen/Qwen2-0.5B-Instruct")


def test_warning_about_a_missing_end_token(tokenizer):
    """It is judged by what the collator makes of the rows: some mask the padding token, which can be the EOS token too."""
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    shown = SimpleNamespace(trainer=SimpleNamespace(model=model), tokenizer=tokenizer)
    assert not preview.find_problems(shown, {5, 6, tokenizer.eos_token_id})
    assert "no EOS token" in preview.find_problems(shown, {5, 6})[0]
