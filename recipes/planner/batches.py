"""The batch of a simulated step: as the run's collator makes it, with every row of full length."""

from harness.data.reading import length_of_rows

import torch
from transformers import PreTrainedConfig, ProcessorMixin, Trainer, TrainingArguments

PIXELS = "pixel_values"  # in batches with images, which also have the size of each image in patches
GRID = "image_grid_thw"


def first_batch(trainer: Trainer) -> dict:
    """The first batch of a run's collator; with an image if rows have some."""
    trainer.args.dataloader_num_workers = 0  # a process that simulates cannot have threads
    batches = iter(trainer.get_train_dataloader())
    if isinstance(trainer.processing_class, ProcessorMixin):
        return next(batch for batch in batches if PIXELS in batch)
    return next(batches)


def batch_of_images(batch: dict, pixels: int, vision: PreTrainedConfig) -> dict:
    """What a batch has for one image of so many pixels in each of its rows, for models that cut images into patches."""
    rows, length = batch["input_ids"].shape
    merged = vision.spatial_merge_size
    side = merged * int(pixels**0.5 / vision.patch_size / merged)  # patches
    return {
        GRID: torch.tensor([[1, side, side]] * rows),
        PIXELS: torch.ones((rows * side**2, batch[PIXELS].shape[1])),
        "position_ids": torch.ones((3, rows, length), dtype=torch.long),  # a model would compute them from the tokens
    }


def full_batch(batch: dict, args: TrainingArguments, rows: int) -> dict:
    """A batch of `rows` rows in which every token counts in the loss. Every row, or packed document, has the maximum length.

    `batch`: of the run's collator. A collator of pairs makes two rows of each.
    """
    given = batch["input_ids"].shape[0]
    is_packed = given == 1 and "position_ids" in batch
    if not is_packed and given == 2 * rows:
        rows *= 2
    length = length_of_rows(args)
    if not length:
        length = batch["input_ids"].shape[1]
        if is_packed:
            length //= rows
    shape = (rows, length)
    if is_packed:
        shape = (1, rows * length)
    full = {}
    for name, value in batch.items():
        if name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            value = torch.arange(0, rows * length + 1, length, dtype=value.dtype)
        elif name in ("max_length_q", "max_length_k"):
            value = length
        elif isinstance(value, torch.Tensor) and value.dim() == 2 and name not in (PIXELS, GRID):
            value = torch.ones(shape, dtype=value.dtype)
        elif isinstance(value, torch.Tensor) and value.shape == (given,):  # a label for each row
            value = torch.ones(rows, dtype=value.dtype)
        full[name] = value
    return full
