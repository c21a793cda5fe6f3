"""Every kind of bad input is one error message that says what to do, and exit code 2, before anything is started or written."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from harness.folder import acquire, lock_of

import pytest
from conftest import ROOT
from runs import assert_one_error

# What a user types: launch.sh itself, or what it passes to `harness.start.launch` (see forked_launcher.py).
TINY = "--tiny qwen2_fineweb_edu 1x3090"
REAL = "qwen2_fineweb_edu 1x3090 --use_cpu --dataset_name data --model_name_or_path"
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "a,b"}

# Command, a word of its message (most often the flag or the file), environment variables, arguments of `mount`.
CASES = [
    # names, options, flags
    ("launch.sh qwen 1x3090", "qwen3_dpo"),  # did you mean …
    ("launch.sh qwen2_chat 1x309", "1x3090"),
    ("launch.sh --tiny 1x3090 qwen2_chat", "1x3090"),
    ("launch.sh qwen2_chat llama31_8b_lora", "llama31_8b_lora"),
    ("launch.sh qwen2_chat", "CONFIG"),
    ("launch.sh --tiny", "RECIPE"),
    ("launch.sh --mrge outputs", "--merge"),
    ("launch.sh --max_steps 3 qwen2_chat", "--max_steps"),
    ("launch.sh --tiny --max_steps 3 qwen2_chat", "RECIPE"),
    ("launch.sh --preview qwen2_chat 1x3090", "CONFIG"),
    ("qwen2_chat 1x3090 --tiny", "--tiny"),
    ("launch.sh qwen2_chat --tiny 1x3090", "--tiny"),
    ("launch.sh qwen2_chat 1x3090 --preview", "--preview"),
    ("launch.sh --merge", "RUN"),
    ("launch.sh --merge nowhere", "nowhere"),
    ("launch.sh --merge adapter", "adapter_config.json"),
    ("launch.sh --merge adapter link", "link"),
    ("launch.sh --plan --preview qwen2_chat", "--preview"),
    ("launch.sh qwen2_chat 1x3090", "PYTHON", {"PYTHON": "/no/python"}),
    ("qwen2_chat 1x3090 --learning_rte 1", "--learning_rate"),
    ("qwen2_chat 1x3090 --num_processes 2", "NPROC_PER_NODE"),  # flags of other programs, and of earlier versions
    ("qwen2_chat 1x3090 --lr 2e-5", "--learning_rate"),
    ("qwen2_chat 1x3090 --max_seq_length 512", "--max_length"),
    (f"{TINY} stray", "stray"),
    # the machine
    ("launch.sh qwen2_fineweb_edu 4gpu_ddp", "4 GPUs"),
    (TINY, "/dev/shm", {}, "-t tmpfs -o size=4k,mode=1777 tmpfs /dev/shm"),
    (TINY, "NPROC_PER_NODE", {"NPROC_PER_NODE": "2"}),
    (TINY, "NPROC_PER_NODE", {"NPROC_PER_NODE": "two"}),
    (TINY, "OMP_NUM_THREADS", {"OMP_NUM_THREADS": "x"}),
    (f"launch.sh {TINY}", "ACCELERATE_USE_DEEPSPEED", {"ACCELERATE_USE_DEEPSPEED": "true"}),
    # recipes
    ("--tiny ./misspelled.py 1x3090", "max_length"),
    # configs
    ("--tiny qwen2_chat ./bytes.yaml", "bytes.yaml"),
    ("--tiny qwen2_chat ./key.yaml", "num_processes"),  # did you mean …
    # several machines
    (TINY, "SLURM_JOB_ID", {"SLURM_JOB_ID": "7"}),
    (TINY, "SLURM_JOB_ID", {"SLURM_JOB_ID": "seven", "SLURM_STEP_ID": "0"}),
    (TINY, "scontrol", STEP | {"PATH": "/nowhere"}),
    # numbers
    (f"{TINY} --max_steps 1.5", "--max_steps"),
    (f"{TINY} --max_steps 0", "--max_steps"),
    (f"{TINY} --max_steps -5", "--max_steps"),
    (f"{TINY} --learning_rate high", "--learning_rate"),
    (f"{TINY} --learning_rate nan", "--learning_rate"),
    (f"{TINY} --per_device_train_batch_size 0", "--per_device_train_batch_size"),
    (f"{TINY} --max_length 0", "--max_length"),
    (f"{TINY} --max_samples 9 --num_train_epochs 0", "--num_train_epochs"),
    (f"{TINY} --max_eval_samples 0", "--max_eval_samples"),
    (f"{TINY} --global_batch_size 5", "is not a multiple of 2"),
    ("--tiny llama31_70b_qlora 2x3090_qlora", "--global_batch_size 12 or 24", {"NPROC_PER_NODE": "3"}),
    (f"{TINY} --global_batch_size 8 --gradient_accumulation_steps 2", "--gradient_accumulation_steps"),
    (f"{TINY} --max_tokens 9 --num_train_epochs 2", "--max_tokens"),
    (f"{TINY} --fp16", "--bf16"),
    (f"{TINY} --eval_strategy sometimes", "--eval_strategy"),
    (f"{TINY} --model_init_kwargs {{bad", "{bad"),
    # what would train something else, or lose the run
    (f"{TINY} --deepspeed ds.json", "--deepspeed"),
    (f"{TINY} --do_train false", "--do_train"),
    (f"{TINY} --hub_token hf_secret", "hf auth login"),
    (f"{TINY} --push_to_hub --hub_strategy checkpoint", "--hub_strategy"),
    (f"{TINY} --resume_from_checkpoint x", "--resume_from_checkpoint"),
    (f"{TINY} --save_only_model", "--save_only_model"),
    (f"{TINY} --save_total_limit 1", "--save_total_limit"),
    (f"{TINY} --load_best_model_at_end --metric_for_best_model loss --greater_is_better true", "--greater_is_better"),
    (TINY + """ --accelerator_config '{"dispatch_batches": true}'""", "dispatch_batches"),
    (f"{TINY} --trust_remote_code", "--trust_remote_code"),
    (f"{TINY} --model_init_kwargs '{{\"trust_remote_code\": true}}'", "--trust_remote_code"),
    (f'{TINY} --model_init_kwargs \'{{"tp_plan": "auto"}}\'', "tp_plan"),
    (TINY, "PARALLELISM_CONFIG_CP_SIZE", {"PARALLELISM_CONFIG_CP_SIZE": "2"}),
    (f"{TINY} --lora_r 8", "--use_peft"),
    (f"{TINY} --use_peft --bnb_4bit_quant_type nf4", "--load_in_4bit"),
    (f"{TINY} --packing false --padding_free true", "--padding_free"),
    ("--tiny qwen3_dpo 4gpu_full_shard --precompute_ref_log_probs true", "--precompute_ref_log_probs"),
    (f"{TINY} --load_in_4bit", "--use_peft"),
    ("--tiny --prepare qwen2_chat --load_in_4bit", "--use_peft"),
    ("--tiny llama31_70b_qlora 2x3090_qlora --bf16 true", "--bf16"),
    ("--tiny qwen2_chat 4gpu_shard_grad_op --optim adamw_8bit", "--optim adamw_8bit"),
    (f"{TINY} --optim paged_adamw_8bit", "--optim paged_adamw_8bit"),
    ("--preview --tiny qwen2_chat --use_peft --lora_target_modules Wq", "Wq"),
    # --config
    (f"{TINY} --config", "--config"),
    (f"{TINY} --config tab.yaml", "--config"),
    (f"{TINY} --config rates.yaml", "--learning_rate"),
    (f"{TINY} --config env.yaml", "env.yaml"),
    # folders
    (f"{TINY} --output_dir empty.py", "empty.py"),
    (f"{TINY} --output_dir empty.py/run", "empty.py"),
    (f"{TINY} --output_dir data/run", "data/run", {}, "-t tmpfs -o ro tmpfs data"),
    (f"{TINY} --output_dir data", "data"),
    (f"{TINY} --output_dir busy", "busy"),
    # models
    (f"{REAL} ./nowhere", "./nowhere"),
    (f"{TINY} --output_dir new --model_name_or_path no/llama", "no/llama"),
    (f"{REAL} ./data", "config.json"),
    (f"{REAL} ./adapter", "adapter_config.json"),
    (f"{REAL} ./weightless", "weightless"),
    (f"{REAL} ./half", "/half"),
    (f"{REAL} ./parts", "model-2.safetensors"),
    (f"{REAL} ./mute", "tokenizer"),
    (f"{REAL} ./t5", "T5ForConditionalGeneration"),
    (f"{TINY} --model_name_or_path ./bert", "BertForMaskedLM"),
    (f"{REAL} ./reward", "Qwen2ForSequenceClassification"),
    (f"{REAL} ./complete --max_length 99999", "--max_length"),
    # data
    (f"{TINY} --dataset_name broken.jsonl --dataset_config x", "--dataset_config"),
    (f"{REAL} ./complete --dataset_name no.jsonl", "no.jsonl"),
    (f"{TINY} --dataset_name my rows.jsonl", "rows.jsonl"),
]

FILES = {
    "bytes.yaml": b"\xff\xfe\x00a",
    "empty.py": "pass\n",
    "tab.yaml": "learning_rate:\t1\n",
    "key.yaml": "distributed_type: FSDP\nnum_procesess: 1\n",
    "env.yaml": "env:\n  HF_ENDPOINT: http://127.0.0.1:9\n",
    "rates.yaml": "learning_rate: [1, 2]\n",
    "broken.jsonl": "{not json\n",
    "data/train.jsonl": "\n".join(json.dumps({"text": f"row {row}"}) for row in range(50)),
    "busy/run.json": json.dumps({"recipe": "another", "tiny": False, "sharded": False, "config": "c", "data_files": []}),
}


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "float32"}
CONFIGS_OF_MODELS = {
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "reward": QWEN2 | {"architectures": ["Qwen2ForSequenceClassification"]},
}


@pytest.fixture(scope="module")
def bad(workdir, rehearse):
    """A folder with bad recipes, configs, models, datasets and runs."""
    rehearse("qwen2_chat", "1x3090")  # makes the tiny models and datasets
    rehearse("qwen2_fineweb_edu", "1x3090")
    folder = workdir / "bad"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    recipe = (ROOT / "recipes/qwen2_fineweb_edu.py").read_text()
    (folder / "misspelled.py").write_text(recipe.replace("max_length=", "max_lenght="))
    (folder / "outputs").mkdir()
    (folder / "link").symlink_to("nowhere")
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{")
    (folder / "outputs/tiny").symlink_to(workdir / "outputs/tiny")
    _models(next((workdir / "outputs/tiny/.made").glob("Qwen--Qwen2-0.5B-????????")), folder)
    held = lock_of(folder / "busy")
    acquire(held)
    yield folder
    held.release()


def _models(complete: Path, folder: Path):
    for name in ("complete", "weightless", "half", "parts", "mute"):
        shutil.copytree(complete, folder / name)
    for name in ("weightless", "parts"):
        (folder / name / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "parts/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(complete / "model.safetensors", folder / "parts/model-1.safetensors")
    os.truncate(folder / "half/model.safetensors", 100_000)
    shutil.copy(complete / "model.safetensors", folder / "adapter/adapter_model.safetensors")
    for file in (folder / "mute").glob("tokenizer*"):
        file.unlink()
    for name, settings in CONFIGS_OF_MODELS.items():
        shutil.copytree(complete, folder / name)
        (folder / name / "config.json").write_text(json.dumps(settings))


def _written(folder: Path) -> dict:
    return {path: path.lstat().st_size for path in folder.rglob("*") if path.name != ".lock"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join([case[0], *(case[2] if len(case) > 2 else [])]))
def test_one_error_message(bad, environment, fork_launch, case):
    command, word, variables, mount = (*case, {}, "")[:4]
    if mount and os.geteuid():
        pytest.skip("only root can mount")
    before, words = _written(bad), shlex.split(command)
    if words[0] == "launch.sh":
        command, environment = [ROOT / "launch.sh", *words[1:]], environment | variables
        process = subprocess.run(command, cwd=bad, env=environment, capture_output=True, text=True, timeout=120)
    else:
        words = [str(bad / word) if word.startswith("./") and word.endswith((".py", ".yaml")) else word for word in words]
        mounts = [[str(bad / word) if word == "data" else word for word in mount.split()]] if mount else []
        process = fork_launch(*words, cwd=bad, mounts=mounts, trains=False, **variables)
    assert_one_error(process, word)
    assert "hf_secret" not in process.stderr and _written(bad) == before
