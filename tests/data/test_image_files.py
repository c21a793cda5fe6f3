"""Files of images: which are skipped and why, their sizes, and what a rehearsal keeps of their paths."""

from harness.data.conversion import cut_texts_of_row

import pytest

pytestmark = pytest.mark.unit


def test_rehearsal_keeps_paths():
    image = {"bytes": None, "path": f"/{'folder/' * 40}cat.png"}
    row = {"messages": [{"role": "user", "content": "<image>" + "Why? " * 100}], "images": [image]}
    cut = cut_texts_of_row(row)
    assert cut["images"] == [image] and len(cut["messages"][0]["content"]) < 200
