"""Every kind of bad input is one line that says what to do, and exit code 2, before anything is spawned or written."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from harness.folder import lock

import pytest
from conftest import ROOT, is_one_line

# What a person types: launch.sh itself, or what it gives to `harness.start.launch` (see starts.py).
TINY = "--tiny qwen2_fineweb_edu 1x3090"
REAL = "qwen2_fineweb_edu 1x3090 --use_cpu --dataset_name data --model_name_or_path"
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "a,b"}

KINDS = {
    # names, options, flags
    "a recipe that is not there": ("launch.sh qwen 1x3090", "no recipe is called 'qwen': did you mean qwen2_chat?"),
    "a config that is not there": ("launch.sh qwen2_chat 1x309", "no config is called '1x309': did you mean 1x3090?"),
    "no config": ("launch.sh qwen2_chat", "which config?"),
    "no recipe": ("launch.sh --tiny", "--tiny needs a RECIPE"),
    "an option that is not there": ("launch.sh --tinny qwen2_chat 1x3090", "unknown option --tinny"),
    "--tiny at the end": ("qwen2_chat 1x3090 --tiny", "--tiny comes first"),
    "--tiny in the middle": ("launch.sh qwen2_chat --tiny 1x3090", "--tiny comes first"),
    "nothing to merge": ("launch.sh --merge", "--merge takes the folder of a run"),
    "a run to merge that is not there": ("launch.sh --merge nowhere", "nowhere is not a folder"),
    "nothing to report": ("launch.sh --report", "--report takes the folders"),
    "no such Python": ("launch.sh qwen2_chat 1x3090", "PYTHON=/no/python is no program", {"PYTHON": "/no/python"}),
    "a misspelt flag": ("qwen2_chat 1x3090 --learning_rte 1", "unknown flag --learning_rte: did you mean --learning_rate?"),
    "a flag of former years": ("qwen2_chat 1x3090 --max_seq_length 512", "--max_seq_length is now --max_length"),
    "a stray word": (f"{TINY} stray", "unknown flag stray"),
    # the machine
    "too few GPUs": ("launch.sh qwen2_fineweb_edu 4gpu_ddp", "needs 4 GPUs, and this machine has none. Rehearse it here"),
    "a module that hides a package": (
        f"launch.sh {TINY}",
        "hides the package datasets: give it another name",
        {"PYTHONPATH": "hides"},
    ),
    "no room in /dev/shm": (TINY, "/dev/shm has 0 MB free", {}, "-t tmpfs -o size=4k,mode=1777 tmpfs /dev/shm"),
    # recipes
    "a recipe with a syntax error": ("--tiny ./syntax.py 1x3090", "syntax.py, line 2: invalid syntax"),
    "a recipe that is no text": ("--tiny ./bytes.py 1x3090", "bytes.py is no Python file"),
    "a recipe without parse": ("--tiny ./empty.py 1x3090", "ended without calling parse()"),
    "a recipe without train": ("--tiny ./untrained.py 1x3090", "calls parse() and never train()"),
    "a recipe with a number nobody knows": ("--tiny ./misspelt.py 1x3090", "unknown flag max_lenght: did you mean max_length?"),
    # configs
    "a YAML with a tab": ("--tiny qwen2_chat ./tab.yaml", "tab.yaml is not a readable YAML file"),
    "a config that is no text": ("--tiny qwen2_chat ./bytes.yaml", "bytes.yaml is not a readable YAML file"),
    "an empty config": ("--tiny qwen2_chat ./empty.yaml", "empty.yaml holds no keys"),
    "a key that accelerate does not read": (
        "--tiny qwen2_chat ./key.yaml",
        "unknown key num_procesess: did you mean num_processes?",
    ),
    "a list where a number belongs": ("--tiny qwen2_chat ./list.yaml", "num_processes ([1])"),
    "a number where keys belong": ("--tiny qwen2_chat ./number.yaml", "fsdp_config is 3, expected lines of `key: value`"),
    "a number where a mesh belongs": ("--tiny qwen2_chat ./mesh.yaml", "parallelism_config is 4, expected lines"),
    "FSDP1": ("--tiny qwen2_chat ./fsdp1.yaml", "fsdp_version is missing, which accelerate takes as 1"),
    "DeepSpeed": ("--tiny qwen2_chat ./deepspeed.yaml", "distributed_type is 'DEEPSPEED', expected one of FSDP"),
    # several machines
    "NNODES alone": (TINY, "NODE_RANK and MASTER_ADDR missing", {"NNODES": "2"}),
    "a number that is a word": (TINY, "NPROC_PER_NODE is 'two', expected a whole number", {"NPROC_PER_NODE": "two"}),
    "a job that SLURM does not know": (TINY, "says that this is job 7, and SLURM does not", {"SLURM_JOB_ID": "7"}),
    "a job that is a word": (TINY, "SLURM_JOB_ID is 'seven'", {"SLURM_JOB_ID": "seven", "SLURM_STEP_ID": "0"}),
    "SLURM without scontrol": (TINY, "scontrol is not in PATH", STEP | {"PATH": "/nowhere"}),
    "a rank beyond the nodes": (TINY, "node rank 5 of 2 nodes", STEP | {"SLURM_NODEID": "5", "MASTER_ADDR": "127.0.0.1"}),
    # numbers
    "half a step": (f"{TINY} --max_steps 1.5", "--max_steps/--max-steps: invalid int value: '1.5'"),
    "a word as learning rate": (f"{TINY} --learning_rate high", "invalid float value: 'high'"),
    "NaN as learning rate": (f"{TINY} --learning_rate nan", "--learning_rate is nan, expected a number above 0"),
    "no step at all": (f"{TINY} --max_steps 0", "--max_steps is 0, expected 1 or more"),
    "a batch size of 0": (f"{TINY} --per_device_train_batch_size 0", "--per_device_train_batch_size is 0, expected 1 or more"),
    "no accumulation at all": (f"{TINY} --gradient_accumulation_steps 0", "--gradient_accumulation_steps is 0, expected 1"),
    "a length of 0": (f"{TINY} --max_length 0", "--max_length is 0, expected 1 or more"),
    "a seed below 0": (f"{TINY} --seed -1", "--seed is -1, expected 0 or more"),
    "an adapter of rank 0": (f"{TINY} --use_peft --lora_r 0", "--lora_r is 0, expected 1 or more"),
    "a budget of no tokens": (f"{TINY} --max_tokens 0", "--max_tokens is 0, expected 1 or more"),
    "a stream without an end": (f"{TINY} --max_steps -1", "a stream has no length"),
    "a batch that cannot be divided": (f"{TINY} --global_batch_size 5", "is not a multiple of 2"),
    "two sizes of a batch": (f"{TINY} --global_batch_size 8 --gradient_accumulation_steps 2", "give one of them"),
    "nobody held out": (f"{TINY} --max_eval_samples 0", "--max_eval_samples is 0, expected 1 or more"),
    "a word that is no choice": (f"{TINY} --eval_strategy sometimes", "invalid choice: 'sometimes'"),
    "JSON that is none": (f"{TINY} --model_init_kwargs {{bad", "{bad is not JSON"),
    # arguments against each other
    "4-bit weights without an adapter": (f"{TINY} --load_in_4bit", "add --use_peft"),
    "nothing to prepare for": ("--tiny --prepare qwen2_chat --load_in_4bit", "add --use_peft"),
    "a cast of packed weights": ("--tiny llama31_70b_qlora 2x3090_qlora --bf16 true", "--bf16 and --fp16 ask for a cast"),
    "packed weights that cannot be sharded": (
        "--tiny llama31_70b_qlora 2x3090_qlora --bnb_4bit_quant_storage uint8",
        "uint8 cannot be sharded",
    ),
    "a token on the command line": (f"{TINY} --hub_token hf_secret", "`hf auth login`"),
    "an upload": (f"{TINY} --push_to_hub", "`hf upload OWNER/NAME`"),
    "one checkpoint only": (f"{TINY} --save_total_limit 1", "give 2 or more"),
    # --config
    "--config of nothing": (f"{TINY} --config", "--config needs the path"),
    "--config with a tab": (f"{TINY} --config tab.yaml", "the file of --config is not a readable YAML file"),
    "--config with a list for a number": (f"{TINY} --config rates.yaml", "--learning_rate is [1, 2], expected a number"),
    "--config with a number for a list": (f"{TINY} --config modules.yaml", "lora_target_modules in the file of --config is 5"),
    # folders
    "a folder that is a file": (f"{TINY} --output_dir empty.py", "empty.py is a file"),
    "a folder in a file": (f"{TINY} --output_dir empty.py/run", "cannot be written (Not a directory)"),
    "a read-only folder": (f"{TINY} --output_dir data/run", "(Read-only file system)", {}, "-t tmpfs -o ro tmpfs data"),
    "somebody else's folder": (f"{TINY} --output_dir data", "holds files that are not a run of this project"),
    "a folder whose owner is unknown": (f"{TINY} --output_dir damaged", "run.json is damaged"),
    "another run's folder": (f"{TINY} --output_dir taken", "holds a run with recipe another"),
    "a folder that another run is in": (f"{TINY} --output_dir busy", "another run is writing into busy"),
    # models
    "a model that is not there": (f"{REAL} ./nowhere", "there is no folder ./nowhere"),
    "a hub that is not there": (f"{TINY} --output_dir new --model_name_or_path no/llama", "the hub cannot be reached"),
    "a model without config": (f"{REAL} ./data", "has no config.json"),
    "a model without weights": (f"{REAL} ./weightless", "weightless has no model.safetensors"),
    "a model with half of its weights": (f"{REAL} ./cut", "bytes, its header says"),
    "a model with weights that are none": (f"{REAL} ./short", "is not a whole safetensors file"),
    "a model that lacks a part": (f"{REAL} ./parts", "parts has no model-2.safetensors"),
    "a tokenizer that is not there": (f"{REAL} ./mute", "mute has no tokenizer"),
    "a tokenizer of another model": (f"{REAL} ./other", "has tokens up to number 2047, and the model has 500"),
    "longer than the model": (f"{REAL} ./whole --max_length 99999", "--max_length 99999 is more than the 32768 positions"),
    "a template that fails": ("--tiny qwen2_chat 1x3090 --chat_template_path fails.jinja", "fails.jinja fails (never)"),
    "a template that is not there": ("--tiny qwen2_chat 1x3090 --chat_template_path no.jinja", "no.jinja is no file"),
    # data
    "a configuration of one file": (f"{TINY} --dataset_name broken.jsonl --dataset_config x", "broken.jsonl is one file"),
    "a file of data that is not there": (f"{REAL} ./whole --dataset_name no.jsonl", "there is no file or folder no.jsonl"),
    "a column that is not there": (f"{REAL} ./whole --dataset_text_field body", "has the columns text; this recipe takes texts"),
    "a split that is not there": (f"{REAL} ./whole --dataset_train_split trian", "none called trian"),
    "no name of data": (f"{TINY} --dataset_name=", "--dataset_name is empty"),
    "data that are none": (f"{REAL} ./whole --dataset_name empty.jsonl", "empty.jsonl is empty"),
    "data that are no JSON": (f"{REAL} ./whole --dataset_name broken.jsonl", "JSON parse error"),
}

FILES = {
    "syntax.py": "import harness\ndef main(:\n",
    "bytes.py": b"\xff\xfe\x00a",
    "bytes.yaml": b"\xff\xfe\x00a",
    "empty.py": "pass\n",
    "empty.yaml": "",
    "hides/datasets.py": "",
    "tab.yaml": "learning_rate:\t1\n",
    "key.yaml": "distributed_type: FSDP\nnum_procesess: 1\n",
    "list.yaml": "distributed_type: MULTI_GPU\nnum_processes: [1]\n",
    "number.yaml": "distributed_type: FSDP\nfsdp_config: 3\n",
    "mesh.yaml": "distributed_type: MULTI_GPU\nparallelism_config: 4\n",
    "fsdp1.yaml": "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: true\n",
    "deepspeed.yaml": "distributed_type: DEEPSPEED\n",
    "rates.yaml": "learning_rate: [1, 2]\n",
    "modules.yaml": "use_peft: true\nlora_target_modules: 5\n",
    "fails.jinja": "{{ raise_exception('never') }}",
    "empty.jsonl": "",
    "broken.jsonl": "{not json\n",
    "data/train.jsonl": "\n".join(json.dumps({"text": f"row {row}"}) for row in range(50)),
    "damaged/run.json": "{",
    "taken/run.json": json.dumps({"recipe": "another", "tiny": False, "sharded": False, "config": "c"}),
    "busy/run.json": json.dumps({"recipe": "another"}),
}


@pytest.fixture(scope="module")
def bad(workplace, rehearse):
    """A folder of bad things."""
    rehearse("qwen2_chat", "1x3090")  # makes the stand-ins
    rehearse("qwen2_fineweb_edu", "1x3090")
    folder = workplace / "bad"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    recipe = (ROOT / "recipes/qwen2_fineweb_edu.py").read_text()
    (folder / "untrained.py").write_text(recipe.replace("parse, train", "parse").replace("    train(trainer)\n", ""))
    (folder / "misspelt.py").write_text(recipe.replace("max_length=", "max_lenght="))
    (folder / "outputs").mkdir()
    (folder / "outputs/tiny").symlink_to(workplace / "outputs/tiny")
    _models(next((workplace / "outputs/tiny/.stand-ins").glob("Qwen--Qwen2-0.5B-????????")), folder)
    held = lock(folder / "busy")
    yield folder
    held.release()


def _models(whole: Path, folder: Path):
    for name in ("whole", "weightless", "cut", "short", "parts", "mute", "other"):
        shutil.copytree(whole, folder / name)
    for name in ("weightless", "parts"):
        (folder / name / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "parts/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(whole / "model.safetensors", folder / "parts/model-1.safetensors")
    os.truncate(folder / "cut/model.safetensors", 100_000)
    os.truncate(folder / "short/model.safetensors", 5)
    for file in (folder / "mute").glob("tokenizer*"):
        file.unlink()
    config = json.loads((folder / "other/config.json").read_text())
    (folder / "other/config.json").write_text(json.dumps(config | {"vocab_size": 500}))


def _written(folder: Path) -> dict:
    return {path: path.stat().st_size for path in folder.rglob("*") if path.name != ".lock"}


@pytest.mark.parametrize("kind", KINDS)
def test_is_refused_in_one_line(bad, environment, starts, kind):
    command, expected, variables, mount = (*KINDS[kind], {}, "")[:4]
    if mount and os.geteuid():
        pytest.skip("only root can mount")
    before, words = _written(bad), shlex.split(command)
    variables = {name: f"{bad / value}" if value == "hides" else value for name, value in variables.items()}
    if words[0] == "launch.sh":
        command, environment = [ROOT / "launch.sh", *words[1:]], environment | variables
        process = subprocess.run(command, cwd=bad, env=environment, capture_output=True, text=True, timeout=120)
    else:
        words = [str(bad / word) if word.startswith("./") and word.endswith((".py", ".yaml")) else word for word in words]
        mounts = [[str(bad / word) if word == "data" else word for word in mount.split()]] if mount else []
        process = starts(*words, cwd=bad, mounts=mounts, trains=False, **variables)
    is_one_line(process, expected)
    assert "hf_secret" not in process.stderr and _written(bad) == before


def test_there_are_sixty_kinds():
    assert len(KINDS) >= 60
