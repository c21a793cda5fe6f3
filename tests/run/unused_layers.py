"""A recipe for test_checkpoints.py: a model that reads images, of which a layer is frozen and others are never used.

`save_pretrained` writes its weights by older names than those in the model. If it is sharded, it has a running mean.
"""

from harness import parse, train

import torch
from datasets import Dataset
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2Config,
    Trainer,
    TrainingArguments,
    set_seed,
)

IMAGE, PATCHES = 60, 4  # the token of a patch, and how many an image has
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}


def main() -> None:
    _, training_args, _ = parse(
        TrainingArguments, global_batch_size=4, per_device_train_batch_size=1, learning_rate=1e-3, eval_strategy="no"
    )
    set_seed(0)
    vision = CLIPVisionConfig(image_size=28, patch_size=14, **SIZES)
    text = Qwen2Config(vocab_size=64, num_key_value_heads=2, **SIZES)
    parts = {"vision_config": vision, "text_config": text}
    # The last vision layer, and the norm after it, are not used.
    model = LlavaForConditionalGeneration(LlavaConfig(**parts, image_token_index=IMAGE, vision_feature_layer=-2))
    model.model.vision_tower.encoder.layers[0].requires_grad_(False)
    trainer = Trainer(model, training_args, train_dataset=make_rows(40))
    if trainer.is_fsdp_enabled:  # `from_pretrained`, which reads the older names, does not know it
        projector = model.model.multi_modal_projector
        projector.register_buffer("mean", torch.zeros(1))
        projector.register_forward_hook(update_mean)
    train(trainer)


def update_mean(projector: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    if projector.training:
        projector.mean.lerp_(output.detach().mean().float(), 0.5)  # of the images of this process


def make_rows(count: int) -> Dataset:
    tokens, pixels = torch.randint(IMAGE, (count, 16)), torch.rand(count, 3, 28, 28)
    tokens[:, :PATCHES] = IMAGE
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    return Dataset.from_dict({"input_ids": tokens.tolist(), "labels": labels.tolist(), "pixel_values": pixels.tolist()})


if __name__ == "__main__":
    main()
