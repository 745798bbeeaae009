"""Check: advantages and returns follow the estimator's formula for the rewards of their own group.

The formulas are reimplemented here by brute force: one sample after another, in float64.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from distflow.algorithms.registry import find_adv_est
from distflow.audit.audited_step.groups_responses_and_masks import functions_of, in_baselines
from distflow.audit.audited_step.normalization_formulas import (
    above_mean,
    finished_advantages,
    mean,
    std,
    whitened,
    whitening,
)
from distflow.audit.check import (
    NOT_APPLICABLE,
    Sample,
    Wrong,
    check,
    check_close,
    doubles,
    is_builtin,
)
from distflow.audit.recorded_step import RecordedStep, by_group_of, conversations_of
from distflow.config.keys.algorithm import AlgorithmConfig, is_on
from distflow.config.keys.reward import scoring_models
from distflow.data.batch import repeated
from distflow.graph import NodeRole

Rows = list[tuple[list[float], list[float]]]
"""(advantages, returns) of each sample's tokens."""
Options = Mapping[str, Any]
Formula = Callable[[Sequence[Sample], Options], Rows]
SampleValue = Callable[[Sample, list[Sample], Options], float]

LIMIT = 1e-3
MOST_TOKENS = 2**20
FIRST_MOMENT = 1e-3
LEAST_VARIANCE = 1e-6
"""The largest mean of whitened values; the variance before whitening from which it is 1
afterwards."""


@check(
    "advantages",
    "advantages and returns follow the estimator's formula, recomputed in float64 from the rewards "
    "of each sample's "
    "own group",
    needs="a built-in estimator, or one that was registered with a formula",
    limit=f"{LIMIT:g} relative",
)
def audit_advantages(recorded: RecordedStep) -> str | None:
    # other ranks have them then
    if not recorded.is_written("advantages") or not recorded.run.resources.trained():
        return NOT_APPLICABLE
    recorded = recorded.everyone
    registered = [
        find_adv_est(settings.adv_estimator) for _, settings, _ in recorded.by_algorithm()
    ]
    if not recorded.is_ours(
        "advantages", [estimator.fn for estimator in registered if estimator.formula]
    ):
        nodes = (
            node for node in recorded.run.pipeline.nodes if "advantages" in node.contract.writes
        )
        if own := [
            n.node_id
            for n in nodes
            if n.node_role is not NodeRole.ADVANTAGE and not is_builtin(n.fn)
        ]:
            return f"the user's node '{own[0]}' writes advantages"
        return (
            "the estimator is the user's and has no formula: register_adv_est(NAME, formula=...) "
            "accepts a second "
            "implementation, (samples, options) -> [(advantages, returns) of each]"
        )
    if sum(len(sample["response_ids"]) for sample in recorded.samples) > MOST_TOKENS:
        return f"the step has more than {MOST_TOKENS:,} tokens"
    if any(
        update.metrics.get("skipped") and not update.metrics.get("empty")
        for update in recorded.updates
    ):
        return "an update of the step was skipped: something in it is not finite"
    why_not = [
        why
        for domain, settings, samples in recorded.by_algorithm()
        if samples and (why := _check_samples(recorded, domain, settings, samples))
    ]
    return why_not[0] if why_not else None


def _check_samples(
    recorded: RecordedStep, domain: str, settings: AlgorithmConfig, samples: list[Sample]
) -> str | None:
    name, estimator = settings.adv_estimator, find_adv_est(settings.adv_estimator)
    if not recorded.is_whole and (needing := over_step(settings)):
        return (
            f"{needing[0]} needs all samples of the step, which are too many to send to all ranks"
        )
    engines = {
        name: model.weight for name, model in scoring_models(recorded.config.reward_model).items()
    }
    weights = {
        "weight_of": lambda sample, part: (engines | functions_of(recorded, sample)).get(part, 1.0)
    }
    options = {"f_norm": 1.0, "whiten": not is_on(settings.adv_norm), **vars(settings)}
    options |= {**settings.adv_estimator_kwargs, **weights}
    formula = estimator.formula or FORMULAS[name]
    if settings.agent_rewards != "shared":
        agents = [*recorded.config.actor_rollout_ref.rollout.agents]
        formula = _by_agent(formula, agents, settings.agent_rewards == "margin")
    samples = in_baselines(recorded, settings, samples)
    found = formula(samples, options)
    counts = [_tokens(sample) for sample in samples]
    advantages = finished_advantages([row for row, _ in found], counts, samples, settings)
    _check_clipped(recorded, domain, settings, samples, [row for row, _ in found])

    def reason(sample: Sample) -> str:
        return f": '{name}' gives this for the rewards of its own group ({sample['group_index']})"

    check_close(samples, "advantages", advantages, LIMIT, reason)
    check_close(samples, "returns", [row for _, row in found], LIMIT, reason)
    return None


