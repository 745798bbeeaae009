"""Runs default tests on a package with one fault in its source: `plant_faults.py NAME...` prints a
JSON object with what became of each. Without names it plants all.

A child of this process has the fault: it loads the changed source in place of the file, and runs
the tests for that file until one fails. Libraries are loaded once, before the children.
"""

import json
import os
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path

import hypothesis
import pytest

from tests.references.faults import FORMULA_FAULTS, FormulaFault, tests_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "distflow"
CAUGHT = "caught"
SURVIVED = "survived"


class Plugin:
    """The first failing example is enough."""

    def pytest_configure(self) -> None:
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("planted", parent=hypothesis.settings(), phases=phases)
        hypothesis.settings.load_profile("planted")


def plant(fault: FormulaFault) -> None:
    """From now on the file is imported with the fault. Raises ValueError if it does not have the
    text exactly once."""
    path = SOURCE / fault.file
    text = path.read_text("utf-8")
    if text.count(fault.before) != 1:
        raise ValueError(
            f"src/distflow/{fault.file} has the text {fault.before!r} {text.count(fault.before)} "
            "times, not once: correct the fault in tests/references/faults.py"
        )

    planted = text.replace(fault.before, fault.after)
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> object:
        if Path(self.path) == path:
            return compile(planted, self.path, "exec", dont_inherit=True)
        return original(self, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def load_libraries() -> None:
    """Load what the tests import, and forget the package and the tests themselves."""
    import distflow.pipelines.nodes  # noqa: F401
    import distflow.runtime.step_metrics  # noqa: F401

    for name in [*sys.modules]:
        if name.partition(".")[0] == "distflow":
            del sys.modules[name]


def run_child(fault: FormulaFault, output: Path) -> None:
    """Ends the process with 0 if a test failed, else with 1; with 2 if tests could not run."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    try:
        plant(fault)
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
        code = pytest.main([*options, *tests_of(fault)], plugins=[Plugin()])
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(2)

    sys.stdout.flush()
    failed, passed = pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.OK
    os._exit({failed: 0, passed: 1}.get(pytest.ExitCode(code), 2))


def plant_all(names: list[str]) -> dict[str, str]:
    """What became of each: `caught`, `survived`, or the output of tests that could not run."""
    num_at_once = len(os.sched_getaffinity(0))
    waiting = [*names]
    running = dict[int, str]()
    found = dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: Path(folder) / f"{number}.txt" for number, name in enumerate(names)}
        while waiting or running:
            if waiting and len(running) < num_at_once:
                name = waiting.pop(0)
                pid = os.fork()
                if not pid:
                    run_child(FORMULA_FAULTS[name], outputs[name])
                running[pid] = name
                continue

            pid, status = os.wait()
            name = running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            output = outputs[name].read_text("utf-8")[-2000:]
            found[name] = {0: CAUGHT, 1: SURVIVED}.get(code, output)

    return found


if __name__ == "__main__":
    os.chdir(ROOT)
    load_libraries()
    print(json.dumps(plant_all(sys.argv[1:] or [*FORMULA_FAULTS])))
