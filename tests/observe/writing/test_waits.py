"""Every wait is known while it lasts and reported when it ends."""

import pytest

from distflow.observe.writing.timing import Wait, Waits, group_waits, running_group


def test_a_wait_is_known_while_it_lasts_and_told_when_it_ends():
    told: list[tuple[Wait, float]] = []
    waits = Waits(lambda wait, ended: told.append((wait, ended)))
    with waits("training", "step 3", on="rollout"):
        with waits("rollout", "capacity", on="training"):
            outer, inner = waits.now()
            assert (outer.who, outer.what, outer.on) == ("training", "step 3", "rollout")
            assert inner.who == "rollout" and outer.since <= inner.since and told == []
        assert waits.now() == [outer] and [wait for wait, _ in told] == [inner]

    assert waits.now() == [] and [wait for wait, _ in told] == [inner, outer]
    assert all(ended >= wait.since for wait, ended in told)


def test_a_wait_that_ends_in_an_error_has_ended():
    told: list[str] = []
    waits = Waits(lambda wait, ended: told.append(wait.what))
    with pytest.raises(KeyError), waits("training", "step 3", on="rollout"):
        raise KeyError
    assert told == ["step 3"] and waits.now() == []


def test_the_same_wait_of_two_loops_lasts_until_both_have_ended(monkeypatch):
    """Two ranks may begin to wait for one step in the same instant."""
    monkeypatch.setattr("time.time", lambda: 5.0)
    waits = Waits()
    with waits("training", "step 3", on="rollout"):
        with waits("training", "step 3", on="rollout"):
            pass
        assert len(waits.now()) == 1


def test_a_wait_of_a_prompt_group_has_its_id_and_none_is_recorded_without_a_group():
    ended = list[Wait]()
    waits = Waits(lambda wait, end: ended.append(wait))
    with group_waits("responses", on="rollout engine"):
        pass

    token = running_group.set((waits, 7))
    try:
        with (
            group_waits("responses", on="rollout engine"),
            group_waits("", on=""),
            waits("reward", "scores", on="it"),
        ):
            pass
    finally:
        running_group.reset(token)

    assert [(wait.who, wait.what, wait.group_id) for wait in ended] == [
        ("reward", "scores", 7),
        ("rollout", "responses", 7),
    ]
