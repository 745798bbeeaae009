"""JSON messages between the run and its reward workers: 4 bytes of length, then UTF-8. No pickle; sizes are capped."""

import json
import socket
import struct
import time
from collections.abc import Mapping

from distflow.observe.crash_safe_files import JSON

MAX_FRAME_BYTES = 32 * 2**20
_READ_BYTES = 2**16
_HEADER = struct.Struct(">I")


class PeerGone(Exception):
    """The other process closed its end: it exited, crashed or was killed."""


def encode(message: Mapping[str, object]) -> bytes:
    """Raises TypeError for values that JSON has not, ValueError for a message beyond `MAX_FRAME_BYTES`."""
    body = json.dumps(dict(message)).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body):,} bytes exceeds the limit of {MAX_FRAME_BYTES:,}")
    return _HEADER.pack(len(body)) + body


class Channel:
    """One end of a socket. Used by one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        # Bytes after the last message: one recv may return several. Each recv releases the interpreter lock, and while
        # another thread computes it takes up to 5 ms to get it back.
        self._received = bytearray()

    def close(self) -> None:
        self._socket.close()

    def send(self, frames: bytes | bytearray, timeout_s: float | None = None) -> None:
        """Raises TimeoutError if the peer does not read in time, PeerGone if it is gone."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(frames)
        except (TimeoutError, BlockingIOError):
            raise TimeoutError from None
        except OSError as error:
            raise PeerGone(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> dict[str, JSON]:
        """The next message. Raises TimeoutError unless all of it came in time, PeerGone, ValueError if it is invalid.

        Data that has arrived is read even after the deadline: this process may have been stopped or starved.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (size,) = _HEADER.unpack(self._take(_HEADER.size, deadline))
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {size:,} bytes exceeds the limit of {MAX_FRAME_BYTES:,}")
        message = json.loads(self._take(size, deadline))
        if not isinstance(message, dict):
            raise ValueError(f"expected a JSON object, got {type(message).__name__}")
        return message

    def _take(self, num_bytes: int, deadline: float | None) -> bytes:
        while (missing := num_bytes - len(self._received)) > 0:
            self._socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            try:
                part = self._socket.recv(max(missing, _READ_BYTES))
            except (TimeoutError, BlockingIOError):
                raise TimeoutError from None
            except OSError as error:
                raise PeerGone(str(error)) from error
            if not part:
                raise PeerGone("end of stream")
            self._received += part
        taken = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return taken
