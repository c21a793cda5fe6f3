"""What a library does without a change of `harness.compat`, and with it; for tests/compat/test_changes.py.

    PYTHONPATH=recipes .venv/bin/python tests/compat/cases.py NAME...

Each case is a function with the name of the change. It runs twice, in processes of its own: with `changed=False` and with
`changed=True`. The program prints what the two returned, as JSON; an error counts as a result.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.compat import accelerate as accelerate_changes
from harness.compat import bitsandbytes as bitsandbytes_changes
from harness.compat import datasets as datasets_changes
from harness.compat import transformers as transformers_changes
from harness.compat import trl as trl_changes

import accelerate
import bitsandbytes
import datasets
import huggingface_hub
import torch
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.integrations import hub_kernels
from trl.kernels import chunked_logprob
from trl.trainer import dpo_trainer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_launched(**more: str) -> None:
    """The environment variables of the only process of a run."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | more


def tiny_llama() -> transformers.PreTrainedModel:
    config = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **config))


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))


def allow_fsdp_on_cpu(changed: bool) -> str:
    """The distributed type of a run whose config asks for FSDP."""
    as_launched(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="NO_WRAP")
    if changed:
        accelerate_changes.allow_fsdp_on_cpu()
    transformers.TrainingArguments("out", use_cpu=True, report_to="none").device  # noqa: B018, makes the process group
    return accelerate.Accelerator().distributed_type.value


def give_weights_addresses(changed: bool) -> int:
    """How many of two weights accelerate finds again."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    if changed:
        accelerate_changes.give_weights_addresses(model)
    return len({weight.data_ptr() for weight in model.parameters()})


def hide_saved_buffers(changed: bool) -> list[str]:
    """The buffers in the state dict after accelerate has sharded a model that saves one."""
    as_launched()
    accelerate_changes.allow_fsdp_on_cpu()
    accelerator = accelerate.Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = tiny_llama()
    model.model.register_buffer("expert_bias", torch.ones(2))
    trainer = types.SimpleNamespace(model=model, accelerator=accelerator, args=types.SimpleNamespace(device=accelerator.device))
    hidden = accelerate_changes.hide_saved_buffers(trainer) if changed else []
    weights = model.state_dict()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    fsdp_utils.fsdp2_load_full_state_dict(accelerator, model, weights)
    for module, name in hidden:
        module.register_buffer(name, getattr(module, name), persistent=True)
    return [name for name in model.state_dict() if "bias" in name]


def keep_4bit_layout(changed: bool) -> bool:
    """Whether the packed weights are the same after an evaluation, on a CPU with AVX512-BF16."""
    modules = bitsandbytes.nn.modules
    modules.has_avx512bf16 = functools.wraps(modules.has_avx512bf16)(lambda: True)
    bitsandbytes.matmul_4bit = lambda x, *args, **kwargs: x  # needs such a CPU
    if changed:
        bitsandbytes_changes.keep_4bit_layout()
    layer = bitsandbytes.nn.Linear4bit(128, 128, bias=False, compute_dtype=torch.bfloat16).to("cpu").eval()
    before = layer.weight.data.clone()
    with torch.no_grad():
        layer(torch.ones(1, 128, dtype=torch.bfloat16))
    return torch.equal(layer.weight.data.flatten(), before.flatten())


def read_no_weights(changed: bool) -> list[str]:
    """Devices of the weights that `from_pretrained` made."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama().save_pretrained(folder)
        if changed:
            transformers_changes.read_no_weights()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return sorted({weight.device.type for weight in model.parameters()})


def load_tokenizers_as_offline(changed: bool) -> bool:
    """Whether `datasets` computes the same hash for a tokenizer that was loaded with and without internet."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer().save_pretrained(folder)
        if changed:
            transformers_changes.load_tokenizers_as_offline()
        hashes = set()
        for offline in (False, True):
            huggingface_hub.constants.HF_HUB_OFFLINE = offline
            hashes.add(Hasher.hash(transformers.AutoTokenizer.from_pretrained(folder)))
    return len(hashes) == 1


def set_date_of_chat_templates(changed: bool) -> str:
    """What a chat template prints as the year."""
    tokenizer = tiny_tokenizer()
    if changed:
        transformers_changes.set_date_of_chat_templates(datetime(2001, 2, 3))
    year = tokenizer.apply_chat_template([{}], chat_template="{{ strftime_now('%Y') }}", tokenize=False)
    return "this year" if year == str(datetime.now().year) else year


def map_in_one_process(changed: bool) -> int:
    """How many of two processes compute a `map` that both call at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_text('{"text": "a"}\n' * 4)
        rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=folder)
        if changed:
            datasets_changes.map_in_one_process()
        barrier = multiprocessing.Barrier(2)
        processes = [multiprocessing.Process(target=_map_rows, args=(rows, barrier, folder)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return len(set(Path(folder, "processes").read_text().split()))


def store_json_exactly(changed: bool) -> list:
    """The numbers that a column of JSON gives, of texts and of a number."""
    if changed:
        datasets_changes.store_json_exactly()
    features = datasets.Features({"numbers": datasets.List(datasets.Json())})
    stored = ["25000000000000000000", "20000000000000000000", "0.1234567890123456789"]
    values = [*stored, 0.12345678901234568]
    rows = datasets.Dataset.from_list([{"numbers": [value]} for value in values], features=features)
    return rows["numbers"][:]


def _map_rows(rows: datasets.Dataset, barrier: Any, folder: str) -> None:
    def note(row: dict) -> dict:
        with Path(folder, "processes").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.1)
        return {"length": len(row["text"])}

    barrier.wait()
    assert rows.map(note)["length"][:] == [1] * 4


def compute_loss_without_triton(changed: bool) -> bool:
    """Whether TRL would use its Triton kernel on a GPU."""
    chunked_logprob._TRITON_AVAILABLE = True  # as where Triton is installed
    if changed:
        trl_changes.compute_loss_without_triton()
    return chunked_logprob._use_triton(torch.device("cuda"))


def keep_activation_checkpointing(changed: bool) -> int:
    """How many hooks the embedding has after two reference passes of DPOTrainer."""
    if changed:
        trl_changes.keep_activation_checkpointing()
    model = tiny_llama()
    model.activation_checkpointing_enable()
    for _ in range(2):
        with dpo_trainer.disable_gradient_checkpointing(model, None):
            pass
    return len(model.get_input_embeddings()._forward_hooks)


def use_no_gpu_kernels(changed: bool) -> list[str]:
    """What transformers calls for a layer with a state on a CPU, if a package with its kernel is installed; and afterwards."""
    Path(folder := tempfile.mkdtemp(), "fla.py").write_text("def kernel(x):\n    return 'kernel'\n")
    sys.path.insert(0, folder)

    @hub_kernels.use_kernel_func_from_hub_with_fallback("kernel", "fla")
    def in_pytorch(x):
        return "torch"

    with transformers_changes.use_no_gpu_kernels() if changed else contextlib.nullcontext():
        within = in_pytorch(0)
    return [within, in_pytorch(0)]


def result_of(function: Callable[[bool], Any], changed: bool) -> Any:
    """What a case returns in a process of its own; of an error its type and message."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        try:
            return pool.submit(function, changed).result()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    results = {name: [result_of(globals()[name], False), result_of(globals()[name], True)] for name in sys.argv[1:]}
    print(json.dumps(results))
