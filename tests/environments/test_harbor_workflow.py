"""The workflow `harbor`: a scripted policy over task folders, and a real run whose episodes run
commands and tests."""

import asyncio
import contextlib
import pickle
import tempfile
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distflow.data.task_folders import HARBOR, Task
from distflow.environments.chat import Chat, Limits, Prompt
from distflow.environments.harbor_workflow import HarborWorkflow
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.workflows import Row
from distflow.errors import UserError
from distflow.observe.run_reader import read_samples
from distflow.sandbox.shell import Shell
from tests.data.test_task_folders import make
from tests.environments import test_tools_of_a_workflow
from tests.environments.test_tools_of_a_workflow import FAMILIES, Callers, Policy

TEST = """
if [ "$(cat answer)" = "$RIGHT" ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""  # noqa: E501
CONFIG = '[verifier]\nenv = {RIGHT = "7"}\n'
WRITES = "echo 7 > answer"


@pytest.fixture(autouse=True)
def needs_bubblewrap():
    try:
        HarborWorkflow()
    except UserError as error:
        pytest.skip(str(error))


def call(command: str, name: str = "shell") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"command": "{command}"}}}}</tool_call>'


def play(
    folder: Path, replies: Sequence[str], limit: int = 6000, **options: Any
) -> tuple[Chat, Any]:
    tokenizer, _ = FAMILIES["qwen2"]
    policy = Policy(tokenizer, replies)
    chat = Chat(
        TurnTokens(tokenizer, [tokenizer.eos_token_id], {}),
        policy,
        Limits(limit, limit + 2000),
        templated=True,
    )
    messages = [{"role": "user", "content": "Write 7 into answer."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    row = Row(Prompt("ask", ids, messages), extra_info={HARBOR: {"folder": str(folder)}})
    workflow = pickle.loads(pickle.dumps(HarborWorkflow(**options)))  # as in another process

    return chat, asyncio.run(workflow(chat, row))


def said(chat: Chat) -> list[str]:
    return [chat.tokens.decode(each.token_ids) for each in chat.segments if each.owner == "tool"]


@pytest.fixture(autouse=True)
def own_folder_of_shells(tmp_path_factory, monkeypatch):
    """Other tests' shells are in another one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("shells")))


def left() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("distflow-shell-*"))


def test_a_task_is_worked_on_in_its_folder_and_scored_by_its_tests(tmp_path):
    before = left()
    task = make(tmp_path / "a", CONFIG, test=TEST)
    (task / "environment" / "data").write_text("of the task")
    chat, rewards = play(task, [call("cat data; ls -d /tests /logs; exit 2"), call(WRITES), "done"])
    assert rewards == {"reward": 1.0, "score": 1.0}
    first, second = said(chat)
    assert (
        "of the task" in first and "[exit status 2]" in first and first.count("No such file") == 2
    )
    assert "(no output)" in second and chat.finish_reason == "stop"
    assert chat.counts.pop("tool/shell/ms") >= 0
    assert chat.counts == {"tool/shell/calls": 2, "tool/shell/errors": 0}
    assert not (task / "environment" / "answer").exists() and left() == before
    assert play(task, ["done"])[1] == {"reward": 0.0, "score": 0.0}, (
        "a folder of its own for each episode"
    )


def test_calls_that_are_wrong_hang_or_print_too_much_are_told_and_counted(tmp_path):
    task = make(tmp_path / "a", CONFIG + "[agent]\ntimeout_sec = 2.0\n", test=TEST)
    replies = ["<tool_call>{</tool_call>", call("ls", name="bash"), call("yes"), call("ls"), "done"]
    chat, rewards = play(task, replies, max_characters=100)
    texts = said(chat)
    assert "cannot be read" in texts[0] and "there is no tool 'bash'" in texts[1]
    assert "did not end within 2 s and was killed" in texts[2] and "cut: the answer has" in texts[2]
    assert "the 2 s that this task has for commands are used up" in texts[3]
    assert chat.counts["tool/shell/errors"] == 2 and rewards["score"] == 0.0


def test_a_command_that_the_system_cannot_start_is_told_to_the_model(tmp_path):
    task = make(tmp_path / "a", CONFIG, test=TEST)
    long = "echo " + "7" * 140_000
    replies = [call("echo \\ud800"), call(long), call("a\\u0000b"), call(WRITES), "done"]
    tokenizer, _ = FAMILIES["qwen2"]
    chat, rewards = play(task, replies, limit=2 * len(tokenizer.encode(long)))
    assert rewards["score"] == 1.0
    assert [each.count("error") for each in said(chat)] == [1, 1, 1, 0]


def test_an_episode_at_its_turn_limit_is_scored_for_what_it_did(tmp_path):
    chat, rewards = play(make(tmp_path / "a", CONFIG, test=TEST), [call(WRITES)], max_turns=2)
    assert chat.turns == 2 and chat.finish_reason == "max_turns" and rewards["score"] == 1.0


