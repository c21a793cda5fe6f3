"""Checks of the arguments against each other, before anything is started, downloaded or written.

Only of what would train something else without a word, lose a run, or fail after minutes with an error that does not say what to
do. Everything else is the libraries' own error.
"""

import copy
import math
import os
import re
import sys
from pathlib import Path

from harness.batches import is_packed
from harness.configs import AccelerateConfig
from harness.data.images import AREA
from harness.data.script_arguments import ScriptArguments
from harness.data.tokenization import NEEDS_TOKENS, are_tokenized
from harness.messages import UserError
from harness.run.parameters import adapters_of, base_of, config_of
from harness.runs import Run, StartedRecipe

import torch
from transformers import TrainingArguments
from transformers.trainer import Trainer
from trl import DPOConfig, ModelConfig, SFTConfig, SFTTrainer

# Values of --optim whose states FSDP cannot shard, or that compute something else with a part of a weight.
NOT_FOR_FSDP = re.compile("8bit|4bit|bnb|paged|lion|ademamix|adafactor|stable")


def check_numbers(run: Run, script_args: ScriptArguments, training_args: TrainingArguments) -> None:
    """Raises UserError for a number with which a run would train nothing, or something else. NaN is refused too."""
    least = dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "max_length"), 1)
    least |= dict.fromkeys(("global_batch_size", "max_tokens", "max_samples", "max_eval_samples"), 1)
    least |= {"max_pixels": AREA, "learning_rate": sys.float_info.min}
    if training_args.max_steps <= 0 or "num_train_epochs" in run.given:
        least["num_train_epochs"] = sys.float_info.min
    if training_args.max_steps < 1 and training_args.max_steps != -1:  # transformers would train for --num_train_epochs
        raise UserError(f"--max_steps is {training_args.max_steps}, expected 1 or more, or -1 for --num_train_epochs")
    for name, smallest in least.items():
        value = next((getattr(part, name) for part in (script_args, training_args) if hasattr(part, name)), None)
        if value is not None and not (isinstance(value, int | float) and smallest <= value < math.inf):
            expected = "a number above 0" if 0 < smallest < 1 else f"{smallest} or more"
            raise UserError(f"--{name} is {value}, expected {expected}")


def check_arguments(training_args: TrainingArguments) -> None:
    """Raises UserError for arguments that show a token, run code, or cost checkpoints."""
    if training_args.hub_token:
        raise UserError(
            "--hub_token would be saved with the run and shown in the process list: use `.venv/bin/hf auth login` or HF_TOKEN"
        )
    if training_args.resume_from_checkpoint:
        raise UserError(
            "--resume_from_checkpoint is not needed: the same command resumes from the newest checkpoint in --output_dir"
        )
    if training_args.hub_strategy in ("checkpoint", "all_checkpoints"):
        raise UserError(
            "--hub_strategy: a checkpoint would be uploaded before it is complete, so no run could resume from it: leave it out"
        )
    if training_args.save_only_model:
        raise UserError("--save_only_model leaves out the optimizer, so the run could not resume: leave out the flag")
    if training_args.save_total_limit == 1:
        raise UserError("--save_total_limit 1 deletes the last checkpoint before the next one is complete: pass 2 or more")
    if (training_args.metric_for_best_model or "").endswith("loss") and training_args.greater_is_better:
        raise UserError("--greater_is_better: a loss is better when it is lower, so the worst model would be kept: leave it out")
    for name in ("split_batches", "dispatch_batches"):
        if getattr(training_args.accelerator_config, name):
            raise UserError(f"--accelerator_config: {name}: every process reads its own rows: leave it out")
    model_init_kwargs = getattr(training_args, "model_init_kwargs", None) or {}
    check_remote_code(training_args, model_init_kwargs)
    check_parallelism(training_args, model_init_kwargs)


