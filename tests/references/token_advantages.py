"""Estimators that give each token, or each turn, its own advantage."""

import math
from collections.abc import Sequence

from tests.references.group_advantages import normalised, whitened_rows
from tests.references.samples import Advantages, Rows, Sample


def rewards_to_go(samples: Sequence[Sample], gamma: float) -> Rows:
    """Σ γ^k r_(t+k)."""
    rows = []
    for sample in samples:
        row = []
        for token in range(len(sample.rewards)):
            later = sample.rewards[token:]
            row.append(math.fsum(gamma**k * reward for k, reward in enumerate(later)))
        rows.append(row)

    return rows


def reinforce(samples: Sequence[Sample], gamma: float = 1.0) -> Advantages:
    """Williams 1992: the reward to go."""
    rows = rewards_to_go(samples, gamma)
    return rows, rows


def reinforce_plus_plus(samples: Sequence[Sample], gamma: float = 1.0) -> Advantages:
    """The reward to go, whitened over the batch (arXiv:2501.03262)."""
    rows = rewards_to_go(samples, gamma)
    return whitened_rows(rows), rows


def remax(samples: Sequence[Sample]) -> Advantages:
    """The reward to go minus the reward of a greedy response (arXiv:2310.10505)."""
    returns = rewards_to_go(samples, 1.0)
    rows = []
    for sample, row in zip(samples, returns, strict=True):
        rows.append([value - sample.baseline for value in row])
    return rows, returns


Steps = list[list[int]]
"""The tokens of each step of an episode, in the order of time."""


def gae_over(
    samples: Sequence[Sample],
    steps_of: Sequence[Steps],
    gamma: float,
    lam: float,
    bootstrap_truncated: bool,
    whiten: bool,
) -> Advantages:
    """A_t = Σ (γλ)^k δ_(t+k), δ_t = r_t + γ v_(t+1) − v_t (arXiv:1506.02438, equation 16). The
    reward of a step is the sum over its tokens, its value the one before its first token."""
    advantages = []
    returns = []
    for sample, steps in zip(samples, steps_of, strict=True):
        rewards = [math.fsum(sample.rewards[token] for token in step) for step in steps]
        values = [sample.values[step[0]] for step in steps]
        is_cut = bootstrap_truncated and sample.truncated and len(steps) > 0
        after_last = values[-1] if is_cut else 0.0

        deltas = []
        for number, reward in enumerate(rewards):
            is_last = number == len(steps) - 1
            following = after_last if is_last else values[number + 1]
            deltas.append(reward + gamma * following - values[number])

        row = [0.0] * len(sample.rewards)
        back = [0.0] * len(sample.rewards)
        for number, step in enumerate(steps):
            later = deltas[number:]
            advantage = math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(later))
            for token in step:
                row[token] = advantage
                back[token] = advantage + values[number]

        advantages.append(row)
        returns.append(back)

    return (whitened_rows(advantages) if whiten else advantages), returns


def gae(
    samples: Sequence[Sample],
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_truncated: bool = False,
    whiten: bool = True,
    over_turns: bool = False,
) -> Advantages:
    """Steps are tokens, or turns."""
    steps_of = []
    for sample in samples:
        if over_turns:
            steps_of.append([tokens_of(sample, turn) for turn in sorted({*sample.turns})])
        else:
            steps_of.append([[token] for token in range(len(sample.rewards))])

    return gae_over(samples, steps_of, gamma, lam, bootstrap_truncated, whiten)


def gae_marft(
    samples: Sequence[Sample],
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_truncated: bool = False,
    whiten: bool = True,
) -> Advantages:
    """Steps are the tokens of all agents in the order in which they spoke (arXiv:2504.16129)."""
    steps_of = []
    for sample in samples:
        in_time = sorted((order, token) for token, order in enumerate(sample.orders))
        steps_of.append([[token] for _, token in in_time])
    return gae_over(samples, steps_of, gamma, lam, bootstrap_truncated, whiten)


def tokens_of(sample: Sample, turn: int) -> list[int]:
    return [token for token, number in enumerate(sample.turns) if number == turn]


def grpo_turns(
    samples: Sequence[Sample],
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
    turn_discount: float = 1.0,
) -> Advantages:
    """GRPO's advantage of G_k = Σ_(j ≥ k) discount^(j − k) r_j among the turns k of the group's
    samples; 0 for a turn that no other sample has."""
    returns = []
    for sample in samples:
        own = {}
        for turn in sample.turns:
            own[turn] = math.fsum(
                turn_discount ** (later - turn) * reward
                for reward, later in zip(sample.rewards, sample.turns, strict=True)
                if later >= turn
            )

        returns.append(own)

    rows = []
    for sample, own in zip(samples, returns, strict=True):
        row = []
        for turn in sample.turns:
            peers = []
            for other, theirs in zip(samples, returns, strict=True):
                if other.group == sample.group and turn in theirs:
                    peers.append(theirs[turn])
            advantage = normalised(own[turn], peers, norm_adv_by_std_in_grpo, adv_epsilon)
            row.append(advantage if len(peers) > 1 else 0.0)

        rows.append(row)

    return rows, rows
