"""Images of rows: where they may stand, what is refused, and which tokens a prompt gets of them."""

import base64
import contextlib
import io
import itertools
import json
import pickle
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image as Picture

from openrl.config.commands import PPOConfig
from openrl.config.groups.data import (
    PreferenceDataFlags,
    PromptDataFlags,
    SupervisedDataFlags,
    TemplateFlags,
)
from openrl.config.groups.model import LoadFlags
from openrl.config.groups.vision import VisionFlags
from openrl.data.fetch import FetchError, fetch
from openrl.data.images import RowImages, image_budget
from openrl.data.loading import RowSource, load_rows
from openrl.data.preference import PairBuilder, RatedBuilder, collate_preferences
from openrl.data.prompts import PromptBuilder
from openrl.data.supervised import SupervisedBuilder, collate_rows
from openrl.data.tokenizer import load_tokenizer
from openrl.errors import UserError
from openrl.vision.pictures import BadImage, make_image, open_image
from openrl.vision.pictures import png as png_bytes
from openrl.vision.placing import unexpanded
from openrl.vision.processor import VisionProcessor
from tests.flags import GRPO, said
from tests.tiny_vision import picture, png, tiny_vision_dir

CHAT = TemplateFlags(apply_chat_template=True)
A, B = png(picture(1)), png(picture(2, (30, 90)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_vision_dir(tmp_path_factory.mktemp("m")))


@pytest.fixture(scope="module")
def processor(checkpoint):
    return VisionProcessor(checkpoint, {})


@pytest.fixture
def build(checkpoint, processor):
    def build(rows, limit=256, flags=None, **columns):
        flags = flags or VisionFlags(max_images_per_prompt=2)
        images = RowImages(flags, processor if flags.max_images_per_prompt else None)
        data = PromptDataFlags(prompt_data="data", **columns)
        builder = PromptBuilder(
            data, CHAT, load_tokenizer(checkpoint, LoadFlags()), limit, images=images
        )
        rows = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
        source = RowSource("rows", "default", rows)
        (prompts,), (report,) = builder.build([source], flag="prompt_data", kind="train")
        return prompts, report

    return build


def pixels(prompt, number=0):
    return open_image(prompt.images[number].image)


def url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_images_stand_where_their_marks_do(build, processor):
    row = {"problem": "a<image>b <image>", "images": [A, B], "answer": "7"}
    (prompt,), report = build([row])
    first, second = prompt.images
    tokens = prompt.token_ids
    assert prompt.text == "u:a<image>b <image><eos>a:" and prompt.label == "7"
    assert (first.start, second.end) == (3, len(tokens) - 3)  # u : a <first> b _ <second> <eos> a :
    # 34 tokens of five tiles, 22 of three: as the processor itself makes them of the whole text
    assert (first.end - first.start, second.end - second.start) == (34, 22)
    whole = processor.processor(
        text=[prompt.text], images=[picture(1), picture(2, (30, 90))], add_special_tokens=False
    )
    assert tokens == whole["input_ids"][0]
    (mark,) = first.placeholder
    assert unexpanded(tokens, prompt.images) == [
        *tokens[:3], mark, *tokens[first.end : second.start], mark, *tokens[second.end :]
    ]  # fmt: skip
    assert prompt.messages[0]["content"] == [
        {"type": "text", "text": "a"}, {"type": "image"},
        {"type": "text", "text": "b "}, {"type": "image"},
    ]  # fmt: skip
    assert "images" not in prompt.meta
    assert "2 images, at most 56 tokens of a prompt" in report


@pytest.mark.parametrize("how", ["bytes", "path", "data", "parts", "arrow", "parquet"])
def test_an_image_may_come_in_many_forms(build, tmp_path, how):
    (tmp_path / "a.png").write_bytes(A)
    rows = {
        "bytes": [{"input": "<image>", "images": [A]}],
        "path": [{"input": "<image>", "images": "a.png"}],
        "data": [{"input": "<image>", "images": [url(A)]}],
        "parts": [
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": url(A)}, "text": None},
                            {"type": "text", "image_url": None, "text": "see"},
                        ],
                    }
                ]
            }
        ],
    }
    if how in ("arrow", "parquet"):
        kinds = Features({"input": Value("string"), "images": List(ImageFeature())})
        table = Dataset.from_dict({"input": ["<image>"], "images": [[picture(1)]]}, features=kinds)
        if how == "parquet":
            table.to_parquet(tmp_path / "t.parquet")
            table = load_rows(str(tmp_path / "t.parquet"), "train", None, flag="prompt_data")
    flags = VisionFlags(max_images_per_prompt=1, image_dir=str(tmp_path))
    (prompt,), _ = build(table if how in ("arrow", "parquet") else rows[how], flags=flags)
    assert pixels(prompt).tobytes() == picture(1).tobytes()


