"""What comes after the training: nothing there makes a good run fail, and each trainer gets what it has a use for."""

import json
import shutil

import pytest
from runs import read, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# Recipes that start as others do; {parse} is what they parse, {trainer} what they hand to `train`.
RECIPE = """
from harness import load, load_tokenizer, parse, tokenize, train

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


def main():
    script_args, training_args, model_args = parse({parse}, dataset_formats="{formats}", dataset_name="{data}",
        model_name_or_path="{model}", eval_strategy="steps", max_eval_samples=4,
        per_device_train_batch_size=2, global_batch_size=2, learning_rate=1e-3)
    train_dataset, eval_dataset = load(script_args)
    name = model_args.model_name_or_path
    tokenizer = load_tokenizer(model_args, training_args)
{trainer}
    train(trainer)


if __name__ == "__main__":
    main()
"""
WITHOUT_TOKENIZER = """
    encode = lambda row: dict.fromkeys(("input_ids", "labels"), tokenizer(row["text"])["input_ids"][:8])
    config = AutoConfig.from_pretrained(name)
    config.name_or_path = ""
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=training_args,
        train_dataset=train_dataset.map(encode),
        eval_dataset=eval_dataset.map(encode),
    )
"""
OF_TRL = """
    trainer = {name}(
        model=name,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )
"""
SENTENCES = [f"The number {number} comes before {number + 1}, and after {number - 1}" for number in range(24)]
PREFERENCES = [{"prompt": "Say it:", "chosen": f" {text}.", "rejected": f" {text[:20]}"} for text in SENTENCES]
LABELED = [{"text": text, "label": number % 2} for number, text in enumerate(SENTENCES)]
SFT = f"""
    train_dataset, eval_dataset = tokenize(train_dataset, eval_dataset, tokenizer, training_args)
    {OF_TRL.format(name="SFTTrainer").strip()}
"""


@pytest.fixture
def rehearse_recipe(fork_launch, tmp_path):
    """Rehearses a recipe with these rows, on one process; returns the output directory and what it printed."""

    def call(parse, trainer, rows, formats="", model="Qwen/Qwen2-0.5B", files=("loss.png", "README.md")):
        data, recipe = tmp_path / "rows.jsonl", tmp_path / "mine.py"
        data.write_text("\n".join(map(json.dumps, rows)))
        text = RECIPE.format(parse=parse, trainer=trainer.strip("\n"), formats=formats, data=data, model=model)
        recipe.write_text(text)
        run = tmp_path / "run"
        process = fork_launch(
            "--tiny", recipe, "1x3090", "--output_dir", run, "--max_steps", "2", "--eval_steps", "2", cwd=tmp_path
        )
        assert process.returncode == 0, process.stdout + process.stderr
        assert "Traceback" not in process.stderr, process.stderr
        assert read(run)["global_step"] == 2 and all((run / name).is_file() for name in ("model.safetensors", *files))
        return run, process.stdout

    return call


@pytest.mark.parametrize(
    ("parse", "trainer", "rows", "reason"),
    [
        ("RewardConfig", OF_TRL.format(name="RewardTrainer"), PREFERENCES, "does not continue texts"),
        ("TrainingArguments", WITHOUT_TOKENIZER, LABELED, "the trainer has no tokenizer"),
    ],
    ids=["reward", "no tokenizer"],
)
def test_trainers_that_write_no_samples(rehearse_recipe, parse, trainer, rows, reason):
    run, printed = rehearse_recipe(parse, trainer, rows)
    lines = [line for line in printed.splitlines() if reason in line]
    assert len(lines) == 1 and lines[0].startswith("No samples: "), printed
    assert read(run)["eval_loss"] > 0 and not (run / "held_out.parquet").exists() and not (run / "samples.txt").exists()
    assert "perplexity" not in read(run) or trainer == WITHOUT_TOKENIZER, "of another loss"


def test_mixture_of_experts_generates(rehearse_recipe, tmp_path):
    """TRL makes its routers return their logits, with which transformers fails to generate from a padded batch."""
    original = tmp_path / "experts"
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 2}
    AutoConfig.for_model("qwen3_moe", **sizes, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(original)
    tiny_tokenizer("Qwen/Qwen2-0.5B").save_pretrained(original)
    rows = [{"prompt": text[: 8 + number], "completion": text[8 + number :]} for number, text in enumerate(SENTENCES)]
    run, printed = rehearse_recipe("SFTConfig", SFT, rows, "prompt_completion", original)
    assert (run / "samples.txt").read_text().count("--- generated\n") == 2 and (run / "held_out.parquet").is_file()
    assert "failed, the model" not in printed
    assert read(run, "config.json")["output_router_logits"] is False
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run, padding_side="left")
    batch = tokenizer(["one", "one two three"], padding=True, return_tensors="pt")
    assert 0 in batch["attention_mask"]
    assert model.generate(**batch, max_new_tokens=4, do_sample=False).shape[0] == 2


