"""Advantages over the turns of episodes against loops in plain Python, and against the auditor's
formulas."""

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from distflow.algorithms.registry import find_adv_est
from distflow.audit.audited_step.advantages import FORMULAS


@dataclass
class Episode:
    """turns: rewards of the tokens of each turn. gaps: given tokens before each turn but the first,
    and at the end."""

    group: int
    turns: list[list[float]]
    gaps: list[int]
    values: list[list[float]]
    valid: bool = True
    truncated: bool = False


def episodes(seed: int) -> list[Episode]:
    """Groups of one to five episodes of one to four turns, some directly after another; some
    invalid or cut off."""
    draw = random.Random(seed)
    made = list[Episode]()
    for group, size in enumerate((4, 5, 1, 3)):
        for _ in range(size):
            turns = [
                [draw.uniform(-1, 1) for _ in range(draw.randint(1, 4))]
                for _ in range(draw.randint(1, 4))
            ]
            gaps = [draw.randint(0, 3) for _ in turns]
            values = [[draw.uniform(-1, 1) for _ in turn] for turn in turns]
            made.append(
                Episode(group, turns, gaps, values, draw.random() > 0.2, draw.random() < 0.3)
            )
    return made


def laid_out(
    rows: list[list[list[float]]], episodes: list[Episode], fill: float, length: int
) -> torch.Tensor:
    """A value for each token of each turn, with `fill` on given tokens and padding."""
    out = torch.full((len(rows), length), fill, dtype=torch.float64)
    for row, (turns, episode) in enumerate(zip(rows, episodes, strict=True)):
        place = 0
        for turn, gap in zip(turns, episode.gaps, strict=True):
            out[row, place : place + len(turn)] = torch.tensor(turn, dtype=torch.float64)
            place += len(turn) + gap
    return out


def columns(made: list[Episode]) -> dict[str, Any]:
    length = max(sum(map(len, each.turns)) + sum(each.gaps) for each in made) + 1
    numbers = [[[float(n)] * len(turn) for n, turn in enumerate(each.turns)] for each in made]
    return {
        "token_level_rewards": laid_out([each.turns for each in made], made, math.nan, length),
        "values": laid_out([each.values for each in made], made, math.inf, length),
        "turn_index": laid_out(numbers, made, -1.0, length).long(),
        "response_mask": laid_out(
            [[[1.0] * len(t) for t in each.turns] for each in made], made, 0.0, length
        ),
        "group_index": torch.tensor([each.group for each in made]),
        "valid": torch.tensor([each.valid for each in made]),
        "truncated": torch.tensor([each.truncated for each in made]),
    }


def spread(by_turn: list[list[float]], made: list[Episode], length: int) -> torch.Tensor:
    rows = [
        [
            [value if each.valid else 0.0] * len(turn)
            for value, turn in zip(own, each.turns, strict=True)
        ]
        for own, each in zip(by_turn, made, strict=True)
    ]
    return laid_out(rows, made, 0.0, length)


def grpo_turns(made: list[Episode], discount: float, by_std: bool) -> list[list[float]]:
    returns = []
    for each in made:
        running = 0.0
        own = list[float]()
        for turn in reversed(each.turns):
            running = sum(turn) + discount * running
            own.insert(0, running)
        returns.append(own)
    out = []
    for own, each in zip(returns, made, strict=True):
        row = []
        for number, value in enumerate(own):
            peers = [
                theirs[number]
                for theirs, other in zip(returns, made, strict=True)
                if other.group == each.group and other.valid and len(theirs) > number
            ]
            mean = sum(peers) / len(peers) if peers else 0.0
            if len(peers) < 2:
                row.append(0.0)
                continue
            std = math.sqrt(sum((peer - mean) ** 2 for peer in peers) / (len(peers) - 1))
            row.append((value - mean) / (std + 1e-6) if by_std else value - mean)
        out.append(row)
    return out


def gae_over_turns(
    made: list[Episode], gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    advantages = []
    returns = []
    for each in made:
        first = [values[0] for values in each.values]
        after = [*first[1:], first[-1] if each.truncated else 0.0]
        delta = [
            sum(t) + gamma * nxt - v for t, nxt, v in zip(each.turns, after, first, strict=True)
        ]
        own = [
            sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(delta)))
            for k in range(len(delta))
        ]
        advantages.append(own)
        returns.append([a + v for a, v in zip(own, first, strict=True)])
    return advantages, returns


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-4, atol=1e-4)


def samples(given: dict[str, Any]) -> list[dict[str, Any]]:
    inside = {
        name: value.nan_to_num(0.0, 0.0, 0.0) if value.is_floating_point() else value
        for name, value in given.items()
    }
    return [
        {name: value[row] for name, value in inside.items()} for row in range(len(given["valid"]))
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("discount", "by_std"), [(1.0, True), (0.5, True), (0.9, False), (0.0, True)]
)
def test_turns_are_compared_with_those_of_the_same_number(
    seed: int, discount: float, by_std: bool
) -> None:
    made = episodes(seed)
    options = {"turn_discount": discount, "norm_adv_by_std_in_grpo": by_std, "adv_epsilon": 1e-6}
    given = columns(made)
    names = ("token_level_rewards", "response_mask", "turn_index", "group_index", "valid")
    actual, returns = find_adv_est("grpo_turns").fn(*(given[name] for name in names), **options)
    wanted = spread(grpo_turns(made, discount, by_std), made, actual.shape[1])
    close(actual, wanted)
    assert torch.equal(actual, returns)
    rows = FORMULAS["grpo_turns"](samples(given), options)
    close(torch.tensor([row for row, _ in rows], dtype=torch.float64), wanted)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0)])
