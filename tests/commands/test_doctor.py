"""`distflow doctor`: the sandbox of a run, and a machine without an accelerator."""

import pytest
import torch

from distflow.cli import main
from distflow.commands.selftest import device
from distflow.data import chat_template
from distflow.sandbox import fork_server_client
from distflow.sandbox.interface import INSTALL
from distflow.sandbox.local_sandbox import probe
from tests.environments.test_chat import FAMILIES


def sections(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    assert main(["doctor", *arguments]) in (0, 1), "1: something may be wrong with this machine"
    title = ""
    found = dict[str, list[str]]()
    for line in filter(None, capsys.readouterr().out.splitlines()):
        if line.startswith("  "):
            found[title].append(line.strip())
        else:
            title = line
            found[title] = []

    return found


def test_a_folder_that_is_not_there(capsys):
    assert main(["doctor", "no/such/run"]) == 2
    assert "no/such/run" in capsys.readouterr().err


def test_what_would_hold_programs(capsys, monkeypatch):
    """The level, and what keeps the stronger one away; where there is none, what to install."""
    told = "sandbox for code under test: "

    def line() -> str:
        (found,) = [line for line in sections(capsys)["machine"] if line.startswith(told)]
        return found.removeprefix(told)

    assert line().startswith(str(probe()))
    monkeypatch.setattr(fork_server_client.shutil, "which", lambda _: None)
    assert line().startswith("floor; no namespaces: bubblewrap is not installed")
    monkeypatch.setattr(fork_server_client.sys, "executable", "/no/such/python")
    assert line().startswith("none; no namespaces: ") and line().endswith(INSTALL)


def checks_of_device(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["doctor", "--device", *words])
    return status, " ".join(capsys.readouterr().out.splitlines()[1].split())


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="wants a machine without an accelerator"
)
def test_without_a_device_it_says_so(capsys):
    """A fault only where one is asked for. What it finds on a device is in
    tests/device/test_doctor.py."""
    none = (
        "device left out torch finds no accelerator here, or trainer.device=cpu: runs compute on "
        "the CPU"
    )
    assert (
        checks_of_device(capsys)
        == checks_of_device(capsys, "ppo", "trainer.device=cpu")
        == (0, none)
    )
    status, line = checks_of_device(capsys, "trainer.device=cuda")
    assert status == 1 and line.startswith(
        "device failed trainer.device=cuda, but torch finds no accelerator here"
    )
    assert main(["doctor", "--device", "no_such_preset"]) == 2


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="wants a machine without an accelerator"
)
def test_a_driver_whose_device_torch_does_not_find_is_a_fault(tmp_path, capsys, monkeypatch):
    """A run would be on the CPU, and nobody told."""
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build\n"
        "GCC version:\n"
    )
    monkeypatch.setattr(device, "_DRIVER", driver)
    status, line = checks_of_device(capsys)
    assert status == 1 and "the NVIDIA driver 560.35.03, but torch" in line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "qwen3",
            ["tools: tool calls are read in the format hermes"],
        ),
        (
            "gemma",
            [
                "turns: a reply that was cut off is closed with '<end_of_turn>'",
                "tools: cannot be used",
            ],
        ),
    ],
)
def test_what_a_chat_template_does_in_episodes(tmp_path, capsys, name, said):
    FAMILIES[name]().tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert main(["doctor", "--template", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "turns: each turn follows the tokens of the one before"
    assert all(any(line.startswith(text) for line in lines) for text in said)


@pytest.mark.parametrize(
    ("template", "limit_s", "said"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            1.0,
            "did not end within 1 s",
        ),
        ("{{ '{:>2000000000}'.format(1) }}", 60.0, "it ran out of memory"),
        ("{{ range(10 ** 9) | list }}", 60.0, "rejects the messages: OverflowError"),
    ],
)
def test_a_template_that_never_ends_or_fills_the_memory(
    tmp_path, capsys, monkeypatch, template, limit_s, said
):
    monkeypatch.setattr(chat_template, "RENDERS_WITHIN_S", limit_s)
    FAMILIES["gemma"]().tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "chat_template.jinja").write_text(template)
    assert main(["doctor", "--template", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "turns: cannot be used: the chat template" in out and said in out


def test_a_template_that_is_not_there(tmp_path, capsys):
    assert main(["doctor", "--template", "builtin:tiny-arithmetic"]) == 0
    assert "turns: cannot be used: messages need a chat template" in capsys.readouterr().out
    assert main(["doctor", "--template", str(tmp_path / "nothing")]) == 2


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "is not a run's folder" in capsys.readouterr().err