def test_rgb_and_size_are_made_once(build):
    transparent = Picture.new("RGBA", (40, 20), (255, 0, 0, 0))
    flags = VisionFlags(max_images_per_prompt=2, image_min_pixels=3200, image_max_pixels=4000)
    (prompt,), _ = build(
        [{"input": "<image><image>", "images": [png(transparent), A]}], flags=flags
    )
    assert (pixels(prompt).mode, pixels(prompt).size) == ("RGB", (80, 40))
    assert pixels(prompt).getpixel((5, 5)) == (255, 255, 255)
    assert pixels(prompt, 1).size == (73, 54)  # 80 x 60, by sqrt(4000 / 4800)


# EXIF orientation -> where a viewer shows the first stored pixel, of a square of 4 x 4
CORNERS = {1: (0, 0), 2: (3, 0), 3: (3, 3), 4: (0, 3), 5: (0, 0), 6: (3, 0), 7: (3, 3), 8: (0, 3)}


@pytest.mark.parametrize("orientation, corner", CORNERS.items())
def test_a_picture_is_turned_as_a_viewer_turns_it(orientation, corner):
    """Most orientations keep the size of a square."""
    square = Picture.new("RGB", (4, 4))
    square.putpixel((0, 0), (255, 0, 0))
    exif, file = Picture.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    square.save(file, "PNG", exif=exif)
    image = make_image(file.getvalue())
    assert open_image(image).getpixel(corner) == (255, 0, 0)
    assert (image.data == file.getvalue()) == (orientation == 1)


def test_a_colour_that_is_transparent_becomes_white():
    square, file = Picture.new("RGB", (4, 4)), io.BytesIO()
    square.putpixel((0, 0), (255, 0, 0))
    square.save(file, "PNG", transparency=(0, 0, 0))
    seen = open_image(make_image(file.getvalue()))
    assert [seen.getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (255, 255, 255)]


def grey(values, dtype, kind="PNG", **settings):
    """The file of a grey picture of one row."""
    file = io.BytesIO()
    Picture.fromarray(np.array([values], dtype=dtype)).save(file, kind, **settings)
    return file.getvalue()


@pytest.mark.parametrize(
    "file",
    [
        grey([0, 257, 25700, 65535], "uint16"),
        grey([0, 257, 25700, 65535], "uint16", "TIFF"),
        grey([0, 1 / 255, 100 / 255, 1], "float32", "TIFF"),
        grey([0, 257, 25700, 65535], "int32", "TIFF"),
    ],
    ids=["png of 16 bits", "tiff of 16 bits", "tiff of floats", "tiff of 32 bits"],
)
def test_grey_of_more_than_8_bits_keeps_its_shades(file):
    seen = open_image(make_image(file))
    assert [seen.getpixel((x, 0)) for x in range(4)] == [(g, g, g) for g in (0, 1, 100, 255)]
    held = Picture.open(io.BytesIO(file))  # as an environment may show it
    assert make_image(png_bytes(held)).sha256 == make_image(png_bytes(seen)).sha256


@pytest.mark.parametrize(
    ("file", "values"),
    [
        (grey([0, 200], "float32", "TIFF"), "from 0 to 200, and 0 to 1"),
        (grey([0, float("nan")], "float32", "TIFF"), "from nan to nan"),
        (grey([-5, 7], "int32", "TIFF"), "from -5 to 7, and 0 to 65535"),
    ],
    ids=["floats to 255", "no numbers", "below zero"],
)
def test_grey_whose_white_nobody_knows_is_refused(file, values):
    with pytest.raises(BadImage, match=f"values {values}.*: store it with 8 bits"):
        make_image(file)


