"""Whole rehearsals, as a user calls them: sharded, saved, reloaded, killed and resumed, over a hub, with adapters."""

import json
import math
import re
import shutil
import subprocess
import sys
import time

from harness.rehearsal import tiny_model

import psutil
import pytest
import torch
from conftest import ROOT, losses, read, readme_pairs
from hub import serve
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

RECIPE = "qwen2_fineweb_edu"


def held_out_loss(model, rows) -> float:
    """The mean over packed rows of nats per trained token: every document alone, by the plain model, without TRL."""
    means = []
    for row in rows:
        total, count, start = 0.0, 0, 0
        labels = row.get("labels", row["input_ids"])
        for length in row["seq_lengths"]:
            part = slice(start, start + length)
            ids, wanted = torch.tensor([row["input_ids"][part]]), torch.tensor(labels[part])[1:]
            start, trained = start + length, wanted != -100
            with torch.no_grad():
                chances = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)[trained]
            total -= chances.gather(1, wanted[trained, None]).sum().item()
            count += int(trained.sum())
        means.append(total / count)
    return sum(means) / len(means)


def reload(run, workplace):
    """The model a run left, in float32, as a user loads it; a 4-bit adapter on the 4-bit weights it was trained on."""
    if not (run / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(run).float().eval()
    if not read(run)["load_in_4bit"]:
        return AutoPeftModelForCausalLM.from_pretrained(run, dtype=torch.float32).eval()
    folder = next((workplace / "outputs/tiny/.quantized").glob(f"{read(run)['model'].replace('/', '--')}*/"))
    base = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, dtype=torch.bfloat16)
    return PeftModel.from_pretrained(base, run).eval()


@pytest.mark.parametrize(("recipe", "config", "processes", "sharded"), readme_pairs())
def test_pair_trains_and_leaves_a_model(rehearse, workplace, build_trainer, two_by_two, recipe, config, processes, sharded):
    """Every pair of the README's table with its processes; eight of them as two replicas of two shards."""
    if processes == 8:
        config, processes = two_by_two, 4
    run = rehearse(recipe, config)
    results = read(run)
    assert (results["fsdp_enabled"], results["world_size"], results["num_nodes"]) == (sharded, processes, 1)
    assert results["config"] == getattr(config, "stem", config) and results["tiny"] and results["resumed_from_step"] == 0
    logged = [loss for loss, _ in losses(run).values()]
    assert logged[0] - logged[-1] > 1.0
    assert results["final_loss"] == logged[-1]
    assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert results["model_params_b"] >= results["trainable_params_b"] > 0
    assert (results["model_params_b"] > results["trainable_params_b"]) == results["use_peft"]
    assert results["peak_host_gb"] > 0.3 * processes
    assert results["versions"]["torch"] == torch.__version__

    trainer = build_trainer(recipe, "--load_in_4bit", "false")
    assert held_out_loss(reload(run, workplace), trainer.eval_dataset) == pytest.approx(results["eval_loss"], rel=0.01)
    if not results["use_peft"]:
        saved, original = read(run, "config.json"), AutoConfig.from_pretrained(trainer.model.config.name_or_path)
        assert saved["dtype"] == str(original.dtype).removeprefix("torch.") and saved["use_cache"]
    assert AutoTokenizer.from_pretrained(run).chat_template == trainer.processing_class.chat_template
    assert (run / "loss.png").stat().st_size > 5000
    assert (run / "samples.txt").read_text().count("> ") >= 3
    # Packed rows hold hardly any padding; chat and code train on a part of them.
    tokens = results["tokens_per_second"] * results["train_runtime"] / (30 * processes * 2 * 2 * 256)
    assert (0.9 if recipe in ("qwen2_fineweb_edu", "gpt2_xl_wikitext") else 0.1) < tokens <= 1