def over_step(settings: AlgorithmConfig) -> list[str]:
    """What compares samples of all groups of a step."""
    name = settings.adv_estimator
    estimator = find_adv_est(settings.adv_estimator)
    found = {
        f"'{name}'": name in GLOBAL
        or (estimator.formula is not None and estimator.scope == "global"),
        "scale_rewards=batch": settings.scale_rewards == "batch",
        "adv_norm": "batch" in (settings.adv_norm.mean_level, settings.adv_norm.std_level),
        "difficulty_weight and length_weight": settings.difficulty_weight or settings.length_weight,
    }
    return [what for what, is_on in found.items() if is_on]


def _check_clipped(
    recorded: RecordedStep,
    domain: str,
    settings: AlgorithmConfig,
    samples: Sequence[Sample],
    rows: list[list[float]],
) -> None:
    """Check the reported share of the policy's tokens whose advantage was clipped."""
    bound = settings.advantage_clip
    name = "advantage_clip/clipped" + (f"/{domain}" if domain else "")
    if bound is None or not recorded.is_whole or recorded.partial:
        return
    counts = [[m > 0 for m in sample["response_mask"].tolist()] for sample in samples]
    plain = replace(settings, advantage_clip=None, difficulty_weight=None, length_weight=None)
    before = finished_advantages(rows, [_tokens(sample) for sample in samples], samples, plain)
    values = []
    for row, own in zip(before, counts, strict=True):
        for v, c in zip(row, own, strict=True):
            if c:
                values.append(abs(v))
    expected = sum(value > bound for value in values) / max(len(values), 1)
    recorded.run.compared.add(name)
    found = recorded.metrics.get(name, expected)
    if abs(found - expected) > LIMIT and not any(abs(value - bound) <= LIMIT for value in values):
        raise Wrong(
            f"the metric {name} is reported as {found:.6g}, but of the step's advantages it is "
            f"{expected:.6g}"
        )


def audit_moments(recorded: RecordedStep) -> str | None:
    """Advantages that are whitened or normalised over the step have mean 0 and variance 1 over the
    tokens of all ranks, or a lower variance if it is unknown whether there was less to whiten."""
    settings = recorded.config.algorithm
    batch = recorded.batch
    name = settings.adv_estimator
    norm = settings.adv_norm
    kwargs = settings.adv_estimator_kwargs
    whitens = (
        name in GLOBAL
        and name != "gpg"
        and kwargs.get("whiten", True)
        and "samples" not in kwargs.values()
    )
    centres = norm.mean_level == "batch" and not norm.mean_leave1out if is_on(norm) else whitens
    changed = settings.domains or settings.advantage_clip is not None or settings.mask_type == "all"
    weighs = settings.difficulty_weight is not None or settings.length_weight is not None
    if not centres or changed or weighs or not recorded.is_ours("advantages"):
        return NOT_APPLICABLE
    sums = dict.fromkeys(("count", "sum", "squares", "before", "squares before"), 0.0)
    # a rank may have no sample, or train another model
    if "advantages" in batch and "returns" in batch:
        counted = (batch.flat("response_mask") > 0) & repeated(
            batch["valid"].bool(), batch.lengths("response")
        )
        values = doubles(batch.flat("advantages"))[counted]
        before = torch.zeros(1).double()
        if name == "reinforce_plus_plus" or (name in ("gae", "gae_marft") and "values" in batch):
            before = doubles(
                batch.flat("returns") - (batch.flat("values") if name.startswith("gae") else 0.0)
            )[counted]
        moments = [
            float(part) for each in (values, before) for part in (each.sum(), each.square().sum())
        ]
        sums = dict(zip(sums, (float(len(values)), *moments), strict=True))
    count, total, squares, of_before, squares_before = recorded.run.ranks.sum(sums).values()
    if count < 2:
        return None
    middle = total / count
    freedom = count - 1
    variance, less = (
        (square - part**2 / count) / freedom
        for square, part in ((squares, total), (squares_before, of_before))
    )
    scales = norm.std_level == "batch" if is_on(norm) else whitens
    if abs(middle) > FIRST_MOMENT or (
        scales and (variance > 1.01 or (variance < 0.99 and less > LEAST_VARIANCE))
    ):
        raise Wrong(
            f"the advantages of '{name}' are whitened or normalised over the step, but have the "
            f"mean {middle:.4g} and "
            f"the variance {variance:.4g} over its {count:.0f} tokens: by the mean or deviation of "
            "some of them, or of "
            "other steps"
        )
    return None


