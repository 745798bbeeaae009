"""Parts of one's own, as docs/extending.md has them: a run takes them all, and one that is
registered in part is told what to add, before a model is loaded."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from distflow import builtin_names as names
from distflow.config import ConfigError, load_config
from distflow.config.compose import load_config as load_config_module
from distflow.config.extension_registries import EXTENSION_POINTS, find_unregistered
from distflow.errors import UserError
from distflow.launch.check_extensions import KINDS, Kind, Part, faults_of
from tests.e2e.runs import Playground
from tests.made_once import made_once
from tests.test_docs import ROOT, blocks, save_if_file
from tests.user_code import forgotten

SOURCE = ROOT / "src" / "distflow"
PAGE = ROOT / "docs" / "extending.md"
HEAD = re.compile(
    r"# (?P<file>[\w/]+\.(?:py|toml))(?: \((?P<new>new)\)|, (?P<how>below|in place of): "
    r"(?P<text>.+))\n"
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def builtin_parts(kind: Kind) -> Iterator[Part]:
    """All parts of its table that are there."""
    return (
        Part(kind.table, name, entry.target, entry)
        for name, entry in kind.entries.items()
        if entry.target
    )


SEEN = """
def seen(*values):
    with open({record!r}, "a") as file:
        print({name!r}, file=file)

"""
CHOSEN = (
    "dag.pipeline=certain",
    "certain.above=0.9",
    "algorithm.adv_estimator=raw_score",
    "algorithm.adv_estimator_kwargs.gain=0.5",
    "actor_rollout_ref.actor.policy_loss=plain",
    "actor_rollout_ref.actor.strategy=counting",
    "actor_rollout_ref.rollout.name=timed",
    "actor_rollout_ref.rollout.max_num_seqs=7",
    "reward.functions={default: [even_length]}",
    "trainer.logger=[steps]",
    "trainer.total_training_steps=1",
)


class Edit(NamedTuple):
    """A block of the page for a file of the package. how: "new", or what `text` is to the code."""

    file: str
    how: str
    text: str
    code: str


def edits() -> list[Edit]:
    found = []
    for block in blocks(PAGE):
        if block.language in ("py", "toml"):
            head = HEAD.match(block.code)
            assert head, f"{block.page}:{block.line} names no place"
            code = (
                block.code[head.end() :]
                if head["new"]
                else block.code[head.end() :].removesuffix("\n")
            )
            found.append(Edit(head["file"], head["new"] or head["how"], head["text"] or "", code))
    return found


NEW = [edit for edit in edits() if edit.how == "new"]


def copy_package(package: Path) -> None:
    """A copy of the package without the parts of the page, which a reader may have added to it."""
    shutil.copytree(SOURCE, package)  # with what is compiled, which holds for files that stay
    for edit in edits():
        path = package / edit.file
        if edit.how == "new":
            path.unlink(missing_ok=True)
        elif edit.how == "below":
            path.write_text(path.read_text().replace(f"{edit.code}\n", ""))
        else:
            path.write_text(path.read_text().replace(edit.code, edit.text))


def apply(edit: Edit, package: Path) -> None:
    path = package / edit.file
    if edit.how == "new":
        path.write_text(edit.code)
        return
    lines = path.read_text().split("\n")
    if edit.how == "below":
        place = next(
            number for number, line in enumerate(lines) if line.strip().startswith(edit.text)
        )
        path.write_text("\n".join([*lines[: place + 1], edit.code, *lines[place + 1 :]]))
    else:
        assert path.read_text().count(edit.text) == 1
        path.write_text(path.read_text().replace(edit.text, edit.code))


def report_calls(edit: Edit, package: Path, record: Path) -> None:
    """Every function of a new file says that it was called."""
    code = re.sub(
        r"(?m)^( *)((?:async )?def \w+\((?:[^\n]|\n(?! *\)))*?(?:\n *\))?.*:)\n",
        r"\1\2\n\1    seen()\n",
        edit.code,
    )
    (package / edit.file).write_text(SEEN.format(record=str(record), name=edit.file) + code)


def command(folder: Path, package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "distflow", *arguments]
    return subprocess.run(
        words, env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run says that takes all parts of the page, and which of their files were called."""
    return (made_once(tmp_path_factory, "extended", run_with_all_parts) / "output.txt").read_text()


def run_with_all_parts(folder: Path) -> None:
    package = folder / "src" / "distflow"
    copy_package(package)
    for edit in edits():
        apply(edit, package)
    assert not find_unregistered(package)
    for edit in NEW:
        report_calls(edit, package, folder / "called.txt")
    overrides = Playground(folder).overrides("run", *CHOSEN, "~custom_reward_function.path")
    runs = [
        command(folder, package, *words)
        for words in (["train", "grpo", *overrides], ["greet", "world"])
    ]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(
        run.stdout + run.stderr for run in runs
    )
    said = "\n".join([*(run.stdout for run in runs), (folder / "called.txt").read_text()])
    (folder / "output.txt").write_text(said)