def check_generation(script_args: ScriptArguments, training_args: TrainingArguments) -> None:
    """Raises UserError for arguments of a trainer whose model writes answers that would change the model, or a resumed run."""
    if getattr(training_args, "use_transformers_continuous_batching", False):
        raise UserError(
            "--use_transformers_continuous_batching casts the trained weights to bf16, where small updates are lost: leave it out"
        )
    if getattr(training_args, "use_vllm", False) and training_args.vllm_mode != "server":
        raise UserError("--use_vllm: vLLM needs other packages than the training: start a server, and pass --vllm_mode server")
    if script_args.dataset_streaming:
        raise UserError(
            "--dataset_streaming: the rows of a step are read again for each micro-batch, which a stream does not do: pass "
            "--dataset_streaming false"
        )
    if not hasattr(training_args, "num_generations"):
        return
    if (training_args.metric_for_best_model or "").endswith("loss"):
        raise UserError(
            "--metric_for_best_model: the loss of an evaluation on rewards is 0, or the distance from the model before the "
            "training: pass --metric_for_best_model reward"
        )
    rows, group = training_args.generation_batch_size, training_args.num_generations
    if rows % group:
        raise UserError(f"--num_generations {group}: {rows} answers at a time are no multiple: pass another --global_batch_size")
    shared = training_args.steps_per_generation * getattr(training_args, "num_iterations", 1)  # micro-batches
    if training_args.gradient_accumulation_steps % shared and training_args.save_strategy != "no":
        raise UserError(
            f"--steps_per_generation, --num_iterations: {shared} micro-batches share a generation, and a step has "
            f"{training_args.gradient_accumulation_steps}: a run that resumes between these steps would generate other answers. "
            "Leave them out, or pass --save_strategy no"
        )