def test_a_finished_run_says_so_and_is_left_alone(rehearse, launch):
    run = rehearse(RECIPE, "1x3090")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "run.json"}
    process = launch("--tiny", RECIPE, "1x3090", "--output_dir", run)
    assert process.returncode == 0
    for word in ("is finished", "30 steps", "--max_steps", "--output_dir", "rm -r"):
        assert word in process.stdout
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "run.json"}


def test_a_run_killed_after_its_last_step_trains_no_other(rehearse, launch, workplace):
    run = workplace / "runs/killed-at-the-end"
    shutil.copytree(rehearse(RECIPE, "1x3090"), run)
    before = losses(run)
    (run / "train_results.json").unlink()
    process = launch("--tiny", RECIPE, "1x3090", "--output_dir", run)
    assert process.returncode == 0, process.stderr
    results = read(run)
    assert (results["global_step"], results["resumed_from_step"]) == (30, 30) and losses(run) == before
    assert results["tokens"] > 0 and results["train_runtime"] > 0  # of the part before


@pytest.fixture
def start(environment, workplace, tmp_path):
    """Starts launch.sh and returns it with the file of what it prints; kills what is left of it afterwards."""
    started = []

    def call(*arguments):
        log = tmp_path / f"{len(started)}.log"
        with log.open("w") as file:
            command = [ROOT / "launch.sh", *map(str, arguments)]
            started.append(subprocess.Popen(command, cwd=workplace, env=environment, stdout=file, stderr=file))
        return started[-1], log

    yield call
    for process in started:
        process.kill()
        process.wait()


