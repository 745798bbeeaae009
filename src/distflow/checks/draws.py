"""Check: each token is the one that the sample's own random stream draws from the policy.

`moved_draws` measures how far low precision moves a draw, against the model's own forward in
float32."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.checks.check import NOT_APPLICABLE, Wrong, check
from distflow.checks.log_probs import policy_scores, scored_samples
from distflow.checks.plain_forward import PlainScores
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.samples import Sample, conversations_of, index_of
from distflow.checks.update_records import OpenEngine
from distflow.config.derived_settings import agent_sampling
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream

EXACT = 1e-3
ROUNDED = 0.1
ROUNDINGS = 4.0
"""The limit is this many times `moved_draws`, if that exceeds `ROUNDED`."""
WIDEST = 0.25
"""With a wider limit, draws of another stream would pass too often."""
LOG_PROB = 3e-2
MASK = 2**64 - 1
TINY = 1e-6
"""A token with less mass may be at the edge of top_k, top_p or min_p."""
TWIN_NATS = -30.0
UNLIKELY = 32.0
LARGEST = 15.0
MOVED = 0.15
KEPT = 0.999
"""By Bernstein's inequality tokens of the policy have a mean log-prob so far from its entropy with
a probability below e^(-UNLIKELY / 2), if no token differs by more than LARGEST; smaller differences
than MOVED standard deviations of a token are ignored. KEPT: weight of earlier samples after each
one, so that a fault that begins late shows."""


@dataclass(frozen=True)
class _Draw:
    """A token of a sample."""

    uid: str
    position: int
    low: float
    high: float
    """The uniform numbers between `low` and `high` draw it."""
    uniform: float
    """From the sample's stream."""


@check(
    "draws",
    "every token is the one that the sample's own random stream draws from the policy of its "
    "version, and has that log-prob; of an engine with random numbers of its own, tokens are "
    "inside of top_k, top_p and min_p, and as likely as the policy's entropy implies (else a "
    "warning)",
    needs="tokens that are not greedy; in float32 for the log-prob",
    limit=f"{EXACT:g} of probability, no token (bfloat16: {ROUNDED:g}, or {ROUNDINGS:g} times the "
    "measured effect of rounding, a tenth of the tokens)",
)
def check_draws(recorded: RecordedStep) -> str | None:
    if not recorded.is_written("rollout_log_probs"):
        return NOT_APPLICABLE

    _no_twins(recorded)
    engine = recorded.config.actor_rollout_ref.rollout.name
    if not ROLLOUT_ENGINES[engine].draws_by_stream:
        _follows_the_policy(recorded)
        return (
            f"the engine '{engine}' draws by random numbers of its own: only cuts and the mean "
            "log-prob are compared"
        )

    draws = []
    unlike = ""
    for sample in recorded.samples:
        if sample["uid"] not in recorded.drawn or recorded.prompt_group(sample) is None:
            continue
        if any(turn.request.params.greedy for turn in recorded.turns(sample)):
            return "greedy draws are not repeated"

        of_sample = _draws_of(recorded, sample)
        draws += of_sample
        unlike = unlike or _unlike(recorded, sample, of_sample)

    if not draws:
        return "no sample whose row is known was scored again"

    limit = EXACT
    allowed = 0.0
    if not recorded.run.is_exact:
        limit = ROUNDED
        allowed = 2 + 0.1 * len(draws)
        if len(_missed(draws, limit)) > allowed:
            limit = max(limit, ROUNDINGS * moved_draws(recorded))
        if limit > WIDEST:
            return "rounding moves this model's draws too far to distinguish streams"

    missed = _missed(draws, limit)
    if len(missed) > allowed:
        first = missed[0]
        raise Wrong(
            f"{len(missed)} of {len(draws)} tokens are not what the samples' random streams draw "
            f"from the policy; token {first.position} of sample {first.uid} needs a draw in "
            f"[{first.low - limit:.4f}, {first.high + limit:.4f}], but its stream gives "
            f"{first.uniform:.4f}. Samples share a stream, or tokens are drawn from a distribution "
            "other than the trained one: by other weights, without their adapter, over keys and "
            "values of older weights, at another temperature, or cut by top_k, top_p and min_p "
            "otherwise"
        )
    if unlike:
        raise Wrong(
            f"sampling_log_probs {unlike} that of the distribution that the token was drawn from"
        )

    return None


def _draws_of(recorded: RecordedStep, sample: Sample) -> list[_Draw]:
    """The draws of the sample's tokens with a score. Raises Wrong for a request with another stream
    or other parameters than the config's."""
    group = recorded.prompt_group(sample)
    assert group is not None, "called only if it is known"
    stream = Stream(recorded.config.trainer.seed, group.stream, group.epoch, group.row)
    scores, known = recorded.drawn[sample["uid"]]

    turns = [
        (turn.request, turn.start, turn.end, turn.conversation) for turn in recorded.turns(sample)
    ]
    if not turns:  # another process generated it
        by_the_config = GenerateRequest((), (), recorded.sampling(sample), stream)
        whole = conversations_of(sample)[0]
        turns = [(by_the_config, 0, len(sample["response_ids"]), whole)]

    draws = []
    for request, start, end, talk in turns:
        own = stream.fork(talk.name)
        if request.stream != own:
            raise Wrong(
                f"sample {sample['uid']} drew from the stream of {request.stream}, but its own is "
                f"{own}"
            )

        _by_the_config(recorded, request.params, sample["domain"], talk.name)
        earlier = sample["versions"][max(talk.first, 0) : start] >= 0
        if request.num_drawn < int(earlier.sum()):
            recorded.run.warn(
                "later turns of a sample reuse the random numbers of earlier turns: a request to "
                "the rollout engine must give in num_drawn the number of tokens sampled before"
            )

        key = _key(own, index_of(sample))
        for position in (start + known[start:end].nonzero()[:, 0]).tolist():
            low = float(scores.below[position])
            high = low + float(scores.mass[position])
            uniform = _uniform(key, request.num_drawn + position - start)
            draws.append(_Draw(sample["uid"], position, low, high, uniform))

    return draws


