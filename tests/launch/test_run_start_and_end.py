"""What every launcher does around a run: what is refused before its folder has a run and its models are loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from distflow.builtin_names import TRACKERS
from distflow.errors import UserError
from tests.e2e.runs import Playground


def test_a_tracker_whose_package_is_missing_is_told_before_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRACKERS, "mlflow", replace(TRACKERS["mlflow"], package="no_such_package"))
    playground = Playground(tmp_path)
    with pytest.raises(UserError, match="the package no_such_package is not installed: pip install 'distflow.mlflow.'"):
        playground.run("grpo", "trainer.logger=[console,mlflow]", name="tracked")
    assert not (tmp_path / "tracked" / "events.jsonl").exists()
