"""The tokenizers of Qwen and Llama 3 with their real vocabularies, which packages of PyPI and npm have.

They are downloaded once, and kept in ~/.cache/recipe-tests. Without network or npm the tests are skipped.
"""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy
import pytest
from filelock import FileLock
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "recipe-tests")
PYPI, NPM = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"], ["npm", "pack", "--silent"]
# The command that downloads the package, the file in it, and its checksum.
SOURCES = {
    "qwen": (
        [*PYPI, "dashscope==2.0.2"],
        "dashscope/resources/qwen.tiktoken",
        "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
    ),
    "llama3": (
        [*NPM, "llama3-tokenizer-js@1.2.0"],
        "package/src/data-converted.js",
        "7abff3033ab88d0eaecf59109994049f1af4ea36236e657dd665d29aa31de74f",
    ),
}
QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_WORDS = QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_SPECIAL = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
# Words that every version of Qwen since 2.5, 3 and so on has as one token, special or not.
QWEN_WORDS_OF_TEMPLATES = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def load(family: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a family, without a chat template."""
    folder = CACHE / family
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / f"{family}.lock"):
        if not folder.exists():
            tokenizer = MAKERS[family](_content(family))
            with tempfile.TemporaryDirectory(dir=CACHE) as draft:
                tokenizer.save_pretrained(Path(draft, "new"))
                Path(draft, "new").rename(folder)
    return AutoTokenizer.from_pretrained(folder)


def _content(family: str) -> str:
    """The file of a vocabulary. Skips the test if its package cannot be downloaded."""
    command, name, checksum = SOURCES[family]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        (*_, package) = [None, *Path(folder).iterdir()]
        if process.returncode or package is None:
            pytest.skip(f"{command[-1]} cannot be downloaded: {process.stderr.strip()[-200:]}")
        if package.suffix == ".whl":
            content = zipfile.ZipFile(package).read(name)
        else:
            with tarfile.open(package) as archive:
                content = archive.extractfile(name).read()
    assert hashlib.sha256(content).hexdigest() == checksum, f"{command[-1]} has another {name}"
    return content.decode()


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]], words: str, **settings: bool) -> Tokenizer:
    """A BPE tokenizer whose words are found by a regular expression."""
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, **settings))
    split = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_qwen(content: str) -> PreTrainedTokenizerBase:
    """`content`: a token in Base64 and its rank in each line. Two parts of a token merge to it, if they are tokens themselves."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, content.splitlines())}
    letters = bytes_to_unicode()

    def as_text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.get):
        pairs = [(token[:index], token[index:]) for index in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    texts = {token: as_text(token) for token in ranks}
    vocabulary = {texts[token]: rank for token, rank in ranks.items()}
    tokenizer = _byte_level(vocabulary, [(texts[one], texts[other]) for one, other in merges], QWEN_WORDS)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN_SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in QWEN_WORDS_OF_TEMPLATES])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def make_llama3(content: str) -> PreTrainedTokenizerBase:
    """`content`: the tokens by number, and the merges as pairs of numbers of 17 bits, both in Base64."""
    texts = dict(re.findall(r'const (\w+) = "([^"]+)"', content))
    tokens = base64.b64decode(texts["llama_vocab_base64"]).decode().split("\n")
    bits = numpy.unpackbits(numpy.frombuffer(base64.b64decode(texts["llama_merges_binary"]), numpy.uint8))
    numbers = bits[: len(bits) // 34 * 34].reshape(-1, 17) @ (1 << numpy.arange(16, -1, -1))
    merges = [(tokens[one], tokens[other]) for one, other in numbers.reshape(-1, 2)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = _byte_level(vocabulary, merges, LLAMA_WORDS, ignore_merges=True)
    special = [LLAMA_SPECIAL.get(number, f"<|reserved_special_token_{number}|>") for number in range(256)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    first = special[0]
    tokenizer.post_processor = processors.TemplateProcessing(f"{first} $A", None, [(first, tokenizer.token_to_id(first))])
    ends = {"bos_token": first, "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


MAKERS = {"qwen": make_qwen, "llama3": make_llama3}
