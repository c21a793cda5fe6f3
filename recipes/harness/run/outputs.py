"""What a run writes at its end: the model, a model card, samples, train_results.json and loss.png."""

import contextlib
import copy
import datetime
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import resource
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.compat.transformers import attention_of, generate_on
from harness.folder import DATA, RESULTS, RUN, read_json, sync, write_json
from harness.launched import DEBUG_VARIABLE, print_once
from harness.model.quantized import SOURCE
from harness.run.forecast import describe_forecast, read_forecast
from harness.run.progress import Progress, evaluation_losses

import pyarrow
import pyarrow.parquet
import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import TrainOutput

HELD_OUT = "held_out.parquet"  # the rows that a run was evaluated on, as tokens
EXPECTED = "expected.json"  # what --verify compares a model with
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes", "datasets")


@contextlib.contextmanager
def only_report(what: str) -> Iterator[None]:
    """Prints an error of this block in one line: once the model is saved, nothing makes the run fail. `what`: what is lost."""
    try:
        yield
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        reason = (str(error).strip().splitlines() or [""])[-1][:300]
        print_once(f"warning: {what} failed, the model is saved: {type(error).__name__}: {reason}")


def set_base_revision(trainer: Trainer) -> None:
    """Records, in the settings of an adapter, the revision of the model that it was trained on. PEFT does not know it."""
    for settings in getattr(trainer.model, "peft_config", {}).values():
        if not settings.base_model_name_or_path:  # the recipe has made the model itself
            continue
        source = read_json(Path(settings.base_model_name_or_path, SOURCE))
        options = getattr(trainer.args, "model_init_kwargs", None) or {}
        settings.revision = source.get("revision") or options.get("revision") or settings.revision


def load_original_config(trainer: Trainer) -> PreTrainedConfig:
    """The config of the model that the run starts from. A recipe can make a model itself: its config is that of the model."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    revision = (getattr(args, "model_init_kwargs", None) or {}).get("revision", "main")
    if model.config.name_or_path:
        with contextlib.suppress(OSError):
            trust_remote_code = getattr(args, "trust_remote_code", False)
            return AutoConfig.from_pretrained(model.config.name_or_path, trust_remote_code=trust_remote_code, revision=revision)
    return copy.deepcopy(model.config)


def restore_config(model: torch.nn.Module, original: PreTrainedConfig) -> None:
    """Gives a trained model the settings of the original that were changed for the training.

    The cache was off. SFTTrainer makes the routers of a mixture of experts return their logits, with which transformers 5.23
    fails to generate from a padded batch.
    """
    model.config.use_cache = getattr(original, "use_cache", True)
    before = original.get_text_config()
    if hasattr(before, "output_router_logits"):
        model.config.get_text_config().output_router_logits = before.output_router_logits


def why_no_text(trainer: Trainer) -> str:
    """Why a trainer's model is not asked to continue texts, "" if it is: a classifier has none, nor has a reward model."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not model.can_generate():
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        return f"{type(base).__name__} does not generate text"
    return "" if trainer.processing_class else "the trainer has no tokenizer"


def save_model(trainer: Trainer, original: PreTrainedConfig) -> None:
    """Writes the model (or adapter) and the tokenizer, in the dtype of the original. Collective; the first process writes.

    The files are written into a draft folder and moved from there, so that each is complete or missing.
    """
    output_dir, draft = Path(trainer.args.output_dir), Path(trainer.args.output_dir, ".model.draft")
    model = trainer.accelerator.unwrap_model(trainer.model)
    for module in trainer.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation, weights can still be unsharded and rounded to the compute dtype
    state = full_state_dict(model, original.dtype or torch.float32)
    restore_config(model, original)
    if trainer.is_world_process_zero():
        is_adapter = not isinstance(model, PreTrainedModel)
        shutil.rmtree(draft, ignore_errors=True)
        if is_adapter:
            # The adapter belongs to the model that was quantized, not to the quantized copy on this machine.
            settings = model.peft_config["default"]
            source = read_json(Path(settings.base_model_name_or_path, SOURCE))
            settings.base_model_name_or_path = source.get("model", settings.base_model_name_or_path)
        model.save_pretrained(draft, state_dict=state)
        if not is_adapter:
            model.config.dtype = original.dtype  # in training the weights are float32
            model.config.save_pretrained(draft)
        if trainer.processing_class:
            trainer.processing_class.save_pretrained(draft)
        with only_report("README.md"):
            card = model_card(read_json(output_dir / RUN), is_adapter, model.can_generate())
            (draft / "README.md").write_text(card, "utf-8")
        for file in draft.iterdir():
            shutil.copymode(output_dir / RUN, file)  # safetensors makes files that only their owner can read
            sync(file)
            file.replace(output_dir / file.name)
        draft.rmdir()
    trainer.accelerator.wait_for_everyone()


