"""Measures how fast packed rows are read from Parquet files on a Hub of this machine, and the host memory of the buffers.

    .venv/bin/python benchmarks/reading.py            # about four minutes on two cores

Streams 14 files of documents, tokenizes and packs them as `qwen2_fineweb_edu` does, and trains nothing: 8 micro-batches of two
rows per step, on one and on four processes. "accelerate": the files are divided among the processes, as accelerate does it.
"parts": as `harness/data/streams.py` does it. Prints seconds to the first step, rows per second of all processes after it (their
documents are tokenized already), and the host memory of all processes after the last step, without the imported libraries.
"""

import json
import os
import random
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "tests")]
FILES, DOCUMENTS, SLOTS, ROWS, LENGTH, STEPS = 14, 3_000, 8, 2, 1024, 60


def make_dataset(folder: Path) -> None:
    """FILES Parquet files of DOCUMENTS documents of about 4 KB."""
    from harness.rehearsal.tiny_data import documents

    import pyarrow
    from pyarrow import parquet

    paragraphs, generator = documents(), random.Random(0)
    folder.mkdir(parents=True)
    for file in range(FILES):
        texts = ["\n".join(generator.choices(paragraphs, k=generator.randint(2, 8))) for _ in range(DOCUMENTS)]
        parquet.write_table(pyarrow.table({"text": texts}), folder / f"{file:02}.parquet", row_group_size=1000)


def read(kind: str, processes: int, rank: int, model: Path) -> tuple[float, float, int, float]:
    """Seconds to the first step, seconds and rows after it, and GB of host memory."""
    from harness.data import loading
    from harness.data.streams import StreamPosition, repeat_stream

    import psutil
    import torch
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer
    from trl import pack_dataset

    torch.set_num_threads(1)
    memory_before, began = psutil.Process().memory_info().rss, time.monotonic()
    script_args = loading.ScriptArguments(dataset_name="some/rows", dataset_streaming=True, max_eval_samples=8)
    script_args.dataset_formats, script_args.display_name = ("text",), "some/rows"
    tokenizer = AutoTokenizer.from_pretrained(model)
    stream, _ = loading.load(script_args)
    stream = stream.map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]}, remove_columns=["text"])
    accelerator = SimpleNamespace(device=torch.device("cpu"), non_blocking=False, dataloader_config=SimpleNamespace())
    args = SimpleNamespace(process_index=rank, world_size=processes, gradient_accumulation_steps=SLOTS // processes)
    args.train_batch_size = ROWS
    trainer = SimpleNamespace(args=args, accelerator=accelerator, eval_dataset=None)
    trainer.train_dataset = pack_dataset(stream, LENGTH, "bfd_split")
    repeat_stream(trainer)

    def collate(rows: list[dict]) -> dict:
        if kind == "accelerate":
            trainer.train_dataset.state_dict()  # for the checkpoint
        return {"rows": rows}

    loader = DataLoader(trainer.train_dataset, batch_size=ROWS, collate_fn=collate)
    prepared = prepare_data_loader(loader, num_processes=processes, process_index=rank, dispatch_batches=False)
    trainer.get_train_dataloader = lambda: prepared
    position = StreamPosition(trainer, None)
    if kind == "parts":
        position.install()
    batches, times = iter(trainer.get_train_dataloader()), []
    for _ in range(STEPS):
        position.take_from([next(batches) for _ in range(SLOTS // processes)])
        times.append(time.monotonic())
    gigabytes = (psutil.Process().memory_info().rss - memory_before) / 1e9
    return times[0] - began, times[-1] - times[0], (STEPS - 1) * SLOTS // processes * ROWS, gigabytes


def main() -> None:
    from local_hub import serve

    with tempfile.TemporaryDirectory() as name, serve(Path(name, "hub")) as hub:
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(Path(name, "home"))}
        from harness.rehearsal import tiny_model

        import datasets

        datasets.disable_progress_bars()
        make_dataset(hub.root / "datasets/some/rows")
        tiny_model.make("Qwen/Qwen2-0.5B", "main", Path(name, "model"))
        for processes in (1, 4):
            for kind in ("accelerate", "parts", "accelerate", "parts"):
                with get_context("spawn").Pool(processes) as pool:
                    wanted = [(kind, processes, rank, Path(name, "model")) for rank in range(processes)]
                    found = pool.starmap(read, wanted, chunksize=1)
                first, seconds = (max(part[place] for part in found) for place in (0, 1))
                rows, gigabytes = (sum(part[place] for part in found) for place in (2, 3))
                numbers = {"seconds_to_first_step": round(first, 1), "rows_per_second": round(rows / seconds)}
                print(json.dumps({"processes": processes, "kind": kind} | numbers | {"host_gb": round(gigabytes, 2)}), flush=True)


if __name__ == "__main__":
    main()
