"""Messages between two processes: whole or not at all, and never too large."""

import asyncio
import socket
import threading

import pytest

from distflow.processes import channel
from distflow.processes.channel import Channel, PeerGone, encode, receive


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs


def received(sent: bytes) -> object:
    """What a coroutine reads of a connection that then ends."""

    async def read() -> object:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        with theirs:
            theirs.sendall(sent)

        try:
            return await receive(reader)
        finally:
            writer.close()

    return asyncio.run(read())


def test_messages_that_come_together_are_read_one_by_one(ends):
    ours, theirs = ends
    theirs.sendall(encode({"first": 1}) + encode(["second"]))
    assert ours.receive(60) == {"first": 1}
    assert ours.receive(60) == ["second"]
    with pytest.raises(TimeoutError):
        ours.receive(0.01)
    theirs.close()
    with pytest.raises(PeerGone):
        ours.receive(60)


def test_a_message_that_is_larger_than_a_socket_comes_whole(ends):
    ours, theirs = ends
    text = "x" * 2**22
    sending = threading.Thread(target=theirs.sendall, args=(encode(text),))
    sending.start()
    assert ours.receive(60) == text
    sending.join()


def test_none_is_larger_than_the_bound(ends, monkeypatch):
    ours, theirs = ends
    frame = encode("x" * 100)
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 50)
    with pytest.raises(ValueError, match="102 bytes .* 50"):
        encode("x" * 100)
    theirs.sendall(frame)
    with pytest.raises(ValueError, match="102 bytes"):
        ours.receive(60)
    with pytest.raises(ValueError, match="102 bytes"):
        received(frame)


def test_one_that_breaks_off_is_no_message():
    assert received(encode([1, 2])) == [1, 2]
    with pytest.raises(ValueError, match="breaks off"):
        received(encode([1, 2])[:-1])
    with pytest.raises(ValueError, match="breaks off"):
        received(encode([1, 2])[:2])
    with pytest.raises(PeerGone):
        received(b"")