def full_state_dict(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights in `dtype` on the CPU of the first process; of an adapter only the trained ones: the base is not gathered."""
    if not isinstance(model, PreTrainedModel):
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        return {name: (w.full_tensor() if isinstance(w, DTensor) else w).detach().cpu() for name, w in trained.items()}
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in state.items() if name not in tied
    }


def save_expectations(trainer: Trainer, original: PreTrainedConfig, evaluation: dict[str, float]) -> None:
    """Writes what --verify compares the saved, merged or served model with; not collective.

    held_out.parquet has the tokens of all evaluation rows, and expected.json the losses of the last evaluation, the first
    conversations with their tokens, and what the tokenizer and the original model say about generation.
    """
    datasets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    rows = [
        {"dataset": name, **tokens_of_row(trainer, row)}
        for name, dataset in datasets.items()
        if isinstance(dataset, Dataset) and "input_ids" in dataset.column_names
        for row in dataset
    ]
    if not rows:
        return
    output_dir = Path(trainer.args.output_dir)
    draft = output_dir / f".{HELD_OUT}.draft"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), draft)
    draft.replace(output_dir / HELD_OUT)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    name = trainer.accelerator.unwrap_model(trainer.model).config.name_or_path
    conversations = getattr(trainer, "conversations", [])
    columns = ("messages", "prompt", "completion", "tools", "chat_template_kwargs", "input_ids")
    # Another loss cannot be computed from log-probabilities.
    is_likelihood = "nll" in getattr(trainer.args, "loss_type", "nll") and not trainer.args.label_smoothing_factor
    losses = {name: f"eval_{name}_loss" if name else "eval_loss" for name in datasets}
    expected = {
        "step": trainer.state.global_step,
        "eval_losses": {name: evaluation[key] for name, key in losses.items() if key in evaluation and is_likelihood},
        "batch_size": trainer.args.per_device_eval_batch_size,
        "processes": trainer.args.world_size,
        "tie_word_embeddings": is_tied(trainer, original),
        "generation": generation_of(read_json(Path(name, SOURCE)).get("model", name)),
        "tokenizer": describe_tokenizer(tokenizer),
        "end_tokens": end_tokens(conversations, tokenizer),
        "conversations": [{name: row[name] for name in columns if name in row} for row in conversations],
    }
    write_json(output_dir / EXPECTED, expected)


def tokens_of_row(trainer: Trainer, row: dict) -> dict[str, list[int]]:
    """Tokens and labels of a row as the model gets them, and the lengths of its documents."""
    columns = ("input_ids", "labels", "seq_lengths", "attention_mask")
    batch = trainer.data_collator([{name: row[name] for name in columns if name in row}])
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    if batch.get("attention_mask") is not None:
        is_token = batch["attention_mask"][0].bool()
        ids, labels = ids[is_token], labels[is_token]
    return {"input_ids": ids.tolist(), "labels": labels.tolist(), "seq_lengths": row.get("seq_lengths") or [len(ids)]}


def is_tied(trainer: Trainer, original: PreTrainedConfig) -> bool:
    """Whether the output layer of the trained model has the weights of the embeddings; an adapter on one of them unties them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    have_no_adapter = isinstance(model.get_input_embeddings(), torch.nn.Embedding) and isinstance(
        model.get_output_embeddings(), torch.nn.Linear
    )
    return bool(original.tie_word_embeddings) and have_no_adapter


def end_tokens(conversations: list[dict], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The special tokens at the end of the trained answers, with their ids; a template may write a line break after them."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special, ends = added | set(tokenizer.all_special_ids), set()
    for row in conversations:
        pairs = list(zip(row["input_ids"], row["labels"], strict=True))
        for is_counted, part in itertools.groupby(pairs, lambda pair: pair[1] != -100):
            tokens = [token for token, _ in part][-3:]
            if is_counted:
                ends.add(next((token for token in reversed(tokens) if token in special), tokens[-1]))
    return {tokenizer.convert_ids_to_tokens(token): token for token in sorted(ends)}


def generation_of(model: str) -> dict:
    """How the generation config of a model differs from transformers' defaults, {} if it has none on this machine."""
    try:
        config = GenerationConfig.from_pretrained(model, local_files_only=True)
    except OSError:
        return {}
    return config.to_diff_dict()


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict:
    """What equal tokenizers share: special tokens with their ids, and checksums of the vocabulary and the chat template."""
    names = ("bos", "eos", "pad", "unk")
    special = {name: [getattr(tokenizer, f"{name}_token"), getattr(tokenizer, f"{name}_token_id")] for name in names}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    texts = {"vocabulary": json.dumps(vocabulary), "chat_template": json.dumps(tokenizer.chat_template)}
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in texts.items()}
    return {"special_tokens": special, **digests}


def model_card(run: dict, is_adapter: bool, generates: bool) -> str:
    """A model card with what the Hub reads: base model, dataset, library. `run`: the contents of run.json."""
    links = {"base_model": [run["model"]], "datasets": run.get("datasets", [run["dataset"]])}
    # Hub IDs only: a rehearsal's model and dataset are tiny ones, and a local path means nothing to others.
    links = {key: [name for name in names if not run["tiny"] and not Path(name).exists()] for key, names in links.items()}
    header = "".join(f"{key}: [{', '.join(names)}]\n" for key, names in links.items() if names)
    kind = "An adapter" if is_adapter else "A fine-tune"
    task = "pipeline_tag: text-generation\n" if generates else ""
    rehearsal = "\n\nThis is a rehearsal with a tiny model and dataset: the model knows nothing." if run["tiny"] else ""
    return (
        f"---\n{header}library_name: {'peft' if is_adapter else 'transformers'}\n{task}---\n\n"
        f"{kind} of {run['model']} on {run['dataset']} with the recipe `{run['recipe']}` "
        f"({run['config'] or 'no config'}). The results are in train_results.json.{rehearsal}\n"
    )


def generate_samples(trainer: Trainer, is_rehearsal: bool, count: int = 3) -> None:
    """Continues a few evaluation rows, or answers their prompts; prints the texts and writes them to samples.txt.

    One batch for all: where weights are all-gathered for every token, three texts cost as much as one.
    """
    rows = trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset
    if isinstance(rows, dict):  # one of each dataset in turn
        rows = itertools.chain.from_iterable(itertools.zip_longest(*rows.values()))
    rows = list(itertools.islice(filter(None, rows), count))
    reason = why_no_text(trainer)
    if not reason and not all("input_ids" in row for row in rows):
        reason = "the rows have no column input_ids"
    if reason:
        print_once(f"No samples: {reason}.")
        return
    prompts = [_prompt_of(row) for row in rows]
    model, tokenizer, width = trainer.model, trainer.processing_class, max(map(len, prompts))
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor, which a model with a vision part has
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    padding = [width - len(prompt) for prompt in prompts]
    ids = [[pad] * pads + prompt for pads, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * pads + [1] * len(prompt) for pads, prompt in zip(padding, prompts, strict=True)]
    device = trainer.accelerator.device
    model.eval()
    torch.manual_seed(0)  # on every process, so that they generate the same tokens
    # Compiled layers would be compiled again for every layer's part of the cache.
    uncompiled = torch.compiler.set_stance("force_eager")
    with torch.no_grad(), trainer.autocast_smart_context_manager(), uncompiled, generate_on(device):
        generated = model.generate(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=12 if is_rehearsal else 48,
            do_sample=True,
            top_p=0.9,
            pad_token_id=pad,
            use_cache=True,
            synced_gpus=trainer.accelerator.num_processes > 1,  # a process that is done continues for the others
        )
    texts = []
    for prompt, tokens in zip(prompts, generated[:, width:].tolist(), strict=True):
        texts.append(f"> {tokenizer.decode(prompt)}\n{_decode_answer(tokens, model, tokenizer)}\n")
    note = "; random weights write nonsense" if is_rehearsal else ""
    print_once(f"\nSamples, prompted with evaluation rows (samples.txt{note}):\n\n" + "\n".join(texts))
    if trainer.is_world_process_zero():
        Path(trainer.args.output_dir, "samples.txt").write_text("\n".join(texts), "utf-8")


def _decode_answer(tokens: list[int], model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> str:
    """The generated text up to its end token, or with "…" if there is none."""
    eos = model.generation_config.eos_token_id
    end_tokens = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    for index, token in enumerate(tokens):
        if token in end_tokens:
            return tokenizer.decode(tokens[: index + 1])
    return f"{tokenizer.decode(tokens)} …"


def _prompt_of(row: dict, length: int = 24) -> list[int]:
    """The tokens of a row before the first one in the loss; its first tokens if all are in the loss."""
    ids = row["input_ids"][: row["seq_lengths"][0]] if "seq_lengths" in row else row["input_ids"]
    labels = list(row.get("labels", ids))[: len(ids)]
    masked = next((index for index, label in enumerate(labels) if label != -100), 0)
    return list(ids[: masked if masked > 1 else length])


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Trained and all parameters. Call it before sharding, after which 4-bit weights do not know their size."""
    if hasattr(model, "get_nb_trainable_parameters"):
        return model.get_nb_trainable_parameters()
    return model.num_parameters(only_trainable=True), model.num_parameters()


def quantization_of(model: torch.nn.Module) -> dict:
    """For --chat: the quantization settings of a model, {} if it is not quantized, and the folder of its 4-bit weights.

    The folder is "" if the weights were quantized while they were loaded.
    """
    settings = getattr(model.config, "quantization_config", None)
    if settings is None:
        return {}
    folder = model.config.name_or_path
    return {
        "quantization": settings if isinstance(settings, dict) else settings.to_dict(),
        "quantized_weights": folder if Path(folder, SOURCE).is_file() else "",
    }


def modules_with_adapter(model: torch.nn.Module) -> dict[str, int]:
    """How many modules of each name have an adapter: {"q_proj": 24, …}."""
    if not hasattr(model, "peft_config"):
        return {}
    names = [name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    return dict(Counter(names))


def describe_training(modules: dict[str, int], parameters: tuple[int, int]) -> str:
    """What is trained, in words; from `modules_with_adapter` and `count_parameters`."""
    trained, total = parameters
    if trained == total:
        return f"all {total:,} parameters"
    words = f"{trained:,} of {total:,} parameters ({trained / total:.2%})"
    if not modules:
        return words
    counts = set(modules.values())
    if len(counts) == 1:
        return f"{words}, in adapters on {', '.join(modules)} ({counts.pop()} of each)"
    return f"{words}, in adapters on {', '.join(f'{count} {name}' for name, count in modules.items())}"


def write_results(
    trainer: Trainer,
    output: TrainOutput | None,
    evaluation: dict[str, float],
    progress: Progress,
    parameters: tuple[int, int],
    resumed_from: int,
    more: dict,
) -> dict:
    """Gathers the numbers of all processes (collective); the first writes them. Memory in GB (1e9 bytes), time in seconds.

    Time and tokens are those of the whole run, including its parts before a resume. `train_runtime` includes everything,
    `tokens_per_second` only the time of optimizer steps. `more`: results of the mirror.
    """
    output_dir, has_gpu = Path(trainer.args.output_dir), torch.cuda.is_available()
    processes = gather_object([measure_process(trainer, progress)])
    by_node, data = group_by_node(processes), {}
    with only_report("the report about the data"):
        data = describe_data(trainer)
    results = (
        read_json(output_dir / RUN)
        | describe_model(trainer, processes, parameters)
        | measure_memory(processes, by_node)
        | collect_losses(trainer, output, evaluation)
        | measure_speed(progress)
        | data
        | {"global_step": trainer.state.global_step, "epoch": trainer.state.epoch, "resumed_from_step": resumed_from}
        | more
        | {
            "device": torch.cuda.get_device_name() if has_gpu else platform.processor() or platform.machine(),
            "finished": datetime.datetime.now().isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES},
        }
    )
    of_every_node = {key: results[key] for key in ("fsdp_enabled", "world_size", "model_params_b", "final_loss")}
    results["nodes"] = [
        {"node": int(node), "peak_gpu_gb": round(max(process["gpu"] for process in of_node), 3), **of_every_node}
        for node, of_node in by_node.items()
    ]
    with only_report("the comparison with the forecast"):
        if has_gpu and (forecast := read_forecast(output_dir, results["device"])):
            results["forecast"] = forecast
    if trainer.is_world_process_zero():
        with only_report("loss.png"):
            names = [name for name in (results.get("recipe"), results.get("config")) if name]
            draw_losses(trainer.state.log_history, " × ".join(names), output_dir / "loss.png")
        write_json(output_dir / RESULTS, results)
    return results


def measure_process(trainer: Trainer, progress: Progress) -> dict:
    """The numbers of this process. Memory in GB (1e9 bytes); "gpus": see `whole_run` in `steps.py`."""
    host_unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    has_gpu = torch.cuda.is_available()
    return {
        "node": os.environ.get("GROUP_RANK", "0"),
        "gpu": torch.cuda.max_memory_allocated() / 1e9 if has_gpu else 0.0,
        "reserved": torch.cuda.max_memory_reserved() / 1e9 if has_gpu else 0.0,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * host_unit / 1e9,
        "fsdp": trainer.is_fsdp_enabled,
        "gpus": progress.gpus.whole_run(),
    }


def group_by_node(processes: list[dict]) -> dict[str, list[dict]]:
    """What `measure_process` returned, by the number of the node."""
    nodes = sorted({process["node"] for process in processes}, key=int)
    return {node: [process for process in processes if process["node"] == node] for node in nodes}


def describe_model(trainer: Trainer, processes: list[dict], parameters: tuple[int, int]) -> dict:
    """How the model was trained and divided. `parameters`: how many are trained, and how many there are."""
    args, accelerator = trainer.args, trainer.accelerator
    model = accelerator.unwrap_model(trainer.model)
    is_sharded, parallelism = all(process["fsdp"] for process in processes), accelerator.parallelism_config
    replicas = accelerator.num_processes
    if is_sharded:
        replicas = parallelism.dp_replicate_size if parallelism else 1
    return {
        "fsdp_enabled": is_sharded,
        "world_size": accelerator.num_processes,
        "global_batch_size": args.train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes,
        "num_nodes": len(group_by_node(processes)),
        "replicas": replicas,  # of the model, each sharded over world_size / replicas processes
        "attention": attention_of(model.config),
        **quantization_of(model),
        "model_params_b": round(parameters[1] / 1e9, 6),
        "trainable_params_b": round(parameters[0] / 1e9, 6),
    }


def measure_memory(processes: list[dict], by_node: dict[str, list[dict]]) -> dict:
    """The largest peaks: of a process on its GPU, and of a node in host memory."""
    hosts = [sum(process["host"] for process in of_node) for of_node in by_node.values()]
    return {
        "peak_gpu_gb": round(max(process["gpu"] for process in processes), 3),
        "peak_gpu_reserved_gb": round(max(process["reserved"] for process in processes), 3),
        "gpu_utilization": [percent for process in processes for percent, _ in process["gpus"]],
        "gpu_memory_gb": [used for process in processes for _, used in process["gpus"]],
        "peak_host_gb": round(max(hosts), 3),
    }


def collect_losses(trainer: Trainer, output: TrainOutput | None, evaluation: dict[str, float]) -> dict:
    """The losses of training, and those of evaluation (for each dataset, if there are several), at the start and at the end."""
    log_history = trainer.state.log_history
    logged = [entry["loss"] for entry in log_history if "loss" in entry]
    on_start: dict[str, float] = {}
    for entry in log_history:
        if entry["step"] == 0:
            on_start |= evaluation_losses(entry)
    at_end = evaluation_losses(evaluation)
    return {
        "final_loss": logged[-1] if logged else (output.training_loss if output else None),
        "train_loss": mean_loss(log_history),
        **{f"eval_{f'{label}_' if label else ''}loss_on_start": loss for label, loss in on_start.items()},
        **{f"eval_{f'{label}_' if label else ''}loss": loss for label, loss in at_end.items()},
        **({"perplexity": math.exp(min(at_end[""], 700))} if "" in at_end else {}),
    }


def measure_speed(progress: Progress) -> dict:
    """Tokens, seconds, and tokens per second of all processes together."""
    counted = progress.so_far()
    seconds = counted["seconds"] or 1  # 0 if the run had no step left
    return {
        "tokens_per_second": round(counted["tokens"] / seconds, 1),
        "loss_tokens_per_second": round(counted["loss_tokens"] / seconds, 1),
        "train_runtime": counted["runtime"],
        "tokens": counted["tokens"],
        "loss_tokens": counted["loss_tokens"],
    }


def describe_data(trainer: Trainer) -> dict:
    """How much of the data was read, and which local files changed during the run."""
    output_dir, state = Path(trainer.args.output_dir), trainer.state
    data = read_json(output_dir / DATA)
    add_reading(data, state.epoch or 0)
    described: dict[str, Any] = {}
    if not isinstance(trainer.train_dataset, IterableDataset) and "datasets" not in data:
        described["times_seen"] = round(state.epoch or 0, 2)
    if data:
        described["data"] = data
    return described


def add_reading(data: dict, epochs: float) -> None:
    """Adds `rows_read` and `times_seen` to every dataset of a mixture in memory, whose epochs read the same `used_rows`."""
    for dataset in data.get("datasets", []):
        if "epoch_rows" in dataset:
            dataset["rows_read"] = round(epochs * dataset["epoch_rows"])
            dataset["times_seen"] = round(dataset["rows_read"] / dataset["used_rows"], 2)


def mean_loss(log_history: list[dict]) -> float | None:
    """The mean training loss of all steps, also of those before a resume; None if none was logged."""
    total, logged = 0.0, 0
    for entry in log_history:
        if "loss" in entry:  # the mean since the last log
            total, logged = total + entry["loss"] * (entry["step"] - logged), entry["step"]
    return total / logged if logged else None


def draw_losses(log_history: list[dict], title: str, path: Path) -> None:
    """Draws training and evaluation loss over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    labels = {label: None for entry in log_history for label in evaluation_losses(entry) if label}
    evaluations = [(f"eval_{label}_loss", f"evaluation of {label}", ".:") for label in labels]
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "evaluation", "o--"), *evaluations):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def describe_datasets(results: dict) -> list[str]:
    """A line for each dataset of a mixture: its evaluation loss, and how often its rows were seen."""
    lines = []
    for dataset in results.get("data", {}).get("datasets", []):
        label = dataset["label"]
        losses = [(results.get(f"eval_{label}_loss{when}"), word) for when, word in (("_on_start", "before"), ("", "after"))]
        words = ", ".join(f"{loss:.4f} {word}" for loss, word in losses if loss is not None)
        words += f"; {dataset['rows_read']:,} rows read" if "rows_read" in dataset else ""
        seen = f", each of {dataset['used_rows']:,} rows {dataset['times_seen']:g} times" if "times_seen" in dataset else ""
        lines.append(f"  {label}: evaluation loss {words}{seen}")
    return lines


