"""The wheel holds all of the package, and runs where nothing is installed but what it asks for."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TINY_RUN = (
    "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
    "actor_rollout_ref.model.init=random",
    "actor_rollout_ref.model.dtype=float32",
    "data.train_files=builtin:arithmetic-rl",
    "data.val_files=builtin:arithmetic-val",
    "data.val_max_samples=2",
    "data.train_batch_size=2",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.total_training_steps=1",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: an older build beside the sources would leak into it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(
        ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    pip(sys.executable, "wheel", "--no-build-isolation", "-w", folder / "dist", folder)
    (made,) = (folder / "dist").glob("*.whl")

    return made


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and links to what it requires of the packages that are
    installed here."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip(folder / "bin" / "python", "install", "--no-index", wheel)
    (packages,) = (folder / "lib").glob("python*/site-packages")

    for required in required_by(distribution("distflow"), frozenset()):
        for path in required.files or ():
            top = path.parts[0]
            link = packages / path.parts[0]
            if top != ".." and not link.exists():
                link.symlink_to(Path(str(required.locate_file(top))))

    return folder


def environment() -> dict[str, str]:
    """Without what would show the checkout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def pip(python: str | Path, command: str, *arguments: str | Path) -> None:
    line = [
        python,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        command,
        "--no-deps",
        *arguments,
    ]
    subprocess.run(line, check=True, timeout=300, env=environment())


def required_by(
    package: Distribution,
    extras: frozenset[str],
    seen: set[tuple[str, frozenset[str]]] | None = None,
) -> Iterator[Distribution]:
    """What a package requires with some of its extras, and what that requires."""
    seen = set() if seen is None else seen
    for requirement in map(Requirement, package.requires or ()):
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        wanted = [
            requirement.marker is None or requirement.marker.evaluate({"extra": e})
            for e in ("", *extras)
        ]
        if key not in seen and any(wanted):
            seen.add(key)
            found = distribution(requirement.name)
            yield found
            yield from required_by(found, key[1], seen)


def distflow(bare: Path, folder: Path, *arguments: str) -> str:
    """What the command printed, from a folder with no source in reach."""
    command = [bare / "bin" / "distflow", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    source = ROOT / "src"
    files = {
        str(path.relative_to(source)) for path in (source / "distflow").rglob("*") if path.is_file()
    }
    files = {name for name in files if not name.endswith(".pyc")}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("distflow/")}
    assert held == files

    for kind in (
        "py.typed",
        "presets/sft.yaml",
        "static/report.js",
        "builtin/arithmetic-rl.jsonl",
        "tokenizer.json",
    ):
        assert any(name.endswith(kind) for name in held), kind


def test_it_finds_nothing_wrong_and_shows_a_preset(bare: Path, tmp_path: Path) -> None:
    assert distflow(bare, tmp_path, "doctor").rstrip().endswith("nothing found")
    assert "adv_estimator: grpo" in distflow(bare, tmp_path, "config", "grpo")


def test_it_trains_and_evaluates(bare: Path, tmp_path: Path) -> None:
    """Neither the checkout nor a package that it does not ask for is there."""
    where = [bare / "bin" / "python", "-c", "import distflow; print(distflow.__file__)"]
    found = subprocess.run(
        where, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment()
    ).stdout
    assert Path(found.strip()).is_relative_to(bare)
    said = distflow(bare, tmp_path, "train", "grpo", *TINY_RUN)
    assert "report: runs/my_project/grpo_training/report.html" in said
    page = (tmp_path / "runs" / "my_project" / "grpo_training" / "report.html").read_text()
    assert "finished" in page and "uPlot" in page
    assert "val_correct/all/mean" in distflow(
        bare, tmp_path, "eval", "runs/my_project/grpo_training"
    )
