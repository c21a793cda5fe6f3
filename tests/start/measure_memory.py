"""A recipe for test_loading.py: writes down each process's private memory before and after its model is loaded."""

import json
from pathlib import Path

from harness import parse

import psutil
from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def private_gb() -> float:
    return psutil.Process().memory_full_info().uss / 1e9


def main():
    _, args, model = parse(SFTConfig, max_length=64, max_steps=1, save_strategy="no", packing=True)
    rows = Dataset.from_dict({"text": ["some words to train on"] * 200})
    before = private_gb()
    trainer = SFTTrainer(model=model.model_name_or_path, args=args, train_dataset=rows)
    measured = {"grown": private_gb() - before, "fsdp_enabled": trainer.is_fsdp_enabled}
    Path(args.output_dir, f"rank{args.process_index}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
