"""Messages between two of our processes: 4 bytes of length, then JSON. Never pickle, since one of
the two may run code of the user's, and never more than a bound."""

import json
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reward processes start without it
    import asyncio

MAX_MESSAGE_BYTES = 64 * 2**20
_READ_BYTES = 2**16
_HEADER = struct.Struct(">I")


class PeerGone(Exception):
    """The other process closed its end: it exited, crashed or was killed."""


def encode(message: object) -> bytes:
    """Raises TypeError for values that JSON lacks, ValueError for a message that is too long."""
    return framed(json.dumps(message).encode())


def framed(body: bytes) -> bytes:
    """A message with this JSON. Raises ValueError if it is too long."""
    _check_size(len(body))
    return _HEADER.pack(len(body)) + body


class Channel:
    """One end of a socket. Used by one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        # Bytes after the last message: one recv may return several. Each recv releases the
        # interpreter lock, which takes up to 5 ms to get back while another thread computes.
        self._received = bytearray()

    def close(self) -> None:
        self._socket.close()

    def send(self, frames: bytes | bytearray, timeout_s: float | None = None) -> None:
        """Send what `encode` returned. Raises TimeoutError if the peer does not read in time,
        PeerGone if it is gone."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(frames)
        except (TimeoutError, BlockingIOError):
            raise TimeoutError from None
        except OSError as error:
            raise PeerGone(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises TimeoutError unless it arrived whole in time, PeerGone,
        ValueError if invalid.

        Data that has arrived is read even after the deadline: this process may have been stopped or
        starved.
        """
        deadline = None
        if timeout_s is not None:
            deadline = time.monotonic() + timeout_s
        size = _size_in(self._take(_HEADER.size, deadline))
        return json.loads(self._take(size, deadline))

    def _take(self, num_bytes: int, deadline: float | None) -> bytes:
        while (missing := num_bytes - len(self._received)) > 0:
            self._socket.settimeout(
                None if deadline is None else max(deadline - time.monotonic(), 0.0)
            )

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


async def receive(reader: "asyncio.StreamReader") -> Any:
    """The next message. Raises PeerGone, ValueError if it is invalid or breaks off."""
    import asyncio

    try:
        header = await reader.readexactly(_HEADER.size)
        return json.loads(await reader.readexactly(_size_in(header)))
    except asyncio.IncompleteReadError as error:
        if error.partial or error.expected != _HEADER.size:
            raise ValueError("it breaks off") from None
        raise PeerGone("end of stream") from None
    except OSError as error:
        raise PeerGone(str(error)) from error


def _size_in(header: bytes) -> int:
    (size,) = _HEADER.unpack(header)
    _check_size(size)
    return int(size)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a message of {num_bytes:,} bytes exceeds the limit of {MAX_MESSAGE_BYTES:,}"
        )
