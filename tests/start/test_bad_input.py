"""Bad input is one error message and exit code 2, within seconds: a whole command for each stage of a start."""

import json
import os
import shlex
import shutil
import subprocess

import pytest
from conftest import ROOT
from filelock import FileLock

# What a user types: launch.sh itself, or what it passes to `harness.start.launch` (see forked_launcher.py).
TINY = "--tiny qwen2_fineweb_edu 1x3090"
REAL = "qwen2_fineweb_edu 1x3090 --use_cpu --dataset_name data --model_name_or_path"

# Command, a word of its message (most often the flag or the file), environment variables, arguments of `mount`.
CASES = [
    # launch.sh: names, options
    ("launch.sh qwen 1x3090", "qwen3_dpo"),  # did you mean …
    ("launch.sh --tiny 1x3090 qwen2_chat", "1x3090"),
    ("launch.sh --mrge outputs", "--merge"),
    ("launch.sh --tiny --max_steps 3 qwen2_chat", "RECIPE"),
    ("launch.sh qwen2_chat 1x3090", "PYTHON", {"PYTHON": "/no/python"}),
    ("launch.sh --merge nowhere", "nowhere"),
    # the launcher: config, machines, environment
    ("--tiny qwen2_chat ./key.yaml", "num_procesess"),
    ("launch.sh qwen2_fineweb_edu 4gpu_ddp", "4 GPUs"),
    (f"launch.sh {TINY}", "ACCELERATE_USE_DEEPSPEED", {"ACCELERATE_USE_DEEPSPEED": "true"}),
    # arguments: of the flags, the recipe and --config
    (f"{TINY} --learning_rte 1", "--learning_rate"),
    ("--tiny ./misspelled.py 1x3090", "max_length"),
    (f"{TINY} --config env.yaml", "--env"),
    (f"{TINY} --hub_token hf_secret", "hf auth login"),
    (f"{TINY} --column_map '[1]'", "--column_map"),
    (f"{TINY} --fp16", "fp16"),  # an error of transformers
    # the machine, once a process has started
    (TINY, "/dev/shm", {}, "-t tmpfs -o size=4k,mode=1777 tmpfs /dev/shm"),
    # the output directory
    (f"{TINY} --output_dir data/run", "data/run", {}, "-t tmpfs -o ro tmpfs data"),
    (f"{TINY} --output_dir busy", "busy"),
    # the model
    (f"{REAL} ./half", "/half"),
    (f"{TINY} --model_name_or_path ./bert", "BertForMaskedLM"),
    # the dataset
    (f"launch.sh {TINY} --dataset_name broken.jsonl", "broken.jsonl"),
]

FILES = {
    "key.yaml": "distributed_type: FSDP\nnum_procesess: 1\n",
    "env.yaml": "env:\n  HF_ENDPOINT: http://127.0.0.1:9\n",
    "broken.jsonl": "{not json\n",
    "data/train.jsonl": "\n".join(json.dumps({"text": f"row {row}"}) for row in range(50)),
    "busy/run.json": json.dumps({"recipe": "another", "tiny": False, "sharded": False, "config": "c", "data_files": []}),
}


@pytest.fixture(scope="module")
def bad(workdir, rehearse):
    """A folder with bad recipes, configs, models, datasets and runs."""
    rehearse("qwen2_fineweb_edu", "1x3090")  # makes the tiny model
    folder = workdir / "bad"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    recipe = (ROOT / "recipes/qwen2_fineweb_edu.py").read_text()
    (folder / "misspelled.py").write_text(recipe.replace("max_length=", "max_lenght="))
    (folder / "outputs").mkdir()
    (folder / "outputs/tiny").symlink_to(workdir / "outputs/tiny")
    complete = next((workdir / "outputs/tiny/.made").glob("Qwen--Qwen2-0.5B-????????"))
    for name in ("half", "bert"):
        shutil.copytree(complete, folder / name)
    os.truncate(folder / "half/model.safetensors", 100_000)
    (folder / "bert/config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    with FileLock(folder / "busy/.lock"):
        yield folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join([case[0], *(case[2] if len(case) > 2 else [])]))
def test_one_error_message(bad, environment, fork_launch, case):
    command, word, variables, mount = (*case, {}, "")[:4]
    if mount and os.geteuid():
        pytest.skip("only root can mount")
    words = shlex.split(command)
    if words[0] == "launch.sh":
        command, environment = [ROOT / "launch.sh", *words[1:]], environment | variables
        process = subprocess.run(command, cwd=bad, env=environment, capture_output=True, text=True, timeout=120)
    else:
        words = [str(bad / word) if word.startswith("./") and word.endswith((".py", ".yaml")) else word for word in words]
        mounts = [[str(bad / word) if word == "data" else word for word in mount.split()]] if mount else []
        process = fork_launch(*words, cwd=bad, mounts=mounts, trains=False, **variables)
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert process.returncode == 2 and len(errors) == 1, process.stdout + process.stderr
    assert word in process.stderr.splitlines()[-1] and "hf_secret" not in process.stderr and "Traceback" not in process.stderr
    assert not list(bad.rglob("checkpoint-*")), "nothing was trained"
