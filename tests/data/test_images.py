"""Rows with images: the forms they have, what is skipped and refused, their tokens and their batches."""

import base64
import copy
import io
import json
from types import SimpleNamespace
from unittest import mock

from harness.data.chat_templates import check_conversations, fit_template, training_template
from harness.data.conversion import split_answers
from harness.data.formats import convert
from harness.data.images import ImageCollator, as_parts, decode, limit_pixels, tokens_of_size
from harness.data.loading import load_rows
from harness.data.tokenization import load_processor, tokenize, tokens_of_conversation
from harness.messages import exit_on_user_error
from harness.rehearsal import tiny
from harness.runs import Run, StartedRecipe

import numpy
import pytest
import torch
from datasets import Dataset, Features, Json, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from runs import data_settings, tiny_tokenizer, write_rows
from torch.utils.data import DataLoader
from transformers import AutoConfig, Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast, Qwen2VLImageProcessor
from trl import GRPOConfig, ModelConfig, RLOOConfig, SFTConfig
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

pytest.importorskip("torchvision")
MODEL = "Qwen/Qwen3.5-4B"
ANSWER = {"role": "assistant", "content": "A cat."}
PART, TEXT = {"type": "image"}, {"type": "text", "text": "What is this?"}


def picture(width=64, height=48, file_format="PNG", **options) -> bytes:
    made = io.BytesIO()
    Image.effect_noise((width, height), 60).convert("RGB").save(made, file_format, **options)
    return made.getvalue()


def as_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def asked(content) -> dict:
    return {"messages": [{"role": "user", "content": content}, ANSWER]}


@pytest.fixture(scope="module")
def processor():
    family = tiny.family_of(MODEL)
    made = tiny.make_processor(MODEL, "main", family, tiny_tokenizer(MODEL), AutoConfig.for_model(**family["config"]))
    made.tokenizer.chat_template = made.chat_template
    return made