def bomb() -> bytes:
    """A PNG of a few bytes that says that it has 40000 x 40000 pixels."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(b"\0" * 10)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input": "<image>", "images": []}, "1 places for images in the text, and 0 images"),
        ({"input": "<image>", "images": [A, B]}, "and 2 images: put <image>, or a part {"),
        ({"input": "<image>" * 3, "images": [A] * 3}, "3 images, more than --max_images_per_prom"),
        ({"input": "<image>", "images": [b"text"]}, "images: an image that cannot be read"),
        ({"input": "<image>", "images": [A[:300]]}, "images: an image that cannot be read"),
        ({"input": "<image>", "images": [bomb()]}, "(1600000000 pixels) exceeds limit"),
        ({"input": "<image>", "images": ["no.png"]}, "no such file: no.png"),
        ({"input": "<image>", "images": ["http://127.0.0.1:1/a"]}, "private address 127.0.0.1"),
        ({"input": "<image>", "images": ["data:image/png,raw"]}, "without base64"),
        (
            {"input": "<image>", "images": ["data:image/png;base64,\u00e9"]},
            "images: string argument",
        ),
        ({"input": "<image>", "images": ["~nouser/a.png"]}, "no such file: ~nouser/a.png"),
        ({"input": "<image>", "images": ["http://["]}, "images: http://[: "),
    ],
)
def test_a_row_that_cannot_be_shown_is_named(build, row, reason):
    kind = Value("string" if isinstance((row["images"] or [""])[0], str) else "binary")
    features = Features({"input": Value("string"), "images": List(kind)})
    good = {"input": "x", "images": []}
    with pytest.raises(UserError) as raised:
        build(Dataset.from_list([good, row], features=features))
    assert "row 1: " in str(raised.value) and reason in str(raised.value)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (5, "a part of the chat is not of the form {type, ...}"),
        ({"type": "text"}, "the chat has a part of type 'text' without a text"),
        ({"type": "video", "video": "a.mp4"}, "the chat has a part of type 'video', which is"),
    ],
)
def test_a_chat_with_a_part_that_cannot_be_read_is_named(build, part, reason):
    chat = [{"role": "user", "content": [part]}]
    with pytest.raises(UserError) as raised:
        build([{"input": json.dumps(chat)}])
    assert f"row 0: input: {reason}" in str(raised.value)


ASKED = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "which is red?"},
    {"role": "assistant", "content": "the first"},
    {"role": "user", "content": "sure?"},
]
PLACED = {"role": "user", "content": "<image><image>which is red?"}


@pytest.mark.parametrize("chat", [True, False])
def test_images_without_a_place_stand_before_the_first_question(build, chat):
    """As TRL's prepare_multimodal_messages puts them, and a mark in their place says the same."""
    rows = [ASKED, [ASKED[0], PLACED, *ASKED[2:]]]
    if not chat:
        rows = [message["content"] for message in (ASKED[1], PLACED)]
    prompts, report = build([{"input": row, "images": [A, B]} for row in rows])
    bare, marked = prompts
    assert bare.token_ids == marked.token_ids and bare.images == marked.images
    asked = next(m["content"] for m in bare.messages if m["role"] == "user")
    assert asked == [*[{"type": "image"}] * 2, {"type": "text", "text": "which is red?"}]
    assert report.count("images without a place in the text stand before the first user") == 1
    _, report = build([{"input": rows[1], "images": [A, B]}])
    assert "without a place" not in report


@pytest.mark.parametrize(
    ("builder", "flags", "row"),
    [
        (SupervisedBuilder, SupervisedDataFlags(dataset="d", input_key="messages"), {}),
        (
            SupervisedBuilder,
            SupervisedDataFlags(dataset="d", input_key="messages", multiturn=True),
            {},
        ),
        (PairBuilder, PreferenceDataFlags(dataset="d", chosen_key="messages"), {}),
        (PairBuilder, PreferenceDataFlags(dataset="d", prompt_key="asked"), {}),
        (RatedBuilder, PreferenceDataFlags(dataset="d", prompt_key="asked"), {"label": True}),
    ],
)
def test_answers_see_images_without_a_place_and_those_of_parts(
    checkpoint, processor, builder, flags, row
):
    images = RowImages(VisionFlags(max_images_per_prompt=2), processor)
    reader = builder(flags, CHAT, load_tokenizer(checkpoint, LoadFlags()), images=images)
    yes, no = ([{"role": "assistant", "content": text}] for text in ("yes", "no"))

    def read(asked, **held):
        whole = {"messages": [*asked, *yes], "chosen": yes, "rejected": no, "asked": asked}
        if getattr(flags, "chosen_key", None) == "messages":
            whole["rejected"] = [*asked, *no]
        chunk = reader.read([(0, {**row, **whole, **held})])
        assert chunk.bad == []
        (item,) = chunk.items
        return item.rows

    marked = read([ASKED[0], PLACED, *ASKED[2:]], images=[A, B])
    assert [len(row.images) for row in marked] == [2] * len(marked)
    told = set(reader.templates.remarks)
    assert not any("without a place" in remark for remark in told)
    parts = [{"type": "image_url", "image_url": {"url": url(image)}} for image in (A, B)]
    source = {"type": "base64", "media_type": "image/png", "data": url(A).partition(",")[2]}
    parts[0] = {"type": "image", "source": source}  # as Anthropic's messages hold it
    question = {"type": "text", "text": "which is red?"}
    of_parts = [ASKED[0], {"role": "user", "content": [*parts, question]}, *ASKED[2:]]
    assert read(of_parts) == marked
    of_parts[1] = {"role": "user", "content": [*parts, question["text"]]}
    assert read(of_parts) == marked
    assert read(ASKED, images=[A, B]) == marked
    (remark,) = reader.templates.remarks - told
    assert remark.startswith("images without a place in the text stand before")


