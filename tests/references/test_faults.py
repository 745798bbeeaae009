"""Faults in formulas are caught by the default tests of their file."""

import json
import os
import subprocess
import sys

import pytest

from tests.references.faults import FORMULA_FAULTS
from tests.references.plant_faults import CAUGHT, ROOT

pytestmark = pytest.mark.slow
NUM_PARTS = 4  # one process would take longer than a test may where others run beside it


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_default_tests_catch_every_fault_in_a_formula(part: int) -> None:
    names = list(FORMULA_FAULTS)[part::NUM_PARTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.references.plant_faults", *names]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=570
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == set(names)
    assert {name: said for name, said in found.items() if said != CAUGHT} == {}