FORMS = {
    "parts": asked([PART, TEXT]) | {"images": ["photos/cat.png"]},
    "one image": asked([PART, TEXT]) | {"image": "photos/cat.png"},
    "file of the column in the part": asked([PART | {"image": "./cat.png"}, TEXT]) | {"images": ["photos/cat.png"]},
    "in the part": asked([PART | {"image": "photos/cat.png"}, TEXT]),
    "LLaVA": {
        "conversations": [{"from": "human", "value": "<image>What is this?"}, {"from": "gpt", "value": "A cat."}],
        "image": "photos/cat.png",
    },
    "no place": asked("What is this?") | {"images": ["photos/cat.png"]},
    "prompt": {"prompt": "What is this?", "completion": "A cat.", "images": ["photos/cat.png"]},
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_forms_of_own_rows(tmp_path, row, streaming):
    """Paths are relative to the file, in whatever folder the run is started."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").write_bytes(picture())
    rows = write_rows(tmp_path / "rows.jsonl", [row, asked("Hi"), asked("Ho")])
    train, held_out = load_rows(data_settings(rows, ("images",), dataset_streaming=streaming, max_eval_samples=1))
    with_image = next(row for row in [*train, *held_out] if row["images"])
    assert with_image["messages"] == asked("<image>What is this?")["messages"]
    assert with_image["images"] == [{"bytes": None, "path": str(tmp_path / "photos/cat.png")}]


@pytest.mark.parametrize("streaming", [False, True])
def test_images_of_parquet_files_stay_files(tmp_path, streaming):
    """Several images in a turn, or none, with keys that are null, as on the Hub. The bytes of the images do not change."""
    images = [picture(40, 40), picture(32, 64)]
    content = [part | {"text": None} for part in (PART, PART)] + [TEXT]
    rows = [asked(content) | {"images": [{"bytes": image, "path": None} for image in images]}, asked([TEXT]) | {"images": []}]
    features = Features({"messages": List(Json()), "images": List(ImageFeature())})
    Dataset.from_list([*rows, asked("Hi") | {"images": []}], features=features).to_parquet(tmp_path / "rows.parquet")
    parts = load_rows(data_settings(tmp_path / "rows.parquet", ("images",), dataset_streaming=streaming, max_eval_samples=1))
    found = {len(row["images"]): row for part in parts for row in part}
    assert found[2]["messages"][0]["content"] == "<image><image>What is this?" and found[0]["images"] == []
    assert [image["bytes"] for image in found[2]["images"]] == images


def test_images_inside_of_messages_stay_files(tmp_path):
    """As parts of turns in a Parquet file, with keys that are null."""
    part = {"type": Value("string"), "text": Value("string"), "image": ImageFeature()}
    features = Features({"messages": List({"role": Value("string"), "content": List(part)})})
    image = {"bytes": picture(), "path": None}
    turns = asked([PART | {"text": None, "image": image}, TEXT | {"image": None}])["messages"]
    turns[1] = ANSWER | {"content": [{"type": "text", "text": "A cat.", "image": None}]}
    systems = [{"role": "system", "content": [TEXT | {"text": f"{number}", "image": None}]} for number in range(3)]
    rows = Dataset.from_list([{"messages": [system, *turns]} for system in systems], features=features)
    rows.to_parquet(tmp_path / "rows.parquet")
    train, _ = load_rows(data_settings(tmp_path / "rows.parquet", ("images",), max_eval_samples=1))
    assert [row["images"] for row in train] == [[image]] * 2
    assert train[0]["messages"][1:] == asked("<image>What is this?")["messages"]


def test_rows_without_any_image(tmp_path, error_of):
    """Such as those of `ImageFolder`, whose images are in another column. Next to rows with images they are trained on."""
    rows = [asked("Hi") | {"file_name": "cat.png"}, asked("Ho") | {"file_name": "dog.png"}]
    texts = write_rows(tmp_path / "texts.jsonl", rows)
    assert "has an image" in error_of(load_rows, data_settings(texts, ("images",), max_eval_samples=1))
    (tmp_path / "cat.png").write_bytes(picture())
    with_images = write_rows(tmp_path / "images.jsonl", [row | {"images": ["cat.png"]} for row in rows])
    train, _ = load_rows(data_settings([texts, with_images], ("images",), max_eval_samples=1, dataset_weights=[0.5, 0.5]))
    assert sorted({len(row["images"]) for row in train}) == [0, 1]


def test_recipe_without_formats_gets_decoded_images(tmp_path):
    """Its trainer's own collator reads them."""
    rows = [asked([PART, TEXT]) | {"images": [{"bytes": picture(), "path": None}]} for _ in range(3)]
    features = Features({"messages": List(Json()), "images": List(ImageFeature())})
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    train, _ = load_rows(data_settings(tmp_path / "rows.parquet", (), max_eval_samples=1))
    assert train[0]["images"][0].size == (64, 48)


def test_first_rows_without_an_image(tmp_path, capsys, error_of):
    """Others can have some; in a small file the cause is that they cannot be read."""
    rows = [asked(f"Hi {number}") | {"images": ["cat.png"] if number > 50 else []} for number in range(60)]
    settings = data_settings(write_rows(tmp_path / "rows.jsonl", rows), ("images",), max_eval_samples=1)
    assert "whose image cat.png" in error_of(load_rows, settings)
    (tmp_path / "dog.png").write_bytes(picture())
    other = write_rows(tmp_path / "other.jsonl", [asked(f"Ho {number}") | {"images": ["dog.png"]} for number in range(4)])
    load_rows(data_settings([tmp_path / "rows.jsonl", other], ("images",), max_eval_samples=1, dataset_weights=[0.5, 0.5]))
    (tmp_path / "cat.png").write_bytes(picture())
    capsys.readouterr()
    with mock.patch("harness.data.reading.SMALL", 0):
        load_rows(settings.with_each(first_rows=40))
    assert "none of the first rows has an image" in capsys.readouterr().out


def test_images_that_cannot_be_read_are_skipped_by_name(tmp_path, capsys):
    """An incomplete JPEG has a size, and fails when it is decoded."""
    (tmp_path / "half.jpg").write_bytes(picture(400, 300, "JPEG")[:9000])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "good.png").write_bytes(picture())
    names = ["half.jpg", "text.png", "missing.png"]
    rows = [asked([PART, {"type": "text", "text": str(number)}]) | {"images": ["good.png"]} for number in range(4)]
    rows += [asked([PART, TEXT]) | {"images": [name]} for name in names]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    train, held_out = load_rows(data_settings(file, ("images",), max_eval_samples=1))
    assert len(train) + len(held_out) == 4
    printed = capsys.readouterr().out
    assert "3 of 7 rows skipped" in printed and all(name in printed for name in names)
    (tmp_path / "missing.png").write_bytes(picture())  # what is mended is found, although the rows have not changed
    assert sum(map(len, load_rows(data_settings(file, ("images",), max_eval_samples=1)))) == 5


