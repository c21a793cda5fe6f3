"""How a prompt for a trained model looks: prompt.json in the folder of its run, which --chat reads.

- rows: what the run was trained on; None if the trainer got tokens, or is no SFTTrainer.
- begins, ends: of PROMPTS, what all of them begin and end with. The recipe has written it around each instruction.
- chat_template_kwargs: what the chat template got besides the messages.
"""

from dataclasses import dataclass, field
from typing import Any

from harness.folder import CONVERSATIONS, PROMPTS, TEXTS

from datasets import Dataset, IterableDataset
from transformers import Trainer
from trl.data_utils import is_conversational

FIRST_ROWS = 256
FEWEST_PROMPTS = 16  # fewer different ones can begin alike by chance
KEPT_CONVERSATIONS = 16


@dataclass
class SeenRows:
    """What is kept of the rows of a run before they are packed: packed rows have no messages."""

    prompt: dict[str, Any] = field(default_factory=dict)  # the content of prompt.json
    conversations: list[dict[str, Any]] = field(default_factory=list)  # the first ones for evaluation, with their tokens

    def record(self, trainer: Trainer, split: str, rows: Dataset | IterableDataset, tokenized: Any) -> None:
        """Records how prompts look, and keeps conversations: --verify compares the prompts of a saved tokenizer with them."""
        if "begins" not in self.prompt:  # of the training rows, unless they are a stream
            self.prompt |= describe_rows(rows)
        if split != "train" and isinstance(rows, Dataset) and is_conversational(rows[0]):
            self.conversations += tokenized.take(KEPT_CONVERSATIONS)


def describe_rows(rows: Dataset | IterableDataset) -> dict[str, Any]:
    """What prompt.json says about rows that SFTTrainer tokenizes. A stream is not read further than its first row."""
    first = next(iter(rows))
    if is_conversational(first):
        return {"rows": CONVERSATIONS}
    if "prompt" not in first:
        return {"rows": TEXTS}
    if not isinstance(rows, Dataset):
        return {"rows": PROMPTS}
    begins, ends = what_all_share(list(set(rows[:FIRST_ROWS]["prompt"])))
    return {"rows": PROMPTS, "begins": begins, "ends": ends}


def what_all_share(prompts: list[str]) -> tuple[str, str]:
    """What all of these different prompts begin with, and what they end with; "" if they are few."""
    if len(prompts) < FEWEST_PROMPTS:
        return "", ""
    begins = common_start(prompts)
    return begins, common_start([prompt[len(begins) :][::-1] for prompt in prompts])[::-1]


def common_start(texts: list[str]) -> str:
    first, last = min(texts), max(texts)  # in the order of a dictionary: all others share what these two share
    return first[: next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))]
