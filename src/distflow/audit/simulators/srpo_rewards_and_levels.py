"""Checks and formulas of policies that act: SRPO's rewards, by a second implementation,
`algorithm.logprob_level` and `reward_level`. Only runs that use them import it."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.audit.audited_step.policy_loss_formulas import Tokens
from distflow.audit.check import Sample, Wrong
from distflow.audit.recorded_step import RecordedStep, index_of
from distflow.audit.simulators.simulator_episodes import tokens_of_action
from distflow.config import Config
from distflow.config.keys.reward import SrpoConfig
from distflow.untrusted_files import load_image

_LIMIT = 1e-5
_CELLS = 8
_MOST = 4


def check_srpo(recorded: RecordedStep) -> None:
    """The rewards of the step's episodes, in float64, by loops over pairs, and their metrics.
    Raises Wrong."""
    samples = sorted(
        (each for each in recorded.samples if each["valid"]), key=lambda each: str(each["uid"])
    )
    for sample in recorded.some_samples(_MOST) if recorded.config.srpo.embedder == "pixels" else ():
        _check_embedding(sample)
    tasks = {_task(sample) for sample in samples}
    found = [
        _check_task(recorded.config.srpo, [s for s in samples if _task(s) == task])
        for task in tasks
    ]
    lost = [reward for rewards, _, _ in found for reward in rewards]
    wanted = {"reward_of_failures": math.fsum(lost) / max(len(lost), 1)}
    wanted["clusters"] = sum(clusters for _, clusters, _ in found) / max(len(found), 1)
    wanted["fallback_frac"] = sum(fallback for _, _, fallback in found) / max(len(found), 1)
    for name, value in wanted.items():
        recorded.run.compared.add(f"srpo/{name}")
        if abs((told := recorded.metrics.get(f"srpo/{name}", value)) - value) > _LIMIT:
            raise Wrong(
                f"the metric srpo/{name} is reported as {told:.6g}, but of the step's tasks it is "
                f"{value:.6g}"
            )


def _check_task(srpo: SrpoConfig, own: Sequence[Sample]) -> tuple[list[float], int, bool]:
    """The rewards of the failures at some distance to a success, the number of clusters, and
    whether there is none."""
    won = [each["embeddings"] for each in own if bool(each["success"])]
    lost = [each for each in own if not bool(each["success"])]
    centres, number = _centres(won, srpo.eps, srpo.min_samples)
    gaps = [
        min((math.dist(each["embeddings"], centre) for centre in centres), default=0.0)
        for each in lost
    ]
    span = max(gaps, default=0.0) - min(gaps, default=0.0)
    wanted = {str(each["uid"]): 1.0 for each in own if bool(each["success"])}
    distances = dict.fromkeys((str(each["uid"]) for each in own), -1.0)
    for each, gap in zip(lost, gaps, strict=True):
        place = 0.5 if span < 1e-6 else (gap - min(gaps)) / span
        wanted[str(each["uid"])] = (
            srpo.max / (1 + math.exp(-srpo.steepness * (0.5 - place))) if won else 0.0
        )
        distances[str(each["uid"])] = place if won else -1.0
    for each in own:
        reward = srpo.reward_coef * wanted[str(each["uid"])]
        total = math.fsum(each["token_level_rewards"].tolist())
        if not abs(reward - total) <= _LIMIT * max(1.0, abs(reward)):
            raise Wrong(
                f"SRPO gives sample {each['uid']} the reward {reward:.6g}, but it has {total:.6g}"
            )
        parts = {
            "distance": distances[str(each["uid"])],
            "clusters": number,
            "fallback": bool(won) and not number,
        }
        for name, value in parts.items():
            if abs((told := float(each["reward_parts"][f"srpo_{name}"])) - value) > _LIMIT:
                raise Wrong(
                    f"sample {each['uid']} reports the srpo_{name} {told:.6g}, but it is "
                    f"{value:.6g}"
                )
    shaped = [srpo.reward_coef * wanted[str(each["uid"])] for each in lost] if won else []
    return shaped, number, bool(won) and not number


def _check_embedding(sample: Sample) -> None:
    """The built-in embedding is the episode's last frame in at most 8 x 8 cells."""
    frames = sample["reward_extra"].get("frames")
    if not sample["valid"] or not frames:
        return
    last = np.asarray(load_image(frames[-1]), np.float64) / 255
    rows, columns = map(_edges, last.shape[:2])
    cells = []
    for a, b in pairwise(rows):
        for c, d in pairwise(columns):
            cells.append(last[a:b, c:d])
    wanted = []
    for cell in cells:
        for channel in range(3):
            wanted.append(float(cell[..., channel].sum()) / cell[..., channel].size)
    if len(wanted) != len(sample["embeddings"]) or math.dist(
        wanted, sample["embeddings"]
    ) > _LIMIT * len(wanted):
        raise Wrong(
            f"the embedding of sample {sample['uid']} is not that of its last frame {frames[-1]}"
        )


