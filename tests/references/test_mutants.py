"""`make mutants`: a fault that tests notice is killed, and one that they do not run survives."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_trees import SOURCE

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutants.py"
CONTROLLER = "error = min(max(kl / target_kl - 1.0, -0.2), 0.2)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "is_killed"),
    [("test_the_controller", True), ("test_an_estimate_and_its_gradient[mse]", False)],
)
def test_a_formula_is_killed_by_its_own_test_alone(test: str, is_killed: bool) -> None:
    lines = (SOURCE / "algorithms" / "kl.py").read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.strip() == CONTROLLER)
    chosen = ["algorithms/kl.py", "--line", f"kl.py:{number}", "--processes", "1"]
    tests = ["--tests", f"tests/algorithms/test_kl.py::{test}"]

    ended = subprocess.run(
        [sys.executable, SCRIPT, *chosen, *tests], capture_output=True, text=True, check=True
    )

    *tried, last = ended.stdout.splitlines()
    assert len(tried) >= 8
    num_killed = sum(line.startswith("killed") for line in tried)
    assert last == f"{num_killed} of {len(tried)} killed"
    assert num_killed >= len(tried) - 1 if is_killed else num_killed == 0
