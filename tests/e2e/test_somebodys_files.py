"""A run and an export touch only what is theirs, and what they write is for its owner alone."""

import os
import stat
from pathlib import Path

import pytest
from safetensors.torch import save_file

from distflow import cli
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from tests.e2e.runs import Playground
from tests.observe.writing.test_folder_lock import state_of

pytestmark = pytest.mark.slow
CHEAP = ("trust.check_rewards=false", "actor_rollout_ref.rollout.n=2", "trainer.total_epochs=4")
EVERYTHING = (
    "trainer.save_freq=1",
    "trainer.keep_last=1",
    "trainer.save_groups=last_k",
    "trainer.save_groups_last=1",
)


@pytest.fixture
def ground(tmp_path):
    return Playground(tmp_path, num_rows=4)


def train(ground: Playground, *overrides: str) -> int:
    return cli.main(["train", "grpo", *ground.overrides("run", *CHEAP, *EVERYTHING, *overrides)])


def test_a_folder_with_somebodys_files_is_refused_before_anything_is_loaded(ground, capsys):
    theirs = ground.folder / "run"
    for name in (
        "checkpoints/old.removed",
        "checkpoints/step-1000/w.bin",
        "config.yaml",
        "run.json",
    ):
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_text("theirs")

    theirs.chmod(0o755)
    before = state_of(theirs)
    assert train(ground) == 2
    out, err = capsys.readouterr()
    assert "checkpoints, config.yaml, run.json" in err and "trainer.default_local_dir" in err
    assert "model:" not in out and "train data:" not in out and state_of(theirs) == before
    (ground.folder / "rows.py").write_text(
        "def rows():\n    yield {'prompt': 'a', 'answer': '7'}\n"
    )
    assert (
        train(ground, f"data.train_files='{ground.folder}/rows.py:rows'", "data.train_batch_size=1")
        == 2
    )
    assert state_of(theirs) == before, "rows of Python code are not kept there either"


def test_what_is_put_into_a_runs_folder_outlives_the_run(ground):
    run = ground.folder / "run"
    assert train(ground, "trainer.total_epochs=1") == 0
    mine = [
        "notes.txt",
        "tokens/best.safetensors",
        "tokens/000000.safetensors",
        "samples/mine.csv",
        "data/x.arrow",
    ]
    mine += [
        "checkpoints/old.removed",
        "checkpoints/model.safetensors.partial",
        "checkpoints/step-1000/w.bin",
    ]

    mine += ["checkpoints/step-000001/notes.txt", "config.yaml.partial"]
    for name in mine:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")

    save_file({}, run / "tokens" / "000000.safetensors", metadata={"format": "pt"})
    kept = {name: (run / name).read_bytes() for name in mine}
    assert train(ground) == 0
    there = {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert all(there[Path(name).name] == data for name, data in kept.items())
    assert CheckpointStore(run / "checkpoints").load().step == 4
    assert len(list((run / "tokens").glob("*.safetensors"))) == 3


@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_every_file_of_a_run_is_for_its_owner_alone_whatever_the_umask(ground, umask):
    logger = "trainer.logger=[console,tensorboard]"
    (ground.folder / "parent").mkdir()

    old = os.umask(umask)
    try:
        folder = f"trainer.default_local_dir={ground.folder}/parent/run"
        assert (
            train(
                ground,
                folder,
                logger,
                f"data.val_files={ground.folder}/rows.jsonl",
                "trainer.test_freq=1",
            )
            == 0
        )
    finally:
        os.umask(old)

    run = ground.folder / "parent" / "run"
    found = [run, *run.rglob("*")]
    wanted = {"ledger.jsonl", "actor.safetensors", "report.html", "tensorboard", "tokens"}
    assert wanted <= {path.name for path in found}
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("target", ["full", "file", "below a file", "a link to a full one"])
def test_an_export_takes_no_folder_that_holds_something(ground, capsys, target):
    assert train(ground, "trainer.total_epochs=1") == 0
    full = ground.folder / "full"
    full.mkdir(mode=0o750)
    (full / "thesis.txt").write_text("mine")
    (ground.folder / "file").write_text("mine")
    (ground.folder / "a link to a full one").symlink_to(full)
    to = ground.folder / ("file/below" if target == "below a file" else target)
    before = state_of(full)
    assert cli.main(["export", str(ground.folder / "run"), "--to", str(to)]) == 2
    assert "distflow: '" in capsys.readouterr().err
    assert state_of(full) == before and (ground.folder / "file").read_text() == "mine"