def test_gae_over_turns(seed: int, gamma: float, lam: float) -> None:
    made = episodes(seed)
    given = columns(made)
    options = {
        "gamma": gamma,
        "lam": lam,
        "bootstrap_truncated": True,
        "whiten": False,
        "over_turns": True,
    }
    names = ("token_level_rewards", "response_mask", "values", "valid", "truncated", "turn_index")
    actual, returns = find_adv_est("gae").fn(*(given[name] for name in names), **options)
    wanted = [spread(each, made, actual.shape[1]) for each in gae_over_turns(made, gamma, lam)]
    close(actual, wanted[0])
    close(returns, wanted[1])
    rows = FORMULAS["gae"](samples(given), options)
    close(torch.tensor([row for row, _ in rows], dtype=torch.float64), wanted[0])
    close(torch.tensor([row for _, row in rows], dtype=torch.float64), wanted[1])


@dataclass
class Talk:
    """What agents say: (turn, agent) → reward and value of each token, in float64. A given token
    follows each turn."""

    said: dict[tuple[int, int], list[tuple[float, float]]]
    valid: bool
    truncated: bool


def talks(seed: int, num_agents: int) -> list[Talk]:
    """Of one to three turns, in which an agent may be silent."""
    draw = random.Random(seed)
    made = list[Talk]()
    for _ in range(6):
        said = {
            (turn, agent): [
                (draw.uniform(-1, 1), draw.uniform(-1, 1)) for _ in range(draw.randint(1, 3))
            ]
            for turn in range(draw.randint(1, 3))
            for agent in range(num_agents)
            if draw.random() < 0.7 or turn == agent == 0
        }
        made.append(Talk(said, draw.random() > 0.2, draw.random() < 0.3))
    return made


def marft(talk: Talk, gamma: float, lam: float) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """(advantage, return) of each token: backward over turns, within a turn over agents in reverse
    order; the value after an agent's last token is that of the next speaker's first."""
    speakers = sorted(talk.said)
    out = {}
    last = talk.said[speakers[-1]][-1][1]
    after = last if talk.truncated else 0.0
    running = 0.0
    for speaker in reversed(speakers):
        own = []
        for reward, value in reversed(talk.said[speaker]):
            running = reward + gamma * after - value + gamma * lam * running
            own.insert(0, (running, running + value))
            after = value
        out[speaker] = own
    return out


def by_conversation(
    made: list[Talk], rows: list[dict[tuple[int, int], list[float]]], fill: float
) -> torch.Tensor:
    """One agent's turns after the other's, as a sample has them, with a given token after each
    turn."""
    agents = sorted({agent for talk in made for _, agent in talk.said})
    lines = []
    for row in rows:
        turns = [row[key] for agent in agents for key in sorted(row) if key[1] == agent]
        lines.append([value for turn in turns for value in (*turn, fill)])
    length = max(map(len, lines))
    return torch.tensor(
        [line + [fill] * (length - len(line)) for line in lines], dtype=torch.float64
    )


@pytest.mark.parametrize("num_agents", [1, 2, 3, 4])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5)])
def test_gae_over_agents(num_agents: int, gamma: float, lam: float) -> None:
    made = talks(num_agents, num_agents)

    def column(fill: float, of: Any) -> torch.Tensor:
        rows = [
            {key: [of(talk, key, t) for t in range(len(talk.said[key]))] for key in talk.said}
            for talk in made
        ]
        return by_conversation(made, rows, fill)

    found = [marft(talk, gamma, lam) for talk in made]
    given = {
        "token_level_rewards": column(math.nan, lambda talk, key, t: talk.said[key][t][0]),
        "response_mask": column(0.0, lambda talk, key, t: 1.0),
        "values": column(math.inf, lambda talk, key, t: talk.said[key][t][1]),
        "turn_order": column(-1.0, lambda talk, key, t: float(sorted(talk.said).index(key))).long(),
        "valid": torch.tensor([talk.valid for talk in made]),
        "truncated": torch.tensor([talk.truncated for talk in made]),
    }
    options = {"gamma": gamma, "lam": lam, "bootstrap_truncated": True, "whiten": False}
    actual = find_adv_est("gae_marft").fn(*given.values(), **options)
    rows = FORMULAS["gae_marft"](samples(given), options)
    for part in range(2):
        own = {
            (id(talk), key): [each[part] * talk.valid for each in row[key]]
            for talk, row in zip(made, found, strict=True)
            for key in row
        }
        wanted = column(0.0, lambda talk, key, t, own=own: own[id(talk), key][t])
        close(actual[part], wanted)
        close(torch.tensor([row[part] for row in rows], dtype=torch.float64), wanted)
    assert num_agents == 1 or not torch.equal(
        given["turn_order"], given["turn_order"].cummax(1).values
    )


def test_with_one_turn_an_episode_it_is_grpo() -> None:
    made = [
        Episode(each.group, each.turns[:1], each.gaps[:1], each.values[:1]) for each in episodes(1)
    ]
    # a group of one has nothing to compare with here
    given = columns([each for each in made if each.group != 2])
    mask = given["response_mask"]
    rewards = given["token_level_rewards"].nan_to_num(0.0)
    actual, _ = find_adv_est("grpo_turns").fn(
        rewards, mask, given["turn_index"], given["group_index"]
    )
    assert torch.equal(actual, find_adv_est("grpo").fn(rewards, mask, given["group_index"])[0])


def test_over_turns_without_turns_is_refused() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match="over_turns needs turns"):
        find_adv_est("gae").fn(ones, ones, ones, over_turns=True)
