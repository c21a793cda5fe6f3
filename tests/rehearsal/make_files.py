"""Makes recipes/harness/rehearsal/data and tokenizers again: python tests/rehearsal/make_files.py FOLDER, with Python 3.11.

The texts are Python's own documentation, which is another one in each version of Python.
"""

import io
import random
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow
from datasets import Dataset, Image, List
from PIL import Image as Picture
from pyarrow import parquet
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SHARDS = 8  # files per split, so that up to eight processes read different ones
SPLITS = {
    "HuggingFaceFW/fineweb-edu": ["train"],
    "HuggingFaceH4/Multilingual-Thinking": ["train"],
    "HuggingFaceH4/ultrachat_200k": ["train_sft", "test_sft"],
    "Salesforce/wikitext": ["train", "validation", "test"],
    "davanstrien/iconclass-vlm": ["train"],
    "iamtarun/python_code_instructions_18k_alpaca": ["train"],
    "openai/gsm8k": ["train", "test"],
    "trl-lib/Capybara": ["train", "test"],
    "trl-lib/ultrafeedback_binarized": ["train", "test"],
}
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINKING = [*CHATML, "<think>", "</think>"]
# As in the real tokenizer of Qwen3, a line break is no part of the word after it.
PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Special tokens; a regular expression for what a token can be a part of, by default GPT-2's.
TOKENIZERS = {
    "gpt2": (["<|endoftext|>"], None),
    "llama": (["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], None),
    "qwen2": (CHATML, None),
    "qwen3": (THINKING, PIECES),
    "qwen3_5": ([*THINKING, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"], PIECES),
}


def documents() -> list[str]:
    """About 500 documents of 100 to 6,000 characters."""
    generator = random.Random(0)
    texts = []
    text = ""
    length = 0
    for paragraph in "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n"):
        if not text:
            length = min(max(generator.lognormvariate(6.2, 0.8), 100), 6000)
        text += paragraph + "\n\n"
        if len(text) >= length:
            texts.append(text.strip())
            text = ""
    texts = list(dict.fromkeys(texts))  # some topics share paragraphs
    generator.shuffle(texts)
    return texts


def conversation(text: str) -> list[dict]:
    """Turns of a user and an assistant. Answers are short, so that even the samples of a rehearsal come to an end."""
    words = text.split(" ")
    size = min(40, len(words))
    turns = []
    for start in range(0, len(words) - size + 1, size):
        part = words[start : start + size]
        asked, answered = " ".join(part[: size * 4 // 5]), " ".join(part[size * 4 // 5 :])
        if asked.strip() and answered.strip():
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return turns


def parts(names: list[str], text: str) -> dict:
    """Each column has a part of the first words: prompt and completion together stay below a rehearsal's max_length."""
    words = text[:200].split(" ")
    ends = [len(words) * place // len(names) for place in range(len(names) + 1)]
    return {name: " ".join(words[ends[place] : ends[place + 1]]) for place, name in enumerate(names)}


def picture(index: int) -> dict:
    """An image of one colour. Images have different sizes."""
    made = io.BytesIO()
    Picture.new("RGB", (32 + index % 5 * 16, 48), (index % 256, index * 7 % 256, 90)).save(made, "PNG")
    return {"bytes": made.getvalue(), "path": None}


def row(dataset: str, index: int, text: str) -> dict:
    """A row with the columns of the original."""
    turns = conversation(text)
    match dataset:
        case "HuggingFaceFW/fineweb-edu":
            names = {name: f"{name}-{index}" for name in ("id", "dump", "url", "file_path", "language")}
            count, share = {"token_count": index}, index / 1000
            return {"text": text, **names, "language_score": share, **count, "score": share, "int_score": index}
        case "HuggingFaceH4/Multilingual-Thinking":
            for turn in turns:  # other turns have the key too, as in every row of a Parquet file
                turn["thinking"] = "A short thought." if turn["role"] == "assistant" else None
            return parts(["reasoning_language", "developer", "user", "analysis", "final"], text) | {"messages": turns}
        case "HuggingFaceH4/ultrachat_200k":
            return {"prompt": text, "prompt_id": f"prompt_id-{index}", "messages": turns}
        case "Salesforce/wikitext":
            return {"text": text}
        case "davanstrien/iconclass-vlm":
            count = (1, 2, 0, 1)[index % 4]
            question = [{"type": "image", "text": None}] * count + [{"type": "text", "text": turns[0]["content"][:100]}]
            answer = [{"type": "text", "text": turns[1]["content"]}]
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            return {"images": [picture(index + number) for number in range(count)], "messages": messages}
        case "iamtarun/python_code_instructions_18k_alpaca":
            return parts(["instruction", "input", "output", "prompt"], text)
        case "openai/gsm8k":
            return {"question": text[:100], "answer": f"{text[:50]}\n#### {index}"}
        case "trl-lib/Capybara":
            return {"source": f"source-{index}", "messages": turns, "num_turns": index}
        case "trl-lib/ultrafeedback_binarized":
            chosen = [turn | {"content": turn["content"].strip()} for turn in turns[:2]]
            rejected = [chosen[0], {"role": "assistant", "content": "I do not know."}]
            return {"chosen": chosen, "rejected": rejected, "score_chosen": index / 1000, "score_rejected": index / 1000}


def make_dataset(dataset: str, folder: Path) -> None:
    """Writes one of SPLITS: nine tenths of the rows are in the first split, the rest in the others."""
    splits = SPLITS[dataset]
    rows = [row(dataset, index, text) for index, text in enumerate(documents())]
    start = 0
    card = ""
    for place, split in enumerate(splits):
        end = len(rows) if split == splits[-1] else int(len(rows) * (0.9 + 0.1 * place / (len(splits) - 1)))
        of_split = Dataset.from_list(rows[start:end])
        has_images = "images" in of_split.column_names
        if has_images:
            of_split = of_split.cast_column("images", List(Image()))
        start = end
        (folder / split).mkdir(parents=True)
        for shard in range(SHARDS):
            table = of_split.shard(SHARDS, shard, contiguous=False).with_format("arrow")[:]
            if not has_images:  # whose type is in the metadata
                table = table.replace_schema_metadata(None)
            options = {"compression": "brotli", "compression_level": 11, "use_dictionary": False, "write_statistics": False}
            parquet.write_table(table, folder / split / f"{shard:05}.parquet", store_schema=has_images, **options)
        card += f"  - split: {split}\n    path: {split}/*.parquet\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{card}---\n", "utf-8")


def make_tokenizer(name: str, file: Path) -> None:
    """Trains a tokenizer of 2,048 tokens on `documents`."""
    special, pieces = TOKENIZERS[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pieces:
        split = pre_tokenizers.Split(Regex(pieces), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents(), trainer)
    if name == "llama":
        tokenizer.post_processor = processors.TemplateProcessing(f"{special[0]} $A", None, [(special[0], 0)])
    tokenizer.save(str(file), pretty=False)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    pyarrow.set_cpu_count(1)
    (folder / "tokenizers").mkdir(parents=True)
    for name in TOKENIZERS:
        make_tokenizer(name, folder / f"tokenizers/{name}.json")
    for dataset in SPLITS:
        make_dataset(dataset, folder / "data" / dataset.replace("/", "--"))
