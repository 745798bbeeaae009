"""Which reward functions judge a sample: those of its domain, weighted, each verdict kept by name."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from distflow.algorithms.filters import overlong_penalty
from distflow.config.errors import UserError, hint
from distflow.data.sample import Sample
from distflow.observe.jsonlines import JSON
from distflow.rewards.ahead import PoolSettings, take_pool
from distflow.rewards.correctness import accuracy
from distflow.rewards.functions import PROMPT, Functions, find_targets
from distflow.rewards.pool import MEMORY_BYTES
from distflow.rewards.tally import TRAINING, Tally, counted_for
from distflow.rewards.verdict import Error, Score, Timeout, Verdict

_Part = TypeVar("_Part")
DEFAULT_DOMAIN = "default"
OVERLONG = "overlong"


class Overlong(NamedTuple):
    """DAPO's penalty: grows to `factor` over the last `buffer_tokens` before the length limit; 0 tokens is off."""

    buffer_tokens: int = 0
    factor: float = 1.0


@dataclass(frozen=True)
class Judgement:
    """The verdict on a sample, and those of its parts by name, unweighted.

    accuracy: how right the answer is, 1 being right, whatever the verdict pays for it (see `correctness.py`); 0 where
    there is no verdict.
    """

    verdict: Verdict
    parts: dict[str, Verdict] = field(default_factory=dict)
    accuracy: float = 0.0

    def scores(self) -> dict[str, float]:
        """The parts that have a score."""
        return {name: part.value for name, part in self.parts.items() if isinstance(part, Score)}


