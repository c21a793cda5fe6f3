"""Records which rows each step trains, and when the run evaluates and saves, as lines of JSON in $RECORDS/records.jsonl.

Rows: `text`, which begins with "row " and a number. Until there is a file $RECORDS/fast, each step takes some time.
"""

import json
import os
import re
import socket
import time
from pathlib import Path

from harness import load, load_tokenizer, parse, tokenize, train

from trl import SFTConfig, SFTTrainer

FOLDER = Path(os.environ.get("RECORDS", "."))
HOST = socket.gethostname()
PAUSE = 0.2  # seconds


def record(event: str, **values):
    # The port of the store where the processes meet: another one after every start.
    values |= {"event": event, "time": time.time(), "start": os.environ["MASTER_PORT"], "host": HOST, "pid": os.getpid()}
    with (FOLDER / "records.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")
    if not (FOLDER / "fast").exists():
        time.sleep(PAUSE)


class RecordedTrainer(SFTTrainer):
    def training_step(self, model, inputs, *arguments, **named):
        text = " ".join(self.processing_class.batch_decode(inputs["input_ids"]))
        rows = [int(number) for number in re.findall(r"row (\d+)", text)]
        loss = super().training_step(model, inputs, *arguments, **named)
        record("rows", step=self.state.global_step + 1, rows=rows, processes=self.args.world_size)
        return loss

    def evaluate(self, *arguments, **named):
        record("evaluating", step=self.state.global_step)
        return super().evaluate(*arguments, **named)

    def _save_optimizer_and_scheduler(self, output_dir):
        record("saving", step=self.state.global_step)  # the model is saved
        super()._save_optimizer_and_scheduler(output_dir)


def main():
    script_args, training_args, model_args = parse(
        SFTConfig,
        dataset_formats="text",
        model_name_or_path="Qwen/Qwen2-0.5B",
        num_train_epochs=1,
        max_length=32,
        logging_steps=1,
        eval_strategy="steps",
    )
    record("starting")
    train_dataset, eval_dataset = load(script_args)
    tokenizer = load_tokenizer(model_args, training_args)
    train_dataset, eval_dataset = tokenize(train_dataset, eval_dataset, tokenizer, training_args)
    train(
        RecordedTrainer(
            model=model_args.model_name_or_path,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
        )
    )


if __name__ == "__main__":
    main()
