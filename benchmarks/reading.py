"""Measures how fast packed rows are read from Parquet files on a Hub of this machine, and the host memory of the buffers.

    .venv/bin/python benchmarks/reading.py            # about seven minutes on two cores

Streams 14 files of documents, tokenizes and packs them as `qwen2_fineweb_edu` does, and trains nothing: 8 micro-batches of two
rows per step, on one and on four processes. "divided": the files are divided among the processes, as accelerate does it. "parts":
as `harness/data/streams.py` does it. "large buffers": with a shuffle buffer of 1,000 documents and packed batches of 1,000 for
each part. Prints the seconds to the first step; of these, the seconds that a core computed (which other work on the machine does
not change), and how many per 1,000 rows from the start to the last step; the share of the rows that is not padding; and the host
memory of all processes after the last step, without the imported libraries.
"""

import json
import os
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "tests"), str(ROOT / "benchmarks")]
FILES, SLOTS, ROWS, LENGTH = 14, 8, 2, 1024


def make_dataset(folder: Path, documents_per_file: int) -> None:
    """FILES Parquet files of documents about as long as those of FineWeb-Edu: 600 tokens in the median, 1,000 on average."""
    from harness.rehearsal import tiny

    import inputs
    from pyarrow import parquet

    tokenizer = tiny.make_tokenizer(tiny.family_of("Qwen/Qwen2-0.5B"))
    with tempfile.TemporaryDirectory() as name:
        inputs.make_documents(Path(name, "all"), tokenizer, FILES * documents_per_file, 600, 1000)
        table = parquet.read_table(Path(name, "all/00000.parquet"))
    folder.mkdir(parents=True)
    for file in range(FILES):
        rows = table.slice(file * documents_per_file, documents_per_file)
        parquet.write_table(rows, folder / f"{file:02}.parquet", row_group_size=1000)


def read(kind: str, processes: int, rank: int, model: Path, steps: int) -> tuple[float, float, float, int, int, float]:
    """Seconds to the first step, CPU seconds to it and to the last one, rows and their tokens, and GB of host memory."""
    from harness.data import loading, stream_rows
    from harness.data.reading import DataSettings, Source
    from harness.data.streams import StreamPosition, documents_per_batch, repeat_stream

    import psutil
    import torch
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer
    from trl import pack_dataset

    torch.set_num_threads(1)
    if kind != "parts":
        stream_rows.SMALLEST_BUFFER = stream_rows.SHUFFLE_BUFFER
    memory_before, began, cpu_before = psutil.Process().memory_info().rss, time.monotonic(), time.process_time()
    data = DataSettings((Source("some/rows", display_name="some/rows"),), ("text",), streaming=True, max_eval_samples=8)
    tokenizer = AutoTokenizer.from_pretrained(model)
    stream, _ = loading.load_rows(data)
    stream = stream.map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]}, remove_columns=["text"])
    batch = documents_per_batch(stream, LENGTH, "bfd_split") if kind == "parts" else 1000
    accelerator = SimpleNamespace(device=torch.device("cpu"), non_blocking=False, dataloader_config=SimpleNamespace())
    args = SimpleNamespace(process_index=rank, world_size=processes, gradient_accumulation_steps=SLOTS // processes)
    args.train_batch_size = ROWS
    trainer = SimpleNamespace(args=args, accelerator=accelerator, eval_dataset=None)
    trainer.train_dataset = pack_dataset(stream, LENGTH, "bfd_split", {"batch_size": batch})
    repeat_stream(trainer)

    def collate(rows: list[dict]) -> dict:
        if kind == "divided":
            trainer.train_dataset.state_dict()  # for the checkpoint
        return {"tokens": torch.tensor(sum(len(row["input_ids"]) for row in rows))}

    loader = DataLoader(trainer.train_dataset, batch_size=ROWS, collate_fn=collate)
    prepared = prepare_data_loader(loader, num_processes=processes, process_index=rank, dispatch_batches=False)
    position = StreamPosition(trainer, None)
    batches, tokens = iter(prepared if kind == "divided" else position.divide(prepared)), 0
    for step in range(steps):
        of_step = [next(batches) for _ in range(SLOTS // processes)]
        position.states_after_next_step()
        tokens += sum(int(batch["tokens"]) for batch in of_step)
        if step == 0:
            first, first_cpu = time.monotonic() - began, time.process_time() - cpu_before
    gigabytes = (psutil.Process().memory_info().rss - memory_before) / 1e9
    return first, first_cpu, time.process_time() - cpu_before, steps * SLOTS // processes * ROWS, tokens, gigabytes


def main(counts: tuple[int, ...] = (1, 4), rounds: int = 2, documents_per_file: int = 1_500, steps: int = 250) -> None:
    from local_hub import serve

    with tempfile.TemporaryDirectory() as name, serve(Path(name, "hub")) as hub:
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(Path(name, "home"))}
        from harness.rehearsal import tiny

        import datasets

        datasets.disable_progress_bars()
        make_dataset(hub.root / "datasets/some/rows", documents_per_file)
        tiny.make_tiny_model("Qwen/Qwen2-0.5B", "main", Path(name, "model"))
        for processes in counts:
            for kind in ("divided", "large buffers", "parts") * rounds:
                with get_context("spawn").Pool(processes) as pool:
                    wanted = [(kind, processes, rank, Path(name, "model"), steps) for rank in range(processes)]
                    found = pool.starmap(read, wanted, chunksize=1)
                first, first_cpu = (max(part[place] for part in found) for place in (0, 1))
                cpu, rows, tokens, gigabytes = (sum(part[place] for part in found) for place in (2, 3, 4, 5))
                numbers = {"seconds_to_first_step": round(first, 1), "cpu_seconds_to_first_step": round(first_cpu, 1)}
                numbers |= {"cpu_seconds_per_1000_rows": round(1000 * cpu / rows, 2)}
                numbers |= {"filled": round(tokens / rows / LENGTH, 4), "host_gb": round(gigabytes, 2)}
                print(json.dumps({"processes": processes, "kind": kind} | numbers), flush=True)


if __name__ == "__main__":
    main()