def test_a_chat_that_holds_its_images_in_arrow_is_read(checkpoint, processor, build):
    """As the notebooks of unsloth and TRL store it: images beside the texts of the parts."""
    part = {"type": Value("string"), "text": Value("string"), "image": ImageFeature()}
    features = Features({"messages": List({"role": Value("string"), "content": List(part)})})
    asked = {"role": "user", "content": [{"type": "image", "image": picture(1)}]}
    says = {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}

    def table(*chat):
        return Dataset.from_list([{"messages": list(chat)}], features=features)

    (prompt,), report = build(table(asked), input_key="messages")
    assert pixels(prompt).tobytes() == picture(1).tobytes() and "not given" not in report
    with pytest.raises(UserError, match="content of the type image, which is no text"):
        build(table(asked), flags=VisionFlags(), input_key="messages")
    images = RowImages(VisionFlags(max_images_per_prompt=1), processor)
    flags = SupervisedDataFlags(dataset="d", input_key="messages")
    reader = SupervisedBuilder(flags, CHAT, load_tokenizer(checkpoint, LoadFlags()), images=images)
    ((row,),), _ = reader.build([RowSource("rows", "default", table(asked, says))])
    assert row.images == prompt.images


def test_a_column_of_one_image_is_read_by_default(build):
    """TRL's name for it. A flag names another, and a text-only run reads none."""
    row = {"input": "<image>", "image": A}
    (prompt,), _ = build([row])
    assert pixels(prompt).tobytes() == picture(1).tobytes() and "image" not in prompt.meta
    (prompt,), _ = build([{**row, "images": [B]}])
    assert pixels(prompt).size == (30, 90)
    with pytest.raises(UserError, match=r"row 0: image: no such file: python:3\.11"):
        build([{"input": "x", "image": "python:3.11"}])
    named = VisionFlags(max_images_per_prompt=1, image_key="shown")
    (prompt,), report = build([{"input": "x", "image": A}], flags=named)
    assert prompt.images == () and "not given to rewards: image" in report
    (prompt,), report = build([{"input": "x", "image": A}], flags=VisionFlags())
    assert prompt.images == () and "not given to rewards: image" in report


def test_each_row_of_a_split_dialogue_has_the_images_that_it_shows(checkpoint, processor):
    """The template drops reasoning once a user goes on, so each answer is a row of its own."""
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}"
        "{% endif %}{% endfor %}{% endif %}{% if m.reasoning_content is defined and loop.last %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}<eos>{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tokenizer = load_tokenizer(checkpoint, LoadFlags())
    tokenizer.chat_template = template.replace("<image>", processor.placeholder)
    images = RowImages(VisionFlags(max_images_per_prompt=2), processor)
    flags = SupervisedDataFlags(dataset="d", input_key="messages", multiturn=True)
    builder = SupervisedBuilder(flags, CHAT, tokenizer, images=images)
    turns = [
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "a", "reasoning_content": "t"},
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "b", "reasoning_content": "u"},
    ]
    chunk = builder.read([(0, {"messages": turns, "images": [A, B]})])
    assert chunk.bad == []
    first, second = chunk.items[0].rows
    shown = [[placed.image for placed in row.images] for row in (first, second)]
    assert shown == [[images.read(A)], [images.read(A), images.read(B)]]
    chunk = builder.read([(0, {"messages": turns, "images": [A, B, B]})])
    assert "3 images" in str(chunk.bad[0][1])
    images.flags = VisionFlags(max_images_per_prompt=3)
    chunk = builder.read([(0, {"messages": turns, "images": [A, B, B]})])
    assert "places for images in the text, and 3 images" in str(chunk.bad[0][1])


