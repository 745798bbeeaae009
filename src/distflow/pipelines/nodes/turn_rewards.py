"""Where an episode's score lies: each turn has what it earned, and the last one the rest."""

import math
from collections.abc import Mapping, Sequence

import torch

from distflow.data.batch import Written
from distflow.data.sample import Sample, Segment
from distflow.rewards.reward_results import Score
from distflow.rewards.router import RewardOutcome

TURN_FIELDS = ("token_level_scores", "turn_index", "turn_order")


def place_on_turns(samples: Sequence[Sample], scores: Sequence[float]) -> Mapping[str, Written]:
    """The columns `TURN_FIELDS` of a group's episodes: for each response token its reward, the
    number of its turn in the sample, and that turn's place in time; -1 if it has none."""
    earned = [_earned(sample) for sample in samples]
    unit = reward_unit(earned, scores)
    tokens = list[tuple[float, int, int]]()
    for sample, score, own in zip(samples, scores, earned, strict=True):
        tokens += _by_token(sample, score, own, unit)
    columns = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 3).T.contiguous()
    return dict(zip(TURN_FIELDS, columns, strict=True))


def _earned(sample: Sample) -> list[float]:
    """The reward of each turn, in the order of the sample; 0 if the episode has no score."""
    outcome = sample.outcome
    if isinstance(outcome, RewardOutcome) and isinstance(outcome.reward_result, Score):
        return [turn.reward for turn in _turns(sample)]
    return [0.0 for _ in _turns(sample)]


def _turns(sample: Sample) -> list[Segment]:
    turns = list[Segment]()
    for segment in sample.response_segments:
        if segment.owner == "policy" and segment.token_ids:
            turns.append(segment)
    return turns


def reward_unit(earned: Sequence[Sequence[float]], scores: Sequence[float]) -> float:
    """The unit of which a group's turn rewards are multiples, so that float64 represents them and
    their sums exactly and equal scores stay equal. 0 if no turn has a reward."""
    sizes = [math.fsum(map(abs, own)) for own in earned]
    if not any(sizes):
        return 0.0
    largest = max(size + abs(score) for size, score in zip(sizes, scores, strict=True))
    return math.ldexp(1.0, math.frexp(largest)[1] - 52)


def _by_token(
    sample: Sample, score: float, earned: Sequence[float], unit: float
) -> list[tuple[float, int, int]]:
    """A turn's reward is on its last token, and the rest of the score on that of the last turn in
    time. unit: see `reward_unit`."""
    rewards = list(earned)
    if unit:
        score = round(score / unit) * unit
        rewards = [round(reward / unit) * unit for reward in earned]

    if rewards:
        rewards[sample.last_turn] += score - math.fsum(rewards)
    turns = _turns(sample)
    in_time = sorted(range(len(turns)), key=lambda number: turns[number].turn)
    places = {number: place for place, number in enumerate(in_time)}

    tokens = list[tuple[float, int, int]]()
    turn = 0
    for segment in sample.response_segments:
        length = len(segment.token_ids)
        if segment.owner != "policy":
            tokens += [(0.0, -1, -1)] * length
        elif length:
            tokens += [(0.0, turn, places[turn])] * (length - 1)
            tokens.append((rewards[turn], turn, places[turn]))
            turn += 1

    return tokens
