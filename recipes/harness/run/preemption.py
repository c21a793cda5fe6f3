"""Stopping a run from outside: all processes leave at one step, after a checkpoint."""

import datetime
import signal

from harness.launched import say
from harness.nodes import signals

import torch
import torch.distributed as dist
from transformers import TrainerCallback


class StopTogether(TrainerCallback):
    """Stops after the step in which any process received a signal of `signals.SIGNALS`.

    The processes agree after every step through a gloo group of their own, on the CPU: nothing waits for a GPU.
    """

    def __init__(self, timeout: float):
        """`timeout`, in seconds, is how long a process waits for the others."""
        signals.listen()  # until now a signal ends the process at once: there is nothing to save
        self.number = 0  # the signal all agreed on
        self.group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            patience = datetime.timedelta(seconds=timeout)
            self.group = dist.new_group(backend="gloo", timeout=patience)
            if dist.get_backend() == "gloo":  # to which transformers does not hand --ddp_timeout
                dist.distributed_c10d._set_pg_timeout(patience)

    def on_step_end(self, args, state, control, **kwargs):
        number = torch.tensor([signals.received])
        if self.group:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self.group)
        self.number = int(number)
        if self.number and state.global_step < state.max_steps:
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy != "no"
            control.should_evaluate = False  # there may be little time
        return control

    def close(self, trainer):
        """Disconnects the processes, after everything that needs the others."""
        self.group = None  # or it would be taken down by the interpreter, at a moment of its choice
        trainer.end()

    def leave(self, trainer):
        """Ends the process when the run was stopped before its last step."""
        if self.number and trainer.state.global_step < trainer.state.max_steps:
            saved = trainer.args.save_strategy != "no"
            goes_on = "the same command goes on from there" if saved else "without a checkpoint"
            say(f"\nStopped by {signal.Signals(self.number).name} at step {trainer.state.global_step}; {goes_on}.")
            self.close(trainer)
            raise SystemExit(signals.OUT_OF_TIME if saved and self.number == signal.SIGUSR1 else 128 + self.number)