@pytest.mark.parametrize(
    "empty",
    [
        "",
        None,
        float("nan"),
        [],
        [""],
        [None],
        {"bytes": None, "path": None},
        [{"bytes": None, "path": ""}],
    ],
    ids=str,
)
def test_a_cell_that_is_filled_up_holds_no_image(build, empty):
    """As tables give rows of text beside rows with images."""
    (prompt,), report = build([{"input": "x", "images": empty}])
    assert prompt.images == () and "images" not in report and "images" not in prompt.meta
    with pytest.raises(UserError, match="1 places for images in the text, and 0 images"):
        build([{"input": "<image>x", "images": empty}])


def test_text_only_runs_refuse_images(build):
    with pytest.raises(UserError, match="1 images, more than --max_images_per_prompt 0") as raised:
        build(
            [{"input": "x", "images": [A]}, {"input": "y", "images": [A] * 3}], flags=VisionFlags()
        )
    assert raised.value.remedy == "--max_images_per_prompt 3"
    prompts, _ = build([{"input": "x", "images": []}], flags=VisionFlags())
    assert prompts[0].images == ()


def test_a_prompt_with_images_is_left_out_rather_than_cut(build):
    rows = [{"input": "<image>" + "x" * 30, "images": [A]}, {"input": "y" * 50, "images": []}]
    prompts, report = build(rows, limit=45, prompt_overflow="truncate_left")
    assert [len(p.token_ids) for p in prompts] == [45]
    assert "; 1 of 2 left out" in report and "; 1 shortened" in report


def test_builders_travel_to_other_processes(processor):
    images = pickle.loads(pickle.dumps(RowImages(VisionFlags(max_images_per_prompt=1), processor)))
    tokens, (placed,) = images.place([processor.placeholder_id], [images.of({"images": [A]})[0]])
    assert len(tokens) == placed.end == 34


@pytest.mark.parametrize(
    ("max_len", "learned", "shown", "length"),
    [(64, "yes<eos>", 1, 43), (40, "y", 1, 40), (30, None, 0, 2)],
)
def test_answers_after_an_image(checkpoint, processor, max_len, learned, shown, length):
    """Tokens of images are not learned, and a row is not cut inside one."""
    tokenizer = load_tokenizer(checkpoint, LoadFlags())
    flags = SupervisedDataFlags(dataset="d", output_key="output", max_len=max_len)
    images = RowImages(VisionFlags(max_images_per_prompt=1), processor)
    builder = SupervisedBuilder(flags, CHAT, tokenizer, images=images)
    row = {"input": "<image>", "output": "yes", "images": [A]}
    (draft,) = builder.read([(0, row)]).items
    (found,) = draft.rows
    assert (len(found.token_ids), len(found.images)) == (length, shown)
    if learned is not None:
        kept = [t for t, mine in zip(found.token_ids, found.loss_mask, strict=True) if mine]
        assert tokenizer.decode(kept) == learned
        assert collate_rows([found], 0).images == [found.images]


def test_the_budget_of_images_is_told_and_refused(processor):
    """To this model every square is five tiles of four tokens, each with its marks."""
    square, _ = processor.place([processor.placeholder_id], [make_image(png(picture(1, (60, 60))))])
    assert len(square) == 34

    def budget(limit, **flags):
        images = RowImages(VisionFlags(max_images_per_prompt=2, **flags), processor)
        return image_budget(images, limit, "prompt_max_len")

    assert budget(100, image_max_pixels=3600) == [
        "images: 34 tokens each at 3600 pixels; 2 would take 68 of the 100 tokens of a prompt"
    ]
    assert budget(60)[0].startswith("images: 34 tokens each at 4194304 pixels")
    assert budget(60)[0].endswith("68 of the 60 tokens of a prompt, more than there are")
    with pytest.raises(UserError, match="--prompt_max_len 20: an image takes 34 tokens or more"):
        budget(20)
    assert image_budget(RowImages(VisionFlags(), None), 20, "prompt_max_len") == []


