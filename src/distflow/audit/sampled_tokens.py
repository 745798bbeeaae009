"""How far low precision moves what a model says: its own forward in float32 beside the one in that precision.

Claim: each token is the one that the sample's own random stream draws from the policy.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.audit.check import Check, Wrong
from distflow.audit.log_probs import audited_samples, dtype_of, ids_of
from distflow.audit.plain_model import logits_of, plain_scores, plainly
from distflow.audit.recorded_data import RecordedStep, Sample
from distflow.audit.recorder import OpenEngine
from distflow.rollout.engine import GenerateRequest


def moved_draws(recorded: RecordedStep) -> float:
    """By how much probability a draw moves between the policy's precision and float32: the root mean square, over the
    tokens of the proved samples, of the change in the mass of the tokens before them in the vocabulary.

    What the rollout engine did has no part in it. 0 where the model can only be run in one precision: where its train
    engine does not show it, or its weights lie over ranks.
    """
    actor, samples = recorded.parts.actor, audited_samples(recorded)
    if not isinstance(actor, OpenEngine) or not samples:
        return 0.0
    low = _masses_below(recorded, actor, samples, dtype_of(actor))
    return float((low - _masses_below(recorded, actor, samples, None)).square().mean().sqrt())


def _masses_below(
    recorded: RecordedStep, actor: OpenEngine, samples: list[Sample], dtype: torch.dtype | None
) -> Tensor:
    """Float64 `(response tokens of all samples,)`."""
    tokens = [ids_of(sample) for sample in samples]
    with torch.no_grad(), plainly(actor.model, compute_dtype=dtype):
        found = logits_of(recorded.parts.turns.run, actor.model, tokens)
        scores = [
            plain_scores(logits, response, recorded.sampling(sample))
            for logits, (_, response), sample in zip(found, tokens, samples, strict=True)
        ]
    return torch.cat([one.below for one in scores])


EXACT, ROUNDED = 1e-3, 0.1
ROUNDINGS = 4.0
"""So many times what rounding moves a draw by, where that is more than `ROUNDED`."""
WIDEST = 0.25
"""Where a draw may lie farther than this from what it should be, those of another stream pass for its own too often."""
MASK = 2**64 - 1
TWIN_NATS = -30.0


def prove(recorded: RecordedStep) -> str | None:
    if not recorded.is_written("rollout_log_probs"):
        return ""
    _no_twins(recorded)
    found: list[_Draw] = []
    for sample in recorded.samples:
        (scores, known), answer = recorded.drawn.get(sample["uid"], (None, ())), recorded.generation(sample)
        if scores is None or answer is None:
            continue
        request, _ = answer
        if request.params.repetition_penalty != 1.0 or request.params.greedy:
            return "draws under a repetition penalty, and greedy ones, are not drawn again"
        prompt_group = recorded.records[int(sample["group_index"])].prompt_group
        row, (epoch, _) = prompt_group.row, recorded.place_of(prompt_group)
        own, drawn = (recorded.config.trainer.seed, epoch, row), request.stream
        if (drawn.seed, drawn.epoch, drawn.row) != own:
            raise Wrong(f"sample {sample['uid']} drew from the stream of {drawn}, its own is (seed, epoch, row) {own}")
        _by_the_config(recorded, request, sample["domain"])
        key = _key(request, epoch, row, int(sample["uid"].split("-")[1]))
        for position in [place for place, is_known in enumerate(known) if is_known]:
            low = float(scores.below[position])
            high = low + float(scores.mass[position])
            found.append(_Draw(sample["uid"], position, low, high, _uniform(key, request.num_drawn + position)))
    if not found:
        return "no sample was drawn by this process and scored again"
    limit, allowed = (EXACT, 0.0) if recorded.parts.exact else (ROUNDED, 2 + 0.1 * len(found))
    if not recorded.parts.exact and len(_missed(found, limit)) > allowed:
        limit = max(limit, ROUNDINGS * moved_draws(recorded))
        if limit > WIDEST:
            return "rounding moves what this model draws too far for streams to be told apart"
    missed = _missed(found, limit)
    if len(missed) > allowed:
        raise Wrong(
            f"{len(missed)} of {len(found)} tokens are not what the samples' random streams draw from the policy; "
            f"{missed[0].told(limit)}. "
            "Samples share a stream, or tokens are drawn from another distribution than is trained"
        )
    return None


@dataclass(frozen=True)
class _Draw:
    """A token of a sample, the range of numbers that draw it, and the number of the sample's stream."""

    uid: str
    position: int
    low: float
    high: float
    uniform: float

    def told(self, limit: float) -> str:
        return (
            f"token {self.position} of sample {self.uid} needs a draw in [{self.low - limit:.4f}, "
            f"{self.high + limit:.4f}], its stream gives {self.uniform:.4f}"
        )


def _missed(draws: list[_Draw], limit: float) -> list[_Draw]:
    return [draw for draw in draws if not draw.low - limit <= draw.uniform <= draw.high + limit]


def _by_the_config(recorded: RecordedStep, request: GenerateRequest, domain: str) -> None:
    settings, own = recorded.config.actor_rollout_ref.rollout, recorded.config.data.domains.get(domain)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        wanted = getattr(own, name, None)
        if getattr(request.params, name) != (getattr(settings, name) if wanted is None else wanted):
            raise Wrong(f"tokens were drawn with {name}={getattr(request.params, name)}, rollout.{name} is another")


def _no_twins(recorded: RecordedStep) -> None:
    """Two answers of one group are equal by chance where they are likely only."""
    seen: dict[tuple[int, tuple[int, ...]], Sample] = {}
    for sample in recorded.samples:
        answer = (int(sample["group_index"]), tuple(sample["response_ids"].tolist()))
        twin = seen.setdefault(answer, sample)
        if twin is not sample and float(sample["sampling_log_probs"].sum()) < TWIN_NATS:
            raise Wrong(
                f"samples {twin['uid']} and {sample['uid']} are the same answer, whose probability is "
                f"e^{float(sample['sampling_log_probs'].sum()):.0f}: they share a random stream"
            )


def _key(request: GenerateRequest, epoch: int, row: int, sample: int) -> int:
    """The counter's key: 8 bytes of BLAKE2b over who draws."""
    identity = repr((request.stream.seed, request.stream.name, epoch, row, sample)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def _uniform(key: int, position: int) -> float:
    """Output number `position` of SplitMix64 seeded by `key`, in [0, 1) (Steele, Lea and Flood, 2014)."""
    state = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return ((state ^ (state >> 31)) >> 11) * 2.0**-53


CHECK = Check(
    "draws",
    "every token is what the sample's own stream (seed, epoch, row, sample, position) draws from the policy that its "
    "version names, by inverse CDF in vocabulary order",
    "sampling without a repetition penalty",
    f"{EXACT:g} of probability, no token (bfloat16: {ROUNDED:g}, or {ROUNDINGS:g} times what rounding is found to move "
    "a draw by, a tenth of the tokens)",
    prove,
)
