"""Every command of the pages works as it stands, behind `make quickstart`, in the order in which
the pages are read."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import OF_QUICKSTART, ROOT, Block, blocks, save_if_file

NEEDS = {
    "# needs the Hugging Face hub": "the hub cannot be reached",
    "# needs a package of PyPI": "is not installed here",
    "# needs vLLM": "has no vLLM",
}
"""First lines of blocks that want more than this machine may have, and what the command then says:
it got as far."""

LIMIT_S = 3600


def pages_in_order() -> list[Path]:
    """The README, the pages in the order of the index, the examples."""
    index = ROOT / "docs" / "index.md"
    named = dict.fromkeys(re.findall(r"\]\((\w+\.md)\)", index.read_text()))
    pages = [
        ROOT / "README.md",
        index,
        *(ROOT / "docs" / name for name in named),
        ROOT / "examples" / "README.md",
    ]
    assert set(pages) >= set((ROOT / "docs").glob("*.md"))

    return pages


def made_by_quickstart() -> list[str]:
    """The commands of `make quickstart`."""
    recipe = (ROOT / "Makefile").read_text().partition("\nquickstart:")[2].partition("\n\n")[0]
    lines = recipe.replace("$(QUICKSTART)", "runs/quickstart").splitlines()
    return [line.replace("$(BIN)/", "").strip() for line in lines if "$(BIN)/distflow" in line]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What a reader has: the examples, an environment to activate, and what the quickstart
    leaves."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "examples", folder / "examples")
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    python = f"PYTHONPATH={shlex.quote(str(ROOT / 'src'))} exec {shlex.quote(sys.executable)}"
    write_tool(tools / "distflow", f'{python} -m distflow "$@"')
    write_tool(tools / "python", f'{python} "$@"')
    write_tool(tools / "pip", "echo not installing: $@")
    (tools / "activate").write_text(f"export PATH={shlex.quote(str(tools))}:$PATH\n")

    for command in made_by_quickstart():
        status, said = run(command, folder)
        assert status == 0, said

    return folder


def write_tool(path: Path, code: str) -> None:
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


def run(code: str, folder: Path) -> tuple[int, str]:
    """Exit status, and everything that was said. With the environment of the pages, and no hub."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    script = f"set -e; . .venv/bin/activate\n{code}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )

    return done.returncode, done.stdout + done.stderr


def fault(block: Block, folder: Path) -> str | None:
    status, said = run(
        f"python - <<'END'\n{block.code}\nEND" if block.language == "python" else block.code, folder
    )
    needed = next((told for line, told in NEEDS.items() if block.code.startswith(line)), None)
    works = status == 0 or (needed is not None and status == 2 and needed in said)

    return (
        None if works else f"{block.page}:{block.line} exits {status}\n{block.code}{said[-3000:]}"
    )


@pytest.mark.by_hand
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_every_command_works_in_the_order_of_reading(checkout):
    faults = []
    num_run = 0
    for block in (block for page in pages_in_order() for block in blocks(page) if block.runs):
        save_if_file(block, checkout)
        if block.language == "bash" or (block.language == "python" and OF_QUICKSTART in block.code):
            num_run += 1
            faults.append(fault(block, checkout))

    assert num_run > 20
    assert not any(faults), "\n\n".join(filter(None, faults))
