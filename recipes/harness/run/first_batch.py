"""What can be seen before the first step: whether anything of it trains."""

import itertools

from harness.launched import fail


def check(trainer):
    """Ends the run, on all processes alike, when the loss of its first step is on no token.

    transformers adds up the tokens of the loss over all processes and micro-batches of a step.
    """
    following, steps = trainer.get_batch_samples, itertools.count()

    def first(*args, **kwargs):
        batches, tokens = following(*args, **kwargs)
        if next(steps) == 0 and tokens is not None and not int(tokens):
            fail(
                "no token of the first step is trained on: either the answers begin after --max_length tokens, or nothing is "
                "marked as an answer; ./launch.sh --preview shows the rows"
            )
        return batches, tokens

    trainer.get_batch_samples = first
