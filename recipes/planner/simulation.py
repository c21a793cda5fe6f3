"""One run, simulated: the recipe's own trainer, sharding, loss and optimizer, at full size, on tensors without memory.

Simulated are loading, one optimizer step with the optimizer's states in place, an evaluation, a sample and the final save, as
the process with rank 0 sees them. A simulation changes its process, so it has one of its own.
"""

import contextlib
import dataclasses
import functools
import gc
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.compat.accelerate import allow_fsdp_on_cpu
from harness.compat.peft import merge_for_generation
from harness.compat.transformers import convert_masks_once, use_no_gpu_kernels
from harness.configs import AccelerateConfig
from harness.data.reading import length_of_rows
from harness.folder import read_json
from harness.messages import UserError
from harness.model.attention import check_packing
from harness.model.gpu_features import VARLEN
from harness.model.models import build_adapter_on_meta, check_architecture, set_loading_options
from harness.run.generation import micro_batches_of_generation
from harness.run.losses import own_loss
from harness.run.sharding import AfterWrapping, freeze_unused_parts, local_tensor, prepare_sharding
from harness.run.trainer import TrainerPrecision, add_overrides
from harness.runs import GpuFeatures, RecipeStopped, Run, StartedRecipe
from harness.start import recipes
from harness.start.environment import set_environment_of_accelerate
from harness.start.machine import set_allocator
from harness.start.recipes import build_trainer
from planner import layers
from planner.batches import GRID, PIXELS, batch_of_images, first_batch, full_batch
from planner.fakes import Fakes, count_wrapping, install_steps
from planner.fused import compile_layers
from planner.generation import (
    PROMPT,
    batch_of_texts,
    count_scoring_passes,
    extend_cache,
    generates,
    mark_cache,
)
from planner.ledger import Counts, Held, Ledger, Peak, add_counts, combine_counts, counts_of_step, hull_of, peaks_of
from planner.processes import Process
from planner.quantized import quantized_bytes
from planner.size import PLANNED, use_planned_size

import datasets
import torch
import tqdm
import transformers
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers import (
    Cache,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class PlannedRecipe(StartedRecipe):
    """A recipe that builds its trainer for a model and rows of full size, which are not loaded."""

    def choose_device(self) -> None:
        self.allocator = set_allocator(self.run.config, self.run.values)

    def prepare(self) -> None:
        run = self.run
        arguments = _, training_args, model_args = self.arguments
        name = model_args.model_name_or_path
        if not name:
            raise UserError(
                f"{Path(run.recipe).name} makes its model itself, and --plan simulates the model that a recipe names as "
                "model_name_or_path"
            )
        if getattr(training_args, "activation_offloading", False):
            raise UserError(
                "--activation_offloading is not simulated: choose a CONFIG yourself, or plan with "
                "--activation_checkpointing_kwargs '{\"offload\": true}' instead"
            )
        # fp16 is for GPUs without Triton and FlashAttention; elsewhere any FlashAttention is simulated as PyTorch's.
        gpu = GpuFeatures([VARLEN], no_triton=run.gpu.no_triton)
        if training_args.fp16:
            gpu = GpuFeatures([], no_triton="fp16 is for GPUs that Triton does not support")
        run = dataclasses.replace(run, gpu=gpu)
        if "flash" in (model_args.attn_implementation or ""):
            model_args.attn_implementation = None
        use_no_gpu_kernels()
        run = dataclasses.replace(run, data=use_planned_size(run.data, training_args, model_args))
        set_loading_options(training_args, model_args, run)
        check_architecture(training_args, model_args, name)
        check_packing(training_args, model_args, name, can_use_kernels=False, can_compute=False)
        if model_args.use_peft:
            build_adapter_on_meta(model_args, name)
        self.run = recipes.prepare_data(run, arguments)


@dataclass
class Simulation:
    """Everything that was found about a run. Memory in bytes."""

    recipe: str
    config: str
    model: str
    processes: int
    nodes: int
    shards: int  # over which a weight is sharded, 1 without FSDP
    replicas: int
    parameters: int  # of the model, without its adapter
    trained: int  # parameters
    quantized: int  # bytes of the 4-bit copy of the model on the disk, 0 without one
    is_adapter: bool
    hub_bytes: int  # per parameter, on the Hub
    needs_bf16: bool
    tokens: int  # of a micro-batch
    micro_batch: int  # rows
    accumulation: int
    max_steps: int  # -1: as many as the epochs have
    epochs: float
    copies: int  # of the model in the host memory of a node while it loads
    # Of texts that a GPU generates for training, 0 if it does not.
    generated_rows: int = 0  # at once
    answers: int = 1  # to a prompt
    prompt: int = 0  # tokens
    completion: int = 0  # tokens
    scored_batches: int = 0  # micro-batches of a forward pass over the texts before the training
    generations: float = 0  # in an optimizer step
    token: Counts = field(default_factory=Counts)  # of one more token of all rows
    is_offloaded: bool = False
    trained_here: int = 0  # parameters that the optimizer of one process updates
    optimizer: int = 0  # bytes of the optimizer's states in one process
    step: Counts = field(default_factory=Counts)
    peaks: dict[str, Peak] = field(default_factory=dict)  # of the GPU, by moment
    host_peaks: dict[str, Peak] = field(default_factory=dict)
    hull: list[tuple[int, int]] = field(default_factory=list)  # (fixed, growing) bytes of possible peaks, see `hull_of`
    curve: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    simulated_layers: int = 0  # the most, if they were extended to all; 0 if all were simulated
    has_global_batch_flag: bool = False
    steps_are_estimated: bool = False
    no_steps: str = ""  # why max_steps is not known

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.bytes)