@pytest.mark.slow
@pytest.mark.parametrize("edit", NEW, ids=lambda edit: edit.file)
def test_a_run_uses_each_part_of_the_page(edit: Edit, output: str) -> None:
    has_functions = "def " in edit.code
    assert edit.file in output or not has_functions
    assert not re.search("note: .*(audit cannot|nothing registers)", output)


@pytest.fixture(scope="module")
def unregistered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the page's new files, and without any of the lines that register them."""
    package = tmp_path_factory.mktemp("unregistered") / "distflow"
    copy_package(package)
    for edit in NEW:
        apply(edit, package)
    return package


def test_a_file_that_nothing_registers_is_named_with_its_line(unregistered: Path) -> None:
    found = {part.file: part for part in find_unregistered(unregistered)}
    assert set(found) == {edit.file for edit in NEW}
    assert {part.point.kind for part in found.values()} == {
        point.kind for point in EXTENSION_POINTS
    }
    for part in found.values():
        line = re.sub(r'"(?:DESCRIPTION|HELP)"', '"."', part.line)
        written = [
            re.sub(r'(\(|description = )"[^"]*",', r'\1".",', edit.code)
            for edit in edits()
            if edit.how != "new"
        ]
        asked = line.split("  #")[0].replace(f"{part.attribute}(...)", f"{part.attribute}(")
        assert any(asked in code for code in written), part.line
        assert part.file in str(part) and part.line in str(part)


HOUSE_TESTS = (
    "test_layout.py",
    "test_callers.py",
    "test_docs.py",
    "test_extending.py",
    "config/keys",
    "graph",
)