# Each function that fails, and what is reported as lost.
LOST = {
    "training.evaluate": "the last evaluation",
    "training.save_held_out": "what --verify compares with",
    "training.generate_samples": "samples.txt",
    "training.print_summary": "the summary",
    "training.write_model_card": "README.md",
    "results.draw_losses": "loss.png",
}


def test_errors_after_the_training_are_reported_only(rehearse_recipe):
    lines = [f"    {name} = fail" for name in LOST]
    failing = "\n".join(["    from harness.run import results, training", *lines, SFT])
    fail = '    def fail(*arguments):\n        raise OSError("what comes first\\nthe last line")\n'
    run, printed = rehearse_recipe("SFTConfig", fail + failing, LABELED, "text", files=())
    for what in LOST.values():
        assert printed.count(f"warning: {what} failed, the model is saved: OSError: the last line\n") == 1, printed
    assert not any((run / name).exists() for name in ("loss.png", "samples.txt", "held_out.parquet"))
    assert "eval_loss" not in read(run) and read(run)["final_loss"] > 0


@pytest.mark.parametrize("failing", ["1", "01"], ids=["one", "all"])
def test_error_in_processes_that_others_wait_for(fork_launch, tmp_path, failing):
    """An error in one process ends the run, else the others would wait until --ddp_timeout. All of them lose nothing."""
    lines = f"""
    import os
    from harness.run import training
    def fail(*arguments):
        raise ValueError("of these processes")
    if os.environ["RANK"] in "{failing}":
        training.evaluate = training.generate_samples = fail
"""
    data, recipe, run = tmp_path / "rows.jsonl", tmp_path / "mine.py", tmp_path / "run"
    data.write_text("\n".join(map(json.dumps, LABELED)))
    trainer = lines + SFT
    recipe.write_text(RECIPE.format(parse="SFTConfig", trainer=trainer, formats="text", data=data, model="Qwen/Qwen2-0.5B"))
    flags = ["--output_dir", run, "--max_steps", "2", "--eval_strategy", "no", "--ddp_timeout", "60"]
    flags += ["--global_batch_size", "4"]
    process = fork_launch("--tiny", recipe, "4gpu_full_shard", *flags, cwd=tmp_path, NPROC_PER_NODE="2")
    assert (run / "model.safetensors").is_file(), process.stderr
    if failing == "01":
        assert process.returncode == 0, process.stderr
        for what in ("the last evaluation", "samples.txt"):
            assert process.stdout.count(f"warning: {what} failed, the model is saved: ValueError: of these processes\n") == 1
        assert read(run)["final_loss"] > 0 and (run / "README.md").is_file()
    else:
        assert "warning: the last evaluation failed in process 1, the model is saved; the run ends." in process.stdout
        assert process.returncode == 1 and "ValueError: of these processes" in process.stderr, process.stderr
        assert not (run / "train_results.json").exists()


def test_links_in_the_folder_of_a_run_are_not_written_through(fork_launch, tmp_path):
    """Also a link in place of a checkpoint that is deleted."""
    run, other = tmp_path / "run", tmp_path / "other"
    flags = ["--output_dir", run, "--max_length", "64", "--eval_strategy", "no", "--save_steps", "1"]
    assert fork_launch("--tiny", "qwen2_chat", "1x3090", *flags, "--max_steps", "2").returncode == 0
    (other / "folder").mkdir(parents=True)
    names = ["samples.txt", "loss.png", "README.md", "trainer_state.json", "held_out.parquet", "data.json"]
    names += ["train_results.json", "config.json", "model.safetensors"]
    for name in names:
        assert (run / name).is_file(), name
        shutil.move(run / name, other / name)
        (run / name).symlink_to(other / name)
    (run / ".model.draft").symlink_to(other / "folder")
    shutil.move(run / "checkpoint-1", other / "checkpoint-1")
    (run / "checkpoint-1").symlink_to(other / "checkpoint-1")
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    process = fork_launch("--tiny", "qwen2_chat", "1x3090", *flags, "--max_steps", "4")
    assert process.returncode == 0 and "warning" not in process.stdout, process.stderr
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    assert not [path for path in run.rglob("*") if path.is_symlink()]
