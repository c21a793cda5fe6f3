"""A recipe for test_batches.py: the second of two processes cannot read the batches of a step.

It loses the Hub, as the readers of `datasets` say it, or, if the variable BAD_ROW is set, meets a row that cannot be read.

Reads two steps without training, the first one with the Hub, and writes what each process got into batches_RANK.json.
"""

import itertools
import json
import os
import runpy
from pathlib import Path

import harness
from harness import runs
from harness.messages import UserError
from harness.run.checkpoints import WeightsOfModel
from harness.run.stopping import make_cpu_group
from harness.run.trainer import add_parts


def read_two_steps(trainer):
    runs.started().trainer = trainer
    rank, control = trainer.args.process_index, trainer.control
    parts = add_parts(trainer, WeightsOfModel(trainer.model), (1, 1), make_cpu_group(trainer.args.ddp_timeout))
    loader = iter(trainer.get_train_dataloader())
    trainer.state.max_steps = 2

    def lose_hub():
        yield from itertools.islice(loader, 3)
        if rank == 1:
            raise UserError("line 7: not JSON") if "BAD_ROW" in os.environ else ConnectionError("Server Disconnected")
        yield next(loader)

    parts.position.loader, steps = lose_hub(), []
    for _ in range(2):
        read, loss_tokens = trainer.get_batch_samples(None, 2, trainer.args.device)
        own = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in read)
        steps.append([len(read), own, None if loss_tokens is None else int(loss_tokens), control.should_training_stop])
    code = parts.reader.report_stop()
    Path(trainer.args.output_dir, f"batches_{rank}.json").write_text(json.dumps({"steps": steps, "exit code": code}))
    parts.reader.group = None
    trainer.end()


harness.train = read_two_steps
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
