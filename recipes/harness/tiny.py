"""Tiny stand-ins for a rehearsal: a two-layer model of the same architecture, real text in the same columns.

The text is Python's own documentation (`pydoc_data.topics`), on every machine that has Python. Stand-ins are made
once per working folder, before any process starts, under `outputs/tiny/.stand-ins`.
"""

import contextlib
import fnmatch
import hashlib
import os
import random
import shutil
import textwrap
from pathlib import Path

from harness.launched import fail, say

FOLDER = Path("outputs/tiny/.stand-ins")
VOCABULARY = 2048
SHARDS = 8  # parquet files a split, so that up to eight processes each read their own

# What a rehearsal runs with unless a flag says otherwise: the recipe's own numbers are for days on GPUs.
NUMBERS = {
    "max_steps": 30,
    "max_length": 256,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "warmup_steps": 4,
    "logging_first_step": True,
    "logging_steps": 5,
    "eval_steps": 15,
    "save_steps": 15,
    "max_eval_samples": 16,
}

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Families that need no network: a pattern of their ids, and what their config and tokenizer have in common.
# Any other id is asked of the hub, or is a folder.
FAMILIES = {
    "Qwen/Qwen2-0.5B*": {
        "config": {"model_type": "qwen2", "tie_word_embeddings": True, "dtype": "bfloat16"},
        "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "tokenizer": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "chat_template": CHATML},
    },
    "meta-llama/Llama-3.1-[78]*B": {
        "config": {"model_type": "llama", "tie_word_embeddings": False, "dtype": "bfloat16", "rms_norm_eps": 1e-5},
        "special": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "tokenizer": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        "begins_with": "<|begin_of_text|>",
    },
    "openai-community/gpt2*": {
        "config": {"model_type": "gpt2", "dtype": "float32"},
        "special": ["<|endoftext|>"],
        "tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    },
}
# The same for data sets: their splits and the type of each column.
DATA_SETS = {
    "HuggingFaceH4/ultrachat_200k": (
        ["train_sft", "test_sft"],
        {"prompt": "string", "prompt_id": "string", "messages": "messages"},
    ),
    "Salesforce/wikitext": (["train", "validation", "test"], {"text": "string"}),
    "iamtarun/python_code_instructions_18k_alpaca": (
        ["train"],
        dict.fromkeys(["instruction", "input", "output", "prompt"], "string"),
    ),
    "trl-lib/Capybara": (["train", "test"], {"source": "string", "messages": "messages", "num_turns": "int64"}),
    "HuggingFaceFW/fineweb-edu": (
        ["train"],
        dict.fromkeys(["text", "id", "dump", "url", "file_path", "language"], "string")
        | {"language_score": "float64", "token_count": "int64", "score": "float64", "int_score": "int64"},
    ),
}
NOT_PROSE = {"id", "prompt_id", "dump", "url", "file_path", "language", "source", "category", "name"}


def prepare(data, model):
    """Makes the stand-ins for `data` and `model`."""
    import datasets

    if set("[]*?") & set(str(FOLDER.absolute())):
        fail(f"`datasets` cannot read files below {Path.cwd()}: it takes [ ] * ? for a pattern; work in another folder")
    datasets.disable_progress_bars()
    for folder, make in (
        (model_folder(model), lambda draft: _make_model(model.model_name_or_path, model.model_revision, draft)),
        (data_folder(data), lambda draft: _make_data(data, draft)),
    ):
        if not folder.is_dir():
            draft = folder.with_name(f"{folder.name}.{os.getpid()}")
            try:
                make(draft)
                with contextlib.suppress(OSError):  # another rehearsal may have been first
                    draft.rename(folder)
            except NotADirectoryError as error:
                fail(f"{FOLDER} cannot be made: {error.filename} is in the way")
            finally:
                shutil.rmtree(draft, ignore_errors=True)


def announce(data, args, model):
    """Says what the stand-ins replace."""
    numbers = [f"{name} {number}" for name, number in NUMBERS.items() if getattr(args, name, None) == number]
    notice = (
        f"This is a rehearsal. The model is not {model.model_name_or_path} but a two-layer model of its architecture with "
        f"random weights; the data is not {data.dataset_name} but Python's documentation in its columns. "
        f"Numbers that are not the recipe's: {', '.join(numbers)}."
    )
    say(textwrap.fill(notice, 110))


def substitute(data, args, model):
    """Puts the stand-ins in the place of what the recipe names."""
    model.model_name_or_path, data.dataset_name = str(model_folder(model)), str(data_folder(data))
    model.model_revision = "main"
    if getattr(args, "model_init_kwargs", None):
        args.model_init_kwargs = {**args.model_init_kwargs, "revision": "main"}


def model_folder(model) -> Path:
    return _folder(model.model_name_or_path, model.model_revision)


def data_folder(data) -> Path:
    return _folder(data.dataset_name, data.dataset_config)


def _folder(name: str, variant: str | None) -> Path:
    """A folder of its own for every name, variant and version of this file."""
    digest = hashlib.sha256(f"{name} {variant} {Path(__file__).read_text('utf-8')}".encode()).hexdigest()
    return FOLDER.absolute() / f"{name.strip('/').replace('/', '--')}-{digest[:8]}"


def documents() -> list[str]:
    """Some 500 documents of 100 to 6,000 characters, always the same ones in the same order."""
    from pydoc_data.topics import topics

    chance = random.Random(0)
    texts, text, length = [], "", 0
    for paragraph in "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n"):
        if not text:
            length = min(max(chance.lognormvariate(6.2, 0.8), 100), 6000)
        text += paragraph + "\n\n"
        if len(text) >= length:
            texts.append(text.strip())
            text = ""
    texts = list(dict.fromkeys(texts))  # some topics share paragraphs
    chance.shuffle(texts)
    return texts


