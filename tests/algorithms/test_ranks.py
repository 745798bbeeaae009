"""On 1, 2 and 4 real gloo ranks with unequal shares, one of them empty, nothing differs from one
process."""

import json
from pathlib import Path

import pytest

from distflow.builtin_names import LOSS_AGG_MODES, POLICY_LOSSES
from tests.algorithms.rank_worker import over_the_batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def test_gradients_metrics_and_advantages_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    run_ranks("tests.algorithms.rank_worker", 4, tmp_path)
    of_advantages = over_the_batch()
    num_wanted = (len(POLICY_LOSSES) + 2) * len(LOSS_AGG_MODES) + len(of_advantages) + 7
    num_checked = 0
    for rank in range(4):
        for size, deviations in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            assert len(deviations) == num_wanted
            for name, deviation in deviations.items():
                assert deviation < (1e-5 if name in of_advantages else 1e-9), (
                    size,
                    rank,
                    name,
                    deviation,
                )
                num_checked += 1
    assert num_checked == (1 + 2 + 4) * num_wanted