def wait_until(condition, log, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("config", ["1x3090", "4gpu_shard_grad_op"])
def test_a_stop_from_outside_leaves_a_checkpoint(rehearse, start, workplace, config):
    """SIGTERM to the launcher: one step more, a checkpoint, and the same command goes on from it."""
    rehearse(RECIPE, "1x3090")  # makes the stand-ins
    run = workplace / "runs" / f"stopped-{config}"
    command = ["--tiny", RECIPE, config, "--output_dir", run, "--logging_steps", "1", "--eval_strategy", "no"]
    process, log = start(*command, "--max_steps", "2000", "--save_steps", "1000")
    wait_until(lambda: log.read_text().count("{'loss'") > 2, log)
    process.terminate()
    assert process.wait(timeout=60) == 143
    (step,) = re.findall(r"Stopped by SIGTERM at step (\d+); the same command goes on from there", log.read_text())
    assert (run / f"checkpoint-{step}/complete.json").is_file() and not (run / "train_results.json").exists()
    assert "Traceback" not in log.read_text() and "error" not in log.read_text()
    if config == "1x3090":
        rehearse(RECIPE, config, *command[3:], "--max_steps", str(int(step) + 2))  # a later --output_dir wins
        assert read(run)["resumed_from_step"] == int(step) and len(losses(run)) == int(step) + 2


def test_a_stop_before_training_leaves_no_process(start, workplace):
    process, log = start("--tiny", RECIPE, "4gpu_full_shard", "--output_dir", workplace / "runs/never-begun")
    ranks = []

    def spawned():
        ranks[:] = [
            child for child in psutil.Process(process.pid).children() if "harness.start.launch" not in " ".join(child.cmdline())
        ]
        return len(ranks) == 4

    wait_until(spawned, log)
    process.terminate()
    assert process.wait(timeout=30) == 143, log.read_text()
    psutil.wait_procs(ranks, timeout=5)
    assert not any(rank.is_running() for rank in ranks)
    assert "Stopped by SIGTERM before the training began." in log.read_text() and "Traceback" not in log.read_text()


def test_killed_and_started_again_logs_the_same_losses(rehearse, environment, workplace):
    undisturbed = rehearse(RECIPE, "1x3090_offload")
    run = workplace / "runs/killed"
    command = [ROOT / "launch.sh", "--tiny", RECIPE, "1x3090_offload", "--output_dir", run]
    with (workplace / "killed.log").open("w") as log:
        process = subprocess.Popen(command, cwd=workplace, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not (run / "checkpoint-15/complete.json").exists():
            assert process.poll() is None and time.monotonic() < deadline, (workplace / "killed.log").read_text()
            time.sleep(0.05)
        process.kill()  # the launcher alone: what it started must go with it
        process.wait()
    # A kill in the middle of a later save leaves half a checkpoint.
    (run / "checkpoint-20").mkdir()
    shutil.copy(run / "checkpoint-15/trainer_state.json", run / "checkpoint-20")

    again = subprocess.run(command, cwd=workplace, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert f"Continuing from {run / 'checkpoint-15'}" in again.stdout and "checkpoint-20 was cut short" in again.stdout
    assert read(run)["resumed_from_step"] == 15
    assert losses(run) == losses(undisturbed)  # bit for bit
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_sharded_equals_unsharded(rehearse):
    """Four processes and one, the same global batches, float32."""
    flags = ["--bf16", "false", "--dataset_streaming", "false", "--max_steps", "8", "--logging_steps", "1"]
    flags += ["--gradient_accumulation_steps", "1", "--eval_strategy", "no", "--learning_rate", "3e-3"]
    four = losses(rehearse(RECIPE, "4gpu_full_shard", *flags, "--per_device_train_batch_size", "1"))
    one = losses(rehearse(RECIPE, "1x3090", *flags, "--per_device_train_batch_size", "4"))
    assert len(one) == 8
    for step, (loss, grad_norm) in one.items():
        assert four[step][0] == pytest.approx(loss, abs=1e-3)
        assert four[step][1] == pytest.approx(grad_norm, rel=1e-2)


def test_sharded_checkpoint_merges_with_accelerate(rehearse, tmp_path, environment):
    run = rehearse(RECIPE, "4gpu_full_shard")
    command = [sys.executable, "-m", "accelerate.commands.merge", run / "checkpoint-30/pytorch_model_fsdp_0", tmp_path]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    merged, saved = load_file(tmp_path / "model.safetensors"), load_file(run / "model.safetensors")
    assert saved.keys() <= merged.keys()
    assert all(torch.equal(merged[name].bfloat16(), weight) for name, weight in saved.items())


@pytest.mark.parametrize(("harness_precision", "low", "high"), [("on", 0, 1e-4), ("off", 5e-4, 1)])
def test_loss_is_float32_under_bf16(rehearse, environment, workplace, tmp_path, harness_precision, low, high):
    """With the harness the loss is what float32 makes of the forward pass; without it, it is rounded to bf16."""
    rehearse(RECIPE, "1x3090_offload")  # makes the stand-ins
    config = ROOT / "accelerate_configs/1x3090_offload.yaml"
    launched = {"recipe": RECIPE, "config": str(config), "processes": 1, "tiny": True, "on_cpu": True}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    command += [ROOT / "tests/measure_loss.py", ROOT / f"recipes/{RECIPE}.py", tmp_path / "differences.json"]
    command += ["--output_dir", tmp_path / "run", "--max_steps", "3", "--save_strategy", "no", "--eval_strategy", "no"]
    variables = {"RECIPE_LAUNCH": json.dumps(launched), "HARNESS_PRECISION": harness_precision}
    variables["PYTHONPATH"] = str(ROOT / "recipes")
    subprocess.run(command, check=True, cwd=workplace, env=environment | variables, capture_output=True)
    differences = json.loads((tmp_path / "differences.json").read_text())
    assert len(differences) == 6 and low <= max(differences) < high


def test_a_copied_recipe_with_a_model_from_the_hub(environment, launch, workplace, tmp_path):
    """`cp recipe mine.py`, another model id: its config and tokenizer come from the hub, nothing else does."""
    root = tmp_path / "hub"
    source = root / "models/some/unknown-llama"
    tokenizer = tiny_model.make_tokenizer(tiny_model.FAMILIES["Qwen/Qwen2-0.5B*"])
    tokenizer.save_pretrained(source)
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256}
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    shutil.copy(ROOT / f"recipes/{RECIPE}.py", tmp_path / "mine.py")
    flags = ["--model_name_or_path", "some/unknown-llama", "--learning_rate", "1e-3", "--max_steps", "4"]
    with serve(root) as server:
        process = launch("--tiny", tmp_path / "mine.py", "1x3090", *flags, HF_ENDPOINT=server.url, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    run = tmp_path / "outputs/tiny/mine"
    assert read(run)["model"] == "some/unknown-llama" and not read(run)["fsdp_enabled"]
    assert read(run, "config.json")["model_type"] == "llama"
    assert not any(request.endswith("model.safetensors") for request in server.requests)


@pytest.fixture
def twins(rehearse, workplace, tmp_path):
    """A hub that serves the tiny stand-ins under the recipe's own ids."""
    rehearse(RECIPE, "1x3090")
    for kind, name in (("models", "Qwen/Qwen2-0.5B"), ("datasets", "HuggingFaceFW/fineweb-edu")):
        stand_in = next((workplace / "outputs/tiny/.stand-ins").glob(f"{name.replace('/', '--')}-*"))
        shutil.copytree(stand_in, tmp_path / "hub" / kind / name)
    with serve(tmp_path / "hub") as server:
        yield server


def test_real_ids_over_http(twins, environment, tmp_path):
    """No rehearsal: the recipe's own ids, config and stream, over HTTP, as `python recipe.py` on a machine's CPU."""
    command = [sys.executable, ROOT / f"recipes/{RECIPE}.py", "--use_cpu", "--max_steps", "2"]
    variables = {"HF_ENDPOINT": twins.url, "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT / "recipes")}
    process = subprocess.run(command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    results = read(tmp_path / f"outputs/{RECIPE}")
    assert results["model"] == "Qwen/Qwen2-0.5B" and not results["tiny"] and results["global_step"] == 2
    parquet = {request.split("/")[-1] for request in twins.requests if request.endswith(".parquet")}
    assert len(parquet) > 1
    assert any(request.startswith("GET /Qwen/Qwen2-0.5B/") and "model.safetensors" in request for request in twins.requests)


@pytest.mark.parametrize("quantized", [[], ["--load_in_4bit"]], ids=["lora", "qlora"])
def test_adapters(rehearse, workplace, build_trainer, quantized):
    """LoRA, and LoRA on 4-bit weights of the real bitsandbytes, sharded with offload; the adapter scores as logged."""
    flags = ["--use_peft", *quantized, "--max_steps", "10"]
    run = rehearse(RECIPE, "1x3090_offload", *flags)
    results = read(run)
    assert results["fsdp_enabled"] and results["trainable_params_b"] < results["model_params_b"]
    assert not (run / "model.safetensors").exists()
    assert all(".lora_" in name for name in load_file(run / "adapter_model.safetensors"))
    trainer = build_trainer(RECIPE)
    assert held_out_loss(reload(run, workplace), trainer.eval_dataset) == pytest.approx(results["eval_loss"], rel=0.01)


def test_a_run_that_is_not_what_its_config_says_stops(rehearse, environment, workplace, tmp_path):
    """FSDP asked for and not started: `python recipe.py` where accelerate should have been."""
    rehearse(RECIPE, "1x3090")
    config = str(ROOT / "accelerate_configs/4gpu_full_shard.yaml")
    launched = json.dumps({"recipe": RECIPE, "config": config, "processes": 4, "tiny": True})
    variables = {"RECIPE_LAUNCH": launched, "PYTHONPATH": str(ROOT / "recipes")}
    command = [sys.executable, ROOT / f"recipes/{RECIPE}.py", "--use_cpu", "--output_dir", tmp_path / "run"]
    process = subprocess.run(command, cwd=workplace, env=environment | variables, capture_output=True, text=True)
    assert process.returncode != 0
    assert "the config says FSDP on 4 processes, but this run is unsharded on 1" in process.stderr
