"""Every kind of bad input is one error message that says what to do, and exit code 2, before anything is started or written."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from harness.folder import lock

import pytest
from conftest import ROOT, assert_one_error

# What a user types: launch.sh itself, or what it passes to `harness.start.launch` (see forked_launcher.py).
TINY = "--tiny qwen2_fineweb_edu 1x3090"
REAL = "qwen2_fineweb_edu 1x3090 --use_cpu --dataset_name data --model_name_or_path"
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "a,b"}

# Kind: command, words of the message, environment variables, arguments of `mount`.
KINDS = {
    # names, options, flags
    "unknown recipe": ("launch.sh qwen 1x3090", "unknown recipe: qwen. Did you mean qwen3_dpo?"),
    "unknown config": ("launch.sh qwen2_chat 1x309", "unknown config: 1x309. Did you mean 1x3090?"),
    "config before recipe": ("launch.sh --tiny 1x3090 qwen2_chat", "1x3090 is accelerate_configs/1x3090.yaml, but a recipe is"),
    "two recipes": ("launch.sh qwen2_chat llama31_8b_lora", "llama31_8b_lora is recipes/llama31_8b_lora.py, but a config is"),
    "no config": ("launch.sh qwen2_chat", "CONFIG is missing, and this machine has no GPU to choose one for"),
    "no recipe": ("launch.sh --tiny", "--tiny needs a RECIPE"),
    "unknown option": ("launch.sh --tinny qwen2_chat 1x3090", "unknown option --tinny"),
    "misspelled option": ("launch.sh --mrge outputs", "unknown option --mrge. Did you mean --merge?"),
    "flags before the recipe": (
        "launch.sh --max_steps 3 qwen2_chat",
        "Flags of a recipe come last: ./launch.sh RECIPE CONFIG --max_steps",
    ),
    "flags before the recipe of --tiny": (
        "launch.sh --tiny --max_steps 3 qwen2_chat",
        "write RECIPE before its flags: ./launch.sh --tiny RECIPE",
    ),
    "--preview of a config": ("launch.sh --preview qwen2_chat 1x3090", "--preview takes no CONFIG: leave out 1x3090"),
    "--tiny at the end": ("qwen2_chat 1x3090 --tiny", "--tiny comes first"),
    "--tiny in the middle": ("launch.sh qwen2_chat --tiny 1x3090", "--tiny comes first: ./launch.sh --tiny qwen2_chat 1x3090"),
    "--preview at the end": ("launch.sh qwen2_chat 1x3090 --preview", "--preview comes first: ./launch.sh --preview RECIPE"),
    "--merge without a run": (
        "launch.sh --merge",
        "--merge: the following arguments are required: RUN: see ./launch.sh --merge --help",
    ),
    "--merge of a missing run": ("launch.sh --merge nowhere", "nowhere is not a folder"),
    "--report without runs": (
        "launch.sh --report",
        "--report: the following arguments are required: RUN: see ./launch.sh --report --help",
    ),
    "two commands": ("launch.sh --plan --preview qwen2_chat", "--plan and --preview are two commands"),
    "missing Python": ("launch.sh qwen2_chat 1x3090", "PYTHON: program not found: /no/python", {"PYTHON": "/no/python"}),
    "misspelled flag": ("qwen2_chat 1x3090 --learning_rte 1", "unknown flag --learning_rte: did you mean --learning_rate?"),
    "flag of accelerate": ("qwen2_chat 1x3090 --num_processes 2", "--num_processes: the config says how many there are"),
    "short name of a flag": ("qwen2_chat 1x3090 --lr 2e-5", "--lr: pass --learning_rate"),
    "flag of an earlier version": ("qwen2_chat 1x3090 --group_by_length", "pass --train_sampling_strategy group_by_length"),
    "flag to overwrite": ("qwen2_chat 1x3090 --overwrite_output_dir", "nothing is overwritten: pass another --output_dir"),
    "earlier name of a flag": ("qwen2_chat 1x3090 --max_seq_length 512", "--max_seq_length is now --max_length"),
    "stray word": (f"{TINY} stray", "stray is no flag, and no value of the flag before it"),
    # the machine
    "too few GPUs": ("launch.sh qwen2_fineweb_edu 4gpu_ddp", "needs 4 GPUs, this machine has none. Rehearse it here"),
    "/dev/shm is full": (TINY, "/dev/shm has 0 MB free", {}, "-t tmpfs -o size=4k,mode=1777 tmpfs /dev/shm"),
    # recipes
    "help of a recipe with a syntax error": ("launch.sh ./syntax.py --help", "syntax.py, line 2: invalid syntax"),
    "two processes without torch.distributed": (
        TINY,
        "1x3090 trains on one GPU, but NPROC_PER_NODE is 2",
        {"NPROC_PER_NODE": "2"},
    ),
    "no number of threads": (TINY, "OMP_NUM_THREADS is 'x', expected a number", {"OMP_NUM_THREADS": "x"}),
    "flag for what the config says": (f"{TINY} --deepspeed ds.json", "--deepspeed: the config says how a run is sharded"),
    "run that does not train": (f"{TINY} --do_train false", "--do_train, --do_predict: a recipe trains"),
    "upload to a repository": (f"{TINY} --hub_model_id me/model", "--hub_model_id is for uploads: add --push_to_hub"),
    "merge of a damaged adapter": ("launch.sh --merge adapter", "adapter_config.json is damaged"),
    "merge into a missing link": ("launch.sh --merge adapter link", "link exists already"),
    "recipe with an unknown argument": ("--tiny ./misspelled.py 1x3090", "unknown flag max_lenght: did you mean max_length?"),
    # configs
    "YAML with a tab": ("--tiny qwen2_chat ./tab.yaml", "tab.yaml: not a readable YAML file"),
    "YAML that is not text": ("--tiny qwen2_chat ./bytes.yaml", "bytes.yaml: not a readable YAML file"),
    "empty YAML": ("--tiny qwen2_chat ./empty.yaml", "empty.yaml: no keys found"),
    "unknown key": ("--tiny qwen2_chat ./key.yaml", "unknown key num_procesess: did you mean num_processes?"),
    "DeepSpeed": ("--tiny qwen2_chat ./deepspeed.yaml", "for FSDP1 or DeepSpeed"),
    # several machines
    "NNODES alone": (TINY, "NODE_RANK and MASTER_ADDR missing", {"NNODES": "2"}),
    "word instead of a number": (TINY, "NPROC_PER_NODE is 'two', expected a whole number", {"NPROC_PER_NODE": "two"}),
    "job that SLURM does not know": (TINY, "SLURM_JOB_ID is 7, which SLURM does not know", {"SLURM_JOB_ID": "7"}),
    "word instead of a job": (TINY, "SLURM_JOB_ID is 'seven'", {"SLURM_JOB_ID": "seven", "SLURM_STEP_ID": "0"}),
    "SLURM without scontrol": (TINY, "scontrol is not in PATH", STEP | {"PATH": "/nowhere"}),
    "rank beyond the nodes": (TINY, "node rank 5 of 2 nodes", STEP | {"SLURM_NODEID": "5", "MASTER_ADDR": "127.0.0.1"}),
    # numbers
    "half a step": (f"{TINY} --max_steps 1.5", "--max_steps/--max-steps: invalid int value: '1.5'"),
    "word as learning rate": (f"{TINY} --learning_rate high", "invalid float value: 'high'"),
    "NaN as learning rate": (f"{TINY} --learning_rate nan", "--learning_rate is nan, expected a number above 0"),
    "no steps": (f"{TINY} --max_steps 0", "--max_steps is 0, expected 1 or more"),
    "batch size of 0": (f"{TINY} --per_device_train_batch_size 0", "--per_device_train_batch_size is 0, expected 1 or more"),
    "no accumulation steps": (f"{TINY} --gradient_accumulation_steps 0", "--gradient_accumulation_steps is 0, expected 1"),
    "length of 0": (f"{TINY} --max_length 0", "--max_length is 0, expected 1 or more"),
    "seed below 0": (f"{TINY} --seed -1", "--seed is -1, expected 0 or more"),
    "seed that is too large": (
        f"{TINY} --seed 99999999999999",
        "--seed is 99999999999999, expected 0 or more, at most 4294967295",
    ),
    "fewer than no steps": (f"{TINY} --max_steps -5", "--max_steps is -5, expected -1 or more"),
    "momentum above 1": (f"{TINY} --adam_beta1 2", "--adam_beta1 is 2.0, expected 0 or more, at most 0.999999"),
    "adapter of rank 0": (f"{TINY} --use_peft --lora_r 0", "--lora_r is 0, expected 1 or more"),
    "no tokens": (f"{TINY} --max_tokens 0", "--max_tokens is 0, expected 1 or more"),
    "no epochs": (f"{TINY} --max_samples 9 --num_train_epochs 0", "--num_train_epochs is 0.0, expected a number above 0"),
    "stream without an end": (f"{TINY} --max_steps -1", "a stream has no length"),
    "epochs of a stream": (f"{TINY} --num_train_epochs 2", "a stream has no length: pass --max_steps, --max_tokens"),
    "slice of a stream": (f"{TINY} --dataset_train_split train[:1%]", "train[:1%]: a stream has no slices: pass --max_samples"),
    "batch that cannot be divided": (f"{TINY} --global_batch_size 5", "is not a multiple of 2"),
    "batch of the run that three GPUs cannot divide": (
        "--tiny llama31_70b_qlora 2x3090_qlora",
        "--global_batch_size 16 is not a multiple of 12, which is --per_device_train_batch_size 4 on 3 processes: pass "
        "--global_batch_size 12 or 24, or another micro-batch, or train the same steps on 1, 2 or 4 processes (NPROC_PER_NODE)",
        {"NPROC_PER_NODE": "3"},
    ),
    "two sizes of a batch": (f"{TINY} --global_batch_size 8 --gradient_accumulation_steps 2", "pass one of them"),
    "no evaluation rows": (f"{TINY} --max_eval_samples 0", "--max_eval_samples is 0, expected 1 or more"),
    "fp16 with a config for bf16": (f"{TINY} --fp16", "pass --bf16 false or --fp16 false too"),
    "unknown choice": (f"{TINY} --eval_strategy sometimes", "invalid choice: 'sometimes'"),
    "invalid JSON": (f"{TINY} --model_init_kwargs {{bad", "{bad is not JSON"),
    # arguments that contradict each other
    "schedule without its arguments": (
        f"{TINY} --lr_scheduler_type warmup_stable_decay",
        "--lr_scheduler_type warmup_stable_decay: get_wsd_schedule() missing 1 required positional argument: 'num_decay_steps'",
    ),
    "schedule with an argument that it does not have": (
        TINY + """ --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lrr": 1e-6}'""",
        "--lr_scheduler_kwargs {'min_lrr': 1e-06}: get_cosine_with_min_lr_schedule_with_warmup() got an unexpected keyword",
    ),
    "package for kernels that is missing": (f"{TINY} --use_liger_kernel true", "-m pip install --no-deps liger-kernel"),
    "rows that would not be cut": (f"{TINY} --packing false --padding_free true", "rows would not be cut at --max_length"),
    "the worst model as the best": (
        f"{TINY} --load_best_model_at_end --metric_for_best_model eval_loss --greater_is_better true",
        "--greater_is_better: a loss is better when it is lower",
    ),
    "the least accurate model as the best": (
        f"{TINY} --load_best_model_at_end --metric_for_best_model eval_mean_token_accuracy --greater_is_better false",
        "--greater_is_better: an accuracy is better when it is higher",
    ),
    "fewer restarts than none": (f"{TINY} --max_restarts -1", "--max_restarts"),
    "batches that the first process reads": (
        TINY + """ --accelerator_config '{"dispatch_batches": true}'""",
        "--accelerator_config: dispatch_batches: every process reads its own rows",
    ),
    "completions of conversations": (
        f"{TINY} --assistant_only_loss false --completion_only_loss true",
        "for conversations pass --assistant_only_loss true",
    ),
    "reference before the model is sharded": (
        "--tiny qwen3_dpo 4gpu_full_shard --precompute_ref_log_probs true",
        "--precompute_ref_log_probs: TRL computes these before FSDP moves the model to the GPU",
    ),
    "variable of accelerate": (
        f"launch.sh {TINY}",
        "ACCELERATE_USE_DEEPSPEED is set in the environment, and would change what the config says",
        {"ACCELERATE_USE_DEEPSPEED": "true"},
    ),
    "4-bit weights without an adapter": (f"{TINY} --load_in_4bit", "add --use_peft"),
    "--prepare with contradicting flags": ("--tiny --prepare qwen2_chat --load_in_4bit", "add --use_peft"),
    "cast of packed weights": ("--tiny llama31_70b_qlora 2x3090_qlora --bf16 true", "--bf16 and --fp16 would cast the weights"),
    "packed weights that cannot be sharded": (
        "--tiny llama31_70b_qlora 2x3090_qlora --bnb_4bit_quant_storage uint8",
        "uint8 cannot be sharded",
    ),
    "4-bit weights in the other 16-bit dtype": (f"{TINY} --use_peft --load_in_4bit --dtype float16", "pass --dtype bfloat16"),
    "sharded 4-bit weights in another dtype": ("--tiny llama31_70b_qlora 2x3090_qlora --dtype float32", "compute in bfloat16"),
    "sharded 4-bit weights with fp16": (
        "--tiny qwen2_chat 3xt4_full_shard --use_peft --load_in_4bit --global_batch_size 9",
        "use a config without mixed_precision: fp16",
    ),
    "compilation of sharded 4-bit weights": (
        "--tiny llama31_70b_qlora 2x3090_qlora --torch_compile true",
        "--torch_compile: bitsandbytes wraps sharded 4-bit weights",
    ),
    "optimizer that FSDP cannot shard": ("--tiny qwen2_chat 4gpu_shard_grad_op --optim adamw_8bit", "--optim adamw_8bit"),
    "optimizer that a resume does not page": (f"{TINY} --optim paged_adamw_8bit", "--optim paged_adamw_8bit"),
    "optimizer without its package": (f"{TINY} --optim adamw_torch_8bit", "--optim adamw_torch_8bit: You need to have `torchao"),
    "tensor parallelism by a flag": (
        f'{TINY} --model_init_kwargs \'{{"tp_plan": "auto"}}\'',
        "--model_init_kwargs: tp_plan: tensor, context and sequence parallelism are not supported",
    ),
    "context parallelism by a variable": (TINY, "PARALLELISM_CONFIG_CP_SIZE: tensor", {"PARALLELISM_CONFIG_CP_SIZE": "2"}),
    "--preview with an unknown module": (
        "--preview --tiny qwen2_chat --use_peft --lora_target_modules Wq",
        "--lora_target_modules",
    ),
    "tokens and epochs": (f"{TINY} --max_tokens 9 --num_train_epochs 2", "--max_tokens and --num_train_epochs set the same"),
    "token on the command line": (f"{TINY} --hub_token hf_secret", "hf auth login`"),
    "upload of checkpoints": (f"{TINY} --push_to_hub --hub_strategy checkpoint", "--hub_strategy: "),
    "only one checkpoint": (f"{TINY} --save_total_limit 1", "pass 2 or more"),
    # --config
    "--config without a path": (f"{TINY} --config", "--config needs the path"),
    "--config with a tab": (f"{TINY} --config tab.yaml", "--config: not a readable YAML file"),
    "--config with a list instead of a number": (
        f"{TINY} --config rates.yaml",
        "--learning_rate is [1, 2], expected a number",
    ),
    "--config with an environment": (f"{TINY} --config env.yaml", "--config: env of env.yaml is not read: set environment"),
    # folders
    "output folder is a file": (f"{TINY} --output_dir empty.py", "--output_dir: empty.py cannot be written"),
    "output folder in a file": (f"{TINY} --output_dir empty.py/run", "cannot be written (Not a directory)"),
    "read-only file system": (f"{TINY} --output_dir data/run", "(Read-only file system)", {}, "-t tmpfs -o ro tmpfs data"),
    "folder with other files": (f"{TINY} --output_dir data", "data has files that are not from a run"),
    "damaged run.json": (f"{TINY} --output_dir damaged", "run.json is damaged"),
    "folder of another run": (f"{TINY} --output_dir taken", "holds a run with recipe another"),
    "folder that another run uses": (f"{TINY} --output_dir busy", "another run is writing into busy"),
    # models
    "missing model folder": (f"{REAL} ./nowhere", "folder not found: ./nowhere"),
    "Hub that cannot be reached": (f"{TINY} --output_dir new --model_name_or_path no/llama", "the Hub cannot be reached"),
    "model without config": (f"{REAL} ./data", "has no config.json"),
    "model without weights": (f"{REAL} ./weightless", "weightless"),
    "model with half of its weights": (f"{REAL} ./half", "/half"),
    "weights that are not safetensors": (f"{REAL} ./short", "/short"),
    "model without one of its files": (f"{REAL} ./parts", "model-2.safetensors"),
    "model without tokenizer": (f"{REAL} ./mute", "mute has no tokenizer"),
    "tokenizer of another model": (f"{REAL} ./other", "has tokens up to 2047, but the model's vocab_size is 500"),
    "encoder-decoder": (f"{REAL} ./t5", "/t5 is a T5ForConditionalGeneration, and this recipe trains causal language models"),
    "rehearsal of a masked model": (f"{TINY} --model_name_or_path ./bert", "/bert is a BertForMaskedLM, and this recipe"),
    "reward model": (f"{REAL} ./reward", "/reward is a Qwen2ForSequenceClassification, and this recipe"),
    "longer than the model": (
        f"{REAL} ./complete --max_length 99999",
        "complete has 32768 positions",
    ),
    "template that fails": ("--tiny qwen2_chat 1x3090 --chat_template_path fails.jinja", "fails.jinja fails (never)"),
    "missing template": ("--tiny qwen2_chat 1x3090 --chat_template_path no.jinja", "file not found: no.jinja"),
    # data
    "config of one file": (f"{TINY} --dataset_name broken.jsonl --dataset_config x", "broken.jsonl is one file"),
    "missing file of rows": (f"{REAL} ./complete --dataset_name no.jsonl", "file or folder not found: no.jsonl"),
    "missing column": (
        f"{REAL} ./complete --dataset_text_field body",
        "has no column body (--dataset_text_field), it has the columns text;",
    ),
    "path with spaces that is not quoted": (f"{TINY} --dataset_name my rows.jsonl", "2 datasets (my, rows.jsonl): quote a path"),
    "missing split": (f"{REAL} ./complete --dataset_train_split trian", "none called trian"),
    "empty dataset name": (f"{TINY} --dataset_name=", "--dataset_name is empty"),
    "empty file of rows": (f"{REAL} ./complete --dataset_name empty.jsonl", "empty.jsonl: it is empty"),
    "loss of a dataset that is not in the mixture": (
        f"{REAL} ./complete --dataset_name data more.jsonl --dataset_weights 1 1 --metric_for_best_model eval_other_loss",
        "--metric_for_best_model eval_other_loss: pass eval_loss or one of eval_data_loss, eval_more_loss",
    ),
    "rows that are not JSON": (f"{REAL} ./complete --dataset_name broken.jsonl", "JSON parse error"),
}