@pytest.mark.parametrize(
    ("test", "rewards"),
    [
        (
            """echo '{"a": 1, "b": 0.5}' > /logs/verifier/reward.json""",
            {"a": 1.0, "b": 0.5, "score": 1.5},
        ),
        (
            """echo '{"a": 1, "reward": 0.5}' > /logs/verifier/reward.json""",
            {"a": 1.0, "reward": 0.5, "score": 0.5},
        ),
        ("echo 0.25 > /logs/verifier/reward.txt; exit 1", {"reward": 0.25, "score": 0.25}),
    ],
)
def test_rewards_are_what_the_tests_write(tmp_path, test, rewards):
    assert play(make(tmp_path / "a", test=test), ["done"])[1] == rewards


@pytest.mark.parametrize(
    ("test", "why"),
    [
        (
            "apt-get update; exit 1",
            r"no /logs/verifier/reward\.txt: .* exit status 1, ",
        ),
        ("true", "wrote no /logs/verifier/reward.txt"),
        ("echo nan > /logs/verifier/reward.txt", "not finite"),
        ("echo passed > /logs/verifier/reward.txt", "could not convert"),
        ("echo '[1]' > /logs/verifier/reward.json", r"no reward .*reward\.json"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "wrote no /logs/verifier/reward.txt"),
        ("mkfifo /logs/verifier/reward.txt", "wrote no /logs/verifier/reward.txt"),
        ("sleep 60", "within 1 s"),
    ],
)
def test_tests_that_fail_are_an_error_and_no_reward(tmp_path, test, why):
    before = left()
    task = make(tmp_path / "a", "[verifier]\ntimeout_sec = 1\n", test=test)
    with pytest.raises(RuntimeError, match=why):
        play(task, ["done"])
    assert left() == before


def test_a_folder_that_was_being_copied_is_removed_as_well(tmp_path, monkeypatch):
    copies = threading.Event()

    def copy(task: Task, shell: Shell) -> None:
        copies.set()
        time.sleep(0.2)
        (shell.files / "more").mkdir(parents=True)

    async def play_and_cancel() -> None:
        row = Row(
            Prompt("ask", (1,)), extra_info={HARBOR: {"folder": str(make(tmp_path / "task"))}}
        )
        chat: Any = types.SimpleNamespace(clock_stopped=contextlib.nullcontext)
        playing = asyncio.ensure_future(object.__new__(HarborWorkflow)(chat, row))
        await asyncio.to_thread(copies.wait)
        playing.cancel()
        await asyncio.wait((playing,))

    monkeypatch.setattr("distflow.environments.harbor_workflow.copy_environment", copy)
    asyncio.run(play_and_cancel())
    assert not left()


def test_rows_of_other_data_are_refused(tmp_path):
    tokenizer, _ = FAMILIES["qwen2"]
    chat = Chat(
        TurnTokens(tokenizer, [tokenizer.eos_token_id], {}),
        Policy(tokenizer, ["x"]),
        Limits(9, 9),
        True,
    )
    with pytest.raises(UserError, match="must be a folder of tasks"):
        asyncio.run(HarborWorkflow()(chat, Row(Prompt("x", (1,)))))


def test_a_run_over_task_folders_trains_and_masks_episodes_whose_tests_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(test_tools_of_a_workflow, "CALL", call(WRITES))
    playground = Callers(tmp_path)

    for number in range(4):
        broken = number == 3
        make(tmp_path / "tasks" / str(number), CONFIG, str(number), "exit 1" if broken else TEST)

    run = playground.run(
        "grpo",
        f"actor_rollout_ref.model.path={tmp_path}/caller",
        "actor_rollout_ref.model.init=random",
        f"data.train_files={tmp_path}/tasks",
        "data.prompt_format=chat",
        "data.max_response_length=160",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.workflow=harbor",
        "actor_rollout_ref.rollout.workflow_kwargs={max_turns: 3, format: hermes}",
        "reward.on_error=mask",
        *("~reward.functions", "~custom_reward_function.path", "~reward.num_workers"),
        "trainer.total_training_steps=1",
    )
    samples = read_samples(run.folder, 1)
    (metrics,) = run.metrics()
    assert len(samples) == 16 and not any("|>3<|" in sample["prompt"] for sample in samples), (
        "its group is replaced"
    )
    assert metrics["async/dropped/too_few_scores"] >= 1 and metrics["reward/error_rate"] > 0
    written = [
        WRITES in sample["response"] and sample["finish_reason"] == "stop" for sample in samples
    ]
    assert {sample["score"] for sample in samples} == {0.0, 1.0} and metrics["tool/shell/calls"] > 0
    assert all(sample["score"] == 1.0 for sample, has in zip(samples, written, strict=True) if has)