def print_summary(results: dict, output_dir: str) -> None:
    """Prints the numbers that a person looks for first."""
    if results["num_nodes"] > 1:
        print_once("\n".join(json.dumps(report) for report in results["nodes"]))
    kind = "FSDP" if results["fsdp_enabled"] else "Unsharded"
    processes = f"{results['world_size']} process{'es' if results['world_size'] > 1 else ''}"
    replicas = results["replicas"]
    if 1 < replicas < results["world_size"]:
        processes += f" ({replicas} replicas of {results['world_size'] // replicas})"
    mean = f" (mean {results['train_loss']:.4f})" if results["train_loss"] is not None else ""
    evaluation = ""
    if "eval_loss" in results:
        on_start = f"{results['eval_loss_on_start']:.4f} before, " if "eval_loss_on_start" in results else ""
        after = f"{results['eval_loss']:.4f}{' after' if on_start else ''}"
        evaluation = f", evaluation loss {on_start}{after} (perplexity {results['perplexity']:.1f})"
    gpu = f"{results['peak_gpu_gb']:.1f} GB per GPU, " if results["peak_gpu_gb"] else ""
    if "eval_loss" in results:
        evaluation += "".join(f"\n{line}" for line in describe_datasets(results))
    forecast = "".join(f"{line}\n" for line in describe_forecast(results)) if "forecast" in results else ""
    seen = f", every row seen {results['times_seen']:g} times" if "times_seen" in results else ""
    print_once(
        f"{kind} on {processes}, {results['global_step']} steps{seen}: loss {results['final_loss']:.4f}{mean}{evaluation}\n"
        f"{results['tokens_per_second']:,.0f} tokens/s, peak memory {gpu}{results['peak_host_gb']:.1f} GB host\n{forecast}"
        f"The model, train_results.json and loss.png are in {output_dir}"
    )
