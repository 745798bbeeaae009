"""Episodes in simulators: their prompts, masks, scores, and what ends them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distflow.acting.workflow import SimulatorWorkflow
from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.environments.chat import Chat, ChatError, Limits, Prompt
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.user_code_process import CallFailed
from distflow.environments.workflows import Row
from distflow.errors import UserError
from tests.tiny_models import tiny_tokenizer

FILE = f"{Path(__file__).with_name('faulty.py')}:"
ACTIONS = {
    "bins": 3,
    "low": [-1.5, -1.5],
    "high": [1.5, 1.5],
    "first_token": 10,
    "action_chunks_len": 4,
}


def play(
    tmp_path: Path, *replies: list[Any], response: int = 8, seed: int = 1, **options: Any
) -> tuple[Any, Chat]:
    """The result, and the chat with these replies of the policy, of which the last is repeated."""
    tokenizer = tiny_tokenizer()
    left = [*replies]

    async def generate(ids: Any, most: int, stop: Any, drawn: int, images: Any = ()) -> Segment:
        ids = own = tuple((left.pop(0) if len(left) > 1 else left[0])[:most])
        if chat.head is not None:  # the replies are values
            ids = tuple(
                int(chat.head["first"] + chat.head["bins"] * place) for place in range(len(own))
            )

        drew = Segment("policy", ids, (-0.5,) * len(ids), (-0.5,) * len(ids), (0,) * len(ids))
        values = own if chat.head is not None else ()
        return replace(drew, values=values, finish_reason="length")

    chat = Chat(
        TurnTokens(tokenizer, [2], {}), generate, Limits(response, response + 100), templated=False
    )
    chat.image_store = tmp_path
    workflow = SimulatorWorkflow(
        **{"env": f"{FILE}Line", "actions": ACTIONS, "prompt": "{instruction}{state}", **options}
    )
    row = Row(Prompt("x", [5]), extra_info={"seed": seed})

    return asyncio.run(workflow(chat, row)), chat


@pytest.mark.parametrize("ends_at", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("success", [True, False])
def test_masks_reach_up_to_the_action_that_ended_the_episode(tmp_path, ends_at, success):
    result, chat = play(
        tmp_path,
        [10, 11, 12, 10, 11, 12, 12, 12],
        env_kwargs={"ends_at": ends_at, "success": success},
    )
    decisions = -(-ends_at // 4)
    assert result["env_steps"] == ends_at and result["episode_len"] == decisions
    assert result["score"] == result["success"] == float(success)
    assert chat.conversations[-1].finish_reason == ("stop" if success else "max_steps")

    for number, talk in enumerate(
        chat.conversations[-1:] if decisions == 1 else [*chat.conversations][:decisions]
    ):
        own = {segment.owner: len(segment.token_ids) for segment in talk.segments[1:]}
        steps = min(4, ends_at - 4 * number)
        assert own == {"policy": 2 * steps, **({"unused": 8 - 2 * steps} if steps < 4 else {})}, (
            number
        )


def test_a_token_that_is_no_action_ends_the_episode_and_is_trained_on(tmp_path):
    result, chat = play(tmp_path, [10, 11, 12, 99, 11, 12, 12, 12], env_kwargs={"ends_at": 9})
    assert result["env_steps"] == 1 and result["score"] == 0.0
    assert chat.finish_reason == "no_action"
    assert [(each.owner, len(each.token_ids)) for each in chat.segments[1:]] == [
        ("policy", 4),
        ("unused", 4),
    ]
    result, chat = play(tmp_path, [99, 11], env_kwargs={"ends_at": 9})
    assert result["env_steps"] == 0 and chat.finish_reason == "no_action"
    assert [(each.owner, len(each.token_ids)) for each in chat.segments[1:]] == [("policy", 2)]


def test_only_a_prefix_of_each_chunk_is_executed(tmp_path):
    result, chat = play(
        tmp_path, [11] * 8, env_kwargs={"ends_at": 5}, actions={**ACTIONS, "execute": 2}
    )
    assert (result["env_steps"], result["episode_len"]) == (5, 3)
    talks = sorted(chat.conversations, key=lambda talk: talk.name)
    assert [len(talk.segments[1].token_ids) for talk in talks] == [4, 4, 2]
    assert [len(talk.segments[2].token_ids) for talk in talks] == [4, 4, 6]


def test_a_sample_is_each_decision_as_a_sequence_of_its_own(tmp_path):
    _, chat = play(tmp_path, [11] * 8, env_kwargs={"ends_at": 6})
    first, second = sorted(chat.conversations, key=lambda talk: talk.name)
    assert chat.tokens.decode(first.segments[0].token_ids) == "go1"
    forks = ((second.name, 8),)
    batch = Batch.from_samples([Sample("0-0", 0, [*first.segments, *second.segments], forks=forks)])
    lengths = [sum(len(segment.token_ids) for segment in talk.segments) for talk in (first, second)]
    assert batch.conversation_lengths().tolist() == lengths
    given = len(second.segments[0].token_ids)
    assert batch["response_mask"][0].tolist() == [1.0] * 8 + [0.0] * given + [1.0] * 4 + [0.0] * 4


NUMBERS = {
    "head": "gaussian",
    "low": [-3.0, 0.0],
    "high": [3.0, 1.0],
    "first_token": 10,
    "action_chunks_len": 4,
}


@pytest.mark.parametrize("ends_at", [1, 4, 5, 8])
def test_numbers_are_recorded_as_drawn_and_executed_within_their_bounds(tmp_path, ends_at):
    """The place on the line is the sum of the first numbers; masks reach up to the action that
    ended the episode."""
    values = [0.5, 0.0, -2.0, 0.0, 1.25, 3.0, -0.25, 0.5]
    prompt = {"env_kwargs": {"ends_at": ends_at}, "prompt": "{state}"}
    _, chat = play(tmp_path, values, actions=NUMBERS, **prompt)

    talks = sorted(chat.conversations, key=lambda talk: talk.name)
    for number, talk in enumerate(talks):
        policy, *unused = talk.segments[1:]
        used = 2 * min(4, ends_at - 4 * number)
        assert policy.owner == "policy" and policy.values == tuple(values[:used])
        assert policy.token_ids == tuple(range(10, 10 + 2 * used, 2))
        assert [(each.owner, len(each.token_ids), each.values) for each in unused] == [
            ("unused", 8 - used, ())
        ] * (used < 8)

    if ends_at > 4:  # from 1, by 1.5, -3, 3 and -0.75
        assert chat.tokens.decode(talks[1].segments[0].token_ids) == "1.75"


FLOW = {**NUMBERS, "head": "flow_sde", "denoising_steps": 2, "bins": 3}


@pytest.mark.parametrize("ends_at", [1, 4, 5, 8])
def test_a_flow_executes_what_its_last_denoising_step_gives(tmp_path, ends_at):
    """Of each action's noise and steps; masks reach up to the last step of the action that ended
    the episode."""
    actions = [(0.5, 0.0), (-2.0, 0.0), (1.25, 3.0), (-0.25, 0.5)]
    values = [each for action in actions for each in (9.0, 9.0, 7.0, 7.0, *action)]
    prompt = {"env_kwargs": {"ends_at": ends_at}, "prompt": "{state}"}
    _, chat = play(tmp_path, values, actions=FLOW, response=24, **prompt)
    assert chat.head == {
        "name": "actions",
        "first": 10,
        "dim": 2,
        "steps": 2,
        "bins": 3,
        "noise": 0.5,
    }

    talks = sorted(chat.conversations, key=lambda talk: talk.name)
    for number, talk in enumerate(talks):
        policy, *unused = talk.segments[1:]
        used = 6 * min(4, ends_at - 4 * number)
        assert policy.owner == "policy" and policy.values == tuple(values[:used])
        assert [(each.owner, len(each.token_ids)) for each in unused] == [("unused", 24 - used)] * (
            used < 24
        )

    if ends_at > 4:  # from 1, by 1.5, -3, 3 and -0.75
        assert chat.tokens.decode(talks[1].segments[0].token_ids) == "1.75"


def test_a_number_that_is_not_finite_is_never_executed(tmp_path):
    with pytest.raises(ValueError, match="dimension 1 of action 0 is nan"):
        play(tmp_path, [0.0, float("nan")] * 4, actions=NUMBERS)


def test_the_state_may_be_tokens_of_the_prompt(tmp_path):
    tokens = {"bins": 4, "low": [0.0], "high": [8.0], "first_token": 50}
    for seed, token in ((-3, 50), (1, 50), (2, 51), (7, 53), (8, 53)):
        _, chat = play(tmp_path, [11] * 8, seed=seed, prompt="{instruction}", state_tokens=tokens)
        assert chat.segments[0].token_ids == (*chat.tokens.of_text("go", begins=True), token), seed


def test_the_score_may_be_the_sum_of_rewards(tmp_path):
    result, _ = play(
        tmp_path, [11] * 8, env_kwargs={"ends_at": 3, "success": False}, score="return"
    )
    assert result["score"] == 1.5 and result["success"] == 0.0 and result["acc"] == 0.0


def test_the_same_row_begins_in_the_same_state_and_another_seed_in_another(tmp_path):
    prompts = [play(tmp_path, [11] * 8, seed=seed)[1].segments[0].token_ids for seed in (1, 1, 2)]
    assert prompts[0] == prompts[1] != prompts[2]


@pytest.mark.parametrize("how", ["dies", "nan reward"])
def test_a_simulator_that_fails_is_an_error_of_the_episode(tmp_path, how):
    with pytest.raises(CallFailed):
        play(tmp_path, [11] * 8, seed=100, env=f"{FILE}Fails", env_kwargs={"how": how})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"actions": {**ACTIONS, "bin": 3}}, "actions.bin: no such option"),
        ({"actions": {"bins": 3}}, "low and high"),
        (
            {"actions": {**NUMBERS, "head": "gauss"}},
            r"actions\.head=gauss: .* action_tokens or gaussian or flow",
        ),
        (
            {"actions": {**NUMBERS, "noise": 0.5}},
            r"actions\.noise: head=gaussian ",
        ),
        ({"actions": {**FLOW, "denoising_steps": 0}}, r"denoising_steps and bins are \(0, 3\)"),
        ({"actions": {**FLOW, "bins": 2.5}}, r"denoising_steps and bins are \(2, 2.5\)"),
        ({"actions": {**FLOW, "first_token": 30}}, "not 72 tokens from 30"),
        ({"actions": FLOW}, r" 24 tokens: .*data\.max_response_length"),
        ({"actions": {**NUMBERS, "bins": 3}}, "actions.bins: head=gaussian draws numbers"),
        ({"actions": {**NUMBERS, "first_token": 90}}, "not 16 tokens from 90"),
        ({"score": "reward"}, "score=reward"),
        ({"gl": "glfw"}, "gl=glfw: .* egl"),
        ({"state_tokens": {"bin": 3}}, "state_tokens.bin: no such option"),
        (
            {"state_tokens": {"low": [0, 0], "high": [1, 1], "bins": 4}},
            "state has 1 numbers, .* bounds 2",
        ),
        ({"actions": {**ACTIONS, "execute": 5}}, "execute=5"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"env": "nowhere"}, "nowhere"),
        ({"actions": {**ACTIONS, "first_token": 10_000}}, "first_token"),
        ({"actions": {**ACTIONS, "first_token": "<absent>"}}, "no token '<absent>'"),
        ({"response": 7}, "set data.max_response_length"),
        ({"env_kwargs": {"images": True}}, "reads text alone"),
    ],
)
def test_what_cannot_be_played_is_refused(tmp_path, options, says):
    with pytest.raises((UserError, ChatError), match=says):
        play(tmp_path, [11] * 8, **options)
