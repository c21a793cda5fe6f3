"""The recipe of benchmarks/published.py: plain Trainer, rows of one length, and the loss and norms of other libraries."""

import types
from dataclasses import dataclass
from typing import Any

from harness import parse, train

import peft
import torch
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator
from trl import get_peft_config, get_quantization_config

CHUNKS = 8  # of a micro-batch, in torchtune's loss


@dataclass
class Arguments(TrainingArguments):
    max_length: int = 2048
    model_init_kwargs: dict | str | None = None  # a recipe that quantizes must have it
    # How logits become the loss:
    # - "whole": float32 logits and PyTorch's cross entropy. The logits are alive until the next micro-batch.
    # - "shifted": like "whole", but of a copy of the logits without the last token, as in transformers until 4.44.
    # - "in_place": like "shifted", by Unsloth's kernel, which writes the gradient into the copy. The logits are released.
    # - "chunks": bf16 logits of all chunks, and float32 inside a compiled kernel, as in torchtune.
    # - "fused": no logits, as in Liger.
    logits: str = "shifted"
    has_half_adapter: bool = False  # adapters in bf16, as before PEFT converted them to float32
    keeps_embedding: bool = False  # unsharded until the end of the backward pass, as FSDP1 keeps what is in no layer
    has_norm_kernel: bool = False  # RMSNorm by one kernel, which keeps its input only


def main():
    _, training_args, model_args = parse(
        Arguments,
        model_name_or_path="meta-llama/Llama-3.1-8B",
        dataset_name="HuggingFaceFW/fineweb-edu",
        max_steps=100,
        activation_checkpointing=True,
        dtype="bfloat16",
        remove_unused_columns=False,
        lora_target_modules=["all-linear"],
    )
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        quantization_config=get_quantization_config(model_args),
        **training_args.model_init_kwargs,
    )
    if training_args.has_norm_kernel:
        use_norm_kernel(model)
    if model_args.use_peft:
        model = peft.get_peft_model(model, get_peft_config(model_args))
    if training_args.has_half_adapter:
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.to(torch.bfloat16)
        model.get_base_model().is_loaded_in_4bit = False  # otherwise this project makes adapters of 4-bit models float32
    row = {"input_ids": [0] * training_args.max_length, "labels": [0] * training_args.max_length}
    trainer = PublishedTrainer(
        model=model,
        args=training_args,
        train_dataset=Dataset.from_list([row] * 8 * training_args.per_device_train_batch_size),
        data_collator=default_data_collator,
        processing_class=AutoTokenizer.from_pretrained(model_args.model_name_or_path),
    )
    train(trainer)


class PublishedTrainer(Trainer):
    """Computes the loss as other libraries do."""

    outputs: Any = None  # of the last micro-batch

    def compute_loss(self, model: torch.nn.Module, inputs: dict, **kwargs: Any) -> torch.Tensor:
        kind = self.args.logits
        labels = inputs.pop("labels")
        embedding = self.model.get_input_embeddings()
        if self.args.keeps_embedding and isinstance(embedding, FSDPModule):
            embedding.set_reshard_after_forward(False)
        if kind in ("chunks", "fused"):
            install_head(self.model, CHUNKS if kind == "chunks" else 0)
            return model(**inputs).logits.mean()
        outputs = model(**inputs)
        outputs.logits = outputs.logits.float()
        logits, targets = outputs.logits, labels
        if kind != "whole":
            logits, targets = logits[..., :-1, :].contiguous(), labels[..., 1:]
        logits, targets = logits.view(-1, logits.shape[-1]), targets.reshape(-1)
        if kind == "in_place":
            return CrossEntropyInPlace.apply(logits)
        self.outputs = outputs
        return torch.nn.functional.cross_entropy(logits, targets)


class CrossEntropyInPlace(torch.autograd.Function):
    """The memory of Unsloth's kernel for cross entropy, or of a compiled one: the gradient replaces the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return torch.zeros(len(logits)).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0]


def install_head(model: torch.nn.Module, chunks: int) -> None:
    """Makes the head return losses instead of logits; 0 chunks: fused with the loss."""
    head = model.get_output_embeddings()

    def losses(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        if not chunks:
            return FusedLoss.apply(hidden, head.weight)
        logits = [torch.nn.functional.linear(chunk, head.weight) for chunk in hidden.chunk(chunks, dim=1)]
        return torch.stack([CrossEntropyInPlace.apply(chunk.flatten(0, 1)) for chunk in logits])

    head.forward = types.MethodType(losses, head)


class FusedLoss(torch.autograd.Function):
    """The memory of Liger's loss: the logits of a part at a time, and gradients that are made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, -2)
        parts = -(-weight.shape[0] // weight.shape[1])
        ctx.shape, ctx.hidden = hidden.shape, torch.empty_like(tokens)
        ctx.weight = torch.zeros_like(weight) if weight.requires_grad else None
        for part, gradient in zip(tokens.chunk(parts), ctx.hidden.chunk(parts), strict=True):
            logits = (part @ weight.to(part.dtype).T).float()
            logits = logits.to(part.dtype)  # in place of the logits, their gradient
            gradient.copy_(logits @ weight.to(part.dtype))
            if ctx.weight is not None:
                ctx.weight += logits.T @ part
        return torch.zeros(len(tokens))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return ctx.hidden.view(ctx.shape), ctx.weight


def use_norm_kernel(model: torch.nn.Module) -> None:
    """Replaces every RMSNorm by the memory of Unsloth's or Liger's kernel."""

    def forward(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return NormKernel.apply(x, norm.weight)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)


class NormKernel(torch.autograd.Function):
    """Keeps its input and a float32 number per row; the gradient replaces that of the output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, weight, _ = ctx.saved_tensors
        return gradient, torch.empty_like(weight) if weight.requires_grad else None


if __name__ == "__main__":
    main()
