"""The reward router: scores a sample by the weighted reward functions of its domain."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal
from functools import partial
from typing import NamedTuple

from distflow.config.keys.reward import RewardPart
from distflow.data.messages import prompt_of
from distflow.data.sample import Sample
from distflow.errors import UserError
from distflow.observe.crash_safe_files import JSON
from distflow.rewards.foreign_signatures import DOES_NOT_APPLY
from distflow.rewards.function_calls import CONVERSATION, PROMPT, call_arguments
from distflow.rewards.pool import domain_pools
from distflow.rewards.reward_results import (
    CUT,
    CallCounts,
    Error,
    RewardCounts,
    RewardResult,
    Score,
    Timeout,
    accuracy,
    in_episode,
    texts_of,
    with_value,
)

OVERLONG = "overlong"
_DECIMAL = Context(prec=100)
KINDS = ("calls", "errors", "timeouts")
"""Counts of all calls, as `reward/KIND`."""

TAKEN = {
    "all": "val_correct/all/mean is over all domains",
    "cut": "reward/cut/PART counts inputs that were cut",
    "errors": "reward/errors/PART counts errors of a part",
    "timeouts": "reward/timeouts/PART counts timeouts of a part",
}
"""Names that a domain may not have, and why."""


class Overlong(NamedTuple):
    """DAPO's penalty, which grows over the last tokens before the length limit."""

    buffer_tokens: int = 0
    """The number of these tokens; 0 is off."""
    factor: float = 1.0
    """The penalty at the limit."""

    def penalty(self, length: int, limit: int) -> float:
        """The penalty for a response's number of tokens, from 0 down to −factor (arXiv:2503.14476,
        eq. 13).

        Raises ValueError if the buffer exceeds the limit.
        """
        if not 0 <= self.buffer_tokens <= limit:
            raise ValueError(
                f"the overlong buffer of {self.buffer_tokens} tokens must be in 0..{limit}"
            )
        if self.buffer_tokens == 0:
            return 0.0

        excess = (length - (limit - self.buffer_tokens)) / self.buffer_tokens

        return -min(max(excess, 0.0), 1.0) * self.factor


@dataclass(frozen=True)
class RewardOutcome:
    """The result for a sample."""

    reward_result: RewardResult
    """The weighted sum of the parts."""
    parts: dict[str, RewardResult] = field(default_factory=dict)
    """The unweighted results by name."""
    accuracy: float = 0.0
    """1 is correct, whatever the score (see `reward_results.accuracy`); 0 if there is no score."""

    @property
    def score(self) -> float | None:
        """None if there is a reward error instead."""
        if not isinstance(self.reward_result, Score):
            return None
        return self.reward_result.value

    def scores(self) -> dict[str, float]:
        """Scores of the parts that have one, and apply to the response."""
        return {name: part.value for name, part in _applicable(self.parts).items()}

    def discounted(self, factor: float) -> "RewardOutcome":
        """The outcome with this factor on the score; accuracy and parts are unchanged."""
        result = self.reward_result
        if not isinstance(result, Score):
            return self
        return replace(self, reward_result=replace(result, value=result.value * factor))

    def remarks(self) -> dict[str, JSON]:
        """Further values of the parts that have a score, as PART/KEY."""
        return _remarks(self.parts)


