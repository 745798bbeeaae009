"""Environments in processes of their own: what they say and pay, and how each of their failures
ends the episode."""

import asyncio
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distflow.data.sample import Segment
from distflow.environments.chat import Chat, Limits, Prompt
from distflow.environments.environment_workflow import EnvironmentWorkflow, seed_of
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.user_code_process import CallFailed
from distflow.environments.workflows import Row
from distflow.errors import UserError
from distflow.observe.run_reader import read_samples
from tests.environments.test_training import Games
from tests.patience import is_running
from tests.tiny_models import tiny_tokenizer

FILE = f"{Path(__file__).with_name('games.py')}:"
EOS = 2


def play(
    workflow: EnvironmentWorkflow,
    replies: Sequence[str],
    chat_prompt: bool = True,
    response: int = 400,
    **extra: Any,
) -> tuple[float, Chat]:
    """The score, and the chat with these replies of the policy, of which the last is repeated."""
    tokenizer = tiny_tokenizer()
    left = [*replies]

    async def generate(
        ids: tuple[int, ...], most: int, stop: tuple[str | int, ...], drawn: int
    ) -> Segment:
        text = left.pop(0) if len(left) > 1 else left[0]
        ids = (*tokenizer(text)["input_ids"], EOS)
        zeros = (0.0,) * len(ids)
        return Segment.drawn(0, ids, zeros, zeros, (0,) * len(ids), "stop")

    chat = Chat(
        TurnTokens(tokenizer, [EOS], {}),
        generate,
        Limits(response, response + 100),
        templated=chat_prompt,
    )
    messages = [{"role": "user", "content": "play"}] if chat_prompt else []
    row = Row(Prompt("play:", tokenizer("play:")["input_ids"], messages), extra_info=extra)

    return asyncio.run(workflow(chat, row)), chat


def given(chat: Chat) -> list[str]:
    return [
        chat.tokens.decode(segment.token_ids)
        for segment in chat.segments
        if segment.owner != "policy"
    ]


def test_a_game_is_played_to_its_end():
    score, chat = play(
        EnvironmentWorkflow(env=f"{FILE}Hunt"), ["9", "0", "7", "8"], seed=7, hint="a digit"
    )
    assert score == 1.0 and chat.turns == 3 and chat.finish_reason == "stop"
    assert [segment.reward for segment in chat.segments if segment.owner == "policy"] == [
        0.0,
        0.0,
        1.0,
    ]
    assert given(chat)[0].startswith("user: play\n\nguess (a digit)")
    assert "lower" in given(chat)[1] and "higher" in given(chat)[2]


def test_reset_is_called_with_the_arguments_that_it_takes():
    for name, secret in (("OnlySeed", "7"), ("NoSeed", "3")):
        assert play(EnvironmentWorkflow(env=f"{FILE}{name}"), [secret], seed=7)[0] == 1.0


def test_plain_text_continues_the_prompt():
    _, chat = play(
        EnvironmentWorkflow(env=f"{FILE}Hunt", env_kwargs={"tries": 2}),
        ["1", "2"],
        chat_prompt=False,
        seed=7,
    )
    assert given(chat) == ["play:guess", "higher"] and chat.turns == 2, (
        "the environment ends it after two tries"
    )


def test_numbers_are_found_in_the_text_and_asked_for_where_there_are_none():
    score, chat = play(
        EnvironmentWorkflow(env=f"{FILE}Walk"), ["I go 3", "north", "9", "step 1 or 2"]
    )
    assert (
        score == 2.5
        and chat.turns == 4
        and "play\n\n0" in given(chat)[0]
        and '{"place": 3}' in given(chat)[1]
    )
    assert all("Write a number from 0 to 3." in text for text in given(chat)[2:])


