"""The documents of tokenized rows, packed or not, for --preview and --verify."""

Document = tuple[list[int], list[int]]  # tokens and labels
IGNORED = -100  # the label of a token that does not count in the loss


def documents_of(row: dict) -> list[Document]:
    """The documents of a tokenized row, packed or not."""
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    documents, start = [], 0
    for length in row.get("seq_lengths") or [len(ids)]:
        documents.append((ids[start : start + length], labels[start : start + length]))
        start += length
    return documents
