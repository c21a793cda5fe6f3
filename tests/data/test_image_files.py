"""Files of images: which are skipped and why, their sizes, and what a rehearsal keeps of their paths."""

import base64
import io

from harness.data.conversion import cut_texts_of_row
from harness.data.formats import convert
from harness.data.images import decode, find_file, size_of
from harness.messages import RefusedRow, UserError

import numpy
import pytest
from PIL import Image

pytestmark = pytest.mark.unit
ASKED = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat."}]}


def encoded(image, file_format="PNG", **options) -> bytes:
    made = io.BytesIO()
    image.save(made, file_format, **options)
    return made.getvalue()


def reason_of(content: bytes) -> str:
    return find_file({"bytes": content, "path": "cat"}, "")


def test_rehearsal_keeps_paths():
    image = {"bytes": None, "path": f"/{'folder/' * 40}cat.png"}
    row = {"messages": [{"role": "user", "content": "<image>" + "Why? " * 100}], "images": [image]}
    cut = cut_texts_of_row(row)
    assert cut["images"] == [image] and len(cut["messages"][0]["content"]) < 200


@pytest.mark.parametrize(("file_format", "orientation"), [("JPEG", 3), ("PNG", 6), ("WEBP", 5), ("TIFF", 8)])
def test_size_is_that_of_the_pixels(file_format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = {"bytes": encoded(Image.new("RGB", (80, 40)), file_format, exif=exif), "path": None}
    assert size_of(image) == decode(image).size == ((40, 80) if orientation > 4 else (80, 40))


def test_thin_images_are_skipped():
    """Of which the processors of Qwen raise an error without a name: those above 200 to 1."""
    assert reason_of(encoded(Image.new("RGB", (2000, 10)))) == reason_of(encoded(Image.new("RGB", (10, 2000)))) == ""
    assert "whose image cat cannot be read: one side" in reason_of(encoded(Image.new("RGB", (2001, 10))))


@pytest.mark.parametrize(("values", "is_read"), [("float32", False), ("int32", False), ("uint16", True)])
def test_greys_of_32_bits_are_skipped(values, is_read):
    largest = numpy.array([[0, 65_535 if is_read else 65_536]], dtype=values)
    assert ("32 bits" in reason_of(encoded(Image.fromarray(largest), "TIFF"))) == (not is_read)


def test_reasons_are_short(monkeypatch):
    assert reason_of(b"<svg></svg>").endswith("cannot be read: convert it to JPEG or PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    reason = reason_of(encoded(Image.new("RGB", (20, 20))))
    assert "400 pixels" in reason and len(reason) < 150
    long = {"bytes": None, "path": "folder/" * 400 + "cat.png"}
    assert len(find_file(long, "/")) < 150


def test_path_in_a_dataset_of_the_hub_is_refused():
    with pytest.raises(RefusedRow, match="download the repository"):
        find_file({"bytes": None, "path": "photos/cat.png"}, "")


@pytest.mark.parametrize("value", [base64.b64encode(b"cat" * 1000).decode(), "data:image/png;base64,a", ["cat.png"]])
def test_images_that_are_none(value):
    """Base64 without or with a wrong URL, and a list."""
    converted, reason = convert(ASKED | {"images": [value]}, "images")
    assert converted is None and len(reason) < 100


@pytest.mark.parametrize("value", [[""], [None], [None, "cat.png"]])
def test_empty_images_are_none(value):
    converted, _ = convert(ASKED | {"images": value}, "images")
    assert [image["path"] for image in converted["images"]] == value[1:]


def test_image_that_is_gone(tmp_path):
    """While a run trains, or before its model is verified."""
    image = {"bytes": None, "path": str(tmp_path / "cat.png")}
    for read in (size_of, decode):
        with pytest.raises(UserError, match="can no longer be read"):
            read(image)