class RewardRouter(AbstractContextManager["RewardRouter"]):
    """Scores samples by the functions of their domain, in processes that can be killed."""

    def __init__(
        self,
        settings: domain_pools.RewardSettings,
        max_response_length: int,
        response_limits: Mapping[str, int] | None = None,
        overlong: Overlong = Overlong(),  # noqa: B008  immutable
    ) -> None:
        """max_response_length: in tokens, for the overlong penalty; response_limits: of domains
        that differ.

        Starts a worker process for each domain. Raises UserError if a function is unknown or cannot
        be loaded.
        """
        functions = settings.functions
        if not functions or not all(functions.values()):
            raise UserError(
                "reward.functions is empty; write e.g. reward.functions={default: [math]}"
            )

        self._functions = functions
        self._overlong = overlong
        self._max_response_length = max_response_length
        self._response_limits = dict(response_limits or {})
        self.call_counts = CallCounts()

        # Whether an earlier process of the run had scores, so that no function is given up for
        # hanging.
        self.has_scored = False
        self.pools = domain_pools.Pools(settings)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.pools.close()

    def functions_of(self, domain: str) -> Sequence[RewardPart]:
        """The domain's functions. Raises UserError if it has none."""
        return domain_pools.functions_of(self._functions, domain)

    async def __call__(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """Score samples, in order; this is the parameter `reward_fn` of a node.

        Raises UserError for a domain without a reward function.
        """
        by_function: dict[tuple[str, str], list[int]] = {}  # the indices of its samples
        for i, sample in enumerate(samples):
            for part in self.functions_of(sample.domain):
                by_function.setdefault((sample.domain, part.name), []).append(i)

        asked = list[Awaitable[list[RewardResult]]]()
        for (domain, name), indices in by_function.items():
            asked.append(self._ask(domain, name, [samples[i] for i in indices]))
        answered = await asyncio.gather(*asked)

        parts: list[dict[str, RewardResult]] = [{} for _ in samples]
        for ((_, name), indices), results in zip(by_function.items(), answered, strict=True):
            for i, result in zip(indices, results, strict=True):
                parts[i][name] = result

        outcomes = list[RewardOutcome]()
        all_counts = list[RewardCounts]()
        for sample, of_sample in zip(samples, parts, strict=True):
            outcome, counts = self._outcome(sample, of_sample)
            outcomes.append(outcome)
            all_counts.append(counts)

        self.call_counts.add(RewardCounts.joined(all_counts))
        return outcomes

    async def _ask(self, domain: str, name: str, samples: Sequence[Sample]) -> list[RewardResult]:
        """Results of one function for samples of the domain; failed calls are retried according to
        its `Patience`."""
        pool = self.pools.of(domain, name)
        patience = self.pools.patience(domain)
        takes_conversation = name in pool.takes_conversations
        asked = [_arguments(sample, takes_conversation) for sample in samples]
        score = partial(
            pool.score_group,
            name,
            timeout_s=patience.timeout_s,
            give_up_after=0 if self.has_scored else patience.give_up_after,
            on_repeat=lambda number: self._add({"reward/retried_calls": number}),
        )

        results = await score(asked)
        for attempt in range(patience.retries):
            failed = [i for i, result in enumerate(results) if not isinstance(result, Score)]
            if not failed or pool.closed:
                break

            self._add({"reward/retries": len(failed)})
            await asyncio.sleep(patience.backoff_s * 2**attempt)

            if name in pool.takes_batches:  # the function scores them together
                again = await score(asked)
                num_scored = sum(isinstance(each, Score) for each in again)
                if num_scored > len(asked) - len(failed):
                    results = again
                continue

            again = await score([asked[i] for i in failed])
            for i, result in zip(failed, again, strict=True):
                results[i] = result

        return results

    def _outcome(
        self, sample: Sample, parts: dict[str, RewardResult]
    ) -> tuple[RewardOutcome, RewardCounts]:
        """The weighted sum of the parts and the overlong penalty. If a part has no score, the
        sample has none."""
        weights = {part.name: part.weight for part in self.functions_of(sample.domain)}
        right = 0.0
        applicable = _applicable(parts)
        if applicable and all(isinstance(part, Score) for part in parts.values()):
            right = accuracy(applicable, weights)

        if self._overlong.buffer_tokens > 0:
            longest = self._response_limits.get(sample.domain, self._max_response_length)
            penalty = self._overlong.penalty(sample.longest_response, longest)
            parts[OVERLONG] = Score(penalty)
            weights[OVERLONG] = 1.0

        result = _combine(parts, weights)
        outcome = RewardOutcome(result, parts, right)

        as_text = dict[str, JSON]()
        for name, part in parts.items():
            if isinstance(part, Score):
                as_text |= {f"{name}/{key}": kind for key, kind in texts_of(part.extra).items()}

        counts = RewardCounts(counts=_counts(parts, sample.domain), as_text=as_text)
        if in_episode.get():
            return outcome, counts

        counts = counts._replace(asked=1)
        if not isinstance(result, Score):
            counts = counts._replace(failed=1, first=f"{result} (domain '{sample.domain}')")
        return outcome, counts

    def _add(self, counts: Mapping[str, float]) -> None:
        self.call_counts.add(RewardCounts(counts=counts))


def _arguments(sample: Sample, takes_conversation: bool) -> dict[str, object]:
    """The arguments of a call for the sample."""
    arguments: dict[str, object] = {PROMPT: prompt_of(sample.prompt, sample.extra_info)}
    arguments |= call_arguments(
        sample.domain, sample.response, sample.ground_truth, sample.extra_info
    )
    if takes_conversation and sample.conversation:
        arguments[CONVERSATION] = list(sample.conversation)
    return arguments


def _applicable(parts: Mapping[str, RewardResult]) -> dict[str, Score]:
    """The parts that have a score, and apply to the response."""
    found = dict[str, Score]()
    for name, part in parts.items():
        if isinstance(part, Score) and DOES_NOT_APPLY not in part.extra:
            found[name] = part
    return found


def _counts(parts: Mapping[str, RewardResult], domain: str) -> Counter[str]:
    by_kind = Counter({"calls": 1})
    counts = Counter[str]()
    for name, part in parts.items():
        if isinstance(part, Score):
            if CUT in part.extra:
                counts[f"reward/cut/{name}"] += 1
            continue

        kind = "timeouts" if isinstance(part, Timeout) else "errors"
        by_kind[kind] += 1
        counts[f"reward/{kind}/{name}"] += 1

    for kind, number in by_kind.items():
        counts[f"reward/{kind}"] += number

    if domain != domain_pools.DEFAULT_DOMAIN:
        for kind in KINDS:
            counts[f"domains/{domain}/{kind}"] = by_kind[kind]

    return counts


def check_domains(functions: domain_pools.Functions, domains: Iterable[str]) -> None:
    """Check domains before the run starts. Raises UserError for the first without a reward
    function, or with a name that other metrics use."""
    for domain in sorted(set(domains)):
        domain_pools.functions_of(functions, domain)
        first_part = domain.partition("/")[0]
        if first_part in TAKEN:
            raise UserError(
                f"a domain of the data is called '{domain}', but metrics of that name have another "
                f"meaning ({TAKEN[first_part]}): rename it in data.domains or in the rows' column "
                "(data.domain_key)"
            )


def _combine(parts: Mapping[str, RewardResult], weights: Mapping[str, float]) -> RewardResult:
    own = {name: part for name, part in parts.items() if name != OVERLONG}
    if all(isinstance(part, Score) for part in own.values()) and not _applicable(own):
        return Error("no reward function scores this response: each returned None for it")

    total = Decimal(0)  # 0.1 + 0.2 and 0.3 are equal scores
    for name, part in parts.items():
        if isinstance(part, Error):
            return Error(f"{name}: {part.reason}")
        if isinstance(part, Timeout):
            return replace(part, part=name)
        total = _DECIMAL.fma(Decimal(repr(weights[name])), Decimal(repr(part.value)), total)

    return with_value(Score(0.0, _remarks(parts)), float(total))


def _remarks(parts: Mapping[str, RewardResult]) -> dict[str, JSON]:
    found = dict[str, JSON]()
    for name, part in parts.items():
        if isinstance(part, Score):
            for key, value in part.extra.items():
                found[f"{name}/{key}"] = value
    return found