@pytest.mark.slow
def test_a_copy_with_all_parts_passes_the_tests(tmp_path: Path) -> None:
    """As someone who adds parts to the package runs them: linters, types, and the tests of the
    package as a whole."""
    for name in ("src", "tests", "docs", "examples", "benchmarks", "scripts"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    for edit in edits():
        apply(edit, tmp_path / "src" / "distflow")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    for words in (
        ["scripts/make_docs.py"],
        ["-m", "ruff", "check", "."],
        ["-m", "ruff", "format", "--check", "."],
        ["-m", "mypy"],
        [
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-x",
            *(f"tests/{name}" for name in HOUSE_TESTS),
        ],
    ):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"


CHOOSES = {
    "raw_score": "algorithm.adv_estimator",
    "plain": "actor_rollout_ref.actor.policy_loss",
    "even_length": "reward.functions.default",
    "certain": "dag.pipeline",
    "timed": "actor_rollout_ref.rollout.name",
    "counting": "actor_rollout_ref.actor.strategy",
    "steps": "trainer.logger",
}


@pytest.mark.parametrize("name", CHOOSES)
def test_an_unknown_name_is_answered_with_the_line_that_is_missing(
    name: str, unregistered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(name in kind.entries for kind in KINDS):
        pytest.skip("this package has the part already")
    monkeypatch.setattr(
        load_config_module, "find_unregistered", partial(find_unregistered, unregistered)
    )
    with pytest.raises(ConfigError) as error:
        load_config(
            "grpo", [f"{CHOOSES[name]}={f'[{name}]' if name in ('steps', 'even_length') else name}"]
        )
    lines = [
        part.line
        for part in find_unregistered(unregistered)
        if part.name == name and "group(" not in part.line
    ]
    assert lines and lines[0].startswith(f"{name} = ") and lines[0] in str(error.value)


def test_the_built_in_parts_are_whole() -> None:
    assert find_unregistered() == []
    for kind in KINDS:
        parts = list(builtin_parts(kind))
        assert parts
        for part in parts:
            assert faults_of(kind, part) == []


MINE = {
    "mine": """
def estimator(token_level_rewards, response_mask): ...
def compute_score(solution_str): return 1.0
def wrong_score(solution_str, beam): return 1.0
class Engine:
    def __init__(self, model, tokenizer=None, *, version=None): ...
    async def generate(self, request): ...
class Tracker:
    def close(self): ...
""",
    "mine_cases": "CASES = ()\ndef compute_score(solution_str, beam): return 1.0\n",
    "users": """
from distflow import register_adv_est, register_policy_loss
@register_adv_est("odd")
def odd(token_level_rewards, response_mask, temprature): ...
@register_policy_loss("odd")
def odd_loss(log_probs, advantages, loss_mask, strength): ...
""",
}
REGISTERED_IN_PART: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "an estimator without its decorator": (
        names.ESTIMATORS,
        "mine:estimator",
        (
            "ESTIMATORS in builtin_names.toml",
            'mine.py does not register it: add @register_adv_est("mine") above estim',
        ),
    ),
    "an estimator that does not exist": (
        names.ESTIMATORS,
        "mine:nope",
        ("its entry names 'mine:nope'", "has no 'nope'"),
    ),
    "a module that does not exist": (
        names.ESTIMATORS,
        "nowhere:nope",
        ("there is no module 'nowhere'",),
    ),
    "a loss without its decorator": (
        names.POLICY_LOSSES,
        "mine:estimator",
        ("add @register_policy_loss",),
    ),
    "a reward without cases": (
        names.REWARDS,
        "mine:compute_score",
        ("mine.py has no CASES", "CASES = (Case("),
    ),
    "a reward that does not exist": (names.REWARDS, "mine:nope", ("mine.py has no 'nope'",)),
    "a reward with a parameter too many": (
        names.REWARDS,
        "mine_cases:compute_score",
        (
            "mine_cases.py: compute_score takes (solution_str, beam)",
            "some of (data_source, solution_str",
        ),
    ),
    "a pipeline that does not exist": (
        names.PIPELINES,
        "mine:nope",
        ("PIPELINES in builtin_names.toml", "has no 'nope'"),
    ),
    "a rollout engine without methods": (
        names.ROLLOUT_ENGINES,
        "mine:Engine",
        (
            "rollout/engine.py describes",
            "Add\n",
            "async def pause(self, release: bool = False) -> None",
            "'shares_weights'",
        ),
    ),
    "a train engine without methods": (
        names.TRAIN_ENGINES,
        "mine:Engine",
        (
            "def train_step(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]",
            "mine.py: Engine cannot be created",
        ),
    ),
    "a tracker without methods": (
        names.TRACKERS,
        "mine:Tracker",
        ("def log(self, step: int, values: Mapping[str",),
    ),
}


@pytest.fixture
def user_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for module, code in MINE.items():
        (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with forgotten(*MINE):
        sys.path.insert(0, str(tmp_path))
        yield tmp_path


@pytest.mark.parametrize("case", REGISTERED_IN_PART)
def test_a_part_that_is_registered_in_part_is_told_what_it_lacks(
    case: str, user_modules: Path
) -> None:
    table, target, expected = REGISTERED_IN_PART[case]
    kind = next(kind for kind in KINDS if kind.entries is table)
    table["mine"] = type(next(iter(table.values())))("a part of mine", target)
    try:
        part = next(part for part in builtin_parts(kind) if part.name == "mine")
        said = "\n".join(faults_of(kind, part))
    finally:
        del table["mine"]
    assert all(text in said for text in expected), said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["trainer.imports=[users]", "algorithm.adv_estimator=odd"],
            (
                "algorithm.adv_estimator",
                "(users.odd) takes 'temprature', not a column",
                "*, temprature=...)",
            ),
        ),
        (
            ["trainer.imports=[users]", "actor_rollout_ref.actor.policy_loss=odd"],
            (
                "policy_loss",
                "(users.odd_loss) takes 'strength'",
                "def odd_loss(..., *, strength=...)",
            ),
        ),
        (
            ["reward.functions={default: ['mine:wrong_score']}"],
            ("mine.py: wrong_score takes (solution_str, beam)",),
        ),
        (["reward.functions={default: ['mine:nope']}"], ("mine.py has no 'nope'",)),
        (
            ["reward.functions={default: ['mine.py:wrong_score']}"],
            ("wrong_score takes (solution_str, beam)",),
        ),
        (["reward.functions={default: ['nowhere:nope']}"], ("there is no module 'nowhere'",)),
        (["dag.pipeline=mine:nope"], ("dag.pipeline", "has no 'nope'")),
    ],
)
def test_a_users_part_that_does_not_fit_is_told_before_a_model_is_loaded(
    overrides: list[str], expected: tuple[str, ...], user_modules: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        own_reward = ["~custom_reward_function.path"] if "reward.functions" in overrides[0] else []
        Playground(tmp_path).spec("grpo", *overrides, *own_reward)
    assert all(text in str(error.value) for text in expected), error.value


@pytest.mark.slow
def test_a_run_takes_the_parts_outside_the_package(tmp_path: Path) -> None:
    for block in blocks(PAGE):
        save_if_file(block, tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = [
        word for block in blocks(PAGE) if block.language == "bash" for word in block.code.split()
    ]
    assert sum(word.startswith("trainer.total_training_steps=1") for word in words) == 5
    chosen = [
        *("trainer.imports=[my_algorithms,my_pipeline]", "algorithm.adv_estimator=my_score"),
        *(
            "actor_rollout_ref.actor.policy_loss=my_loss",
            "dag.pipeline=my_pipeline:certain_pipeline",
        ),
        "reward.functions={default: ['my_rewards_file.py:short']}",
    ]
    done = command(
        tmp_path, SOURCE, "train", "examples/tiny.yaml", "trainer.total_training_steps=1", *chosen
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = next(tmp_path.rglob("metrics.jsonl")).read_text()
    assert "certain_frac" in metrics and "confidence" in metrics