def _edges(size: int) -> list[int]:
    number = min(size, _CELLS)
    return [place * (size // number) + min(place, size % number) for place in range(number + 1)]


def _task(sample: Sample) -> tuple[str, str]:
    return str(sample["domain"]), str(sample["reward_extra"].get("instruction", ""))


def _centres(
    won: Sequence[Sequence[float]], eps: float, min_samples: int
) -> tuple[list[list[float]], int]:
    """The mean of each cluster of core points and their neighbours, and the number of clusters; the
    mean of all points if there is no core point."""
    if not won:
        return [], 0
    columns = list(zip(*won, strict=True))
    means = [math.fsum(column) / len(won) for column in columns]
    spreads = [
        math.sqrt(math.fsum((x - m) ** 2 for x in c) / len(won))
        for c, m in zip(columns, means, strict=True)
    ]
    scaled = [
        [x / (s if s > 1e-15 * 10 else 1.0) for x, s in zip(each, spreads, strict=True)]
        for each in won
    ]
    near = [
        [j for j, other in enumerate(scaled) if math.dist(each, other) <= eps] for each in scaled
    ]
    cores = [i for i, own in enumerate(near) if len(own) >= min_samples]
    cluster = {core: core for core in cores}  # by its first core point
    for _ in cores:
        for core in cores:
            cluster[core] = min(cluster[other] for other in near[core] if other in cluster)
    members: dict[int, list[int]] = {}
    for point, own in enumerate(near):
        names = (
            [cluster[point]]
            if point in cluster
            else [cluster[other] for other in own if other in cluster]
        )
        if names:
            members.setdefault(min(names), []).append(point)
    groups = [*members.values()] or [list(range(len(won)))]
    centres = [
        [math.fsum(won[i][k] for i in group) / len(group) for k in range(len(won[0]))]
        for group in groups
    ]
    return centres, len(members)


def dim_of(config: Config, level: str) -> int:
    """Tokens of an action, or 0 for whole chunks."""
    options: Any = config.actor_rollout_ref.rollout.workflow_kwargs["actions"]
    return tokens_of_action(options) if level == "action" else 0


def by_unit(tokens: Tokens, units: Tensor) -> Tokens:
    """Units in place of tokens: the sum of their log-probs, and the mean of their advantages."""
    size = torch.bincount(units).double()

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(len(size), dtype=torch.float64).index_add(0, units, values)

    columns = {"advantages": summed(tokens.advantages) / size}
    if "old_log_probs" in tokens.columns:
        columns["old_log_probs"] = summed(tokens.old)
    return Tokens(
        summed(tokens.now),
        columns,
        tokens.sample.new_zeros(len(size)).scatter(0, units, tokens.sample),
    )


def rewards_of_steps(recorded: RecordedStep, sample: Sample, total: float) -> list[float] | None:
    """The score of each token by what the simulator returned for each env step: on the last token
    of its action, or of its chunk; the rest on the policy's last token. None if the episode's
    events are not known."""
    record = recorded.record_of(sample)
    events: Sequence[tuple[Any, ...]] = (
        record.events.get(index_of(sample), ()) if record is not None else ()
    )
    results = [event[3] for event in events if event[:2] == ("called", "act")]
    turns = sample["turn_index"].tolist()
    placed = [0.0] * len(sample["response_ids"])
    if not results or sample["reward_errors"] is not None:
        return None
    dim = dim_of(recorded.config, recorded.config.algorithm.reward_level)
    has_won = False
    counts_returns = (
        recorded.config.actor_rollout_ref.rollout.workflow_kwargs.get("score") == "return"
    )
    for number, result in enumerate(results):
        own = [place for place, turn in enumerate(turns) if turn == number]
        for step, (reward, won) in enumerate(
            zip(result["rewards"], result["success"], strict=True)
        ):
            part = reward if counts_returns else float(won and not has_won)
            placed[own[dim * step + dim - 1] if dim else own[-1]] += part
            has_won = has_won or won
    placed[max(place for place, turn in enumerate(turns) if turn >= 0)] += total - math.fsum(placed)
    return placed
