"""Messages on the private descriptor between a program's process and who asked for it: 8 bytes that the question
carried and the answer repeats, 4 bytes of length, JSON in ASCII."""

import os
import struct

HEADER = struct.Struct(">8sI")
MAX_BYTES = 2 * 2**20


def write_frame(descriptor: int, token: bytes, body: bytes) -> None:
    """Blocks until all is written. Raises OSError."""
    rest = memoryview(HEADER.pack(token, len(body)) + body)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_frame(descriptor: int) -> tuple[bytes, bytes] | None:
    """Token and body; None at the end of the stream."""
    header = _read_exactly(descriptor, HEADER.size)
    if header is None:
        return None
    token, size = HEADER.unpack(header)
    body = _read_exactly(descriptor, size)
    return None if body is None else (token, body)


def _read_exactly(descriptor: int, size: int) -> bytes | None:
    read = bytearray()
    while len(read) < size:
        part = os.read(descriptor, size - len(read))
        if not part:
            return None
        read += part
    return bytes(read)
