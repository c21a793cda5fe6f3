"""Images of rows: where they are in a conversation, their files, their tokens, and the batches that a model reads.

In a converted row `images` has the bytes or the absolute path of each image, and the contents of `messages` have `<image>` where
it is. In an answer, `<image>` is plain text. Rows keep both until a batch is made (`ImageCollator`): only then an image is
decoded completely, by the process, or the worker of its loader, that trains on it.
"""

import base64
import contextlib
import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.data.turns import CONTENT, IGNORED, is_conversation, is_nothing, read_json, role_of
from harness.messages import RefusedRow, SkippedRow, UserError, plural

import PIL.Image
import PIL.ImageOps
from datasets import List, Value

IMAGE = "<image>"  # in a content; also in rows of LLaVA and LLaMA-Factory
FEATURE = List({"bytes": Value("binary"), "path": Value("string")})
PARTS = ("image", "image_url", "input_image")  # types of parts of a content
KEYS_OF_PART = ("image", "path", "url", "image_url")  # under which a part itself has its image
ORIENTATION = 0x0112  # of EXIF: how a camera was held
SIDEWAYS = (5, 6, 7, 8)
AREA = 64 * 64  # a `size` of a processor below it is a length, others count pixels; no --max_pixels is smaller
MOST_RATIO = 200  # of the sides of an image; Qwen's processors fail above
MOST_GREY = 65_535  # of 16 bits
LONGEST_NAME = 250  # of files; what is longer and has no suffix is base64
SHOWN_LETTERS = 100  # of a name, or of a reason of Pillow
OF_IMAGE = ("whose image", "with an image")  # why a row is skipped begins so


def mark_parts(value: Any, found: list) -> Any:
    """Turns in which image parts are texts, IMAGE. Images that the parts themselves have are added to `found`.

    Raises RefusedRow for an answer with an image part.
    """
    turns = read_json(value)
    if isinstance(turns, list):
        turns = [read_json(turn) for turn in turns]
    if not isinstance(turns, list) or not is_conversation(turns):
        return value
    marked = []
    for turn in turns:
        for key in CONTENT:
            if isinstance(turn.get(key), list):
                turn = turn | {key: [_mark_part(part, found, role_of(turn)) for part in turn[key]]}
        marked.append(turn)
    return marked


def _mark_part(part: Any, found: list, role: str) -> Any:
    if not isinstance(part, dict) or part.get("type") not in PARTS:
        return part
    if role == "assistant":
        raise RefusedRow("an answer has an image, and a model learns to write texts only: delete the row, or the image")
    image = next((part[key] for key in KEYS_OF_PART if part.get(key)), None)
    if isinstance(image, dict) and "url" in image:  # OpenAI's form
        image = image["url"]
    if image is not None:
        found.append(image)
    return {"type": "text", "text": IMAGE}


def read_row(row: dict, of_parts: list) -> list[dict]:
    """The images of a row, in its column or in the parts of its messages. Raises RefusedRow if these differ."""
    of_column = read_images(row.get("images")) or read_images(row.get("image"))
    in_parts = read_images(of_parts)
    if of_column and in_parts and (len(of_column) != len(in_parts) or not all(map(_may_be_the_same, of_column, in_parts))):
        raise RefusedRow(
            f"its column has {plural(len(of_column), 'image')}, the parts of its messages have {len(in_parts)}, and they are "
            "not the same: delete the ones or the others"
        )
    return of_column or in_parts


def _may_be_the_same(one: dict, other: dict) -> bool:
    """False for two paths with different ends: one can be relative to a folder of the other."""
    parts = Path(one["path"] or "").parts
    others = Path(other["path"] or "").parts
    shorter = min(len(parts), len(others))
    return parts[len(parts) - shorter :] == others[len(others) - shorter :]


def read_images(value: Any) -> list[dict]:
    """The images in a column: one or several paths, `data:` URLs, or bytes of files, as `datasets` has them."""
    value = read_json(value)
    if is_nothing(value):
        return []
    if not isinstance(value, list):
        value = [value]
    return [_read_image(image) for image in value if not is_nothing(image)]


def _read_image(image: Any) -> dict:
    if isinstance(image, str) and image.startswith("data:"):
        try:
            image = base64.b64decode(image.partition(",")[2])
        except ValueError as error:
            raise SkippedRow("with an image whose data: URL is not valid base64") from error
    if isinstance(image, str) and len(image) > LONGEST_NAME and "." not in image:
        raise SkippedRow("with an image in base64 without data:image/png;base64, in front")
    if isinstance(image, str):
        return {"bytes": None, "path": image.removeprefix("file://")}
    if isinstance(image, bytes):
        return {"bytes": image, "path": None}
    if isinstance(image, dict) and (image.get("bytes") or image.get("path")):
        return {"bytes": image.get("bytes"), "path": image.get("path")}
    raise SkippedRow(f"with an image that is neither a path nor the bytes of a file, but a {type(image).__name__}")


