"""The documents of tokenized rows, packed or not, for --preview and --verify."""

from harness.data.turns import IGNORED

Document = tuple[list[int], list[int]]  # tokens and labels
ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids")  # of DPOTrainer's and KTOTrainer's rows, next to prompt_ids


def documents_of(row: dict) -> list[Document]:
    """The documents of a tokenized row, packed or not; of a pair of answers the prompt with each of them."""
    if "prompt_ids" in row:
        prompt = row["prompt_ids"]
        return [(prompt + row[name], [IGNORED] * len(prompt) + row[name]) for name in ANSWERS if name in row]
    ids = row["input_ids"]
    labels = row.get("labels", ids)
    documents = []
    start = 0
    for length in row.get("seq_lengths") or [len(ids)]:
        documents.append((ids[start : start + length], labels[start : start + length]))
        start += length
    return documents