def _unlike(recorded: RecordedStep, sample: Sample, draws: list[_Draw]) -> str:
    """Which reported log-prob is not that of the distribution of its draw; empty if all are, or if
    rounding hides it."""
    if not recorded.run.is_exact:
        return ""

    for draw in draws:
        mass = draw.high - draw.low
        if mass <= TINY:
            continue
        gap = float(sample["sampling_log_probs"][draw.position]) - math.log(mass)
        if not abs(gap) <= LOG_PROB:
            return f"of token {draw.position} of sample {sample['uid']} is {gap:+.3g} away from"

    return ""


def _follows_the_policy(recorded: RecordedStep) -> None:
    """Without the random numbers: check that tokens are inside of top_k, top_p and min_p, and,
    without these, that all checked tokens so far are on average as likely as the policy's entropy
    says. Warns of the latter, since filters of groups move it a little."""
    scored = list[tuple[Sample, PlainScores, Tensor]]()
    for sample in recorded.samples:
        if sample["uid"] in recorded.drawn:
            scored.append((sample, *recorded.drawn[sample["uid"]]))

    outside = sum(int((scores.mass[known] == 0).sum()) for _, scores, known in scored)
    total = sum(int(known.sum()) for *_, known in scored)
    if outside > (1 if recorded.run.is_exact else 2 + 0.1 * total):
        raise Wrong(
            f"{outside} of {total} tokens are outside of what the config's top_k, top_p and min_p "
            "leave: the engine ignores them, or computes with other weights"
        )

    sums = recorded.run.state.setdefault("likelihood", [0.0, 0.0, 0.0])
    for sample, scores, known in scored:
        if any(_is_cut(params) for _, params, _ in recorded.sampling_of_tokens(sample)):
            continue

        surprise = (scores.log_probs + scores.entropy)[known]
        now = (known.sum(), surprise.sum(), scores.variance[known].sum())
        for i, more in enumerate(now):
            sums[i] = KEPT * sums[i] + float(more)

    number, signed, variance = sums
    moved = abs(signed)

    is_unlikely = moved**2 > UNLIKELY * (variance + LARGEST * moved / 3)
    if is_unlikely and moved > MOVED * math.sqrt(variance * number):
        recorded.run.warn(
            f"checked tokens are on average {'likelier' if signed > 0 else 'less likely'} than the "
            "policy's entropy implies: the engine draws at another temperature, or from another "
            "distribution, than the config sets"
        )


def _is_cut(params: SamplingParams) -> bool:
    cuts = (params.top_k, params.top_p, params.min_p, params.repetition_penalty)
    return cuts != (-1, 1.0, 0.0, 1.0)


def moved_draws(recorded: RecordedStep) -> float:
    """How much probability moves between the policy's precision and float32: the root mean square,
    over the tokens of the checked samples, of the change in the mass of the tokens before them in
    the vocabulary. 0 if the model can be run in only one precision, because its train engine does
    not expose it, or its weights are sharded."""
    actor = recorded.run.resources.actor
    samples = scored_samples(recorded)
    if not isinstance(actor, OpenEngine) or not samples:
        return 0.0

    rounded = policy_scores(recorded, actor, samples)
    exact = policy_scores(recorded, actor, samples, torch.float32)
    moved = torch.cat([rounded[uid].below - exact[uid].below for uid in rounded])
    return float(moved.square().mean().sqrt())


def _missed(draws: list[_Draw], limit: float) -> list[_Draw]:
    return [draw for draw in draws if not draw.low - limit <= draw.uniform <= draw.high + limit]


def _by_the_config(
    recorded: RecordedStep, params: SamplingParams, domain: str, conversation: str
) -> None:
    settings = recorded.config.actor_rollout_ref.rollout
    own = recorded.config.data.domains.get(domain)
    agents = agent_sampling(recorded.config, conversation)
    names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
    if recorded.is_ours("responses"):  # a user's turns may end elsewhere
        names.append("stop")

    for name in names:
        wanted = agents.get(name, getattr(own, name, None))
        if getattr(params, name) != (getattr(settings, name) if wanted is None else wanted):
            raise Wrong(
                f"tokens were drawn with {name}={getattr(params, name)}, which is not what the "
                "config sets"
            )


def _no_twins(recorded: RecordedStep) -> None:
    """Check that equal responses in a group are likely: improbable ones are not equal by chance."""
    seen: dict[tuple[int, tuple[float, ...]], Sample] = {}
    for sample in recorded.samples:
        drawn = sample["action_values" if "action_values" in sample else "response_ids"]
        response = (int(sample["group_index"]), tuple(drawn.tolist()))
        twin = seen.setdefault(response, sample)

        nats = float(sample["sampling_log_probs"].sum())
        if twin is not sample and nats < TWIN_NATS:
            raise Wrong(
                f"samples {twin['uid']} and {sample['uid']} are the same response, with "
                f"probability e^{nats:.0f}: they share a random stream"
            )


def _key(stream: Stream, sample: int) -> int:
    """The counter's key: 8 bytes of BLAKE2b over the sample's identity."""
    identity = repr((stream.seed, stream.name, stream.epoch, stream.row, sample)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def _uniform(key: int, position: int) -> float:
    """Output number `position` of SplitMix64 seeded by `key`, in [0, 1) (Steele, Lea and Flood,
    2014)."""
    state = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return ((state ^ (state >> 31)) >> 11) * 2.0**-53