def test_images_that_disappear_while_a_run_is_interrupted(tmp_path, error_of):
    """Paths in a Parquet file, not in its first rows. With one row less, those that are trained on already would be others."""
    rows = [asked(f"Hi {number}") | {"images": []} for number in range(20)]
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(picture())
        rows.append(asked(f"What is {number}?") | {"images": [str(tmp_path / f"{number}.png")]})
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    settings = data_settings(tmp_path / "rows.parquet", ("images",), max_eval_samples=1, output_dir=str(tmp_path / "run"))
    assert sum(map(len, load_rows(settings))) == 24
    (tmp_path / "0.png").unlink()
    assert sum(map(len, load_rows(settings))) == 23
    (tmp_path / "run/checkpoint-2").mkdir()
    assert sum(map(len, load_rows(settings, keep=lambda row: "Hi 3" not in str(row)))) == 22  # of an edited recipe
    (tmp_path / "1.png").rename(tmp_path / "0.png")  # as many are missing, but another one
    assert "because of an image" in error_of(load_rows, settings)


@pytest.mark.parametrize(
    "row",
    [
        asked([PART, TEXT]) | {"images": ["https://example.com/cat.png"]},
        asked([PART, PART, TEXT]) | {"images": [as_url(picture())]},
        asked([PART, TEXT]) | {"images": []},
        asked([PART | {"image": "dog.png"}, TEXT]) | {"images": ["cat.png"]},
        asked([PART | {"image": "left/cat.png"}, TEXT]) | {"images": ["right/cat.png"]},
        asked([PART | {"image": "cat.png"}, TEXT]) | {"images": ["cat.png"] * 2},
        {"messages": [{"role": "user", "content": "Draw"}, ANSWER | {"content": [PART]}], "images": ["cat.png"]},
    ],
    ids=["address", "too few", "none", "other in a part", "other folder in a part", "more than parts", "in an answer"],
)
def test_rows_that_are_refused(tmp_path, error_of, row):
    rows = write_rows(tmp_path / "rows.jsonl", [asked("Hi"), asked("Ho"), row])
    assert f"{rows}, line 3: " in error_of(load_rows, data_settings(rows, ("images",)))


def test_batches_are_those_of_trl(processor):
    """The same tokens, labels and pixels as TRL's collator makes, for two images in a turn and for none."""
    rows = [asked("<image>Compare <image>these") | {"images": [picture(40, 200), picture(100, 64)]}, asked("Hi") | {"images": []}]
    template = training_template(processor.tokenizer)
    mine = []
    theirs = []
    for row in rows:
        row["images"] = [{"bytes": image, "path": None} for image in row["images"]]
        mine.append(tokens_of_conversation(row, processor, template, False) | {"images": row["images"]})
        theirs.append({"messages": as_parts(row["messages"]), "images": list(map(decode, row["images"]))})
    batch = ImageCollator(processor)(mine)
    of_trl = DataCollatorForVisionLanguageModeling(processor, assistant_only_loss=True, chat_template=template)(theirs)
    assert batch.keys() == of_trl.keys() and len(batch["image_grid_thw"]) == 2
    assert all(torch.equal(batch[name], of_trl[name]) for name in batch)
    assert processor.decode(batch["labels"][0][batch["labels"][0] >= 0]).endswith("A cat.<|im_end|>")


