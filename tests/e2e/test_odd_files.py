"""Files that are garbage, empty, too deep, or a folder in a file's place: one message and status 2,
or a fallback."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distflow import cli
from distflow.runtime.checkpoint import files as checkpoint_files
from tests.e2e.runs import Playground
from tests.launch.run_folders.test_replay_nonfinite_update import make_bundle
from tests.sparse_params import BY_HAND, one_fast_in

CHEAP = (
    "trust.check_rewards=false",
    "actor_rollout_ref.rollout.n=2",
    "trainer.save_freq=1",
    "trainer.save_groups=all",
)
pytestmark = pytest.mark.slow
DEEP = b"[" * 100_000
RATHER_DEEP = (
    b'{"kind": "start", "restart": 0, "step": 1, "m": '
    + b'{"a": ' * 900
    + b"1"
    + b"}" * 901
    + b"\n"
)
WRONG_KINDS = (
    b'{"kind": "issued", "restart": 0, "group_id": "x", "step": "y", "m": 3, "t": [], '
    b'"message": {}, "role": 1}\n'
) * 2
ODD: dict[str, bytes | None] = {
    "garbage": bytes(range(256)) * 5, "empty": b"", "deep": DEEP, "rather deep": RATHER_DEEP, ("a "
        "list"): (b"[1, "
        b"2]\n"),
    "wrong kinds": WRONG_KINDS, "a folder": None,
}  # fmt: skip


def put(path: Path, content: bytes | None) -> None:
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


def one_message(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert (
        "Traceback" not in out + err and len(re.findall("^distflow: ", err, re.MULTILINE)) == 1
    ), err
    return err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Playground:
    ground = Playground(tmp_path_factory.mktemp("odd"), num_rows=4)
    assert (
        cli.main(["train", "grpo", *ground.overrides("whole", *CHEAP, "trainer.total_epochs=2")])
        == 0
    )
    return ground


@pytest.fixture
def run(finished: Playground) -> Iterator[Path]:
    """A copy of a run of two steps."""
    folder = finished.folder / "run"
    shutil.copytree(finished.folder / "whole", folder)
    yield folder
    shutil.rmtree(folder)


def resume(ground: Playground) -> int:
    return cli.main(["train", "grpo", *ground.overrides("run", *CHEAP, "trainer.total_epochs=3")])


def test_a_pointer_that_is_no_name_is_passed_over(
    finished: Playground, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run / "checkpoints" / "latest", ODD["garbage"])
    assert resume(finished) == 0
    assert "resumed from step-000002" in capsys.readouterr().out


def test_a_pointer_that_could_not_be_moved_on_is_said_at_the_start(
    finished: Playground, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run / "checkpoints" / "latest", None)
    assert resume(finished) == 2
    out, err = capsys.readouterr()
    assert "checkpoints/latest" in err and "model:" not in out


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("actor.safetensors", "a folder"),
        ("run.json", "rather deep"),
        ("manifest.json", "rather deep"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_said(
    finished: Playground, run: Path, capsys: pytest.CaptureFixture[str], name: str, odd: str
) -> None:
    put(run / "checkpoints" / "step-000002" / name, ODD[odd])
    assert resume(finished) == 0
    out = capsys.readouterr().out
    assert "resumed from step-000001" in out and f"step-000002 is damaged ({name}" in out


@pytest.mark.parametrize(
    ("part", "content"),
    [("run", '{"a": 1}'), ("run", '{"config": 3}'), ("run", "[" * 50_000), ("actor", "{")],
)
def test_a_checkpoint_with_a_right_manifest_of_wrong_parts(
    finished: Playground, run: Path, capsys: pytest.CaptureFixture[str], part: str, content: str
) -> None:
    """As somebody could make one by hand."""
    for folder in (run / "checkpoints").glob("step-*"):
        name = "run.json" if part == "run" else "actor.safetensors"
        (folder / name).write_text(content)
        manifest = checkpoint_files.read_manifest(folder)
        files = {**manifest.files, name: checkpoint_files.describe(folder / name)}
        (folder / "manifest.json").unlink()
        checkpoint_files.write_manifest(
            folder, checkpoint_files.Manifest(manifest.step, manifest.serial, None, files)
        )
    for command in (
        lambda: resume(finished),
        lambda: cli.main(["export", str(run), "--to", str(run / "out")]),
    ):
        assert command() == 2
        assert "the checkpoint" in one_message(capsys)


FILES = (
    "ledger.jsonl",
    "metrics.jsonl",
    "events.jsonl",
    "run.json",
    "config.yaml",
    "samples/000001.parquet",
    ".writer",
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "odd", one_fast_in(3, ["rather deep", "garbage", "a folder"], others=BY_HAND)
)
def test_other_files_of_a_run(
    finished: Playground, run: Path, capsys: pytest.CaptureFixture[str], name: str, odd: str
) -> None:
    put(run / name, ODD[odd])
    for command in (lambda: resume(finished), lambda: cli.main(["report", str(run)])):
        if command() == 0:
            capsys.readouterr()
        else:
            assert Path(name).name in one_message(capsys)


@pytest.mark.parametrize("depth", one_fast_in(3, [100_000, 120, 900], others=BY_HAND))
@pytest.mark.parametrize("file", ["rows.jsonl", "rows.json"])
def test_rows_that_are_nested_too_deeply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], depth: int, file: str
) -> None:
    ground = Playground(tmp_path, num_rows=4)
    row = '{"prompt": "a", "answer": "7", "more": ' + "[" * depth + "]" * depth + "}"
    (tmp_path / file).write_text(row if file == "rows.jsonl" else f"[{row}]")
    assert (
        cli.main(
            [
                "train",
                "grpo",
                *ground.overrides("run", *CHEAP, f"data.train_files={tmp_path}/{file}"),
            ]
        )
        == 2
    )
    assert "nested too deeply" in one_message(capsys)


def test_a_config_that_is_nested_too_deeply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deep.yaml"
    file.write_text("trainer: " + "{a: " * 900 + "1" + "}" * 900 + "\n")
    for command in ("train", "eval", "config"):
        assert cli.main([command, str(file)]) == 2
        assert "too deep" in one_message(capsys)


def test_damaged_bundles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = make_bundle(Playground(tmp_path), monkeypatch, "advantages", "grpo").rename(
        tmp_path / "whole"
    )
    capsys.readouterr()
    bundle = tmp_path / "bundle"
    odd = {**ODD, "a role": json.dumps({"role": "../x", "step": 1, "metrics": {}}).encode()}
    for name in ("bundle.json", "config.yaml", "batch.safetensors", "weights.safetensors"):
        for content in (
            odd.values() if name.endswith("json") else (ODD["garbage"], ODD["wrong kinds"], None)
        ):
            shutil.copytree(whole, bundle)
            put(bundle / name, content)
            assert cli.main(["replay", str(bundle)]) == 2, (name, content)
            assert str(bundle) in one_message(capsys) or name == "config.yaml"
            shutil.rmtree(bundle)
    shutil.copytree(whole, bundle)
    save_file({"other": torch.ones(2)}, bundle / "batch.safetensors")
    assert cli.main(["replay", str(bundle)]) == 2
    assert "is damaged" in one_message(capsys)
