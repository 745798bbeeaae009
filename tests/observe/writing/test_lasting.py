"""Lines while something lasts; none where it does not."""

import threading

import pytest

from distflow.observe.writing.timing import lasting


def test_what_lasts_says_so_and_stops_at_its_end():
    lines, enough = [], threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            enough.set()

    with lasting(say, "loading", lambda: f", {len(lines)} of 9", first_s=0.001):
        assert enough.wait(60)
    count = len(lines)
    assert lines[:2] == ["loading: 0:00 so far, 0 of 9", "loading: 0:00 so far, 1 of 9"]
    assert threading.active_count() == 1 or not any(
        each.name == "progress" for each in threading.enumerate()
    )
    assert len(lines) == count


def test_what_is_short_says_nothing_and_an_error_goes_through():
    lines: list[str] = []
    with pytest.raises(KeyError), lasting(lines.append, "loading"):
        raise KeyError
    assert not lines
