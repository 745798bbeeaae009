"""JSON messages between the run and its verifiers: 4 bytes of length, then UTF-8. No pickle; sizes are capped."""

import json
import socket
import struct
import time
from collections.abc import Mapping

from distflow.observe.jsonlines import JSON

MAX_FRAME_BYTES = 32 * 2**20
_HEADER = struct.Struct(">I")


class PeerGone(Exception):
    """The other process closed its end: it exited, crashed or was killed."""


def encode(message: Mapping[str, object]) -> bytes:
    """Raises TypeError for what JSON cannot hold, ValueError for a message beyond `MAX_FRAME_BYTES`."""
    body = json.dumps(dict(message)).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body):,} bytes is above the limit of {MAX_FRAME_BYTES:,}")
    return _HEADER.pack(len(body)) + body


def send_frame(channel: socket.socket, frame: bytes, timeout_s: float | None = None) -> None:
    """Raises TimeoutError where the peer does not read in time, PeerGone where it is no more."""
    channel.settimeout(timeout_s)
    try:
        channel.sendall(frame)
    except (TimeoutError, BlockingIOError):
        raise TimeoutError from None
    except OSError as error:
        raise PeerGone(str(error)) from error


def receive_frame(channel: socket.socket, timeout_s: float | None = None) -> dict[str, JSON]:
    """The next message. Raises TimeoutError unless all of it came in time, PeerGone, ValueError for nonsense.

    What is there is read, however late this process comes to it: it may have been stopped, or starved.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (size,) = _HEADER.unpack(_receive_exactly(channel, _HEADER.size, deadline))
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {size:,} bytes is above the limit of {MAX_FRAME_BYTES:,}")
    message = json.loads(_receive_exactly(channel, size, deadline))
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, got {type(message).__name__}")
    return message


def _receive_exactly(channel: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        channel.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        try:
            part = channel.recv(num_bytes - len(parts))
        except (TimeoutError, BlockingIOError):
            raise TimeoutError from None
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not part:
            raise PeerGone("end of stream")
        parts += part
    return bytes(parts)