def test_one_that_never_ends_is_left_after_max_turns_with_its_rewards():
    score, chat = play(EnvironmentWorkflow(env=f"{FILE}Endless", max_turns=3), ["1"])
    assert score == 1.5 and chat.turns == 3 and chat.finish_reason == "max_turns"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("not made", "OSError: no board (at games.py:"),
        ("not reset", "reset returned 'only an observation', not (observation, info)"),
        ("object", "an observation of object is not text"),
        ("raises", "RuntimeError: the board is broken (at games.py:"),
        ("exits", "SystemExit: 1"),
        ("dies", "its process exited with status 7"),
        ("four", "not (observation, reward, terminated, truncated, info)"),
        ("no number", "which is not a number"),
        ("nan", "step returned the reward nan"),
        ("inf", "step returned the reward inf"),
    ],
)
def test_a_failure_is_no_score(how, said):
    with pytest.raises(CallFailed) as error:
        play(EnvironmentWorkflow(env=f"{FILE}Bad", env_kwargs={"how": how}), ["1"])
    assert said in str(error.value)


def test_observations_may_change_their_shape():
    score, chat = play(EnvironmentWorkflow(env=f"{FILE}Bad", env_kwargs={"how": "shapes"}), ["1"])
    assert score == 3.0 and chat.turns == 3
    assert [message["content"] for message in chat.messages[2::2]] == [
        "[[0.5]]",
        "[[0.5, 0.5], [0.5, 0.5]]",
    ]


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    file = tmp_path / "pid"
    workflow = EnvironmentWorkflow(
        env=f"{FILE}Bad", env_kwargs={"how": "hangs", "file": str(file)}, timeout_s=1.0
    )
    with pytest.raises(CallFailed, match="within 1 s"):
        play(workflow, ["1"])
    while is_running(int(file.read_text())):
        time.sleep(0.05)


def test_its_server_ends_with_the_workflow():
    workflow = EnvironmentWorkflow(env=f"{FILE}Hunt")
    pid = workflow._server.pid
    assert is_running(pid)
    del workflow
    gc.collect()
    assert not is_running(pid)


def test_rows_give_the_seed():
    row = Row(Prompt("a", [1]), extra_info={"seed": 5})
    others = [Row(Prompt(text, [1]), truth) for text, truth in (("a", None), ("b", None), ("a", 1))]
    assert seed_of(row) == 5 and len({seed_of(other) for other in others}) == 3
    assert seed_of(others[0]) == seed_of(Row(Prompt("a", [2])))


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (f"{FILE}Nothing", "has no 'Nothing'"),
        (f"{FILE}no_environment", "cannot be called"),
        ("Blackjack-v999", "'Blackjack-v999'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_the_start(env, said):
    with pytest.raises(UserError, match=said):
        EnvironmentWorkflow(env=env)


@pytest.mark.slow
def test_failures_of_an_environment_are_counted_and_their_groups_replaced(tmp_path):
    playground = Games(tmp_path)
    playground.write_rows([{"prompt": f"{number}:", "seed": number} for number in range(12)])
    run = playground.run(
        "grpo",
        "actor_rollout_ref.rollout.workflow=environment",
        (
            f"actor_rollout_ref.rollout.workflow_kwargs={{env: '{FILE}Broken', env_kwargs: "
            f"{{tries: 2}}}}"
        ),
        "actor_rollout_ref.rollout.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n]",
        "data.max_response_length=60",
        "trainer.total_training_steps=4",
        "trust.check_freq=1",
    )

    for step in range(1, 5):
        samples = read_samples(run.folder, step)
        assert len(samples) == 16 and all(int(sample["prompt"][:-1]) % 3 for sample in samples)
        assert all(sample["errors"] is None for sample in samples)

    assert "the board is broken (at games.py:" in (
        run.folder / "ledger.jsonl"
    ).read_text() or run.notes("warning")


def test_a_class_that_is_no_environment_is_refused_at_the_start(tmp_path):
    (tmp_path / "half.py").write_text(
        "class Half:\n    def reset(self, **given):\n        return 'go', {}\n"
    )

    with pytest.raises(UserError, match="no step: .* reset and step"):
        EnvironmentWorkflow(env=f"{tmp_path}/half.py:Half")