def _tokens(sample: Sample) -> list[bool]:
    """Which tokens count: the policy's, if the sample has a score."""
    return [bool(sample["valid"]) and m > 0 for m in sample["response_mask"].tolist()]


def _score(sample: Sample) -> float:
    return math.fsum(sample["token_level_rewards"].tolist())


def _groups(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    return by_group_of(sample for sample in samples if sample["valid"])


def _on_samples(samples: Sequence[Sample], value: Callable[[Sample, list[Sample]], float]) -> Rows:
    """One value per sample, on each of its tokens; returns are the same."""
    groups = _groups(samples)
    rows = list[list[float]]()
    for sample in samples:
        number = value(sample, groups[int(sample["group_index"])]) if sample["valid"] else 0.0
        rows.append([number if counted else 0.0 for counted in _tokens(sample)])
    return [(row, row) for row in rows]


def _to_go(sample: Sample, gamma: float) -> list[float]:
    """Rewards to go; tokens that do not count pass the running sum on."""
    running = 0.0
    out = []
    for reward, counted in zip(
        reversed(sample["token_level_rewards"].tolist()), reversed(_tokens(sample)), strict=True
    ):
        running = reward + gamma * running if counted else running
        out.append(running if counted else 0.0)
    return out[::-1]


def _whitened(formula: Formula, returns_too: bool = False) -> Formula:
    """The estimator whose advantages are those of `formula`, whitened over all tokens that
    count."""

    def apply(samples: Sequence[Sample], options: Options) -> Rows:
        found = formula(samples, options)
        rows = [row for row, _ in found]
        if options.get("whiten", True):
            rows = whitened(rows, [_tokens(sample) for sample in samples])
        return list(zip(rows, rows if returns_too else [row for _, row in found], strict=True))

    return apply


def _by_agent(formula: Formula, agents: Sequence[str], is_margin: bool) -> Formula:
    """The estimator over the tokens of each agent of an episode, with the agent's rewards, compared
    with the same agent's in the group's other episodes."""

    def apply(samples: Sequence[Sample], options: Options) -> Rows:
        out: Rows = [
            ([0.0] * len(s["response_mask"]), [0.0] * len(s["response_mask"])) for s in samples
        ]
        rows = list[Sample]()
        places = list[tuple[int, list[int]]]()
        for number, sample in enumerate(samples):
            said = {agent: list[int]() for agent in agents}
            for talk in conversations_of(sample):
                agent = talk.name.split(".")[0]
                drawn = range(max(talk.first, 0), talk.first + len(talk.ids))
                said[agent if agent in said else agents[0]] += [
                    t for t in drawn if sample["response_mask"][t] > 0
                ]
            rewards = {
                agent: sample["token_level_rewards"][own].tolist()
                for agent, own in said.items()
                if own
            }
            for agent, own in said.items():
                mask = torch.zeros_like(sample["response_mask"])
                reward = torch.zeros(len(out[number][0])).double()
                mask[own] = 1.0
                reward[own] = torch.tensor(rewards.get(agent, [])).double()
                others = [math.fsum(theirs) for other, theirs in rewards.items() if other != agent]
                if own and others and is_margin:
                    reward[max(own)] -= mean(others)
                group = int(sample["group_index"]) * len(agents) + agents.index(agent)
                changed = {
                    "response_mask": mask,
                    "token_level_rewards": reward,
                    "group_index": torch.tensor(group),
                }
                rows.append({**sample, **changed, "valid": sample["valid"] and bool(own)})
                places.append((number, own))
        for (number, own), row in zip(places, formula(rows, options), strict=True):
            for mine, values in zip(out[number], row, strict=True):
                for place in own:
                    mine[place] = values[place]
        return out

    return apply


def _grpo(samples: Sequence[Sample], options: Options) -> Rows:
    return _on_samples(samples, _grpo_value(samples, options, _score))


def _grpo_value(
    samples: Sequence[Sample], options: Options, score: Callable[[Sample], float]
) -> Callable[[Sample, list[Sample]], float]:
    """GRPO's advantage of a sample within its group, for these scores."""
    scale = options["scale_rewards"] or ("group" if options["norm_adv_by_std_in_grpo"] else "none")
    # each is in the groups of several
    known = {id(sample): score(sample) for sample in samples if sample["valid"]}
    epsilon, of_batch = options["adv_epsilon"], std([*known.values()])

    def value(sample: Sample, group: list[Sample]) -> float:
        own = known[id(sample)]
        scores = [known[id(other)] for other in group]
        if len(group) == 1:
            return {"group": own / (1.0 + epsilon), "batch": 0.0, "none": own}[scale]
        if max(scores) == min(scores):
            return 0.0
        deviation = {"group": std(scores) + epsilon, "batch": of_batch + epsilon, "none": 1.0}[
            scale
        ]
        return above_mean(own, scores) / deviation

    return value


def _gdpo(samples: Sequence[Sample], options: Options) -> Rows:
    """Each part of the reward by GRPO's rule, then weighted, summed, and whitened."""
    names = sorted({name for sample in samples for name in sample["reward_parts"]})
    by_group = {**options, "scale_rewards": None}

    def part(name: str) -> Callable[[Sample], float]:
        return lambda sample: float(sample["reward_parts"].get(name, 0.0))

    values = {name: _grpo_value(samples, by_group, part(name)) for name in names}

    def summed(sample: Sample, group: list[Sample]) -> float:
        total = 0.0
        for name in (name for name in names if name in sample["reward_parts"]):
            having = [other for other in group if name in other["reward_parts"]]
            total += options["weight_of"](sample, name) * values[name](sample, having)
        return total

    if options.get("whiten_over", "tokens") == "tokens":
        return _whitened(lambda samples, _: _on_samples(samples, summed), returns_too=True)(
            samples, options
        )
    groups = _groups(samples)
    sums = [summed(s, groups[int(s["group_index"])]) for s in samples if s["valid"]]
    middle, scale = mean(sums), whitening(sums)
    return _on_samples(samples, lambda sample, group: (summed(sample, group) - middle) * scale)


def _by_sample(value: SampleValue) -> Formula:
    """The estimator that gives all tokens of a sample one value, from its group's scored
    samples."""
    return lambda samples, options: _on_samples(
        samples, lambda sample, group: value(sample, group, options)
    )


def _rloo(sample: Sample, group: list[Sample], options: Options) -> float:
    others = [_score(other) for other in group if other is not sample]
    return above_mean(_score(sample), others) if others else 0.0


def _opo(sample: Sample, group: list[Sample], options: Options) -> float:
    if len(group) == 1:
        return _score(sample)
    own = _score(sample)
    lengths = [sum(m > 0 for m in other["response_mask"].tolist()) for other in group]
    if not sum(lengths):
        return own
    return math.fsum(
        n * (own - _score(other)) for n, other in zip(lengths, group, strict=True)
    ) / sum(lengths)


def _passk(sample: Sample, group: list[Sample], options: Options) -> float:
    scores = sorted((_score(other) for other in group), reverse=True)
    if len(scores) < 2 or scores[0] == scores[1] or _score(sample) != scores[0]:
        return 0.0
    scale = std(scores) + options["adv_epsilon"] if options["norm_adv_by_std_in_grpo"] else 1.0
    return (scores[0] - scores[1]) / scale


def _centred(sample: Sample, group: list[Sample], options: Options) -> float:
    """The score minus the group's mean; the score itself for a single sample."""
    return (
        above_mean(_score(sample), [_score(other) for other in group])
        if len(group) > 1
        else _score(sample)
    )


def _gpg(samples: Sequence[Sample], options: Options) -> Rows:
    scored = [sample for sample in samples if sample["valid"]]
    groups = _groups(samples)

    def counts(sample: Sample) -> bool:
        """Whether the sample has a reward, or its group has more than one."""
        if options.get("alpha_counts", "groups") == "rewards":
            return _score(sample) != 0
        scores = [_score(other) for other in groups[int(sample["group_index"])]]
        return max(scores) != min(scores) or (len(scores) == 1 and scores[0] != 0)

    alpha = len(scored) / max(sum(counts(sample) for sample in scored), 1)
    return _on_samples(
        samples, lambda sample, group: alpha * _centred(sample, group, options) / options["f_norm"]
    )


def _reinforce(samples: Sequence[Sample], options: Options) -> Rows:
    return [(row, row) for row in (_to_go(sample, options["gamma"]) for sample in samples)]


def _turns(sample: Sample) -> list[list[int]]:
    """The positions of the tokens of each turn that counts."""
    turns: dict[int, list[int]] = {}
    for place, (turn, counted) in enumerate(
        zip(sample["turn_index"].tolist(), _tokens(sample), strict=True)
    ):
        if counted:
            turns.setdefault(turn, []).append(place)
    return [turns[turn] for turn in sorted(turns)]


def _grpo_turns(samples: Sequence[Sample], options: Options) -> Rows:
    """The value of each turn by GRPO's rule among the group's turns with the same number."""
    discount = options.get("turn_discount", 1.0)
    rows = list[list[float]]()
    returns = list[list[float]]()
    for sample in samples:
        rewards = [
            math.fsum(sample["token_level_rewards"][places].tolist()) for places in _turns(sample)
        ]
        returns.append(
            [
                math.fsum(r * discount**n for n, r in enumerate(rewards[turn:]))
                for turn in range(len(rewards))
            ]
        )
    for sample, own in zip(samples, returns, strict=True):
        row = [0.0] * len(sample["response_mask"])
        for turn, places in enumerate(_turns(sample)):
            peers = [
                theirs[turn]
                for other, theirs in zip(samples, returns, strict=True)
                if int(other["group_index"]) == int(sample["group_index"]) and len(theirs) > turn
            ]
            scale = (
                std(peers) + options["adv_epsilon"] if options["norm_adv_by_std_in_grpo"] else 1.0
            )
            value = above_mean(own[turn], peers) / scale if max(peers) > min(peers) else 0.0
            for place in places:
                row[place] = value
        rows.append(row)
    return [(row, row) for row in rows]


def _remax(samples: Sequence[Sample], options: Options) -> Rows:
    rows = []
    for sample in samples:
        returns = _to_go(sample, 1.0)
        baseline = float(sample["reward_baselines"])
        rows.append(
            (
                [r - baseline if c else 0.0 for r, c in zip(returns, _tokens(sample), strict=True)],
                returns,
            )
        )
    return rows


def _gae(samples: Sequence[Sample], options: Options, by_agents: bool = False) -> Rows:
    """by_agents: over the tokens in the order of the turns of all agents."""
    gamma = options["gamma"]
    lam = options["lam"]
    rows = []
    for sample in samples:
        rewards = sample["token_level_rewards"].tolist()
        values = sample["values"].tolist()
        counted = _tokens(sample)
        groups = (
            _turns(sample)
            if options.get("over_turns")
            else [[t] for t, c in enumerate(counted) if c]
        )
        groups.sort(key=lambda own: int(sample["turn_order"][own[0]]) if by_agents else 0)
        places = [group[0] for group in groups]
        tokens_of = {group[0]: group for group in groups}
        cut_off = options["bootstrap_truncated"] and bool(sample["truncated"])
        following = values[places[-1]] if places and cut_off else 0.0
        running = 0.0
        row = [0.0] * len(counted)
        back = [0.0] * len(counted)
        for t in reversed(places):
            earned = math.fsum(rewards[token] for token in tokens_of[t])
            running = earned + gamma * following - values[t] + gamma * lam * running
            following = values[t]
            for token in tokens_of[t]:
                row[token] = running
                back[token] = running + values[t]
        rows.append((row, back))
    return rows


FORMULAS: dict[str, Formula] = {
    "grpo": _grpo,
    "gdpo": _gdpo,
    "gspo": _grpo,
    "cpgd": _grpo,
    "rloo": _by_sample(_rloo),
    "opo": _by_sample(_opo),
    "grpo_passk": _by_sample(_passk),
    "grpo_turns": _grpo_turns,
    "gpg": _gpg,
    "reinforce": _reinforce,
    "remax": _remax,
    "reinforce_plus_plus": _whitened(_reinforce),
    "reinforce_plus_plus_baseline": _whitened(_by_sample(_centred), returns_too=True),
    "gae": _whitened(_gae),
    "gae_marft": _whitened(partial(_gae, by_agents=True)),
}
GLOBAL = ("gpg", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "gae_marft")
"""Estimators that need the whole step, on all ranks."""