def add_marks(turns: list[dict], count: int) -> list[dict]:
    """Turns with as many marks as there are images. Without any mark, the images come first in the first question, as in TRL."""
    marks = count_marks(turns)
    if marks == count:
        return turns
    roles = [turn["role"] for turn in turns]
    if marks or "user" not in roles:
        raise RefusedRow(
            f"it has {plural(count, 'image')}, and {plural(marks, 'place')} for one in its messages (parts of the type image, "
            f"or {IMAGE} in a message that is not an answer): write one place for each image"
        )
    first = roles.index("user")
    question = turns[first]
    marked = question | {"content": IMAGE * count + question["content"]}
    return [*turns[:first], marked, *turns[first + 1 :]]


def count_marks(turns: list[dict]) -> int:
    return sum(len(_texts_around_marks(turn)) - 1 for turn in turns)


def _texts_around_marks(turn: dict) -> list[str]:
    if turn["role"] == "assistant":
        return [turn["content"]]
    return turn["content"].split(IMAGE)


def find_file(image: dict, folder: str) -> str:
    """Makes the path of an image absolute. Returns why its row is skipped, "" if the image can be read.

    `folder`: to which paths are relative; "" for a dataset of the Hub. Raises RefusedRow for a remote image.
    """
    name = name_of(image)
    if image["bytes"] is None:
        path = Path(folder, Path(image["path"]).expanduser())
        if "://" in image["path"] or not path.is_absolute():
            raise RefusedRow(
                f"the image {name} is no file on this machine, and a run downloads rows only: download it, and write its path. "
                "Of a dataset of the Hub download the repository, and pass its folder"
            )
        if not path.is_file():
            return f"whose image {name} does not exist"
        image["path"] = str(path)
    try:
        with PIL.Image.open(_file_of(image)) as opened:
            if max(opened.size) > MOST_RATIO * min(opened.size):
                raise ValueError(f"one side is more than {MOST_RATIO} times the other")
            opened.draft("L", (1, 1))  # a JPEG is decoded at an eighth of its size, which finds an incomplete one too
            opened.load()
            if opened.mode == "F" or (opened.mode == "I" and opened.getextrema()[1] > MOST_GREY):
                raise ValueError("32 bits a pixel")
    except PIL.UnidentifiedImageError:
        return f"whose image {name} cannot be read: convert it to JPEG or PNG"
    except Exception as error:  # a file can be broken in any way
        return f"whose image {name} cannot be read: {str(error)[:SHOWN_LETTERS]}"
    return ""


def name_of(image: dict) -> str:
    """For messages. The end of a long path is the name of its file."""
    name = image["path"] or "in the dataset"
    if len(name) <= SHOWN_LETTERS:
        return name
    return f"…{name[-SHOWN_LETTERS:]}"


def _file_of(image: dict) -> Any:
    if image["bytes"] is None:
        return image["path"]
    return io.BytesIO(image["bytes"])


def version_of(image: dict, folder: str) -> tuple[int, int] | None:
    """By which a changed file is found; None for bytes, and for a file that does not exist."""
    if image["bytes"] is not None:
        return None
    path = Path(folder, Path(image["path"]).expanduser())
    if not path.is_file():
        return None
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def open_image(image: dict) -> Iterator[PIL.Image.Image]:
    """The image without its pixels, which are read when they are needed."""
    try:
        with PIL.Image.open(_file_of(image)) as opened:
            yield opened
    except OSError as error:  # it could be read when the run began
        raise UserError(
            f"--dataset_name: the image {name_of(image)} can no longer be read ({error}): restore the file, and start the same "
            "command again"
        ) from error


def size_of(image: dict) -> tuple[int, int]:
    """Width and height, upright."""
    with open_image(image) as opened:
        width, height = opened.size
        is_sideways = opened.format != "TIFF" and opened.getexif().get(ORIENTATION) in SIDEWAYS  # Pillow turns a TIFF itself
    if is_sideways:
        return (height, width)
    return (width, height)


def decode(image: dict) -> PIL.Image.Image:
    """The pixels, upright, in three colours of 8 bits, and white where they are transparent."""
    with open_image(image) as opened:
        upright = PIL.ImageOps.exif_transpose(opened)
    if upright.mode.startswith("I"):  # grey with 16 bits, of which Pillow would cut what is above 255
        grey = upright.convert("I").point(lambda value: value / 256).convert("L")
        return PIL.Image.merge("RGB", [grey] * 3)
    if upright.has_transparency_data:
        upright = upright.convert("RGBA")
        upright = PIL.Image.alpha_composite(PIL.Image.new("RGBA", upright.size, "white"), upright)
    return upright.convert("RGB")