def test_mark_in_an_answer_is_a_text(processor):
    """It is neither a place for an image nor one of the tokens of an image."""
    row = asked("Look") | {"images": [as_url(picture())]}
    row["messages"][1] = ANSWER | {"content": "Use the `<image>` tag"}
    converted, _ = convert(row, "images")
    assert converted["messages"][0]["content"] == "<image>Look"
    labels = tokens_of_conversation(converted, processor, training_template(processor.tokenizer), False)["labels"]
    assert "Use the `<image>` tag" in processor.decode([label for label in labels if label >= 0])
    assert len(split_answers(converted)[0]["images"]) == 1


def test_pixels_are_limited(processor):
    """A photo of 12 megapixels is shrunk to a thousand tokens of 32 x 32 pixels, a small image keeps its size."""
    limited = SimpleNamespace(image_processor=Qwen2VLImageProcessor(patch_size=16, merge_size=2, max_pixels=16_777_216))
    limit_pixels(limited, 1_000_000)
    sizes = {(4000, 3000): (0.9e6, 1e6), (320, 256): (320 * 256,) * 2}
    for (width, height), (least, most) in sizes.items():
        rows, columns = limited.image_processor(Image.new("RGB", (width, height)), return_tensors="pt")["image_grid_thw"][0][1:]
        assert least <= rows * columns * 16 * 16 <= most
    assert tokens_of_size(processor, 4000, 3000) <= 4 == tokens_of_size(processor, 64, 64)


@pytest.mark.parametrize("rows_of", [Dataset.from_list, lambda rows: Dataset.from_list(rows).to_iterable_dataset()])
def test_long_rows_are_left_out(processor, tmp_path, capsys, error_of, rows_of):
    """No image is cut: a row is trained on as it is, or not."""
    image = {"bytes": picture(), "path": None}
    dataset = rows_of([asked(f"<image>{'word ' * count}") | {"images": [image]} for count in (1, 2, 90)])
    args, run = SFTConfig(str(tmp_path), max_length=60, use_cpu=True, bf16=False, max_steps=1), Run("recipe.py", trains=True)
    tokens, _ = tokenize(dataset, None, processor, args, StartedRecipe(run))
    assert "1 of the 3 training rows are not used" in " ".join(capsys.readouterr().out.split())
    assert [len(row["images"]) for row in tokens] == [1, 1]
    args.max_length = 8
    assert "--max_length" in error_of(tokenize, dataset, None, processor, args, StartedRecipe(run))


@pytest.mark.parametrize("values", ["uint16", ">u2", "int32"])
def test_grey_of_16_bits_keeps_its_shades(values):
    """As of X-rays and depth. Pillow's own conversion to RGB cuts all above 255."""
    greys = Image.fromarray(numpy.array([[0, 4096, 8192, 65535]], dtype=values))
    made = io.BytesIO()
    greys.save(made, "TIFF")
    decoded = decode({"bytes": made.getvalue(), "path": None})
    assert decoded.mode == "RGB" and numpy.asarray(decoded)[0].tolist() == [[0] * 3, [16] * 3, [32] * 3, [255] * 3]


@pytest.mark.parametrize(("mode", "colour", "options"), [("RGBA", 0, {}), ("LA", 0, {}), ("P", 0, {"transparency": 0})])
def test_transparent_is_white(mode, colour, options):
    """The transparent pixels of most files are black."""
    made = io.BytesIO()
    Image.new(mode, (2, 2), colour).save(made, "PNG", **options)
    assert decode({"bytes": made.getvalue(), "path": None}).getpixel((1, 1)) == (255, 255, 255)


TEXTS = "{% for message in messages %}{% generation %}{{ message.content[-1].text }}{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "template"),
    [("<image>What?", TEXTS), ("<image>What is <|image_pad|>?", None), ("<image>What is <|video_pad|>?", None)],
    ids=["template without images", "image in a text", "video in a text"],
)
def test_tokens_of_an_image_or_video_that_is_none(processor, error_of, text, template):
    """Else the model would fail in the middle of a run."""
    row = asked(text) | {"images": [{"bytes": picture(), "path": None}]}
    message = error_of(tokens_of_conversation, row, processor, template or training_template(processor.tokenizer), False)
    assert "_pad|> tokens" in message and "What" in message