def check_teacher_is_another(training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Raises UserError for a teacher that is the model itself, from which nothing can be learned."""
    teacher = getattr(training_args, "teacher_model_name_or_path", None)
    is_same_name = teacher and teacher == model_args.model_name_or_path
    is_quantized = model_args.load_in_4bit or model_args.load_in_8bit  # its teacher can be the model without quantization
    if is_same_name and not is_quantized and (training_args.teacher_model_revision or "main") == model_args.model_revision:
        raise UserError(
            f"--teacher_model_name_or_path: {teacher} is the model that is trained: pass another teacher, a better model"
        )


def check_remote_code(training_args: TrainingArguments, model_init_kwargs: dict) -> None:
    """Raises UserError if Python code that comes with a model is to be run."""
    if getattr(training_args, "trust_remote_code", False) or "trust_remote_code" in model_init_kwargs:
        raise UserError(
            "--trust_remote_code: code that comes with a model is not run here: leave it out, and use a model whose architecture "
            "is part of transformers"
        )


def check_parallelism(training_args: TrainingArguments, model_init_kwargs: dict) -> None:
    """Raises UserError for tensor, context or sequence parallelism that a flag or a variable asks for.

    `configs.read` refuses the keys of a config. Batch sizes and tokens/s would be wrong by the number of processes that share
    a row.
    """
    options = [name for name in ("distributed_config", "tp_plan", "tp_size") if name in model_init_kwargs]
    asking = [f"--model_init_kwargs: {name}" for name in options]
    asking += ["--parallelism_config"] if training_args.parallelism_config else []
    # What `accelerate launch --parallelism_config_tp_size` sets.
    variables = [f"PARALLELISM_CONFIG_{kind}_SIZE" for kind in ("TP", "CP", "SP")]
    asking += [name for name in variables if os.environ.get(name, "1") != "1"]
    if asking:
        raise UserError(f"{asking[0]}: tensor, context and sequence parallelism are not supported: leave it out")


def check_flags_have_effect(
    run: Run, script_args: ScriptArguments, training_args: TrainingArguments, model_args: ModelConfig
) -> None:
    """Raises UserError for a flag that was passed and would change nothing, or something else than it says."""
    given = run.given
    for_adapters = sorted(name for name in given if name.startswith("lora_") or name in ("use_rslora", "use_dora"))
    if for_adapters and not model_args.use_peft:
        raise UserError(f"--{for_adapters[0]} is for adapters: add --use_peft")
    for_4bit = sorted(given & {"bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"})
    if for_4bit and not model_args.load_in_4bit:
        raise UserError(f"--{for_4bit[0]} is for 4-bit weights: add --load_in_4bit --use_peft")
    if "max_pixels" in given and "images" not in run.data.formats:
        raise UserError("--max_pixels is for images, and this recipe reads none: leave it out")
    if script_args.ignore_bias_buffers:
        raise UserError("--ignore_bias_buffers is for TRL's own scripts: leave it out")
    if training_args.do_predict or ("do_train" in given and not training_args.do_train):
        raise UserError("--do_train, --do_predict: a recipe trains and evaluates: leave them out")
    packs = is_packed(training_args) or getattr(training_args, "eval_packing", None)
    if packs and run.data.formats == ("images",):
        raise UserError("--packing: rows with images are not packed: pass --packing false")
    if getattr(training_args, "padding_free", False) and not is_packed(training_args) and training_args.max_length:
        raise UserError("--padding_free: without --packing true, rows would not be cut at --max_length: pass --packing true")
    if getattr(training_args, "precompute_ref_log_probs", False) and model_args.use_peft and run.is_sharded:
        raise UserError(
            "--precompute_ref_log_probs: TRL computes these before FSDP moves the model to the GPU: leave out the flag, or use a "
            "config without FSDP"
        )
    for name in ("max_steps", "num_train_epochs"):
        if script_args.max_tokens and name in given:
            raise UserError(f"--max_tokens and --{name} set the same: pass one of them")
    if model_args.load_in_4bit or model_args.load_in_8bit:
        check_quantized(run, training_args, model_args)


def check_built_trainer(recipe: StartedRecipe) -> None:
    """Raises UserError for a trainer that the recipe has built without its rows as tokens, or arguments of the model."""
    _, training_args, model_args = recipe.arguments
    check_rows_are_tokens(recipe)
    model = recipe.trainer.model
    loads_model = hasattr(training_args, "model_init_kwargs")  # TRL's trainers get the name of the model
    adapters = adapters_of(model)
    if model_args.use_peft and not adapters:
        line = "model = peft.get_peft_model(model, trl.get_peft_config(model_args)) before the trainer"
        if loads_model:
            line = "peft_config=get_peft_config(model_args) to the trainer (from trl import get_peft_config)"
        raise UserError(f"--use_peft: the recipe builds a trainer without an adapter: add {line}")
    is_quantized = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not is_quantized:
        raise UserError(
            "--load_in_4bit, --load_in_8bit: the recipe builds a trainer whose model is not quantized: add "
            "quantization_config=get_quantization_config(model_args) to the trainer (from trl import get_quantization_config)"
        )
    settings = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
    settings |= {"use_rslora": "use_rslora", "use_dora": "use_dora"}
    for flag in sorted(recipe.run.given & settings.keys()):
        if adapters and getattr(adapters[0], settings[flag]) != getattr(model_args, flag):
            raise UserError(
                f"--{flag}: the recipe gives its adapter another value: make the adapter's settings with "
                "get_peft_config(model_args) (from trl import get_peft_config), or leave out the flag"
            )
    asked, config = getattr(torch, model_args.dtype or "", None), config_of(base_of(model))
    if "dtype" in recipe.run.given and asked and config and not is_quantized and config.dtype not in (None, asked):
        raise UserError(
            f"--dtype: the recipe loads its model in {config.dtype}: pass dtype=model_args.dtype to from_pretrained there, or "
            "leave out the flag"
        )


def check_rows_are_tokens(recipe: StartedRecipe) -> None:
    """Raises UserError for an SFTTrainer that has tokenized its rows itself. It must with images, with each batch."""
    trainer = recipe.trainer
    if not isinstance(trainer, SFTTrainer):
        return
    if are_tokenized(trainer.args):
        of_trl = type(trainer.data_collator).__module__.startswith("trl.")  # it expects messages
        if of_trl and "images" in (trainer.train_dataset.column_names or []):
            raise UserError(
                f"{Path(recipe.run.recipe).name}: rows with images need data_collator=image_collator(processor) in the trainer "
                "(from harness import image_collator)"
            )
        return
    if type(trainer) is not SFTTrainer and type(trainer).__module__.startswith("trl."):  # GOLDTrainer tokenizes in its own way
        return
    if not {"image", "images"} & {*(trainer.train_dataset.column_names or [])}:
        raise UserError(f"{Path(recipe.run.recipe).name}: {NEEDS_TOKENS}")


def check_quantized(run: Run, training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Raises UserError for options with which quantized weights would not be trained, not be sharded, or be destroyed."""
    if not model_args.use_peft:
        raise UserError(
            "--load_in_4bit, --load_in_8bit: quantized weights are frozen, so nothing would be trained: add --use_peft"
        )
    if not (hasattr(training_args, "model_init_kwargs") and model_args.model_name_or_path):
        raise UserError("--load_in_4bit, --load_in_8bit: this recipe loads the whole model itself: use a recipe with SFTTrainer")
    if not run.is_sharded:
        return
    if model_args.load_in_8bit:
        raise UserError("--load_in_8bit: FSDP2 shards floating-point parameters only, so it is for one GPU: use --load_in_4bit")
    computes_in, given = (None, ModelConfig().dtype, "bfloat16"), run.given
    wrong = {
        "bnb_4bit_quant_storage": model_args.bnb_4bit_quant_storage not in (None, "float32", "bfloat16", "float16"),
        "fp16": training_args.fp16,
        "bf16": training_args.bf16 and "bf16" in given,
        "dtype": model_args.dtype not in computes_in or ("dtype" in given and model_args.dtype != "bfloat16"),
        "torch_compile": training_args.torch_compile,
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(
                f"--{name}: sharded 4-bit weights are stored as floating-point numbers, computed in bfloat16 without mixed "
                "precision (which would destroy their bits), and not compiled: leave out the flag"
            )


def check_optimizer(training_args: TrainingArguments, config: AccelerateConfig) -> None:
    """Raises UserError for an optimizer whose states FSDP cannot shard, and for arguments that transformers ignores."""
    name = training_args.optim.value
    if config.is_fsdp and NOT_FOR_FSDP.search(name):
        raise UserError(f"--optim {name} is not for FSDP: use adamw_torch_fused, whose states are divided among all GPUs")
    if "paged" in name:
        raise UserError(f"--optim {name}: bitsandbytes does not page the states of a resumed run: use adamw_8bit")
    for word in training_args.optim_args.split(",") if training_args.optim_args else []:
        if "=" not in word or not is_read_by_optimizer(training_args, word):
            raise UserError(f"--optim_args: {name} does not read {word!r}: pass NAME=VALUE of its arguments, separated by commas")


def is_read_by_optimizer(training_args: TrainingArguments, word: str) -> bool:
    """Whether the optimizer reads this one of `optim_args`, NAME=VALUE: transformers ignores others without a word."""
    changed = copy.copy(training_args)
    changed.optim_args = None
    _, without = Trainer.get_optimizer_cls_and_kwargs(changed)
    changed.optim_args = f"{word.partition('=')[0]}=0.37"  # no default
    try:
        return Trainer.get_optimizer_cls_and_kwargs(changed)[1] != without
    except (ValueError, AttributeError):  # it is no number
        return True


# Flags that only some losses of DPOTrainer read: the argument that chooses the loss, and its values with which the flag is read.
READ_BY_DPO = {
    "label_smoothing": ("loss_type", {"robust", "exo_pair", "aot", "aot_unpaired"}),
    "discopop_tau": ("loss_type", {"discopop"}),
    "f_alpha_divergence_coef": ("f_divergence_type", {"alpha_divergence"}),
    "ref_model_sync_steps": ("sync_ref_model", {True}),
    "ref_model_mixup_alpha": ("sync_ref_model", {True}),
}


def check_loss(run: Run, training_args: TrainingArguments) -> None:
    """Raises UserError for numbers with which a loss of TRL is another one than they say, constant, or not finite."""
    if not training_args.average_tokens_across_devices:
        raise UserError(
            "--average_tokens_across_devices: the loss would be a mean of the processes' means, in which a token of a process "
            "with few tokens counts more: leave it out"
        )
    loss_type = getattr(training_args, "loss_type", None)  # None: of transformers
    reads_smoothing = loss_type is None or (isinstance(training_args, SFTConfig) and loss_type == "nll")
    if "label_smoothing_factor" in run.given and not reads_smoothing:
        raise UserError("--label_smoothing_factor: this trainer, with its --loss_type, does not read it: leave it out")
    of_dpo = READ_BY_DPO.keys() & run.given if isinstance(training_args, DPOConfig) else ()
    for name in sorted(of_dpo):
        choice, needed = READ_BY_DPO[name]
        chosen = getattr(training_args, choice, needed)
        if not needed & (set(chosen) if isinstance(chosen, list | set) else {chosen}):
            values = " or ".join(sorted(map(str, needed))).lower()
            raise UserError(f"--{name} has no effect without --{choice} {values}: leave it out")
    ranges = {"label_smoothing_factor": (0, 1)}
    if isinstance(training_args, DPOConfig):
        # With a label smoothing of 0.5, both answers of a pair are as good; "robust" divides by 1 - 2 * label_smoothing.
        ranges |= {"label_smoothing": (0, 0.5), "beta": (sys.float_info.min, math.inf)}
    if getattr(training_args, "ld_alpha", None) is not None and not 0 <= training_args.ld_alpha <= 1:
        raise UserError(f"--ld_alpha is {training_args.ld_alpha}, expected a number from 0 to 1")
    for name, (smallest, end) in ranges.items():
        value = getattr(training_args, name)
        if not smallest <= value < end:
            expected = "a number above 0" if smallest else f"0 or more, and less than {end}"
            raise UserError(f"--{name} is {value}, expected {expected}")
