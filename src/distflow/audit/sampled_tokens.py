"""Check: each token is the one that the sample's own random stream draws from the policy.

`moved_draws` measures how far low precision moves a draw, against the model's own forward in float32.
"""

import hashlib
from dataclasses import dataclass

import torch

from distflow.audit.check_base import NOT_APPLICABLE, RecordedStep, Sample, Wrong, check, index_of
from distflow.audit.log_probs import audited_samples, policy_scores
from distflow.audit.recorded_calls import OpenEngine
from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream

EXACT, ROUNDED = 1e-3, 0.1
ROUNDINGS = 4.0
"""The limit is this many times `moved_draws`, if that is more than `ROUNDED`."""
WIDEST = 0.25
"""With a wider limit than this, draws of another stream would pass too often."""
MASK = 2**64 - 1
TWIN_NATS = -30.0


@check(
    "draws",
    "every token is what the sample's own stream (seed, epoch, row, sample, position) draws from the policy of its "
    "version, by inverse CDF in vocabulary order",
    needs="sampling without a repetition penalty",
    limit=f"{EXACT:g} of probability, no token (bfloat16: {ROUNDED:g}, or {ROUNDINGS:g} times the measured effect of "
    "rounding, a tenth of the tokens)",
)
def audit_sampled_tokens(recorded: RecordedStep) -> str | None:
    if not recorded.is_written("rollout_log_probs"):
        return NOT_APPLICABLE
    _no_twins(recorded)
    engine = recorded.config.actor_rollout_ref.rollout.name
    if not ROLLOUT_ENGINES[engine].draws_by_stream:
        return f"the engine '{engine}' draws by random numbers of its own"
    found: list[_Draw] = []
    for sample in recorded.samples:
        prompt_group = recorded.prompt_group(sample)
        if sample["uid"] not in recorded.drawn or prompt_group is None:
            continue
        scores, known = recorded.drawn[sample["uid"]]
        row, (epoch, _) = prompt_group.row, recorded.place_of(prompt_group)
        own = Stream(recorded.config.trainer.seed, prompt_group.stream, epoch, row)
        turns = [(turn.request, turn.start, turn.end) for turn in recorded.turns(sample)]
        by_the_config = GenerateRequest((), (), recorded.sampling(sample), own)
        for request, start, end in turns or [(by_the_config, 0, len(sample["response_ids"]))]:
            if request.params.repetition_penalty != 1.0 or request.params.greedy:
                return "draws with a repetition penalty, and greedy ones, are not repeated"
            if request.stream != own:
                raise Wrong(f"sample {sample['uid']} drew from the stream of {request.stream}, but its own is {own}")
            _by_the_config(recorded, request.params, sample["domain"])
            if request.num_drawn < int((sample["versions"][:start] >= 0).sum()):
                recorded.run.warn(
                    "later turns of a sample draw by the random numbers of earlier ones again: a request to the "
                    "rollout engine says in num_drawn how many tokens of the sample it has drawn before"
                )
            key = _key(own, index_of(sample))
            for position in (start + known[start:end].nonzero()[:, 0]).tolist():
                low, mass = float(scores.below[position]), float(scores.mass[position])
                uniform = _uniform(key, request.num_drawn + position - start)
                found.append(_Draw(sample["uid"], position, low, low + mass, uniform))
    if not found:
        return "no sample whose row is known was scored again"
    limit, allowed = (EXACT, 0.0) if recorded.run.is_exact else (ROUNDED, 2 + 0.1 * len(found))
    if not recorded.run.is_exact and len(_missed(found, limit)) > allowed:
        limit = max(limit, ROUNDINGS * moved_draws(recorded))
        if limit > WIDEST:
            return "rounding moves this model's draws too far to distinguish streams"
    missed = _missed(found, limit)
    if len(missed) > allowed:
        first = missed[0]
        raise Wrong(
            f"{len(missed)} of {len(found)} tokens are not what the samples' random streams draw from the policy; "
            f"token {first.position} of sample {first.uid} needs a draw in [{first.low - limit:.4f}, "
            f"{first.high + limit:.4f}], but its stream gives {first.uniform:.4f}. Samples share a stream, or tokens "
            "are drawn from a distribution other than the trained one: by other weights, without their adapter, over "
            "keys and values of older weights, at another temperature"
        )
    return None


def moved_draws(recorded: RecordedStep) -> float:
    """By how much probability a draw moves between the policy's precision and float32: the root mean square, over the
    tokens of the audited samples, of the change in the mass of the tokens before them in the vocabulary. 0 if the model
    can be run in one precision only: its train engine does not expose it, or its weights are sharded."""
    actor, samples = recorded.run.resources.actor, audited_samples(recorded)
    if not isinstance(actor, OpenEngine) or not samples:
        return 0.0
    rounded, exact = (policy_scores(recorded, actor, samples, dtype) for dtype in (None, torch.float32))
    moved = torch.cat([rounded[uid].below - exact[uid].below for uid in rounded])
    return float(moved.square().mean().sqrt())


@dataclass(frozen=True)
class _Draw:
    """A token of a sample, the range of uniform numbers that draw it, and the number from the sample's stream."""

    uid: str
    position: int
    low: float
    high: float
    uniform: float


def _missed(draws: list[_Draw], limit: float) -> list[_Draw]:
    return [draw for draw in draws if not draw.low - limit <= draw.uniform <= draw.high + limit]


def _by_the_config(recorded: RecordedStep, params: SamplingParams, domain: str) -> None:
    settings, own = recorded.config.actor_rollout_ref.rollout, recorded.config.data.domains.get(domain)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    for name in (*names, *(("stop",) if recorded.is_ours("responses") else ())):  # a user's turns may end elsewhere
        wanted = getattr(own, name, None)
        if getattr(params, name) != (getattr(settings, name) if wanted is None else wanted):
            raise Wrong(f"tokens were drawn with {name}={getattr(params, name)}, which is not rollout.{name}")


def _no_twins(recorded: RecordedStep) -> None:
    """Equal responses in one group must be likely: improbable ones are not equal by chance."""
    seen: dict[tuple[int, tuple[int, ...]], Sample] = {}
    for sample in recorded.samples:
        response = (int(sample["group_index"]), tuple(sample["response_ids"].tolist()))
        twin = seen.setdefault(response, sample)
        nats = float(sample["sampling_log_probs"].sum())
        if twin is not sample and nats < TWIN_NATS:
            both = f"samples {twin['uid']} and {sample['uid']}"
            raise Wrong(f"{both} are the same response, with probability e^{nats:.0f}: they share a random stream")


def _key(stream: Stream, sample: int) -> int:
    """The counter's key: 8 bytes of BLAKE2b over the sample's identity."""
    identity = repr((stream.seed, stream.name, stream.epoch, stream.row, sample)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def _uniform(key: int, position: int) -> float:
    """Output number `position` of SplitMix64 seeded by `key`, in [0, 1) (Steele, Lea and Flood, 2014)."""
    state = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return ((state ^ (state >> 31)) >> 11) * 2.0**-53
