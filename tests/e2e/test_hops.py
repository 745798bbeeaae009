"""How far it is from the command to `backward()`, in frames of our own."""

import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch

import distflow
from distflow import cli
from tests.e2e.runs import Playground
from tests.sparse_params import one_fast_in

MAX_FRAMES = 7
SOURCE = str(Path(distflow.__file__).parent)


def ours(frame: FrameType | None) -> list[str]:
    """ "file:function" of the package's own frames, from the outermost in."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            found.append(
                f"{Path(frame.f_code.co_filename).relative_to(SOURCE)}:{frame.f_code.co_name}"
            )
        frame = frame.f_back

    return found[::-1]


@pytest.mark.parametrize("command", one_fast_in(2, [["train", "ppo"], ["train", "grpo"]]))
def test_few_frames_from_main_to_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
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
        assert len(stack) <= MAX_FRAMES, " ".join(stack)
