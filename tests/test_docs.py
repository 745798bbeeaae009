"""The documentation is true: its code runs, its commands parse, its keys, links, files and
functions exist."""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from distflow.cli import main, make_parser
from distflow.commands.train import split_configs
from distflow.config import load_config
from distflow.config.keys.schema import group_names, schema_keys
from distflow.config.migration.tables import all_tables, find_names
from tests.observe.conftest import write_run
from tests.user_code import forgotten

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "distflow"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "examples" / "README.md"])
NOT_RUN = "<!-- not run"

# What a page may leave open because a reader would not type it: any model, any data, modules of the
# reader's own.
OPEN = [
    "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
    "data.train_files=builtin:arithmetic-rl",
]
READERS_MODULES = {
    "my_rewards": (
        "def length_penalised(token_level_scores, *, penalty: float = 1.0):\n"
        "    return token_level_scores\n"
    ),
    "my_nodes": "def log_lengths(response_mask):\n    return None\n",
}
SHORT_FORMS = {
    short: f"actor_rollout_ref.{short}" for short in ("actor", "rollout", "ref", "model")
}
EXECUTED = ("config", "doctor", "--version")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    code: str
    runs: bool


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    start = None
    before = ""
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            before = line if start is None and line.strip() else before
        elif start is None:
            start = number
        else:
            code = "\n".join(lines[start + 1 : number]) + "\n"
            yield Block(
                name_of(page),
                start + 1,
                lines[start][3:].strip(),
                code,
                not before.startswith(NOT_RUN),
            )
            start = None
            before = ""


OF_QUICKSTART = '"quickstart_grpo"'
"""Python that names it needs the model of the quickstart: `test_docs_commands` runs it."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


FILE_NAME = re.compile(r"# ([\w./-]+\.(?:py|yaml))")


def save_if_file(block: Block, folder: Path) -> None:
    """A block of code whose first line is the name of a file is that file."""
    if name := FILE_NAME.fullmatch(block.code.splitlines()[0]):
        (folder / name[1]).write_text(block.code)


def all_blocks(language: str) -> list[Any]:
    found = [block for page in PAGES for block in blocks(page) if block.language == language]
    return [pytest.param(block, id=f"{block.page}:{block.line}") for block in found]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def quoted(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


@pytest.fixture
def readers_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module, text in READERS_MODULES.items():
        (tmp_path / f"{module}.py").write_text(text)
    with forgotten(*READERS_MODULES):
        sys.path.insert(0, str(tmp_path))
        yield tmp_path


def slow_if_long(page: Path) -> Any:
    """The page on Python has several runs."""
    return pytest.param(page, marks=pytest.mark.slow) if page.name == "python.md" else page


@pytest.mark.parametrize("page", [slow_if_long(page) for page in PAGES], ids=name_of)
def test_python_runs_from_the_top_of_a_page_to_its_end(page, readers_folder):
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.language == "python" and block.runs and OF_QUICKSTART not in block.code:
            padding = "\n" * block.line
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(padding + block.code, page, "exec"), namespace)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the examples and all files that the pages are to be saved as."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "examples").symlink_to(ROOT / "examples")
    for page in PAGES:
        for block in blocks(page):
            save_if_file(block, folder)
    return folder


@pytest.mark.parametrize("block", all_blocks("bash"))
def test_commands_are_accepted(block, saved, monkeypatch, capsys):
    """Those that only look are run; of the others the arguments and the config are checked.
    `test_docs_commands` runs them all."""
    monkeypatch.chdir(saved)

    # `distflow doctor` finds more threads than cores wrong
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    for line in block.code.splitlines() if block.runs else ():
        words = shlex.split(line, comments=True)
        if not words or words[0] != "distflow":
            continue
        if words[1] in EXECUTED:
            assert main(words[1:]) == 0, capsys.readouterr().err
            continue

        arguments = make_parser().parse_args(words[1:])
        if words[1] in ("train", "sft", "eval") and not arguments.preset.startswith(
            ("runs/", "first/")
        ):
            for preset, *overrides in split_configs(arguments.preset, arguments.overrides).values():
                load_config(preset, overrides)


@pytest.mark.parametrize("block", all_blocks("sql"))
def test_queries_are_answered(block, tmp_path):
    duckdb = pytest.importorskip("duckdb", reason="the extra `ui`")
    run_dir = write_run(tmp_path / "run")
    assert main(["report", str(run_dir), "--views", str(tmp_path / "views.sql")]) == 0
    connection = duckdb.connect()
    connection.execute((tmp_path / "views.sql").read_text())
    connection.execute(block.code)


@pytest.mark.parametrize("block", all_blocks("yaml"))
def test_yaml_is_a_config(block, tmp_path):
    """A fragment stands for a file that builds on `grpo`, with a model and data."""
    content = yaml.safe_load(block.code)
    if isinstance(content, list) or not block.runs:
        return

    content.setdefault("defaults", ["grpo", "_self_"])
    needs = (
        ["data.train_files=[]"]
        if "domains" in (data := content.get("data", {})) and "tag_key" not in data
        else []
    )
    (tmp_path / "page.yaml").write_text(yaml.safe_dump(content))
    load_config(str(tmp_path / "page.yaml"), [*OPEN, *needs])


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "config.md"], ids=name_of)
def test_every_key_that_is_named_exists(page):
    keys = schema_keys()
    groups = {
        name.rsplit(".", depth)[0] for name in keys for depth in range(1, name.count(".") + 1)
    }

    for text in quoted(page):
        key = re.split(r"[=\s,({]", text)[0].rstrip(".*")
        first, _, rest = key.partition(".")
        if not rest or not re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", key) or _is_no_key(key):
            continue

        full = (
            key
            if first in group_names()
            else f"{SHORT_FORMS[first]}.{rest}"
            if first in SHORT_FORMS
            else None
        )
        if full is None:
            continue

        known = full in keys or full in groups or any(name.startswith(full) for name in keys)
        is_foreign = page.name == "migrating.md" and (find_names(key) or is_group_elsewhere(key))
        inside = any(
            full.startswith(f"{name}.") and isinstance(info.default, dict)
            for name, info in keys.items()
        )
        assert known or is_foreign or inside, f"{name_of(page)} names the key '{text}'"


def is_group_elsewhere(key: str) -> bool:
    return any(
        name.startswith(f"{key}.") for table in all_tables().values() for name in table.names
    )


def _is_no_key(text: str) -> bool:
    return text.endswith((".py", ".md", ".jsonl", ".yaml", ".json", ".pkl")) or text in (
        "reward_model.ground_truth",
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue

        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"

        if anchor:
            assert anchor in anchors(file), (
                f"{name_of(page)} links to {target}: there are {sorted(anchors(file))}"
            )


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    for text in quoted(page):
        if re.fullmatch(r"[\w./]+\.py", text) and "/" in text and "NAME" not in text:
            assert (ROOT / text).is_file() or (SOURCE / text).is_file(), (
                f"{name_of(page)} names {text}"
            )
