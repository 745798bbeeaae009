"""Phases of a step add up to it, nested and interrupted ones included."""

import threading

import pytest

from distflow.observe.writing.timing import PhaseTimer


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_to_the_step():
    clock = Clock()
    ended = []
    runs = []
    phases = PhaseTimer(
        lambda t0, t1, name: ended.append((name, t1 - t0)),
        lambda name, seconds: runs.append((name, seconds)),
        clock,
    )
    clock.now += 1

    with phases("rollout"):
        clock.now += 4
        with phases("reward"):
            clock.now += 2
        clock.now += 1

    with phases("rollout"):
        clock.now += 8
    clock.now += 16
    first = phases.finish_step()
    assert first == {
        "timing_s/rollout": 13,
        "timing_s/reward": 2,
        "timing_s/other": 17,
        "timing_s/step": 32,
    }
    assert [
        (name, pytest.approx(seconds))
        for name, seconds in (("reward", 2), ("rollout", 7), ("rollout", 8))
    ] == ended
    assert runs == [
        ("rollout", 0),
        ("reward", 0),
        ("rollout", 6),
        ("other", 0),
        ("rollout", 0),
        ("other", 0),
    ]
    clock.now += 3
    with phases("save"):
        clock.now += 1
    assert phases.finish_step() == {"timing_s/save": 1, "timing_s/other": 3, "timing_s/step": 4}


def test_each_part_of_a_phase_is_reported_at_its_border():
    charged: list[str] = []
    phases = PhaseTimer(on_charge=charged.append)
    with phases("train_step"), phases("audit"):
        pass
    phases.finish_step()
    assert charged == ["other", "train_step", "audit", "train_step", "other"]


def test_a_phase_that_raises_is_charged():
    clock = Clock()
    phases = PhaseTimer(clock=clock)
    with pytest.raises(KeyError), phases("rollout"):
        clock.now += 5
        raise KeyError
    assert phases.finish_step() == {"timing_s/rollout": 5, "timing_s/other": 0, "timing_s/step": 5}


def test_what_would_count_time_twice_is_refused():
    phases = PhaseTimer()
    with pytest.raises(AssertionError, match="is taken"), phases("step"):
        pass
    with phases("rollout"), pytest.raises(AssertionError, match="phase 'rollout'"):
        phases.finish_step()
    errors: list[str] = []

    def elsewhere() -> None:
        try:
            with phases("reward"):
                pass
        except AssertionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "another thread" in errors[0]
