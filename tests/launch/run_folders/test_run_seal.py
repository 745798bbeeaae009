"""A user's own run may run its code again without a flag; whatever differs from that run needs the
flag."""

import json
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.launch.run_folders.run_seal import is_own_run
from tests.e2e.runs import Playground

REWARD = "def compute_score(solution_str):\n    return float(len(solution_str))\n"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Playground:
    ground = Playground(tmp_path_factory.mktemp("own"))
    (ground.folder / "mine.py").write_text(REWARD)
    ground.run(
        "grpo", f"custom_reward_function.path={ground.folder}/mine.py", "trainer.save_freq=1"
    )
    return ground


def checkpoint_config(run: Path) -> dict:
    folder = max((run / "checkpoints").glob("step-*"))
    return json.loads((folder / "run.json").read_text())["config"]


@pytest.mark.slow
def test_an_evaluation_of_ones_own_run_needs_no_flag(
    ground: Playground, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = ["eval", str(ground.folder / "run"), f"data.val_files={ground.folder}/rows.jsonl"]
    assert main([*evaluate, f"--to={ground.folder}/out"]) == 0
    assert (
        f"running Python code:\n  custom_reward_function: {ground.folder}/mine.py"
        in capsys.readouterr().out
    )
    (ground.folder / "mine.py").write_text(REWARD + "# changed\n")
    try:
        assert main([*evaluate, f"--to={ground.folder}/again"]) == 2
        assert "--trust-code" in capsys.readouterr().err
    finally:
        (ground.folder / "mine.py").write_text(REWARD)


@pytest.mark.slow
def test_a_run_from_elsewhere_or_one_that_changed_is_not_ones_own(
    ground: Playground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ground.folder / "run"
    code = ground.folder / "mine.py"
    config = checkpoint_config(run)
    assert is_own_run(run, config)
    other_steps = {**config, "trainer": {**config["trainer"], "total_training_steps": 99}}
    assert not is_own_run(run, other_steps)
    code.write_text(REWARD + "# changed\n")
    assert not is_own_run(run, config)
    code.unlink()
    assert not is_own_run(run, config)
    code.write_text(REWARD)
    assert is_own_run(run, config)
    run.chmod(0o777)
    assert not is_own_run(run, config)
    run.chmod(0o700)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
        assert not is_own_run(run, config)
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "seal": "0" * 64}))
    assert not is_own_run(run, config)
    (run / "run.json").write_text(json.dumps(facts))
