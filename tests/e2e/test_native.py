"""A run says by which code its tokens were made, and one that goes on without it is told."""

from pathlib import Path

import pytest

from distflow.models.native import build
from distflow.models.native.build import NotNative
from distflow.observe.run_reader import read_json
from tests.e2e.runs import Playground


@pytest.mark.skipif(not build.is_there(), reason="there is no C compiler here")
def test_a_resume_where_there_is_no_compiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ground, name = Playground(tmp_path), build.name()
    run = ground.run("grpo", "trainer.save_freq=1", "trainer.total_training_steps=1")
    assert name.startswith("native-")
    assert read_json(run.folder, "run.json")["native_code"] == name
    monkeypatch.setattr(build, "outcome", lambda: NotNative("there is no C compiler"))
    run = ground.run("grpo", "trainer.save_freq=1", "trainer.total_training_steps=2")
    assert any(f"native_code was {name} in the checkpoint and is torch now" in note for note in run.notes("warning"))
    assert [step["actor/grad_norm"] > 0 for step in run.metrics()] == [True, True]
