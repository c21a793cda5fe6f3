"""The micro-batches of a step: a stream is read ahead, and all processes read a step or none does."""

import itertools
import queue
import threading
from collections.abc import Iterator

from harness.data.images import ImageCollator
from harness.data.streams import StreamPosition
from harness.hub import HubLost, temporary_failure
from harness.messages import UserError, print_once
from harness.run.stopping import maximum
from harness.signals import OUT_OF_TIME

from accelerate.utils import gather_object
from datasets import IterableDataset
from torch.distributed import ProcessGroup
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

READ_AHEAD = 16  # steps of a stream at most; a step of 16,000 tokens has 1 MB

Step = tuple[list[dict], dict[int, dict]]  # micro-batches, and the states of a stream after them


class AgreedReader(TrainerCallback):
    """Reads a step on all processes, or on none if one of them lost the Hub or met a row of a stream that it cannot read.

    Then all stop, with a checkpoint if there is progress to save. A stream is read ahead, in a thread, so that no GPU waits for
    the tokenizer: packing takes many documents at once.
    """

    def __init__(self, trainer: Trainer, group: ProcessGroup | None, position: StreamPosition) -> None:
        self.trainer = trainer
        self.position = position
        self.is_stream = isinstance(trainer.train_dataset, IterableDataset)
        self.group = group if self.is_stream else None
        self.steps: queue.Queue[Step | BaseException] | None = None  # that were read ahead
        self.saved_step = 0  # of the last checkpoint
        self.error = ""  # why this process cannot read
        self.exit_code = 0  # of the run, if one of the processes cannot read

    def next_step(self, iterator: Iterator, count: int) -> Step:
        """`count` micro-batches. `iterator`: of the trainer's loader, without those that a resumed run was trained on.

        A stream is read from its own loader, which starts where the run was stopped. Errors of the thread are raised here.
        """
        if not self.is_stream:
            return self._read(iterator, count)
        if self.steps is None:
            # A step of sixteen images of a megapixel has 400 MB.
            self.steps = queue.Queue(1 if isinstance(self.trainer.data_collator, ImageCollator) else READ_AHEAD)
            # It does not keep the process from exiting.
            threading.Thread(target=self._read_ahead, args=(count,), name="read ahead", daemon=True).start()
        step = self.steps.get()
        if isinstance(step, BaseException):
            raise step
        return step

    def _read(self, iterator: Iterator, count: int) -> Step:
        batches = list(itertools.islice(iterator, count))
        return batches, self.position.states_after_next_step()

    def _read_ahead(self, count: int) -> None:
        """Reads all steps."""
        try:
            iterator = iter(self.position.loader)
            for _ in range(self.trainer.state.max_steps - self.trainer.state.global_step):
                self.steps.put(self._read(iterator, count))
        except BaseException as error:
            self.steps.put(error)

    def read(self, iterator: Iterator, count: int) -> list[dict]:
        """The micro-batches of the next step, [] on all processes if one of them has none. Collective."""
        batches = []
        states = {}
        code = 0
        try:
            batches, states = self.next_step(iterator, count)
        except Exception as error:
            reason = str(error) if isinstance(error, HubLost) else temporary_failure(error)  # the latter of `datasets`
            if not self.is_stream or not (reason or isinstance(error, UserError)):
                raise
            self.error = reason or str(error)
            code = OUT_OF_TIME if reason else 2
        self.exit_code = maximum(code, self.group)
        if self.exit_code:
            self.trainer.control.should_training_stop = self.trainer.control.should_log = True
            return []
        self.position.states = states
        return batches

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.saved_step = state.global_step

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """transformers ends the epoch when the run stops. Then nothing is evaluated, and saved only what is not saved yet."""
        if self.exit_code:
            control.should_evaluate = False
            control.should_save = args.save_strategy != "no" and state.global_step > self.saved_step

    def report_stop(self) -> int:
        """The exit code, after one message from all processes, if one of them could not read; else 0. Collective."""
        if not self.exit_code:
            return 0
        reason = max(gather_object([self.error]), key=len)
        kind = hint = ""
        if self.exit_code != OUT_OF_TIME:  # a file that was mended has changed, so the same command would be refused
            kind = "error: "
        elif self.saved_step:
            hint = f" The same command resumes from step {self.saved_step}."
        print_once(f"\n{kind}Stopped at step {self.trainer.state.global_step}: {reason}.{hint}")
        return self.exit_code
