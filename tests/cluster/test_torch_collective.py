"""What three real gloo ranks get from each reduction."""

import json

import pytest

from tests.ranks import run_ranks


@pytest.mark.slow
def test_every_rank_gets_the_sum_and_the_maximum_of_all(tmp_path):
    run_ranks("tests.cluster.collective_worker", 3, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [rank.pop("place") for rank in ranks] == [[0, 3], [1, 3], [2, 3]]
    assert ranks[0] == ranks[1] == ranks[2]
    found = ranks[0]
    assert found["tensor"] == [[[3.0, -6.0], [3.0, 1.5]], [[1.0, -2.0], [2.0, 0.5]]]
    assert found["unchanged"] is True
    assert found["number"] == [3 * 2**40 + 0.75, -1.0], "numbers are summed in float64"
    assert found["whole"] == 3
    assert found["named"] == [{"a": 3.0, "b": 3.0}, {"a": 0.0}, {}]
    assert found["integers"] == [3 * 2**60]
    assert "'kl'" in found["refused"]
    assert found["afterwards"] == 3.0
