"""Images of rows: every form, every fault, and their places in prompts."""

import base64
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from distflow.data.dataset_columns import BadRows, Columns, read_rows
from distflow.data.images import parts_of, place_images, read_images
from distflow.data.messages import RowError
from distflow.errors import UserError
from distflow.untrusted_files import load_image
from tests.tiny_vision_models import png, square


@pytest.mark.parametrize(
    "form", ["bytes", "mapping", "path in a mapping", "path", "data URI", "pillow", "list"]
)
def test_every_form_gives_the_same_pixels(tmp_path: Path, form: str) -> None:
    content = png(square("r"))
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "a.png").write_bytes(content)
    given: dict[str, Any] = {
        "bytes": content,
        "mapping": {"bytes": content, "path": "nowhere.png"},
        "path in a mapping": {"bytes": None, "path": "img/a.png"},
        "path": "img/a.png",
        "data URI": "data:image/png;base64," + base64.b64encode(content).decode(),
        "pillow": square("r"),
        "list": [content],
    }
    (path,) = read_images(given[form], "images", tmp_path, tmp_path / "run" / "store")
    assert np.array_equal(load_image(path), square("r"))


def test_equal_images_are_kept_once_and_others_apart(tmp_path: Path) -> None:
    paths = read_images(
        [png(square("r")), png(square("g")), png(square("r"))], "images", None, tmp_path
    )
    assert paths[0] == paths[2] != paths[1]
    assert len(list(tmp_path.iterdir())) == 2
    assert read_images(None, "images", None, tmp_path) == ()


def test_a_kept_image_that_has_changed_is_refused(tmp_path: Path) -> None:
    (path,) = read_images(png(square("r")), "images", None, tmp_path)
    square("g").save(path)
    with pytest.raises(UserError, match=r"\.png' .* has changed"):
        load_image(path)
    Path(path).write_bytes(b"no image")
    with pytest.raises(UserError, match=r"\.png' .* cannot be read"):
        load_image(path)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has this size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
            "cannot be decoded",
        ),
        (b"no image at all", "image 1 .column 'images'. cannot be decoded"),
        (png(square("r"))[:80], "cannot be decoded"),
        (bomb(30_000, 30_000), "cannot be decoded: .*decompression bomb"),
        (bomb(9_000, 9_000), "9000 x 9000 .*67,108,864"),
        ("../outside.png", "outside the folder"),
        ("link.png", "outside the folder"),
        ("missing.png", "cannot be read"),
        ("/etc/passwd", "outside the folder"),
        ("data:image/png;base64,%%%", "not base64"),
        (7, "image 1 .* int 7"),
        ({"text": "no"}, "image 1 .* missing, not bytes"),
        ([b"", None], "is bytes b''|cannot be decoded"),
    ],
)
def test_a_faulty_image_is_named(tmp_path: Path, given: object, says: str) -> None:
    (tmp_path / "outside.png").write_bytes(png(square("r")))
    folder = tmp_path / "data"
    folder.mkdir()
    os.symlink(tmp_path / "outside.png", folder / "link.png")
    with pytest.raises(RowError, match=says):
        read_images(given, "images", folder, tmp_path / "store")


def test_a_path_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="image 1 .*'a.png'.* folder"):
        read_images("a.png", "images", None, tmp_path)


@pytest.mark.parametrize(
    ("prompt", "number", "placed"),
    [
        ("which?", 1, "<image>which?"),
        ("is <image> like <image>?", 2, "is <image> like <image>?"),
        (
            [{"role": "user", "content": "which?"}],
            1,
            [{"role": "user", "content": "<image>which?"}],
        ),
        (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
            2,
            [{"role": "system", "content": "s"}, {"role": "user", "content": "<image><image>q"}],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
            1,
            [{"role": "user", "content": "a<image>"}],
        ),
    ],
)
def test_places(prompt: Any, number: int, placed: object) -> None:
    assert place_images(prompt, number) == placed


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("<image> and <image>", "has 2 times <image> and 1 images"),
        ([{"role": "system", "content": "s"}], "no message of the user"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "neither text nor an image"),
    ],
)
def test_places_that_do_not_fit(prompt: Any, says: str) -> None:
    with pytest.raises(RowError, match=says):
        place_images(prompt, 1)


def test_parts_of_a_message() -> None:
    image = {"type": "image"}
    text = {"type": "text", "text": "a"}
    assert parts_of("<image>a<image>") == [image, text, image]


def test_rows_of_a_file_find_images_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}")
    (tmp_path / "a.png").write_bytes(png(square("g")))
    columns = Columns(images="images", store=tmp_path / "store")
    bad = BadRows("skip")
    values = [
        {"prompt": "q", "answer": "g", "images": ["a.png"], "level": 3},
        {"prompt": "q", "answer": "g"},
    ]
    values.append({"prompt": "q", "answer": "g", "images": ["b.png"]})
    file_rows = [(f"{file}:{number}", row) for number, row in enumerate(values, 1)]
    rows = list(read_rows(file_rows, columns, bad, "rows"))
    assert [len(row.images) for row in rows] == [1, 0]
    assert rows[0].prompt == "<image>q" and rows[0].extra_info == {"level": 3}
    assert len(bad.reasons) == 1 and "b.png" in bad.reasons[0]


def test_without_the_column_rows_are_text(tmp_path: Path) -> None:
    values = {"prompt": "q", "answer": "g", "images": ["a.png"]}
    (row,) = read_rows([("here", values)], Columns(), BadRows(), "rows")
    assert row.images == () and row.prompt == "q" and row.extra_info == {"images": ["a.png"]}


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_usual_formats_are_read(tmp_path: Path, kind: str) -> None:
    memory = io.BytesIO()
    square("b").save(memory, format=kind)
    (path,) = read_images(memory.getvalue(), "images", None, tmp_path)
    assert load_image(path).size == (28, 28)


def test_modes_of_colour_become_rgb(tmp_path: Path) -> None:
    grey = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8), "L")
    (path,) = read_images(png(grey), "images", None, tmp_path)
    assert np.asarray(load_image(path)).shape == (8, 8, 3)
