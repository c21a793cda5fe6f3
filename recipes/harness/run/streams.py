"""Streams under several processes: each reads files of its own, and none may run out before the others."""

from harness.launched import fail

from datasets import IterableDataset


def keep_together(trainer):
    """Begins a training stream anew where it ends, so that all processes go on to the last step.

    Files differ in length: a process whose files are read would save or evaluate while the others still train, and all
    would wait for each other for ever. Ends the process with one line when a stream is to be evaluated, which must end.
    """
    if isinstance(trainer.train_dataset, IterableDataset):
        trainer.train_dataset = trainer.train_dataset.repeat(None)
    if isinstance(trainer.eval_dataset, IterableDataset) and trainer.args.world_size > 1:
        fail(
            "eval_dataset is a stream, and processes whose files end at different times would wait for each other for ever: "
            "hold out a fixed number of rows, Dataset.from_list(list(stream.take(256)))"
        )
