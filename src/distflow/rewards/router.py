"""The reward router: scores a sample by the weighted reward functions of its domain."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from distflow.rewards.load_and_call_reward_functions import CONVERSATION, PROMPT, call_arguments
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
    """DAPO's penalty: grows to `factor` over the last `buffer_tokens` before the length limit; 0
    tokens is off."""

    buffer_tokens: int = 0
    factor: float = 1.0

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
    """The result for a sample, and the unweighted results of its parts by name.

    accuracy: 1 is correct, whatever the score (see `reward_results.accuracy`); 0 if there is no
    score.
    """

    reward_result: RewardResult
    parts: dict[str, RewardResult] = field(default_factory=dict)
    accuracy: float = 0.0

    @property
    def score(self) -> float | None:
        """None if there is a reward error instead."""
        return self.reward_result.value if isinstance(self.reward_result, Score) else None

    def scores(self) -> dict[str, float]:
        """Scores of the parts that have one, and apply to the response."""
        scored = {name: part for name, part in self.parts.items() if isinstance(part, Score)}
        return {
            name: part.value for name, part in scored.items() if DOES_NOT_APPLY not in part.extra
        }

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
        start: domain_pools.StartPool = domain_pools.take_pool,
    ) -> None:
        """max_response_length: in tokens, for the overlong penalty; response_limits: of domains
        that differ. start: see `Pools`.

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
        parts = [part for each in functions.values() for part in each]
        self.without_options = sorted(
            {part.name for part in parts} - {part.name for part in parts if part.options}
        )
        self.pools = domain_pools.Pools(settings, start)

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
        asked: dict[tuple[str, str], list[int]] = {}
        for i, sample in enumerate(samples):
            for part in self.functions_of(sample.domain):
                asked.setdefault((sample.domain, part.name), []).append(i)
        answered = await asyncio.gather(
            *(
                self._ask(domain, name, [samples[i] for i in of_these])
                for (domain, name), of_these in asked.items()
            )
        )
        parts: list[dict[str, RewardResult]] = [{} for _ in samples]
        for ((_, name), of_these), reward_results in zip(asked.items(), answered, strict=True):
            for i, reward_result in zip(of_these, reward_results, strict=True):
                parts[i][name] = reward_result
        found = [self._outcome(sample, of_it) for sample, of_it in zip(samples, parts, strict=True)]
        self.call_counts.add(RewardCounts.joined([counts for _, counts in found]))
        return [outcome for outcome, _ in found]

    async def _ask(self, domain: str, name: str, samples: Sequence[Sample]) -> list[RewardResult]:
        """Results of one function for samples of the domain; failed calls are retried according to
        its `Patience`."""
        pool = self.pools.of(domain, name)
        patience = self.pools.patience(domain)
        is_told = name in pool.takes_conversations
        asked = [
            {
                PROMPT: prompt_of(sample.prompt, sample.extra_info),
                **call_arguments(
                    sample.domain, sample.response, sample.ground_truth, sample.extra_info
                ),
                **(
                    {CONVERSATION: list(sample.conversation)}
                    if is_told and sample.conversation
                    else {}
                ),
            }
            for sample in samples
        ]
        score = partial(
            pool.score_group,
            name,
            timeout_s=patience.timeout_s,
            give_up_after=0 if self.has_scored else patience.give_up_after,
            on_repeat=lambda number: self._add({"reward/retried_calls": number}),
        )
        reward_results = await score(asked)
        for attempt in range(patience.retries):
            failed = [
                i
                for i, reward_result in enumerate(reward_results)
                if not isinstance(reward_result, Score)
            ]
            if not failed or pool.closed:
                break
            self._add({"reward/retries": len(failed)})
            await asyncio.sleep(patience.backoff_s * 2**attempt)
            if name in pool.takes_batches:  # the function scores them together
                again = await score(asked)
                if sum(isinstance(each, Score) for each in again) > len(asked) - len(failed):
                    reward_results = again
            else:
                again = await score([asked[i] for i in failed])
                for i, reward_result in zip(failed, again, strict=True):
                    reward_results[i] = reward_result
        return reward_results

    def _outcome(
        self, sample: Sample, parts: dict[str, RewardResult]
    ) -> tuple[RewardOutcome, RewardCounts]:
        """The weighted sum of the parts and the overlong penalty. If a part has no score, the
        sample has none."""
        weights = {part.name: part.weight for part in self.functions_of(sample.domain)}
        scores = {name: part for name, part in parts.items() if isinstance(part, Score)}
        applicable = {
            name: score for name, score in scores.items() if DOES_NOT_APPLY not in score.extra
        }
        right = accuracy(applicable, weights) if applicable and len(scores) == len(parts) else 0.0
        if self._overlong.buffer_tokens > 0:
            length = sample.longest_response
            longest = self._response_limits.get(sample.domain, self._max_response_length)
            parts[OVERLONG] = Score(self._overlong.penalty(length, longest))
            weights[OVERLONG] = 1.0
        outcome = RewardOutcome(_combine(parts, weights), parts, right)
        failed = not isinstance(outcome.reward_result, Score)
        first = f"{outcome.reward_result} (domain '{sample.domain}')" if failed else ""
        as_text = {
            f"{name}/{key}": kind
            for name, part in scores.items()
            for key, kind in part.as_text.items()
        }
        counts = RewardCounts(1, int(failed), first, _counts(parts, sample.domain), as_text)
        return outcome, counts._replace(asked=0, failed=0, first="") if in_episode.get() else counts

    def _add(self, counts: Mapping[str, float]) -> None:
        self.call_counts.add(RewardCounts(counts=counts))


def _counts(parts: Mapping[str, RewardResult], domain: str) -> Counter[str]:
    kinds = ["calls"]
    by_part = list[str]()
    for name, part in parts.items():
        if isinstance(part, Score):
            by_part += [f"reward/cut/{name}"] * (CUT in part.extra)
        else:
            kinds.append("timeouts" if isinstance(part, Timeout) else "errors")
            by_part.append(f"reward/{kinds[-1]}/{name}")
    counts = Counter([*(f"reward/{kind}" for kind in kinds), *by_part])
    if domain != domain_pools.DEFAULT_DOMAIN:
        counts.update({f"domains/{domain}/{kind}": kinds.count(kind) for kind in KINDS})
    return counts


def check_domains(functions: domain_pools.Functions, domains: Iterable[str]) -> None:
    """Check domains before the run starts. Raises UserError for the first without a reward
    function, or with a name that other metrics use."""
    for domain in sorted(set(domains)):
        domain_pools.functions_of(functions, domain)
        if domain.partition("/")[0] in TAKEN:
            raise UserError(
                f"a domain of the data is called '{domain}', but metrics of that name have another "
                "meaning "
                f"({TAKEN[domain.partition('/')[0]]}): rename it in data.domains or in the rows' "
                "column "
                "(data.domain_key)"
            )


def _combine(parts: Mapping[str, RewardResult], weights: Mapping[str, float]) -> RewardResult:
    own = [part for name, part in parts.items() if name != OVERLONG]
    if all(isinstance(part, Score) and DOES_NOT_APPLY in part.extra for part in own):
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
    scored = {name: part for name, part in parts.items() if isinstance(part, Score)}
    return {
        f"{name}/{key}": value for name, part in scored.items() for key, value in part.extra.items()
    }