@pytest.mark.parametrize("builder", [PairBuilder, RatedBuilder])
def test_answers_that_are_compared_see_the_images_of_their_prompt(checkpoint, processor, builder):
    """Two prompts of the same tokens are different prompts if their images are."""
    images = RowImages(VisionFlags(max_images_per_prompt=1), processor)
    flags = PreferenceDataFlags(dataset="d", prompt_key="prompt", max_len=64)
    one, other = (
        {"prompt": "<image>", "chosen": "yes", "rejected": "no", "label": True, "images": [image]}
        for image in (A, png(picture(7)))
    )
    other["label"] = False
    reader = builder(flags, CHAT, load_tokenizer(checkpoint, LoadFlags()), images=images)
    source = RowSource("rows", "default", Dataset.from_list([one, other]))
    (examples,), _ = reader.build([source])
    first, second = ([row.images for row in example.rows] for example in examples)
    assert first == [first[0]] * 2 and second == [second[0]] * 2 and first != second
    (placed,) = first[0]
    for example in examples:
        for row in example.rows:
            assert row.token_ids[placed.start : placed.end] == processor._tokens(placed.image)
            assert row.loss_mask.index(True) > placed.end
    assert collate_preferences(examples, 0).images == [*first, *second]


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/torn":
                self.send_response(200)
                self.send_header("Content-Length", str(len(A) + 7))
                self.end_headers()
                self.wfile.write(A)
                return
            if self.path == "/slow":
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):  # the client has gone
                    while True:
                        self.wfile.write(b"x")
            asked.append(self.path)
            moved = self.path == "/moved"
            self.send_response(302 if moved else 200 if self.path != "/no" else 404)
            self.send_header("Location", "/a.png")
            self.end_headers()
            self.wfile.write(b"" if moved else A)

        def log_message(self, *args):
            pass

    asked: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_an_image_that_breaks_off_is_not_kept(server, tmp_path):
    address, _ = server
    with pytest.raises(FetchError, match=r"/torn: the connection ended 7 bytes early"):
        fetch(f"{address}/torn", private=True, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_image_that_never_ends_is_given_up(server, tmp_path, monkeypatch):
    address, _ = server
    clock = itertools.count(step=8)  # seconds, one step for each look
    monkeypatch.setattr("openrl.data.fetch.time", SimpleNamespace(monotonic=clock.__next__))
    with pytest.raises(FetchError, match="/slow: it is not complete after 20 s"):
        fetch(f"{address}/slow", private=True, cache=tmp_path)
    assert next(clock) == 32  # three pieces, which came at 8, 16 and 24 s
    monkeypatch.setattr("openrl.data.fetch.MOST_BYTES", 0)
    with pytest.raises(FetchError, match="/slow: more than 0 bytes"):
        fetch(f"{address}/slow", private=True, cache=tmp_path)


def test_urls_are_fetched_once_and_never_from_private_addresses(server, tmp_path):
    address, asked = server
    with pytest.raises(FetchError, match=r"private address 127\.0\.0\.1"):
        fetch(f"{address}/a.png", cache=tmp_path)
    assert not asked
    for _ in range(2):
        assert fetch(f"{address}/moved", private=True, cache=tmp_path) == A
    assert asked == ["/moved", "/a.png"]
    with pytest.raises(FetchError, match="the server answers 404"):
        fetch(f"{address}/no", private=True, cache=tmp_path)
    with pytest.raises(FetchError, match="no http or https URL"):
        fetch("file:///etc/passwd", cache=tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max_images_per_prompt 1", "--apply_chat_template"),
        (
            "--max_images_per_prompt 1 --apply_chat_template --ulysses_size 2",
            "image features need whole rows",
        ),
        (
            "--limit_mm_per_prompt 1 --apply_chat_template --image_min_pixels 9"
            " --image_max_pixels 4",
            "9 is more than 4",
        ),
        (
            "--max_images_per_prompt 1 --apply_chat_template --freeze_visual_encoder"
            " --vllm_load_format dummy",
            "random weights",
        ),
        ("--image_dir /tmp", "--max_images_per_prompt"),
    ],
)
def test_flags_that_cannot_mean_anything(words, expected):
    assert any(expected in problem for problem in said(PPOConfig, f"{GRPO} {words}"))


def test_pictures_of_a_file_that_breaks_off_late():
    """JPEG decoders fill up what is missing unless they are asked to look."""
    out = io.BytesIO()
    picture(4, (300, 300)).save(out, "JPEG")
    images = RowImages(VisionFlags(max_images_per_prompt=1), None)
    with pytest.raises(Exception, match="cannot be read"):
        images.of({"images": [out.getvalue()[:2000]]})