def _make_model(name: str, revision: str, folder: Path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed
    from transformers.utils import logging

    family = next((family for pattern, family in FAMILIES.items() if fnmatch.fnmatchcase(name, pattern)), None)
    if family:
        tokenizer = _make_tokenizer(family)
        if name.startswith("Qwen/") and name.endswith("-Instruct"):
            tokenizer.eos_token = "<|im_end|>"
        config = AutoConfig.for_model(**family["config"])
    else:
        config, tokenizer = _from_hub(name, revision)
    _shrink(config.get_text_config(), len(tokenizer))
    for token in ("bos", "eos", "pad"):
        setattr(config, f"{token}_token_id", getattr(tokenizer, f"{token}_token_id"))
    set_seed(0)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    logging.enable_progress_bar()


def _make_tokenizer(family: dict):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=family["special"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(), trainer)
    if start := family.get("begins_with"):
        tokenizer.post_processor = processors.TemplateProcessing(f"{start} $A", None, [(start, tokenizer.token_to_id(start))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **family["tokenizer"])


def _from_hub(name: str, revision: str):
    from transformers import AutoConfig, AutoTokenizer

    from harness import checks

    checks.reachable(name, revision)
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        fail(f"the rehearsal needs config.json and the tokenizer of {name}: {str(error).splitlines()[0]}")
    return config, tokenizer.train_new_from_iterator(documents(), VOCABULARY, show_progress=False)


def _shrink(config, vocabulary: int):
    """Two small layers, whatever the architecture calls its sizes."""
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_local_experts": 4,
        "moe_intermediate_size": 32,
        "vocab_size": vocabulary,
        "initializer_range": 0.25,  # strong enough that even an adapter on frozen random weights has something to mend
    }
    for name, size in sizes.items():
        if isinstance(getattr(config, name, None), int | float):
            setattr(config, name, size)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]


def _make_data(data, folder: Path):
    from datasets import Dataset

    splits, columns = DATA_SETS.get(data.dataset_name) or _describe(data)
    texts = documents()
    # The first split gets nine tenths of the text, the others share the rest.
    cuts = [0, *(int(len(texts) * (0.9 + 0.1 * i / max(1, len(splits) - 1))) for i in range(len(splits)))]
    cuts[-1] = len(texts)
    for split, start, end in zip(splits, cuts, cuts[1:], strict=False):
        rows = [{name: _value(name, kind, texts[i], i, columns) for name, kind in columns.items()} for i in range(start, end)]
        for shard in range(SHARDS):
            path = folder / split / f"{shard:05}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            Dataset.from_list(rows[shard::SHARDS]).to_parquet(str(path))
    files = "".join(f"  - split: {split}\n    path: {split}/*.parquet\n" for split in splits)
    card = f"---\nconfigs:\n- config_name: {data.dataset_config or 'default'}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(card, "utf-8")


def _describe(data) -> tuple[list[str], dict]:
    """Splits and columns of a data set the table does not know: read from its first row."""
    from datasets import get_dataset_split_names, load_dataset

    from harness import checks

    checks.dataset(data)
    with checks.hub_errors("data set", data.dataset_name):
        splits = get_dataset_split_names(data.dataset_name, data.dataset_config)
        stream = load_dataset(data.dataset_name, data.dataset_config, split=data.dataset_train_split, streaming=True)
        row = next(iter(stream))
    kinds = {int: "int64", float: "float64", list: "messages"}
    splits = sorted(splits, key=lambda split: split != data.dataset_train_split)
    return splits, {name: kinds.get(type(value), "string") for name, value in row.items()}


def _value(name: str, kind: str, text: str, index: int, columns: dict[str, str]):
    if kind == "messages":
        words = text.split(" ")
        size = min(40, len(words) // 2)
        turns = [" ".join(words[start : start + size]) for start in range(0, len(words) - size + 1, size)]
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns[: len(turns) // 2 * 2])]
    if kind == "int64":
        return index
    if kind == "float64":
        return index / 1000
    if name in NOT_PROSE:
        return f"{name}-{index}"
    prose = [column for column in columns if columns[column] == "string" and column not in NOT_PROSE]
    words, place = text.split(" "), prose.index(name)
    return " ".join(words[len(words) * place // len(prose) : len(words) * (place + 1) // len(prose)])
