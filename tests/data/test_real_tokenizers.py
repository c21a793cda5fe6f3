"""Real vocabularies: masks, end tokens, and boundaries of prompt and answer are what the texts say.

A tiny tokenizer of bytes cannot show tokens that go over a boundary, such as a line break of the prompt and one of the answer.
"""

import functools
from pathlib import Path

from harness.data.tokenization import tokenize
from harness.runs import Run, StartedRecipe

import pytest
import real_tokenizers
import trl
from conftest import ROOT, slow
from datasets import Dataset
from trl import SFTConfig

pytestmark = slow  # downloads vocabularies

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# The vocabulary, the header of an answer, and the token that ends it, of chat templates.
FAMILIES = {
    "qwen2_5": ("qwen", "<|im_start|>assistant\n", "<|im_end|>"),
    "qwen3": ("qwen", "<|im_start|>assistant\n", "<|im_end|>"),
    "qwen3_instruct_2507": ("qwen", "<|im_start|>assistant\n", "<|im_end|>"),
    "llama3": ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "llama3_1": ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "llama3_2": ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "headings": ("qwen", "### Assistant\n", "<|im_end|>"),
}
ANSWERS = ["def f():\n    return 'naïve café'  # 東京 🎉", "It's 12345 , isn't it ?", "- one\n- two\n\nYes."]


def question(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


CONVERSATION = [{"role": "system", "content": "Be brief."}]
for text in ANSWERS:
    CONVERSATION += [question(f"Why {len(CONVERSATION)}?\n"), answer(text)]


@pytest.fixture(scope="module")
def tokenizer_of():
    """The tokenizer of a family, with its chat template."""
    load = functools.cache(real_tokenizers.load)

    def call(family):
        tokenizer = load(FAMILIES.get(family, (family,))[0])
        file = ROOT / "recipes/headings.jinja" if family == "headings" else TEMPLATES / f"{family}.jinja"
        if family in FAMILIES:
            tokenizer.chat_template = file.read_text("utf-8")
        return tokenizer

    return call


@pytest.fixture
def train_rows(tmp_path):
    """The rows that are trained on, and the same before they were truncated and packed."""

    def call(tokenizer, rows, **settings):
        args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, max_steps=1, **settings)
        recipe = StartedRecipe(Run("recipe.py", trains=True))
        found, _ = tokenize(Dataset.from_list(rows), None, tokenizer, args, recipe)
        return list(found), list(recipe.uncut.tokens)

    return call


@pytest.mark.parametrize(("family", "tokens"), [("qwen", [9707, 1879]), ("llama3", [128000, 9906, 1917])])
def test_vocabularies_are_the_real_ones(tokenizer_of, family, tokens):
    tokenizer = tokenizer_of(family)
    assert tokenizer("Hello world")["input_ids"] == tokens
    for text in ANSWERS:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_their_end_tokens_count(tokenizer_of, train_rows, family):
    """In every conversation each answer is trained after the tokens of the prompt that a server makes."""
    tokenizer, (_, header, end) = tokenizer_of(family), FAMILIES[family]
    conversations = [CONVERSATION[:3], CONVERSATION]
    if family == "qwen3":  # it drops the reasoning of earlier answers
        conversations = conversations[:1]
    rows = [{"messages": turns} for turns in conversations]
    _, found = train_rows(tokenizer, rows, assistant_only_loss=True, max_length=None)
    for row, turns in zip(found, conversations, strict=True):
        ids, labels = row["input_ids"], row["labels"]
        expected = [-100] * len(ids)
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(turns[:number], add_generation_prompt=True)["input_ids"]
            assert ids[: len(prompt)] == prompt and tokenizer.decode(prompt).endswith(header)
            tokens = tokenizer(turn["content"] + end, add_special_tokens=False)["input_ids"]
            if family == "qwen3":  # which writes empty thoughts before the last answer
                tokens = tokenizer(f"<think>\n\n</think>\n\n{turn['content']}{end}", add_special_tokens=False)["input_ids"]
            expected[len(prompt) : len(prompt) + len(tokens)] = tokens
        assert labels == expected, tokenizer.decode([label for label in labels if label != -100])
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(turns, tokenize=False)


@pytest.mark.parametrize("family", ["qwen", "llama3"])
def test_prompt_and_completion(tokenizer_of, train_rows, family):
    """All of the completion counts, and nothing of the prompt but letters that are one token with the begin of the completion."""
    tokenizer = tokenizer_of(family)
    first, end = tokenizer.bos_token if family == "llama3" else "", tokenizer.eos_token
    pairs = [
        ("### Task\nAdd.\n\n### Python\n", "def f(x):\n    return x + 1"),
        ("Why?", " So."),
        ("Why? ", "So."),
        ("Why?\n", "\nSo."),
    ]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    _, found = train_rows(tokenizer, rows, max_length=None)
    for row, (prompt, completion) in zip(found, pairs, strict=True):
        assert tokenizer.decode(row["input_ids"]) == f"{first}{prompt}{completion}{end}"
        in_loss = tokenizer.decode([label for label in row["labels"] if label != -100])
        goes_over = in_loss.removesuffix(f"{completion}{end}")
        assert in_loss.endswith(f"{completion}{end}") and prompt.endswith(goes_over)
        assert len(goes_over) <= 2 and (not goes_over or pairs.index((prompt, completion)) > 1)