class RewardRouter:
    """Judges samples by the functions of their domain, in processes that can be killed. A context manager."""

    def __init__(
        self,
        functions: Functions,
        *,
        timeout_s: float,
        num_workers: int,
        max_response_length: int,
        overlong: Overlong = Overlong(),  # noqa: B008  immutable
        custom: tuple[str, str] | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """functions: domain → (name, weight[, options]) of its parts; "default" serves domains that are not named.
        max_response_length: in tokens, for the overlong penalty.

        A name is a built-in one, "custom" (then `custom` is the path and the name of the user's function) or
        "module:function". Starts a verifier process; raises UserError where a function is unknown or cannot be loaded.
        """
        if not functions or not all(functions.values()):
            raise UserError("reward.functions names no function; write e.g. reward.functions={default: [math]}")
        self._functions = {
            domain: tuple((name, weight) for name, weight, *_ in parts) for domain, parts in functions.items()
        }
        self.configured = frozenset(name for parts in functions.values() for name, _, *options in parts if any(options))
        self._overlong, self._max_response_length = overlong, max_response_length
        self.tally = Tally()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # the asyncio thread counts, the learner takes the counts
        self.names = sorted({name for parts in self._functions.values() for name, _ in parts})
        self.pool = take_pool(PoolSettings(find_targets(functions, custom), num_workers, timeout_s, memory_bytes))

    def __enter__(self) -> "RewardRouter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the verifier processes."""
        self.pool.close()

    def functions_of(self, domain: str) -> Sequence[tuple[str, float]]:
        """Names and weights that judge the domain. Raises UserError where none do."""
        return _functions_of(self._functions, domain)

    async def __call__(self, samples: Sequence[Sample]) -> list[Judgement]:
        """What the parameter `judge` of a node is called for: a judgement on each sample, in their order.

        Raises UserError for a domain that no function judges.
        """
        asked: dict[str, list[int]] = {}
        for i, sample in enumerate(samples):
            for name, _ in self.functions_of(sample.domain):
                asked.setdefault(name, []).append(i)
        answered = await asyncio.gather(*(self._ask(name, [samples[i] for i in asked[name]]) for name in asked))
        verdicts = {
            name: dict(zip(asked[name], found, strict=True)) for name, found in zip(asked, answered, strict=True)
        }
        return [
            self._judgement(sample, {name: verdicts[name][i] for name, _ in self.functions_of(sample.domain)})
            for i, sample in enumerate(samples)
        ]

    async def score(self, sample: Sample) -> Judgement:
        """The same for one."""
        (judgement,) = await self([sample])
        return judgement

    async def _ask(self, name: str, samples: Sequence[Sample]) -> list[Verdict]:
        """Of one function, on each sample."""
        asked = [
            {
                "data_source": sample.domain,
                "solution_str": sample.response,
                "ground_truth": sample.ground_truth,
                "extra_info": sample.extra_info,
            }
            for sample in samples
        ]
        if name in self.pool.takes_groups:
            asked = [{**each, PROMPT: sample.prompt} for each, sample in zip(asked, samples, strict=True)]
            return await self.pool.judge_group(name, asked)
        return list(await asyncio.gather(*(self.pool.judge(name, arguments) for arguments in asked)))

    def _judgement(self, sample: Sample, parts: dict[str, Verdict]) -> Judgement:
        """The weighted sum of the parts and the overlong penalty. A part without a score leaves the sample without."""
        weights = dict(self.functions_of(sample.domain))
        scores = {name: part for name, part in parts.items() if isinstance(part, Score)}
        right = accuracy(scores, weights) if len(scores) == len(parts) else 0.0
        if self._overlong.buffer_tokens > 0:
            parts[OVERLONG] = Score(self._length_penalty(sample))
            weights[OVERLONG] = 1.0
        judgement = Judgement(_combine(parts, weights), parts, right)
        self._count(parts)
        failed = not isinstance(judgement.verdict, Score)
        self.tally.add(1, int(failed), f"{judgement.verdict} (domain '{sample.domain}')" if failed else "")
        return judgement

    def take_counts(self) -> dict[str, float]:
        """Metrics of training since the last call: verdicts that failed, in all and by part."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        totals = {f"reward/{kind}": float(counts.pop(kind, 0)) for kind in ("verdicts", "errors", "timeouts")}
        return totals | {f"reward/{name}": float(number) for name, number in sorted(counts.items())}

    def _length_penalty(self, sample: Sample) -> float:
        length = sum(len(segment.token_ids) for segment in sample.response_segments)
        return float(overlong_penalty(torch.tensor([length]), self._max_response_length, *self._overlong))

    def _count(self, parts: Mapping[str, Verdict]) -> None:
        if counted_for.get() != TRAINING:
            return
        kinds = {name: {Error: "errors", Timeout: "timeouts"}.get(type(part)) for name, part in parts.items()}
        with self._lock:
            self._counts["verdicts"] += 1
            for name, kind in kinds.items():
                if kind is not None:
                    self._counts[kind] += 1
                    self._counts[f"{kind}/{name}"] += 1


def check_domains(functions: Functions, domains: Iterable[str]) -> None:
    """Raises UserError for the first domain that no function judges; for before the run starts."""
    for domain in sorted(set(domains)):
        _functions_of(functions, domain)


def _functions_of(functions: Mapping[str, Sequence[_Part]], domain: str) -> Sequence[_Part]:
    parts = functions.get(domain) or functions.get(DEFAULT_DOMAIN)
    if parts is None:
        raise UserError(
            f"no reward function for the domain '{domain}': add it to reward.functions, or a '{DEFAULT_DOMAIN}' "
            f"entry, or see data.domain_key{hint(domain, functions)}"
        )
    return parts


def _combine(parts: Mapping[str, Verdict], weights: Mapping[str, float]) -> Verdict:
    total, extra = 0.0, dict[str, JSON]()
    for name, part in parts.items():
        if isinstance(part, Error):
            return Error(f"{name}: {part.reason}")
        if isinstance(part, Timeout):
            return part
        total += weights[name] * part.value
        extra.update({f"{name}/{key}": value for key, value in part.extra.items()})
    return Score(total, extra)
