"""Samples are found again in the data that holds them, and mistakes in data have a name."""

import numpy as np
import pytest
import torch

from distflow.tinker import draws as draws_module
from distflow.tinker.data_checks import (
    TrainedDatum,
    mistake_in,
    mistakes_of_step,
    trained_datum,
)
from distflow.tinker.draws import Draw, Draws
from distflow.tinker.messages import Datum

PROMPT = [3, 4, 5]


def drawn(
    response: list[int],
    log_probs: list[float],
    prompt: list[int] = PROMPT,
    version: int = 0,
    temperature: float = 1.0,
) -> Draw:
    ids = np.array([*prompt, *response])
    own = np.array(log_probs, np.float32)
    return Draw("m", version, temperature, 0.0, 1.0, ids, len(prompt), own, True)


def trained(
    ids: list[int], known: Draws, log_probs: list[float], **inputs: list[float]
) -> TrainedDatum:
    given = {name: torch.tensor(values) for name, values in inputs.items()}
    datum = Datum(torch.tensor(ids[:-1]), {"target_tokens": torch.tensor(ids[1:]), **given})
    return trained_datum(datum, torch.tensor(log_probs), known)


def test_samples_are_found_in_the_data_that_begins_with_them() -> None:
    """Of several turns, with later versions of the same tokens, and no others."""
    known = Draws()
    first = drawn([6, 7], [-1.0, -2.0])
    again = drawn([6, 7], [-1.5, -2.5], version=1)
    second = drawn([9], [-0.5], prompt=[*PROMPT, 6, 7, 8])
    known.add([first, again, drawn([6, 8], [-1.0, -1.0]), second])

    found = known.within(np.array([*PROMPT, 6, 7, 8, 9, 1]))
    assert [[*equal] for equal in found] == [[first, again], [second]]
    assert known.within(np.array([*PROMPT, 6])) == []
    assert known.within(np.array([4, 5, 6, 7])) == []

    datum = trained(
        [*PROMPT, 6, 7, 8, 9],
        known,
        [-1.0] * 6,
        logprobs=[0.0, 0.0, -1.5, -2.5, 0.0, -0.5],
        advantages=[0.0, 0.0, 1.0, 1.0, 0.0, 1.0],
    )
    assert datum.draws == [again, second]
    assert datum.prompt_length == 3
    assert datum.log_ratios().tolist() == [0.5, 1.5, -0.5]


def test_the_oldest_samples_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "_MOST_TOKENS", 12)
    known = Draws()
    for token in range(10, 14):
        known.add([drawn([token], [-1.0])])
    assert not known.within(np.array([*PROMPT, 10]))
    for token in (11, 12, 13):
        assert known.within(np.array([*PROMPT, token]))

    for _ in range(200):
        known.add([drawn([13], [-1.0])])
    assert 0 < len(known.within(np.array([*PROMPT, 13]))[0]) <= 64


@pytest.mark.parametrize(
    ("sent", "now", "temperature", "expected"),
    [
        ([-1.0, -2.0], [-1.0, -2.0], 1.0, None),
        ([-1.02, -2.0], [-1.0, -2.0], 1.0, None),
        ([-2.0, -1.0], [-1.0, -2.0], 1.0, "other_logprobs"),
        ([-1.0, -2.0], [-1.3, -2.3], 0.5, "ratios"),
        ([-1.0, -2.0], [-1.3, -2.3], 1.0, "ratios"),
    ],
)
def test_log_probs_that_come_back_are_compared(
    sent: list[float], now: list[float], temperature: float, expected: str | None
) -> None:
    """With those that were drawn, and those of the trained model if it has the same weights."""
    known = Draws()
    known.add([drawn([6, 7], [-1.0, -2.0], temperature=temperature)])
    datum = trained(
        [*PROMPT, 6, 7],
        known,
        [-9.0, -9.0, *now],
        logprobs=[0.0, 0.0, *sent],
        advantages=[0.0, 0.0, 1.0, 1.0],
    )
    found = mistake_in(datum, "m", version=0)
    assert (found and found[0]) == expected
    if expected != "other_logprobs":
        assert mistake_in(datum, "m", version=1) is None
        assert mistake_in(datum, "other", version=0) is None


def test_log_probs_of_another_place_are_no_matter_where_nothing_trains() -> None:
    known = Draws()
    known.add([drawn([6, 7], [-1.0, -2.0])])
    datum = trained(
        [*PROMPT, 6, 7],
        known,
        [-9.0, -9.0, -1.0, -9.0],
        logprobs=[5.0, 5.0, -1.0, 5.0],
        advantages=[0.0, 0.0, 1.0, 0.0],
    )
    assert mistake_in(datum, "m", version=0) is None


def test_data_that_nobody_drew() -> None:
    nothing = Draws()
    far = trained([1, 2, 3], nothing, [-5.0, -6.0], logprobs=[0.0, 0.0], advantages=[1.0, 1.0])
    assert (mistake_in(far, "m", 0) or "")[0] == "ratios"
    near = trained([1, 2, 3], nothing, [-5.0, -6.0], logprobs=[-5.5, -6.0], advantages=[1.0, 1.0])
    assert mistake_in(near, "m", 0) is None
    masked = trained([1, 2, 3], nothing, [-5.0, -6.0], weights=[0.0, 0.0])
    assert (mistake_in(masked, "m", 0) or "")[0] == "trains_nothing"
    plain = trained([1, 2, 3], nothing, [-5.0, -6.0])
    assert mistake_in(plain, "m", 0) is None
    equal = trained([7, 7, 7], nothing, [-5.0, -6.0])
    assert mistake_in(equal, "m", 0) is None


def test_mistakes_of_a_step() -> None:
    nothing = Draws()
    zero = trained([1, 2], nothing, [-1.0], logprobs=[-1.0], advantages=[0.0])
    one = trained([1, 2], nothing, [-1.0], logprobs=[-1.0], advantages=[1.0])
    assert [*mistakes_of_step([zero, zero], 0.1, 0.0)] == ["trains_nothing"]
    assert [*mistakes_of_step([zero, one], 0.1, 0.0)] == ["no_gradient"]
    assert [*mistakes_of_step([zero, one], 0.0, 1.0)] == ["no_learning_rate"]
    assert not mistakes_of_step([zero, one], 0.1, 1.0)