def limit_pixels(processor: Any, pixels: int) -> None:
    """Makes a processor shrink larger images to so many pixels. One with a fixed size, or with tiles, has no such limit."""
    size = processor.image_processor.size
    most = size.get("longest_edge")
    least = size.get("shortest_edge")
    if most and least and most >= AREA:
        processor.image_processor.size = {"longest_edge": min(most, pixels), "shortest_edge": min(least, pixels)}


def as_parts(turns: list[dict]) -> list[dict]:
    """Turns whose contents are lists of parts, as the chat template of a processor expects them."""
    changed = []
    for turn in turns:
        parts = []
        for index, text in enumerate(_texts_around_marks(turn)):
            if index:
                parts.append({"type": "image"})
            if text:
                parts.append({"type": "text", "text": text})
        changed.append(turn | {"content": parts})
    return changed


def encode_turns(processor: Any, turns: list[dict], images: list[dict], **options: Any) -> dict[str, list[int]]:
    """What `apply_chat_template` of a processor makes of a conversation: `input_ids`, and `assistant_masks` if asked.

    `images`: one for each IMAGE in `turns`. The processor raises ValueError unless the template writes a place for each, and for
    nothing else.
    """
    from harness.compat.transformers import without_pixels  # which imports torch

    left = iter(images)
    turns = as_parts(turns)
    for turn in turns:
        for part in turn["content"]:
            if part["type"] == "image":
                part["image"] = PIL.Image.new("RGB", size_of(next(left)))
    options |= {"tokenize": True, "return_dict": True, "return_tensors": None}
    found = without_pixels(processor).apply_chat_template(turns, processor_kwargs={"add_special_tokens": False}, **options)
    return {name: found[name][0] for name in ("input_ids", "assistant_masks") if name in found}


@functools.lru_cache(4096)
def tokens_of_size(processor: Any, width: int, height: int) -> int:
    """How many of its tokens are those of an image of this size."""
    part = {"type": "image", "image": PIL.Image.new("RGB", (width, height))}
    ids = processor.apply_chat_template([{"role": "user", "content": [part]}], tokenize=True)[0]
    return sum(token in processor.image_token_ids for token in ids)


class ImageCollator:
    """Makes batches of rows with `input_ids`, `labels` and `images`: padded tokens, and the pixels of their images."""

    def __init__(self, processor: Any, padding_side: str = "right") -> None:
        self.processor = processor
        self.padding_side = padding_side

    def __call__(self, rows: list[dict]) -> dict[str, Any]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        def pad(values: list[list[int]], padding: int) -> torch.Tensor:
            rows = list(map(torch.tensor, values))
            return pad_sequence(rows, batch_first=True, padding_value=padding, padding_side=self.padding_side)

        ids = [row["input_ids"] for row in rows]
        batch = {
            "input_ids": pad(ids, self.processor.tokenizer.pad_token_id),
            "attention_mask": pad([[1] * len(of_row) for of_row in ids], 0),
            "labels": pad([row["labels"] for row in rows], IGNORED),
        }
        names = {"mm_token_type_ids", "token_type_ids"} & {*self.processor.model_input_names}
        if getattr(self.processor, "return_mm_token_type_ids", False) and names:  # which tokens are those of an image
            batch[min(names)] = pad(self.processor.create_mm_token_type_ids(ids), 0)
        images = [[decode(image) for image in row["images"]] for row in rows if row["images"]]
        if images:
            pixels = self.processor.image_processor(images=images, return_tensors="pt")
            batch |= {name: value for name, value in pixels.items() if name not in self.processor.unused_input_names}
        return batch

    def for_prompts(self, prompts: list[list[int]], images: list[list[dict]]) -> dict[str, Any]:
        """What `generate` gets for the first tokens of rows: these, and the images among them."""
        rows = []
        for prompt, of_row in zip(prompts, images, strict=True):
            left = sum(token in self.processor.image_token_ids for token in prompt)
            kept = []
            for image in of_row:
                left -= tokens_of_size(self.processor, *size_of(image))
                if left >= 0:
                    kept.append(image)
            rows.append({"input_ids": prompt, "labels": prompt, "images": kept})
        batch = self(rows)
        del batch["labels"]
        return batch


def with_one_token_each(ids: list[int], labels: list[int], processor: Any) -> tuple[list[int], list[int]]:
    """Tokens and labels with the first token only of each image, to be printed; for a tokenizer instead of a processor all."""
    of_images = getattr(processor, "image_token_ids", [])
    kept = []
    kept_labels = []
    for index, token in enumerate(ids):
        if index == 0 or token not in of_images or token != ids[index - 1]:
            kept.append(token)
            kept_labels.append(labels[index])
    return kept, kept_labels


def image_collator(processor: Any) -> ImageCollator:
    """The `data_collator` of rows with images: decodes the images of a batch, and pads its tokens."""
    return ImageCollator(processor)