def test_line_breaks_around_images_are_those_of_the_processor():
    """Gemma writes line breaks around an image, which are one token with those of the text."""
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    backend = tiny_tokenizer("meta-llama/Llama-3.1-8B").backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end_of_text|>", extra_special_tokens=names)
    tokenizer.add_tokens(["\n\n", "\n\n\n", "\n\n\n\n"])
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + '\n' }}{% for part in message.content %}"
        "{{ '<start_of_image>' if part.type == 'image' else part.text }}{% endfor %}{{ eos_token }}{% endfor %}"
        "{{ 'assistant\n' if add_generation_prompt }}"
    )
    images = Gemma3ImageProcessor(size={"height": 56, "width": 56})
    processor = Gemma3Processor(images, tokenizer, tokenizer.chat_template, image_seq_length=4)
    row = asked("<image>\nCompare<image> these") | {"images": [{"bytes": picture(), "path": None}] * 2}
    tokens = tokens_of_conversation(row, processor, training_template(tokenizer), False)
    turns = as_parts(row["messages"])
    for part in turns[0]["content"]:
        part |= {"image": decode(row["images"][0])} if part["type"] == "image" else {}
    expected = processor.apply_chat_template(turns, tokenize=True, processor_kwargs={"add_special_tokens": False})[0]
    assert tokens["input_ids"] == expected
    assert tokenizer.decode([label for label in tokens["labels"] if label >= 0]) == f"A cat.{tokenizer.eos_token}"
    whole = tokens_of_conversation(row, processor, None, False)
    assert whole["labels"].count(-100) == 8 and whole["input_ids"] == tokens["input_ids"]


def test_load_processor(processor, tmp_path):
    """A size of 980 is a length, which is no limit of an area. TRL pads prompts on the left."""
    limit, model_args, options = SimpleNamespace(max_pixels=5000), ModelConfig(str(tmp_path)), {"use_cpu": True, "bf16": False}
    saved = copy.deepcopy(processor)
    saved.save_pretrained(tmp_path)
    for config_class, side in ((SFTConfig, "right"), (GRPOConfig, "left"), (RLOOConfig, "left")):
        found = load_processor(limit, model_args, config_class(str(tmp_path), **options))
        assert found.image_processor.size["longest_edge"] == 64 * 64 and found.tokenizer.padding_side == side
    saved.image_processor.size = {"shortest_edge": 378, "longest_edge": 980}
    saved.save_pretrained(tmp_path)
    found = load_processor(limit, model_args, SFTConfig(str(tmp_path), **options))
    assert found.image_processor.size["longest_edge"] == 980


def test_chat_template_that_only_the_processor_has(processor, tmp_path, error_of):
    """In the file of an older version. A recipe for texts has the tokenizer alone."""
    template = processor.chat_template
    saved = copy.deepcopy(processor)
    saved.chat_template = saved.tokenizer.chat_template = None
    saved.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    model_args, training_args = ModelConfig(str(tmp_path)), SFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    row = asked("<image>What is this?") | {"images": [{"bytes": picture(), "path": None}]}
    check_conversations([("", row)], training_args, model_args)
    data = fit_template(data_settings(tmp_path, ("images",)), training_args, model_args, frozenset())
    loaded = load_processor(SimpleNamespace(max_pixels=5000), model_args, training_args)
    assert loaded.tokenizer.chat_template == template and data.drops_marks
    without = [("", asked("What is this?"))]
    assert "no chat template" in error_of(check_conversations, without, training_args, model_args)


def test_image_lost_during_a_run_is_one_message(processor, tmp_path, error_of):
    """Also where the worker of a loader decodes it, whose errors torch returns with their traceback."""
    row = {"input_ids": [1], "labels": [1], "images": [{"bytes": None, "path": str(tmp_path / "lost.png")}]}

    def read() -> None:
        with exit_on_user_error():
            next(iter(DataLoader([row], num_workers=1, collate_fn=ImageCollator(processor))))

    message = error_of(read)
    assert message.startswith(f"error: --dataset_name: the image {tmp_path / 'lost.png'} can no longer be read")
    assert "Traceback" not in message
