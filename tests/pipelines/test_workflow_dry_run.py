"""A user's workflow is run once with canned replies before a model is loaded: its mistakes are
refused, what may depend on the reply is noted, and nothing that it does stays."""

from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.errors import UserError
from distflow.launch.dry_run_of_user_code import try_users_code
from distflow.launch.make_spec import make_spec
from tests.e2e.runs import Playground

pytestmark = pytest.mark.slow  # each trial is a process that imports PyTorch

OWN = """
import json, os, pathlib, subprocess, time

async def fine(chat, row):
    print("said once more")
    pathlib.Path(os.environ["MARK"]).write_text(str(os.getpid()))
    reply = await chat.ask(row.prompt, max_tokens=4)
    await chat.fork().ask("again", max_tokens=2)
    return {"score": float(reply.text == row.ground_truth), "turns": chat.turns}

async def not_awaited(chat, row):
    return float(chat.ask(row.prompt).text == "")

async def misspelt(chat, row):
    await chat.ask(row.promt)

async def reads_column(chat, row):
    await chat.ask(row["question"])

async def asks_nothing(chat, row):
    return 1.0

async def returns_text(chat, row):
    return (await chat.ask(row.prompt)).text

async def no_tokens(chat, row):
    await chat.ask(row.prompt, max_tokens=0)

async def reads_json(chat, row):
    return float(json.loads((await chat.ask(row.prompt)).text)["x"])

async def reads_match(chat, row):
    await chat.ask(row.prompt)
    return None.group(1)

async def rejects(chat, row):
    await chat.ask(row.prompt)

async def judged(chat, row, reward_fn):
    await chat.ask(row.prompt)
    return (await reward_fn()).discounted(0.5)

async def forever(chat, row):
    subprocess.Popen(["sleep", "1000"])
    time.sleep(1000)

async def dies(chat, row):
    os._exit(3)
"""


def tried(name: str, folder: Path, *more: str) -> list[str]:
    ground = Playground(folder, num_rows=8)
    (folder / "own.py").write_text(OWN)
    workflow = f"actor_rollout_ref.rollout.workflow={folder}/own.py:{name}"
    of_rewards = ("reward.", "custom_reward_function.")
    keys = [
        key
        for key in ground.overrides("tried", workflow, "trust.check_rewards=true", *more)
        if name == "judged" or not key.startswith(of_rewards)
    ]
    said: list[str] = []
    try_users_code(make_spec(load_config("grpo", keys), say=lambda line: None), said.append)

    return [
        line.replace(f"{folder}/", "").replace(str(folder), "")
        for line in said
        if "the workflow" in line
    ]


@pytest.mark.parametrize("name", ["rejects", "judged"])
def test_a_sound_workflow_needs_no_remark(name: str, tmp_path: Path) -> None:
    assert tried(name, tmp_path) == []


def test_it_runs_in_a_process_that_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    assert tried("fine", tmp_path) == []
    assert not Path(f"/proc/{(tmp_path / 'mark').read_text()}").exists()
    assert "said once more" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("not_awaited", "has no attribute 'text': is `await` missing? (at "),
        ("misspelt", "'Row' object has no attribute 'promt' (at "),
        ("reads_column", "write row.columns['question'] (at own.py"),
        ("asks_nothing", "it must await chat.ask"),
        ("returns_text", "which is not a number"),
        ("no_tokens", "max_tokens=0: pass at least 1"),
    ],
)
def test_a_mistake_is_refused(name: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'\w+', .*first row .* trial") as refused:
        tried(name, tmp_path)
    assert what in str(refused.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("reads_json", "JSONDecodeError"),
        ("reads_match", "'NoneType' object has no attribute 'group'"),
        ("forever", "its episode did not end within"),
        ("dies", "its episode ended the process"),
    ],
)
def test_what_may_depend_on_the_reply_is_noted(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "distflow.pipelines.nodes.workflow_dry_run._WITHIN_S", 1.0 if name == "forever" else 30.0
    )
    (line,) = tried(name, tmp_path)
    assert line.startswith("note: the workflow ") and what in line


def test_the_trial_can_be_skipped(tmp_path: Path) -> None:
    assert tried("misspelt", tmp_path, "trust.check_rewards=false") == []
