"""On 1, 2 and 4 real gloo ranks with unequal shares, one of them empty, nothing differs from one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

from distflow.config.names import LOSS_AGG_MODES, POLICY_LOSSES

ROOT = Path(__file__).parents[2]


def test_gradients_metrics_and_advantages_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", "tests.algorithms.rank_worker"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), str(tmp_path / f"{rank}.json")],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0, 0], "\n".join(errors)

    num_checked = 0
    for rank in range(4):
        for size, deviations in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            assert len(deviations) == (len(POLICY_LOSSES) + 1) * len(LOSS_AGG_MODES) + 4
            for name, deviation in deviations.items():
                assert deviation < (1e-9 if " " in name else 1e-5), (size, rank, name, deviation)
                num_checked += 1
    assert num_checked == (1 + 2 + 4) * ((len(POLICY_LOSSES) + 1) * len(LOSS_AGG_MODES) + 4)
