"""Checkpoints in a folder: paths, names, what a failed or killed save leaves, and expiry."""

from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.tinker.checkpoints import Checkpoints, write
from distflow.tinker.messages import BadRequest

RUN = "session-1:train:0"
PATH = f"tinker://{RUN}/weights/first"


def saver(text: str) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        (folder / "adapter").write_text(text)
        (folder / "distflow.json").write_text(
            '{"config": {"rank": 4}, "user_metadata": {"a": "b"}}'
        )

    return save


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    made = Checkpoints(tmp_path)
    made.begin(RUN, "base", 4, {"recipe": "sl"})
    return made


def save(checkpoints: Checkpoints, path: str, text: str = "one") -> Path:
    folder = checkpoints.place(path, overwrite=True)
    write(folder, saver(text))
    return folder


def paths(checkpoints: Checkpoints) -> list[str]:
    return [each["tinker_path"] for each in checkpoints.listed()]


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "a/b", "", "a" * 200, "a\n", "ä b"])
def test_a_name_that_leads_elsewhere_is_none(checkpoints: Checkpoints, name: str) -> None:
    save(checkpoints, PATH)
    for kind in ("weights", "sampler_weights"):
        path = f"tinker://{RUN}/{kind}/{name}"
        with pytest.raises(BadRequest, match="called"):
            checkpoints.place(path, overwrite=True)
        with pytest.raises(BadRequest, match="no checkpoint"):
            checkpoints.delete(path)
    assert paths(checkpoints) == [PATH]


def test_a_run_that_is_not_there_has_no_checkpoints(checkpoints: Checkpoints) -> None:
    for path in ("tinker://../weights/first", "tinker://other/weights/first", "first"):
        with pytest.raises(BadRequest, match="no checkpoint"):
            checkpoints.find(path)
    for run in ("..", "other", "."):
        with pytest.raises(KeyError):
            checkpoints.training_run(run)


def test_a_save_that_fails_leaves_what_was_there(checkpoints: Checkpoints) -> None:
    folder = save(checkpoints, PATH)

    def fail(new: Path) -> None:
        (new / "adapter").write_text("half")
        raise OSError("the disk is full")

    for path in (PATH, f"tinker://{RUN}/weights/second"):
        with pytest.raises(OSError, match="full"):
            write(checkpoints.place(path, overwrite=True), fail)
    assert paths(checkpoints) == [PATH]
    assert (folder / "adapter").read_text() == "one"
    assert [each.name for each in folder.parent.iterdir()] == ["first"]


def test_what_a_kill_left_is_not_listed(checkpoints: Checkpoints) -> None:
    folder = save(checkpoints, PATH)
    (folder.parent / ".second.new").mkdir()
    assert paths(checkpoints) == [PATH]
    save(checkpoints, f"tinker://{RUN}/weights/second")
    assert len(paths(checkpoints)) == 2


def test_only_an_overwrite_replaces_a_checkpoint(checkpoints: Checkpoints) -> None:
    folder = save(checkpoints, PATH)
    with pytest.raises(BadRequest, match="already"):
        checkpoints.place(PATH, overwrite=False)
    save(checkpoints, PATH, "two")
    assert (folder / "adapter").read_text() == "two"


def test_a_checkpoint_ends_when_its_time_is_over(checkpoints: Checkpoints) -> None:
    folder = save(checkpoints, PATH)
    checkpoints.expire(PATH, 3600)
    assert checkpoints.listed()[0]["expires_at"] > checkpoints.listed()[0]["time"]
    checkpoints.expire(PATH, None)
    assert checkpoints.listed()[0]["expires_at"] is None

    checkpoints.expire(PATH, -1)
    with pytest.raises(BadRequest, match="no checkpoint"):
        checkpoints.find(PATH)
    assert not folder.exists()
    assert paths(checkpoints) == []


def test_a_run_knows_its_last_checkpoints(checkpoints: Checkpoints) -> None:
    assert checkpoints.training_run(RUN)["last_checkpoint"] is None
    save(checkpoints, PATH)
    save(checkpoints, f"tinker://{RUN}/sampler_weights/drawn")
    checkpoints.begin("session-2:train:0", "base", 8, None)

    run = checkpoints.training_run(RUN)
    assert run["last_checkpoint"]["tinker_path"] == PATH
    assert run["last_checkpoint"]["user_metadata"] == {"a": "b"}
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/drawn"
    assert run["user_metadata"] == {"recipe": "sl"}
    assert {each["lora_rank"] for each in checkpoints.training_runs()} == {4, 8}
