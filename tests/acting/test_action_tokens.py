"""Numbers of actions as tokens, and back."""

import json

import numpy as np
import pytest

from distflow.acting.action_tokens import (
    ActionTokens,
    ContinuousActions,
    action_bounds,
)
from distflow.errors import UserError


@pytest.mark.parametrize("bins", [2, 3, 7, 255, 256])
@pytest.mark.parametrize(
    ("low", "high"), [((-1.0, 0.0), (1.0, 0.3)), ((-1e-3, 1e3), (1e-3, 1e3 + 1))]
)
def test_token_to_number_to_token_is_the_identity(bins, low, high):
    codec = ActionTokens(low, high, bins, first=40, chunk=bins)
    tokens = [40 + each for number in range(bins) for each in (number, bins - 1 - number)]
    actions = codec.decode(tokens)
    assert actions.shape == (bins, 2) and codec.encode(actions) == tokens
    assert np.all(actions > low) and np.all(actions < high)


def test_bins_are_equal_parts_and_their_number_is_the_middle():
    codec = ActionTokens((-1.0,), (1.0,), 4, first=0, chunk=1)
    assert codec.decode([0, 1, 2, 3])[:, 0].tolist() == [-0.75, -0.25, 0.25, 0.75]
    assert codec.encode(np.array([[-1.0], [-0.5], [0.499], [1.0]])) == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [1.1, -1.0001, float("nan"), float("inf")])
def test_a_number_out_of_bounds_is_refused(number):
    codec = ActionTokens((-1.0, -1.0), (1.0, 1.0), 4, first=0, chunk=1)
    with pytest.raises(ValueError, match="dimension 1 of action 0 is .* -1 to 1"):
        codec.encode(np.array([[0.0, number]]))


def test_numbers_beyond_quantiles_count_as_the_nearest_bin_but_nan_is_refused():
    codec = ActionTokens((-1.0,), (1.0,), 4, first=0, chunk=1, clips=True)
    assert codec.encode(np.array([[-9.0], [9.0]])) == [0, 3]
    with pytest.raises(ValueError, match="is nan"):
        codec.encode(np.array([[np.nan]]))


def test_a_response_is_read_up_to_the_first_token_that_is_no_action():
    codec = ActionTokens((0.0, 0.0), (1.0, 1.0), 2, first=10, chunk=3)
    assert codec.num_tokens == 6
    assert codec.decode([10, 11, 11, 10, 11, 11]).shape == (3, 2)
    for wrong in ([10, 11, 9, 10, 11, 11], [10, 11, 10, 12, 10, 10], [10, 11, 10]):
        assert codec.decode(wrong).tolist() == [[0.25, 0.75]]
    assert codec.decode([]).shape == (0, 2)


def test_bins_that_floats_cannot_tell_apart_are_refused():
    with pytest.raises(UserError, match=r"256 bins between \(1000000000\.0,\)"):
        ActionTokens((1e9,), (1e9 + 1e-7,), 256, first=0, chunk=1)


def test_bounds_from_numbers_lists_and_statistics(tmp_path):
    assert action_bounds({"low": -1, "high": 1, "action_dim": 3}) == (
        (-1.0,) * 3,
        (1.0,) * 3,
        False,
    )
    assert action_bounds({"low": [0, 1], "high": [2, 3]}) == ((0.0, 1.0), (2.0, 3.0), False)
    path = tmp_path / "statistics.json"
    path.write_text(
        json.dumps({"bridge": {"action": {"q01": [-1.0, 0.0], "q99": [1.0, 0.5]}}, "other": {}})
    )
    own = {"statistics": str(path), "unnorm_key": "bridge", "action_dim": 2}
    assert action_bounds(own) == ((-1.0, 0.0), (1.0, 0.5), True)

    for changes, says in [
        ({"unnorm_key": "fractal"}, "unnorm_key=fractal"),
        ({"action_dim": 7}, "action_dim=7"),
    ]:
        with pytest.raises(UserError, match=says):
            action_bounds({**own, **changes})

    for wrong in ({}, {"low": 0}, {"low": [0, 2], "high": [1, 2]}, {"low": [0], "high": [1, 2]}):
        with pytest.raises(UserError, match="low"):
            action_bounds(wrong)


def test_actions_of_a_flow_are_the_values_of_the_last_step():
    codec = ContinuousActions((-2.0,), (2.0,), first=0, chunk=2, steps=2, bins=4, noise=0.5)
    assert codec.num_tokens == 6 and codec.head == {
        "name": "actions",
        "first": 0,
        "dim": 1,
        "steps": 2,
        "bins": 4,
        "noise": 0.5,
    }
    assert codec.decode([1.0, 0.9, 0.5, 0.2, 0.3, -7.0]).tolist() == [[1.0], [-2.0]]
    assert codec.decode([1.0, 0.9, 0.5, 0.2, 0.3]).tolist() == [[1.0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused(value):
    codec = ContinuousActions((-1.0, -1.0), (1.0, 1.0), first=0, chunk=2)
    with pytest.raises(ValueError, match="dimension 1 of action 1 is .* diverged"):
        codec.decode([0.0, 0.0, 0.0, value])
