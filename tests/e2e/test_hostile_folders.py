"""Folders and files that somebody handed over: a command that looks at them ends soon, in little
memory, with one message that names the file, or does without it."""

import json
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import distflow
from distflow import cli
from distflow.errors import UserError
from tests.e2e.hostile import assert_harmless
from tests.e2e.hostile_folders import (
    JOURNALS,
    KINDS,
    YAML,
    line,
    spoil_journal,
)
from tests.e2e.runs import Playground
from tests.observe.conftest import write_run
from tests.sparse_params import BY_HAND, one_fast_in

FILES = (
    "metrics.jsonl",
    "ledger.jsonl",
    "run.json",
    "plan.json",
    "samples/000001.parquet",
    "spans/training.jsonl",
)
MOST_MB = 1000


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run of two steps that trained on group 0 and group 1."""
    run = write_run(tmp_path_factory.mktemp("handed") / "over" / "run", num_steps=2)
    issued = b"".join(line(kind="issued", group_id=i, epoch=0, row=i, version=0) for i in range(2))
    done = b"".join(line(kind="complete", group_id=i, tokens=9, version=0) for i in range(2))
    taken = b"".join(line(kind="consumed", step=i + 1, group_ids=[i]) for i in range(2))
    (run / "ledger.jsonl").write_bytes(line(kind="opened", ledger="x") + issued + done + taken)
    return run


@pytest.fixture
def run(sound):
    copy = sound.parent.parent / "copies" / "copy"
    shutil.copytree(sound, copy)
    yield copy
    shutil.rmtree(copy.parent)


def look(*command: str | Path) -> int:
    return cli.main(list(map(str, command)))


def one_message(capsys: pytest.CaptureFixture[str], status: int) -> str:
    """What the command said: a message for the user, or none where it went well."""
    out, err = capsys.readouterr()
    assert_harmless(out + err)
    assert status in (0, 2) and "Traceback" not in err
    assert len(re.findall("^distflow: ", err, re.MULTILINE)) == (status == 2), err
    return err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_files_that_are_none(run, capsys, file, kind):
    KINDS[kind](run / file)
    status = look("report", run)
    said = one_message(capsys, status)
    assert status == 2 or kind == "sparse" or file in ("ledger.jsonl", "plan.json"), (
        "the ends of long journals are read, and a report reads neither ledger nor plan"
    )
    assert status == 0 or str(run / file) in said
    status = look("why", run, 1)
    said = one_message(capsys, status)
    assert (status == 2) == (
        file == "ledger.jsonl" or file.startswith("samples/") and kind != "sparse"
    )
    assert status == 0 or str(run / file) in said


@pytest.mark.parametrize("kind", KINDS)
def test_one_run_that_cannot_be_read_hides_no_other(run, capsys, kind):
    (run.parent / "whole").mkdir()
    (run.parent / "whole" / "events.jsonl").write_bytes(line(kind="start", message="m"))
    KINDS[kind](run / "metrics.jsonl")
    assert look("runs", run.parent) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert len(lines) == 2 and "no end yet" in lines[1]
    assert kind == "sparse" or f"'{run}/metrics.jsonl' cannot be read: " in lines[0]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_no_files(run, sound, tmp_path, capsys, kind):
    other = shutil.copytree(sound, tmp_path / "other")
    for folder in (run, other):
        for name in (
            "tokens/000001.safetensors",
            "tokens/000001.1.safetensors",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            save_file({"x": torch.zeros(2)}, folder / name)

    for name in ("tokens/000001.safetensors", "tokens/000001.1.safetensors"):
        KINDS[kind](run / name)
        assert look("report", run, "--views", tmp_path / "views.sql") == 0
        capsys.readouterr()


@pytest.mark.parametrize("kind", [*YAML, *KINDS])
def test_a_config_of_a_run_is_shown_or_left_out(run, capsys, kind):
    if kind in YAML:
        text = YAML[kind]
        (run / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    else:
        KINDS[kind](run / "config.yaml")

    assert look("report", run) == 0
    one_message(capsys, 0)
    if kind in KINDS:
        assert "(config.yaml cannot be read: " in (run / "report.html").read_text()

    if kind in (*KINDS, "aliases", "deep", "NUL"):
        with pytest.raises(UserError, match=r"config\.yaml' .* read: "):
            assert distflow.load_run(run).config


@pytest.mark.parametrize("kind", one_fast_in(3, YAML))
def test_configs_that_stand_for_too_much(tmp_path, capsys, kind):
    text = YAML[kind]
    (tmp_path / "own.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "built.yaml").write_text("defaults: [own, _self_]\ntrainer: {seed: 2}\n")

    for command, file in product(("config", "train"), ("own", "built")):
        status = look(command, tmp_path / f"{file}.yaml")
        assert status == 2
        assert "own.yaml" in one_message(capsys, status) or kind in ("deep", "digits", "escapes")


def watched(commands: list[list[str]]) -> tuple[list[int], int]:
    """The statuses of commands that one process runs after one another, and the most memory that it
    had, in MB."""
    code = (
        "import json, re, sys\nfrom distflow import cli\n"
        "statuses = [cli.main(command) for command in json.loads(sys.argv[1])]\n"
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(json.dumps([statuses, int(peak) // 1024]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=60 * len(commands),
    )
    assert done.returncode == 0, done.stderr
    statuses, peak = json.loads(done.stdout.splitlines()[-1])

    return statuses, peak


@pytest.mark.slow
def test_they_take_little_memory(sound, tmp_path):
    """All together: what one leaves in memory, the next one uses."""
    commands = []
    for number, name in enumerate(JOURNALS):
        run = tmp_path / str(number)
        shutil.copytree(sound, run)
        spoil_journal(run, name)
        commands += [["report", str(run)], ["why", str(run), "1"]]

    statuses, peak = watched(commands)
    assert set(statuses) <= {0, 2} and peak < MOST_MB


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("trained"), num_rows=4)
    cheap = ("trust.check_rewards=false", "trainer.save_freq=1", "trainer.total_epochs=1")
    assert cli.main(["train", "grpo", *ground.overrides("run", *cheap)]) == 0
    return ground


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_fast_in(2, KINDS, others=BY_HAND))
def test_checkpoints_and_models(trained, tmp_path, kind):
    commands = []
    for number, file in enumerate(("manifest.json", "run.json", "actor.safetensors")):
        run = tmp_path / f"run{number}"
        shutil.copytree(trained.folder / "run", run)
        KINDS[kind](run / "checkpoints" / "step-000001" / file)
        commands.append(["export", str(run), "--to", str(tmp_path / f"out{number}")])
        commands.append(["eval", str(run), f"data.val_files={trained.folder}/rows.jsonl"])
        commands.append(["doctor", str(run)])

    for number, file in enumerate(("config.json", "tokenizer.json", "model.safetensors")):
        model = tmp_path / "models" / f"model{number}"
        shutil.copytree(trained.folder / "model", model)
        KINDS[kind](model / file)
        named = f"actor_rollout_ref.model.path={model}"
        commands.append(["train", "grpo", *trained.overrides(f"of{number}", named)])

    statuses, peak = watched(commands)
    assert statuses[:9] == [2, 2, 0] * 3 and peak < MOST_MB
    assert kind == "link out" or statuses[9:] == [2, 2, 2], "a hub's cache has links"