@dataclass
class Refused:
    """A run that was refused before it was simulated."""

    config: str
    reason: str


def simulate(
    run: Run,
    flags: list[str],
    make_fakes: Callable[[Ledger], Any] = Fakes,
    with_evaluation: bool = True,
    with_all_layers: bool = False,
) -> Simulation:
    """Simulates a run.

    Args:
        make_fakes: makes the replacements; the tests compare with a run on real tensors.
        with_evaluation: also simulate an evaluation and a sample, which need less memory than training.
        with_all_layers: also of a model whose layers are alike, of which a few would do (see `layers.py`).
    """
    config = run.config
    gc.freeze()  # otherwise every garbage collection would look through the libraries
    gc.set_threshold(200_000)
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"  # that a batch has a token for each part of an image
    ledger = Ledger()
    fakes = make_fakes(ledger)
    set_environment_of_accelerate(run)
    if config.distributed_type != "NO":
        fakes.join_processes(run.processes, run.processes // run.nodes)
    if config.is_fsdp:
        allow_fsdp_on_cpu()
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    tqdm.tqdm.monitor_interval = 0  # otherwise a thread watches progress bars, and this process cannot be forked
    with (
        tempfile.TemporaryDirectory(prefix="plan-") as output_dir,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        own = ["--output_dir", output_dir, "--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true"]
        own += ["--use_liger_kernel", "false"]  # its kernels need a GPU; with them, a run needs less
        plan = PlannedRecipe(run)
        build_trainer(plan, [*flags, *own])
        limit = re.search(r"pinned_max_round_threshold_mb:(\d+)", plan.allocator)
        ledger.pinned_limit = int(limit[1]) * 2**20 if limit else None
        simulation = simulate_training(plan, ledger, fakes, with_evaluation, with_all_layers)
    simulation.has_global_batch_flag = "global_batch_size" in plan.run.given
    return simulation


def simulate_training(
    plan: StartedRecipe, ledger: Ledger, fakes: Any, with_evaluation: bool, with_all_layers: bool
) -> Simulation:
    """Runs the trainer for one step on fake tensors, with a batch of full length, while `ledger` records what it does.

    Returns what is known of the run, with the counts of the step.
    """
    trainer = plan.trainer
    args = trainer.args
    model = trainer.model
    config = plan.run.config
    rows = args.per_device_train_batch_size
    if generates(args):
        batch = batch_of_texts(args, rows, PROMPT)
    else:
        first = first_batch(trainer)
        batch = full_batch(first, args, rows)
    if GRID in batch:
        fakes.mode.keeps_values = True
        batch |= batch_of_images(batch, plan.arguments[0].max_pixels, model.config.vision_config)
    ledger.vocabulary = model.config.get_text_config().vocab_size
    if not config.is_fsdp:  # which moves the weights to the GPU only when it wraps the model, see `count_wrapping`
        for tensor in (*model.parameters(), *model.buffers()):
            ledger.mark(tensor, "weights", "gpu")
    for name, other in second_models(trainer):
        for tensor in (*other.parameters(), *other.buffers()):
            ledger.mark(local_tensor(tensor), name)
    if args.torch_compile:
        compile_layers(model, ledger)
    freeze_unused_parts(trainer)
    hidden = prepare_sharding(trainer, config)
    simulation = describe_run(plan, batch)
    if trainer.is_fsdp_enabled:
        # With it, accelerate moves the model to the meta device and waits for the weights of the first process.
        trainer.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
    args.eval_on_start = False  # an evaluation is simulated after the step
    needs_float32 = own_loss(trainer) is not None
    trainer.add_callback(AfterWrapping(trainer, config, plan.run.processes, hidden, needs_float32))
    step = SimulatedStep(trainer, config, ledger, fakes, batch, simulation, with_evaluation)
    trainer.add_callback(step)
    count_wrapping(trainer, ledger, fakes)
    trainer.remove_callback(transformers.PrinterCallback)
    found = None if with_all_layers else simulate_few_layers(step)
    if found is None:
        with contextlib.suppress(RecipeStopped):
            trainer.train()
        found = list(ledger.highest().values())
        simulation.curve = ledger.curve()
    simulation.peaks = peaks_of(found, "gpu")
    simulation.host_peaks = peaks_of(found, "host")
    simulation.hull = hull_of(found)
    simulation.trained_here = step.trained_here
    simulation.optimizer = step.optimizer
    simulation.step = counts_of_step(step.parts, simulation.accumulation)
    # Clipping and the optimizer have no matrix multiplication, and exchange only the norm of the gradients.
    simulation.step.touched += step.after.touched
    simulation.step.launches += step.after.launches
    simulation.step = add_counts(simulation.step, step.prompts, simulation.generations)
    simulation.step = add_counts(simulation.step, step.scores, simulation.generations * simulation.scored_batches)
    simulation.token = step.token
    return simulation


def simulate_few_layers(step: "SimulatedStep") -> list[Held] | None:
    """Simulates the model of `step` with a few of its layers; returns what is held with all, None if it cannot.

    Each number of layers has a forked process, because training changes the trainer.
    """
    trainer = step.trainer
    all_layers = layers.equal_layers(trainer.model)
    if all_layers is None or trainer.optimizer is not None or step.config.distributed_type == "MULTI_GPU":  # of DDP's buckets
        return None
    recordings = call_in_forks([functools.partial(record_few_layers, step, all_layers, count) for count in layers.FEW])
    if recordings is None:
        return None
    few, more = recordings
    added = len(all_layers) - layers.FEW[1]
    line = functools.partial(layers.linear, added=added)
    counts = [combine_counts(one, other, line) for one, other in zip(few.counts, more.counts, strict=True)]
    *step.parts, step.after, step.prompts, step.scores, step.token = counts
    step.trained_here = line(few.trained_here, more.trained_here)
    step.optimizer = line(few.optimizer, more.optimizer)
    step.simulation.simulated_layers = layers.FEW[1]
    return [*step.ledger.highest().values(), *layers.extend(few.highest, more.highest, added).values()]


@dataclass
class Recording:
    """What a run with a few layers has found."""

    highest: dict[tuple, Held]
    counts: list[Counts]
    trained_here: int  # see `Simulation`, as the next one
    optimizer: int


def record_few_layers(step: "SimulatedStep", all_layers: torch.nn.ModuleList, count: int) -> Recording:
    """Trains with the first layers only."""
    del all_layers[count:]
    gc.collect()
    start = len(step.ledger.events)
    with contextlib.suppress(RecipeStopped):
        step.trainer.train()
    counts = [*step.parts, step.after, step.prompts, step.scores, step.token]
    return Recording(step.ledger.highest(start), counts, step.trained_here, step.optimizer)


def call_in_forks(functions: list[Callable[[], Any]]) -> list[Any] | None:
    """The results of functions, each called in a fork of this process. None if one fails, or the process cannot be forked."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return None
    started = [Process("fork", function) for function in functions]
    ends = [process.wait() for process in started]
    return None if any(code for code, _ in ends) else [result for _, result in ends]


def describe_run(plan: StartedRecipe, batch: dict) -> Simulation:
    """What is known before anything runs."""
    trainer = plan.trainer
    run = plan.run
    config = run.config
    processes = run.processes
    model = trainer.model
    args = trainer.args
    weights = list(model.parameters())
    bytes_in_4bit = sum(weight.nbytes for weight in weights if hasattr(weight, "quant_type"))  # two parameters in a byte
    parameters = 2 * bytes_in_4bit + sum(weight.numel() for weight in weights if not hasattr(weight, "quant_type"))
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    is_adapter = hasattr(model, "peft_config")
    folder = Path(plan.arguments[2].model_name_or_path)
    published = read_json(folder / "config.json")
    text = published.get("text_config", published)  # of a model that reads images too
    dtype = published.get("dtype") or published.get("torch_dtype") or text.get("dtype") or "float32"
    # Every process reads a reference model or a teacher, and with it the model, from their files: see `set_loading_options`.
    has_reference = not is_adapter and (hasattr(args, "precompute_ref_log_probs") or hasattr(args, "sync_ref_model"))
    has_second = has_reference or hasattr(args, "teacher_model_name_or_path")
    copies = processes // run.nodes
    if config.cpu_ram_efficient_loading and not bytes_in_4bit and not has_second:
        copies = 1
    shards = 1
    if config.is_hybrid:
        shards = config.shards
    elif trainer.is_fsdp_enabled:
        shards = processes
    generated = {}
    if generates(args):
        micro_batches = micro_batches_of_generation(args)
        generated = {
            "generated_rows": args.per_device_train_batch_size * micro_batches,
            "answers": getattr(args, "num_generations", 1),
            "prompt": batch["prompt_ids"].shape[1],
            "completion": args.max_completion_length,
            "scored_batches": count_scoring_passes(trainer) * micro_batches,
            "generations": args.gradient_accumulation_steps / micro_batches / getattr(args, "num_iterations", 1),
        }
    return Simulation(
        recipe=Path(run.recipe).stem,
        config=config.name,
        model=read_json(folder / PLANNED)["model"],
        processes=processes,
        nodes=run.nodes,
        shards=shards,
        replicas=processes // shards,
        parameters=parameters - (trained if is_adapter else 0),
        trained=trained,
        quantized=quantized_bytes(model) if bytes_in_4bit and trainer.is_fsdp_enabled else 0,
        is_adapter=is_adapter,
        hub_bytes=getattr(torch, dtype).itemsize,
        needs_bf16=not args.fp16 and (bool(args.bf16) or any(weight.dtype is torch.bfloat16 for weight in weights)),
        tokens=batch["input_ids"].numel(),
        micro_batch=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        max_steps=args.max_steps,
        epochs=args.num_train_epochs,
        copies=copies,
        **generated,
    )


def second_models(trainer: Trainer) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that a trainer holds next to its model, such as a reference model or a teacher, and the attributes' names."""
    own = set(trainer.model.modules())
    for name, value in vars(trainer).items():
        values = [value]
        if isinstance(value, dict):
            values = value.values()
        elif isinstance(value, list | tuple):
            values = value
        for module in values:
            if isinstance(module, torch.nn.Module) and own.isdisjoint(module.modules()):
                yield name, module


class SimulatedTrainer(TrainerPrecision):
    """Trains on fake batches in place of those of the data loader."""

    simulated_step: "SimulatedStep"

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list[dict], Any]:
        batches = self.simulated_step.make_batches()
        loss_tokens = self._get_num_items_in_batch(batches, device)
        return batches, None if loss_tokens is None else loss_tokens.clamp(min=1)

    def _prepare_inputs(self, inputs: dict) -> dict:
        """A trainer that generates would do it here."""
        return inputs if generates(self.args) else super()._prepare_inputs(inputs)

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> tuple:
        """A dataset shorter than a step would end the epoch, and start the optimizer, before the last micro-batch."""
        *others, batches_of_epoch, max_steps = super().set_initial_training_values(args, dataloader)
        return *others, max(batches_of_epoch, self.simulated_step.micro_batches), max_steps


class SimulatedStep(TrainerCallback):
    """Starts the simulation when the model is wrapped, and ends it after one optimizer step and what comes after a run."""

    def __init__(
        self,
        trainer: Trainer,
        config: AccelerateConfig,
        ledger: Ledger,
        fakes: Any,
        batch: dict,
        simulation: Simulation,
        with_evaluation: bool,
    ) -> None:
        self.trainer = trainer
        self.ledger = ledger
        self.fakes = fakes
        self.batch = batch
        self.simulation = simulation
        self.config = config
        self.with_evaluation = with_evaluation
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        simulation.is_offloaded = isinstance(getattr(plugin, "cpu_offload", None), CPUOffloadPolicy)
        self.place = "host" if simulation.is_offloaded else "gpu"
        # One micro-batch that is added to existing gradients stands for the last of many. If FSDP keeps unsharded gradients
        # until the last micro-batch, only a first micro-batch can put them there, so there are two.
        self.has_earlier_batches = trainer.args.gradient_accumulation_steps > 1
        keeps_gradients = config.is_fsdp and not config.reduce_each_batch
        self.micro_batches = 2 if self.has_earlier_batches and keeps_gradients else 1
        trainer.args.gradient_accumulation_steps = self.micro_batches  # `describe_run` has read the real number before
        self.parts: list[Counts] = []  # of the micro-batches
        self.after = Counts()  # of clipping and the optimizer
        self.prompts = Counts()  # of a forward pass over the prompts of generated texts
        self.scores = Counts()  # of the forward passes that score a micro-batch of generated texts
        self.token = Counts()  # see `Simulation`
        self.trained_here = self.optimizer = 0  # see `Simulation`
        self.optimized: list[torch.Tensor] = []  # the weights that the optimizer updates
        self.forward_labels: Any = None  # entered when the training begins, and left by the labels of what comes after
        add_overrides(trainer, SimulatedTrainer)
        trainer.simulated_step = self

    def make_batches(self) -> list[dict]:
        """The loader moves all micro-batches of a step to the GPU, of which their pixels are large."""
        if PIXELS in self.batch:
            size = self.simulation.accumulation * self.batch[PIXELS].nbytes
            with self.fakes.mode:
                self.pixels = torch.empty(size, dtype=torch.uint8)
            self.ledger.mark(self.pixels, "images")
        return [self.fake_batch(self.batch) for _ in range(self.micro_batches)]

    def fake_batch(self, batch: dict) -> dict:
        """The sizes of images remain values: a model cuts its tensors by them."""
        return {name: value if name == GRID else self.fakes.fake(value) for name, value in batch.items()}

    def on_train_begin(self, *others: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        """Makes the optimizer's states and the gradients of earlier micro-batches."""
        ledger = self.ledger
        optimizer = self.trainer.optimizer.optimizer
        for weight in model.parameters():
            ledger.mark(local_tensor(weight), "weights")
        self.optimized = [weight for group in optimizer.param_groups for weight in group["params"]]
        with self.fakes.here(moment="first step", holder="optimizer", place=self.place):
            for weight in self.optimized:
                weight.grad = torch.zeros_like(weight)
            optimizer.step()
            for tensor in self.optimizer_states():
                ledger.mark(tensor, "optimizer")
            if self.micro_batches == 2 or not self.has_earlier_batches:
                optimizer.zero_grad()
            for weight in self.optimized:
                if weight.grad is not None:
                    ledger.mark(local_tensor(weight.grad), "gradients")
        self.optimizer = sum(state.nbytes for state in self.optimizer_states())
        ledger.take_counts()
        install_steps(self.trainer, self.run_backward, self.run_optimizer)
        self.forward_labels = self.fakes.here(moment="forward", holder="activations")
        self.forward_labels.__enter__()

    def optimizer_states(self) -> list[torch.Tensor]:
        states = self.trainer.optimizer.optimizer.state.values()
        values = [value for state in states for value in state.values()]
        return [local_tensor(value) for value in values if isinstance(value, torch.Tensor) and value.dim()]

    def run_backward(self, backward: Callable, *args: Any, **kwargs: Any) -> Any:
        with self.ledger.within(moment="backward", holder="activations"):
            result = backward(*args, **kwargs)
        self.parts.append(self.ledger.take_counts())
        return result

    def run_optimizer(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Clipping, and the optimizer's step."""
        with self.ledger.within(moment="optimizer step", holder="rest", place=self.place):
            if function.__name__ == "step":
                for weight in self.optimized:
                    self.ledger.mark(local_tensor(weight.grad), "gradients")
            return function(*args, **kwargs)

    def on_step_end(self, args: TrainingArguments, *others: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        """Counts the step, simulates an evaluation, a sample and the final save, and ends the simulation."""
        self.trained_here = sum(local_tensor(weight).numel() for weight in self.optimized)
        self.after = self.ledger.take_counts()
        self.trainer.model_wrapped.eval()
        if self.simulation.completion:
            self.simulate_generation(args)
        if self.with_evaluation:
            self.simulate_evaluation(args)
        if self.with_evaluation and not self.simulation.completion:
            self.simulate_sample(args)
        self.simulate_save(model)
        raise RecipeStopped

    def simulate_evaluation(self, args: TrainingArguments) -> None:
        """The first batch of an evaluation."""
        if self.trainer.eval_dataset is None:
            return
        rows = args.per_device_eval_batch_size
        batch = batch_of_texts(args, rows, PROMPT) if generates(args) else full_batch(self.batch, args, rows)
        with self.ledger.within(moment="evaluation"):
            self.trainer.prediction_step(self.trainer.model_wrapped, self.fake_batch(batch), True)

    def simulate_generation(self, args: TrainingArguments) -> None:
        """The texts for the next step: the prompts, a token in the middle of the texts, and the last one; and their scores."""
        ledger = self.ledger
        simulation = self.simulation
        rows = simulation.generated_rows
        ledger.take_counts()
        merged = merge_for_generation(self.trainer.model, self.trainer.accelerator)
        keep_weights = ledger.within(moment="generate", holder="weights", place="host")
        with torch.no_grad(), keep_weights, merged, convert_masks_once(), ledger.within(holder="rest", place="gpu"):
            cache = self.forward_cached(rows, simulation.prompt, simulation.prompt, None)
            self.prompts = ledger.take_counts()
            half = simulation.completion // 2
            extend_cache(cache, half, ledger)
            ledger.take_counts()
            ledger.is_bound_by_memory = True
            self.forward_cached(rows, 1, simulation.prompt + half + 1, cache)
            self.token = ledger.take_counts()
            ledger.is_bound_by_memory = False
            extend_cache(cache, simulation.completion - half - 2, ledger)
            self.forward_cached(rows, 1, simulation.prompt + simulation.completion, cache)
            del cache
        ledger.take_counts()
        if simulation.scored_batches:
            with ledger.within(moment="score", holder="activations"), torch.no_grad():
                self.trainer.compute_loss(self.trainer.model_wrapped, self.fake_batch(self.batch))
            self.scores = ledger.take_counts()

    def forward_cached(self, rows: int, tokens: int, length: int, cache: Cache | None) -> Cache:
        """A forward pass over so many tokens of each row, which has `length` with them; with a mask, as prompts are padded."""
        ids = self.fakes.fake(torch.ones(rows, tokens, dtype=torch.long))
        mask = self.fakes.fake(torch.ones(rows, length, dtype=torch.long))
        model = self.trainer.model
        output = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        mark_cache(output.past_key_values, self.ledger)
        return output.past_key_values

    def simulate_sample(self, args: TrainingArguments) -> None:
        """The forward pass over a prompt of the maximum length, which makes the key-value cache."""
        if self.trainer.model.config.is_encoder_decoder:  # the prompt is not in the cache of what it generates
            return
        prompt = torch.ones(1, length_of_rows(args) or 512, dtype=torch.long)
        with self.ledger.within(moment="sample"), torch.no_grad():
            self.trainer.model(input_ids=prompt, use_cache=True, logits_to_keep=1)

    def simulate_save(self, model: torch.nn.Module) -> None:
        """The final save: the weights are all-gathered one after the other, to the host."""
        with self.ledger.within(moment="save", holder="gathered"), torch.no_grad():
            self.ledger.spike(1, "rest")  # so that saving has a peak too where nothing is gathered: what is allocated already
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            for weight in model.parameters():
                if hasattr(weight, "full_tensor") and (weight.requires_grad or not self.simulation.is_adapter):
                    weight.full_tensor()
