"""Parts of one's own, as docs/extending.md has them: a run takes them all, and one that is
registered in part is told what to add, before a model is loaded."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from distflow import builtin_names as names
from distflow.errors import UserError
from distflow.launch.check_extensions import TABLES, Part, faults_of
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
    "mine_cases": "def compute_score(solution_str, beam): return 1.0\n",
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
        ("mine does not register 'mine': add the decorator above estimator",),
    ),
    "an estimator that does not exist": (
        names.ESTIMATORS,
        "mine:nope",
        ("has no 'nope'",),
    ),
    "a module that does not exist": (
        names.ESTIMATORS,
        "nowhere:nope",
        ("there is no module 'nowhere'",),
    ),
    "a loss without its decorator": (
        names.POLICY_LOSSES,
        "mine:estimator",
        ("add the decorator above",),
    ),
    "a reward that does not exist": (names.REWARDS, "mine:nope", ("mine has no 'nope'",)),
    "a reward with a parameter too many": (
        names.REWARDS,
        "mine_cases:compute_score",
        (
            "mine_cases: compute_score takes (solution_str, beam)",
            "some of (data_source, solution_str",
        ),
    ),
    "a pipeline that does not exist": (
        names.PIPELINES,
        "mine:nope",
        ("has no 'nope'",),
    ),
    "a rollout engine without methods": (
        names.ROLLOUT_ENGINES,
        "mine:Engine",
        (
            "distflow.rollout.engine",
            "Add\n",
            "pause(self, release: bool = False) -> None",
        ),
    ),
    "a train engine without methods": (
        names.TRAIN_ENGINES,
        "mine:Engine",
        ("train_step(self, batch",),
    ),
    "a tracker without methods": (
        names.TRACKERS,
        "mine:Tracker",
        ("log(self, step: int, values",),
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
    kind = next(kind for kind, own in TABLES.items() if own is table)
    table["mine"] = type(next(iter(table.values())))("a part of mine", target)

    try:
        said = "\n".join(faults_of(Part(kind, "key", "mine", target)))
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
            ("mine: wrong_score takes (solution_str, beam)",),
        ),
        (["reward.functions={default: ['mine:nope']}"], ("mine has no 'nope'",)),
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
    assert sum(word.startswith("trainer.total_training_steps=1") for word in words) == 6
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
