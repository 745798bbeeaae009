"""How far it is from the command to `backward()` in frames of our own, and from a row to its gradient in files."""

import io
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType

import pytest
import torch

import distflow
from distflow import cli
from distflow.runtime.worker import Worker
from tests.e2e.runs import Playground
from tests.forks import forks
from tests.sparse_params import one_fast_in

MAX_FRAMES = 7
SOURCE = str(Path(distflow.__file__).parent)

RECORDS = {
    *("PromptGroup", "Group", "GenerateRequest", "Sequence"),
    *("Sample", "Segment", "FinishedGroup", "TrainingStep", "Batch"),
}
"""The types that a prompt row is part of on its way to its gradient. A new one makes that way longer to read."""
MOST_FILES = 20
"""Files with a function that is called with one of these records: 19 when this was last counted."""


def ours(frame: FrameType | None) -> list[str]:
    """ "file:function" of the package's own frames, from the outermost in."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            found.append(f"{Path(frame.f_code.co_filename).relative_to(SOURCE)}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]


@pytest.mark.parametrize("command", one_fast_in(2, [["train", "ppo"], ["train", "grpo"]]))
def test_few_frames_from_main_to_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    stacks: list[list[str]] = []
    original = torch.Tensor.backward

    def backward(self: torch.Tensor, *arguments: object, **options: object) -> None:
        if threading.current_thread() is threading.main_thread():
            stacks.append(ours(sys._getframe()))
        original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    playground = Playground(tmp_path)
    assert cli.main([*command, *playground.overrides("run", "trainer.total_training_steps=1")]) == 0
    assert stacks and all(stack[0] == "cli.py:main" for stack in stacks)
    for stack in stacks:
        assert len(stack) <= MAX_FRAMES, stack


def records_of(value: object) -> Iterator[str]:
    """The type of a value, or of the elements of a collection."""
    if isinstance(value, dict):
        value = list(value.values())
    value = value[0] if isinstance(value, list | tuple) and value else value
    if type(value).__module__.startswith("distflow.") and type(value).__name__ in RECORDS:
        yield type(value).__name__


def walk(folder: Path) -> dict[str, list[str]]:
    """The records that functions of each file are called with, on all threads that start meanwhile, from entering the
    worker to the first `backward()`. For a process of its own: it leaves its profiler behind."""
    found: dict[str, set[str]] = defaultdict(set)
    walking = False
    enter, backward = Worker.__enter__, torch.Tensor.backward

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not walking or event != "call" or not code.co_filename.startswith(SOURCE):
            return
        file = code.co_filename[len(SOURCE) + 1 :]
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            found[file].update(records_of(frame.f_locals.get(name)))

    def begin(worker: Worker) -> Worker:
        nonlocal walking
        walking = True
        threading.setprofile(note)
        sys.setprofile(note)
        return enter(worker)

    def end(self: torch.Tensor, *arguments: object, **options: object) -> None:
        nonlocal walking
        walking = False
        backward(self, *arguments, **options)  # type: ignore[arg-type]

    Worker.__enter__, torch.Tensor.backward = begin, end  # type: ignore[method-assign, assignment]
    options = Playground(folder).overrides("run", "trainer.total_training_steps=1", "trust.audit_freq=0")
    assert cli.main(["train", "grpo", *options]) == 0
    sys.setprofile(None)
    return {file: sorted(records) for file, records in found.items() if records}


def write_walk(folder: Path, file: Path) -> None:
    with redirect_stdout(io.StringIO()):
        found = walk(folder)
    file.write_text(json.dumps(found))


def test_a_row_passes_few_files_and_records_on_its_way_to_its_gradient(tmp_path: Path) -> None:
    """Without audit and checks. In a process of its own: where an earlier test has left a thread that is to be
    interrupted, CPython 3.11 never gets past the start of a function that it profiles."""
    process = forks.Process(target=write_walk, args=(tmp_path, tmp_path / "found.json"))
    process.start()
    process.join()
    assert process.exitcode == 0
    found = json.loads((tmp_path / "found.json").read_text())
    apart = ("audit/", "checks/", "runtime/audit_protocol.py")
    files = sorted(file for file in found if not file.startswith(apart))
    assert len(files) <= MOST_FILES, "\n".join(f"{file}: {', '.join(found[file])}" for file in files)
    assert set().union(*(found[file] for file in files)) == RECORDS
