"""Images of rows: read within limits, and kept in the run's folder by the hash of their content;
their places in a prompt."""

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from distflow.data.messages import RowError, kind
from distflow.observe.crash_safe_files import JSON, replacing
from distflow.untrusted_files import check_file, image_hash

IMAGE_MARK = "<image>"
"""The place of an image in a row's prompt."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Others are not opened: Pillow runs programs for some of them."""
MAX_PIXELS = 2**26
MAX_BYTES = 2**26
"""Of one image; a larger one makes its row a bad row."""
_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,")


def read_images(found: object, name: str, folder: Path | None, store: Path) -> tuple[str, ...]:
    """The images of a row, which has one or a list of them, as encoded bytes, a mapping with
    `bytes` or `path` (as in Parquet files of `datasets`), a data URI, or a path below `folder`.
    Returns the path of each in `store`, a PNG file that is named by the hash of its content. name:
    of the column. Raises RowError for anything else.
    """
    if found is None:
        return ()

    values = found if isinstance(found, list | tuple) else [found]
    paths = list[str]()
    for number, value in enumerate(values, 1):
        what = f"image {number} (column '{name}')"
        image = _decoded(_bytes_of(value, what, folder), what)
        paths.append(str(_keep(image, store)))

    return tuple(paths)


def keep_pixels(pixels: Any, store: Path) -> str:
    """The path in `store` of an image of uint8 `(H, W, 3)`. It is not synced to the disk: an
    episode that a crash of the machine cuts short is drawn again."""
    from PIL import Image

    return str(_keep(Image.fromarray(pixels), store, synced=False))


def place_images(prompt: Any, number: int) -> JSON:
    """The prompt with a mark for each image: as it is if it has them, else with all of them in
    front of the text, or of the first message of the user. Raises RowError if it has marks for
    another number of images.

    Contents of messages may be lists of parts, `{"type": "image"}` and
    `{"type": "text", "text": ...}`.
    """
    if isinstance(prompt, str):
        if _has_marks(prompt, number):
            return prompt
        return IMAGE_MARK * number + prompt
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return prompt  # `read_prompt` says what is wrong

    messages: list[Any] = [
        {**message, "content": _text_of(message.get("content"))} for message in prompt
    ]

    texts: list[Any] = [message for message in messages if isinstance(message["content"], str)]
    if not _has_marks("".join(message["content"] for message in texts), number):
        first = next((message for message in texts if message.get("role") == "user"), None)
        if first is None:
            raise RowError("the prompt has images, but no message of the user with a text")
        first["content"] = IMAGE_MARK * number + first["content"]

    return messages


def parts_of(text: str) -> list[JSON]:
    """The content of a message as chat templates of models for images take it."""
    parts: list[JSON] = []
    for place, piece in enumerate(text.split(IMAGE_MARK)):
        parts.extend([{"type": "image"}] * bool(place))
        parts.extend([{"type": "text", "text": piece}] * bool(piece))
    return parts


class ImageEncoder(Protocol):
    """The processor of a model's images, as far as prompts need it: see
    `models/image_inputs.py`."""

    token_id: int
    mark: str

    def encode(self, text: str, paths: Sequence[str], **special: bool) -> list[int]:
        """Token ids of a text with the placeholders of its images. Raises ValueError if the text
        has marks for another number of images."""
        ...


def encoder_of(tokenizer: object) -> ImageEncoder | None:
    """The processor that came with a tokenizer; None if its model reads text alone."""
    return getattr(tokenizer, "image_processor", None)


def _keep(image: Any, store: Path, synced: bool = True) -> Path:
    path = store.absolute() / f"{image_hash(image)}.png"
    if not path.is_file():
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, synced) as aside:
            image.save(aside, format="PNG", compress_level=1)
    return path


def _bytes_of(value: object, what: str, folder: Path | None) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")

    # an image of Pillow, as `datasets` decodes it
    if callable(save := getattr(value, "save", None)):
        memory = io.BytesIO()
        save(memory, format="PNG")
        value = memory.getvalue()

    if isinstance(value, str) and (found := _DATA_URI.match(value)):
        try:
            value = base64.b64decode(value[found.end() :], validate=True)
        except binascii.Error as error:
            raise RowError(f"{what} is a data URI that is not base64 ({error})") from None

    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise RowError(
            f"{what} is {kind(value)}, not bytes, a path, a data URI or a mapping with 'bytes' or "
            "'path'"
        )

    return _file_of(value, what, folder)


def _file_of(name: str, what: str, folder: Path | None) -> bytes:
    if folder is None:
        raise RowError(
            f"{what} is the path '{name}', but the rows are not in a file's folder: give its bytes"
        )

    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise RowError(f"{what} is '{name}', outside the folder '{folder}' of the data")

    try:
        if path.stat().st_size > MAX_BYTES:
            raise RowError(f"{what}, '{name}', has more than {MAX_BYTES:,} bytes")
        return check_file(path).read_bytes()
    except OSError as error:
        raise RowError(f"{what}, '{path}', cannot be read: {error.strerror or error}") from None


def _decoded(content: bytes, what: str) -> Any:
    """Pixels as RGB. The size is checked before anything is decompressed."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as file:
            width, height = file.size
            if width * height > MAX_PIXELS or len(content) > MAX_BYTES:
                raise RowError(
                    f"{what} has {width} x {height} pixels, more than {MAX_PIXELS:,} together"
                )
            return file.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, RowError):
            raise
        raise RowError(f"{what} cannot be decoded: {error}") from None


def _text_of(content: Any) -> JSON:
    """A message's content, with marks for its images if it is a list of parts."""
    if not isinstance(content, list):
        return content

    pieces = list[str]()
    for part in content:
        is_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url") and not is_text:
            pieces.append(IMAGE_MARK)
        elif is_text:
            pieces.append(str(part["text"]))
        else:
            raise RowError(f"a message has a part that is neither text nor an image: {kind(part)}")

    return "".join(pieces)


def _has_marks(text: str, number: int) -> bool:
    """Whether the text has marks. Raises RowError if they are for another number of images."""
    marks = text.count(IMAGE_MARK)
    if marks not in (0, number):
        raise RowError(f"the prompt has {marks} times {IMAGE_MARK} and {number} images")
    return marks > 0