FILES = {
    "syntax.py": "import harness\ndef main(:\n",
    "bytes.py": b"\xff\xfe\x00a",
    "bytes.yaml": b"\xff\xfe\x00a",
    "empty.py": "pass\n",
    "relative.py": "import harness\nfrom . import own\n",
    "empty.yaml": "",
    "hides/datasets.py": "",
    "tab.yaml": "learning_rate:\t1\n",
    "key.yaml": "distributed_type: FSDP\nnum_procesess: 1\n",
    "env.yaml": "env:\n  HF_ENDPOINT: http://127.0.0.1:9\n",
    "deepspeed.yaml": "distributed_type: DEEPSPEED\n",
    "rates.yaml": "learning_rate: [1, 2]\n",
    "fails.jinja": "{{ raise_exception('never') }}",
    "empty.jsonl": "",
    "broken.jsonl": "{not json\n",
    "data/train.jsonl": "\n".join(json.dumps({"text": f"row {row}"}) for row in range(50)),
    "more.jsonl": "\n".join(json.dumps({"text": f"more {row}"}) for row in range(50)),
    "damaged/run.json": "{",
    "taken/run.json": json.dumps({"recipe": "another", "tiny": False, "sharded": False, "config": "c", "data_files": []}),
    "taken/checkpoint-1/complete.json": "{}",
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
    (folder / "untrained.py").write_text(recipe.replace("parse, train", "parse").replace("    train(trainer)\n", ""))
    (folder / "plain.py").write_text(
        recipe.replace("parse, train", "parse").replace("    train(trainer)\n", "    trainer.train()\n")
    )
    (folder / "misspelled.py").write_text(recipe.replace("max_length=", "max_lenght="))
    (folder / "outputs").mkdir()
    (folder / "link").symlink_to("nowhere")
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{")
    (folder / "outputs/tiny").symlink_to(workdir / "outputs/tiny")
    _models(next((workdir / "outputs/tiny/.made").glob("Qwen--Qwen2-0.5B-????????")), folder)
    held = lock(folder / "busy")
    yield folder
    held.release()


def _models(complete: Path, folder: Path):
    for name in ("complete", "weightless", "half", "short", "parts", "mute", "other"):
        shutil.copytree(complete, folder / name)
    for name in ("weightless", "parts"):
        (folder / name / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "parts/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(complete / "model.safetensors", folder / "parts/model-1.safetensors")
    os.truncate(folder / "half/model.safetensors", 100_000)
    os.truncate(folder / "short/model.safetensors", 5)
    shutil.copy(complete / "model.safetensors", folder / "adapter/adapter_model.safetensors")
    for file in (folder / "mute").glob("tokenizer*"):
        file.unlink()
    for name, settings in CONFIGS_OF_MODELS.items():
        shutil.copytree(complete, folder / name)
        (folder / name / "config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "other/config.json").read_text())
    (folder / "other/config.json").write_text(json.dumps(config | {"vocab_size": 500}))


def _written(folder: Path) -> dict:
    return {path: path.lstat().st_size for path in folder.rglob("*") if path.name != ".lock"}


@pytest.mark.parametrize("kind", KINDS)
def test_one_error_message(bad, environment, fork_launch, kind):
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
        process = fork_launch(*words, cwd=bad, mounts=mounts, trains=False, **variables)
    assert_one_error(process, expected)
    assert "hf_secret" not in process.stderr and _written(bad) == before


def test_debug_shows_the_traceback(launch, fork_launch, tmp_path):
    """Of an error in the launcher, and in the process that checks the run. The message is the last line."""
    tiny = ["--tiny", "qwen2_fineweb_edu", "1x3090"]
    for process, function in (
        (launch("--debug", *tiny, "--max_lenght", "5", cwd=tmp_path), "check_names"),
        (fork_launch(*tiny, "--max_steps", "0", cwd=tmp_path, HARNESS_DEBUG="1"), "check_numbers"),
    ):
        assert process.returncode == 2 and not process.stdout
        first, *_, last = process.stderr.splitlines()
        assert first == "Traceback (most recent call last):" and process.stderr.count("Traceback") == 1
        assert f"in {function}\n" in process.stderr and "harness.messages.UserError: " in process.stderr
        assert last.startswith("error: ") and "--max_" in last
