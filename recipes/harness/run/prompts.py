"""How a prompt for a trained model looks: prompt.json in the folder of its run, which --chat reads.

- rows: what the run was trained on; None if the trainer got tokens, or is no SFTTrainer.
- system: of CONVERSATIONS, the system message of the training rows, if the first ones all have the same.
- chat_template_kwargs: what the chat template got besides the messages.
"""

from dataclasses import dataclass, field
from typing import Any

from harness.folder import CONVERSATIONS, PROMPTS, TEXTS

from datasets import Dataset, IterableDataset
from trl.data_utils import is_conversational

Rows = Dataset | IterableDataset
COMPARED_ROWS = 256
KEPT_CONVERSATIONS = 16


@dataclass
class SeenRows:
    """What is kept of the rows of a run before they are cut and packed: packed rows have no messages."""

    prompt: dict[str, Any] = field(default_factory=dict)  # the content of prompt.json
    conversations: list[dict[str, Any]] = field(default_factory=list)  # the first ones for evaluation, with their tokens
    tokens: Rows | None = None  # of the training rows, of any length

    def record(self, split: str, rows: Rows, tokens: Rows) -> None:
        """Records how prompts look, and keeps conversations: --verify compares the prompts of a saved tokenizer with them.

        `split`: "train", or of an evaluation; `rows`: as `tokenize` gets them; `tokens`: the same as tokens, of any length.
        """
        if split == "train":
            self.tokens = tokens
        if "system" not in self.prompt:  # of the training rows, unless they are a stream
            self.prompt |= describe_rows(rows)
        if split != "train" and isinstance(rows, Dataset) and is_conversational(rows[0]):
            for row, of_row in zip(rows.take(KEPT_CONVERSATIONS), tokens.take(KEPT_CONVERSATIONS), strict=True):
                self.conversations.append(row | {"input_ids": of_row["input_ids"]})


def describe_rows(rows: Rows) -> dict[str, Any]:
    """What prompt.json says about readable rows. A stream is not read further than its first row."""
    first = next(iter(rows))
    if "input_ids" in first:
        return {}
    if not is_conversational(first):
        return {"rows": PROMPTS if "prompt" in first else TEXTS}
    if not isinstance(rows, Dataset):
        return {"rows": CONVERSATIONS}
    systems = set()
    for row in rows.take(min(COMPARED_ROWS, len(rows))):
        turn = (row.get("messages") or row["prompt"])[0]
        systems.add(str(turn["content"]) if turn["role"] == "system" else None)
    return {"rows": CONVERSATIONS, "system": systems.pop() if len(systems) == 1 else None}
