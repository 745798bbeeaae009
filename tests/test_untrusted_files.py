"""Limits on files of others: processor time, and headers of weights."""

import json
import signal
import struct
import threading
import time

import pytest

from distflow.untrusted_files import MAX_HEADER_BYTES, OutOfTime, check_tensors, limited_time


def test_time_is_limited_and_the_handler_put_back():
    before = signal.getsignal(signal.SIGVTALRM)
    started = time.process_time()

    with pytest.raises(OutOfTime), limited_time(0.1):
        while True:
            pass

    assert time.process_time() - started < 1.0
    assert (
        signal.getsignal(signal.SIGVTALRM) == before
        and signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0.0
    )
    with limited_time(0.1):
        time.sleep(0.3)  # costs no processor time


def test_another_thread_has_no_limit():
    done: list[bool] = []

    def work() -> None:
        with limited_time(0.01):
            done.append(sum(range(3_000_000)) > 0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_the_header_of_weights_is_bounded(tmp_path):
    file = tmp_path / "model.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert check_tensors(file, tmp_path) == file
    file.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 8) + header.ljust(MAX_HEADER_BYTES + 8))
    with pytest.raises(OSError, match="header .* 8,388,616 bytes"):
        check_tensors(file)
