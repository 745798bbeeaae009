"""Checks: the rollout engine computes with the trainer's weights; the weights of a token's version
give the log-prob that the engine reported; each token is the one that the sample's own random
stream draws from the policy.

`moved_draws` measures how far low precision moves a draw, against the model's own forward in
float32.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import DynamicCache

from distflow.audit.audited_step.log_probs import (
    audited_samples,
    dtype_of,
    ids_of,
    is_beyond,
    numbers_of,
    policy_scores,
    sequences_of,
)
from distflow.audit.check import NOT_APPLICABLE, Sample, Wrong, check, doubles, is_builtin
from distflow.audit.model_forward import (
    PlainScores,
    Turns,
    Weights,
    model_of,
    plain_scores,
    plainly,
    vocabulary_of,
)
from distflow.audit.record_groups_and_updates import OpenEngine
from distflow.audit.recorded_step import (
    RecordedStep,
    conversations_of,
    index_of,
    policies_of_conversations,
)
from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config.derived_settings import agent_sampling
from distflow.models.image_inputs import UNUSED, own_pass
from distflow.models.lora import unwrapped
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream
from distflow.training.multi_policy_engine import models_of

EXACT = (1e-3, 3e-2)
ROUNDED = (0.15, 5.0)
LEAST_TOKENS = 16
_Scored = tuple[PlainScores, Tensor]
"""Scores of a sample's tokens, and a mask of tokens with a score."""
PRESENT: Weights = {}
"""Stands for the policy's current weights."""


@check(
    "weights",
    "the rollout engine's tensors are the trainer's of the same version, cast to its dtype; with "
    "LoRA only adapters "
    "are trained, from the start that trainer.seed draws, on all linear layers if "
    "target_modules=all-linear; without "
    "LoRA frozen weights cause a warning",
    needs="an engine on this worker; no unmerged adapter",
    limit="equal hashes of sampled elements of each tensor",
)
def audit_weights(recorded: RecordedStep) -> str | None:
    resources = recorded.run.resources
    model = model_of(resources.actor) if is_builtin(type(resources.actor)) else None
    for own in models_of(model).values() if model is not None else ():
        _check_trained(recorded, own)
    if resources.rollout is None or resources.actor is None:
        return (
            "the rollout engine is on another worker"
            if recorded.is_written("rollout_log_probs")
            else NOT_APPLICABLE
        )
    version = recorded.synced_version
    if not recorded.sent_hashes:
        return (
            "no weights were synced, or an adapter is applied unmerged, on the trainer's own "
            "storage"
        )
    engine_hashes = recorded.run.engine_hashes()
    different = [
        name for name, own in recorded.sent_hashes.items() if engine_hashes.get(name) != own
    ]
    if different:
        raise Wrong(
            f"the rollout engine serves version {version}, but {len(different)} of its tensors are "
            "not the "
            f"trainer's of that version ({', '.join(different[:4])}): they were not sent, or not "
            "loaded"
        )
    return None


@check(
    "versions",
    "the engine's log-prob of a token equals that of the weights of its version, over keys and "
    "values as "
    "`kv_on_update` requires; the other rule does not fit better; old weights are kept for the "
    "audit; no more tokens "
    "have a version than the engines drew with it",
    needs="tokens of the current weights, or of weights that were kept",
    limit=f"mean {EXACT[0]:g}, largest {EXACT[1]:g} (bfloat16: {ROUNDED[0]:g}, {ROUNDED[1]:g})",
)
def audit_versions(recorded: RecordedStep) -> str | None:
    if not recorded.is_written("rollout_log_probs"):
        return NOT_APPLICABLE
    actor = recorded.run.resources.actor
    if not isinstance(actor, OpenEngine):
        return "the train engine does not expose its model"
    recomputes = recorded.config.actor_rollout_ref.rollout.kv_on_update == "recompute"
    others = dict[str, _Scored]()
    for sample in audited_samples(recorded):
        recorded.drawn[sample["uid"]] = _scores(recorded, actor, sample, recomputes)
        if not recorded.run.is_exact and len(set(sample["versions"].tolist())) > 1:
            others[sample["uid"]] = _scores(recorded, actor, sample, not recomputes)
    if not any(bool(known.any()) for _, known in recorded.drawn.values()):
        return "no token of the drawn samples is of weights that were kept"
    if not recorded.is_ours("rollout_log_probs") and not any(map(recorded.turns, recorded.samples)):
        return "a user's node writes rollout_log_probs"
    if not recorded.run.is_exact and bool(
        ((v := recorded.batch.flat("versions"))[v >= 0] == recorded.step).all()
    ):
        # below float32, rounding may be large, but is corrected; every step compares these
        return None
    for sample in recorded.samples:
        if sample["uid"] in recorded.drawn:
            _same(recorded, sample, *recorded.drawn[sample["uid"]])
    _fits_better(recorded, others)
    return None


def _check_trained(recorded: RecordedStep, model: nn.Module) -> None:
    """Check that all weights are trained (except sinusoidal positions), or all adapter weights and
    nothing else, and that an adapter is scaled by alpha over rank."""
    settings = recorded.config.actor_rollout_ref.model
    adapts = settings.lora_rank > 0
    left = getattr(unwrapped(model), UNUSED, ())
    named = [
        (name, p)
        for name, p in model.named_parameters()
        if "position" not in name and name not in left
    ]
    trained = {name: p.requires_grad for name, p in named}
    if odd := [name for name in trained if trained[name] != (not adapts or ".lora_" in name)]:
        what = (
            f"{odd[0]} and {len(odd) - 1} more of the policy's weights are "
            f"{'trained' if trained[odd[0]] else 'frozen'}"
        )
        if adapts:
            raise Wrong(f"{what}, but adapters and nothing else should be trained")
        recorded.run.warn(
            f"{what}, and no key freezes any: this is correct only if the model's own code freezes "
            "them"
        )
    if not adapts:
        return
    if recorded.step == 0 and not recorded.num_updates:
        _check_start(recorded, unwrapped(model))
    expected = settings.lora_alpha / max(settings.lora_rank, 1)
    modules = dict(unwrapped(model).named_modules())
    for name, module in modules.items():
        for scale in (
            getattr(module, "scaling", {}).values() if hasattr(module, "get_delta_weight") else ()
        ):
            if abs(scale - expected) > 1e-6 * expected:
                raise Wrong(
                    f"the adapter of {name} is scaled by {scale:g}, but lora_alpha / lora_rank is "
                    f"{expected:g}"
                )
    head = unwrapped(model).get_output_embeddings()
    found = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and module is not head
    ]
    plain = [name for name in found if not re.search(r"\.base_layer$|\.lora_", name)]
    if settings.target_modules == "all-linear" and plain:
        raise Wrong(
            f"target_modules is all-linear, but {plain[0]} and {len(plain) - 1} more have no "
            "adapter"
        )


def _check_start(recorded: RecordedStep, model: nn.Module) -> None:
    """Check that the first adapter begins with the weights that PEFT draws by the run's seed."""
    from peft import LoraConfig, get_peft_model  # an extra

    adapted = (
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    )
    name, module = next(adapted, ("", model))
    base: Any = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Linear) or isinstance(base.weight, DTensor):
        return
    alone = nn.Sequential(nn.Linear(base.in_features, base.out_features, device=base.weight.device))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recorded.config.trainer.seed)
        own = get_peft_model(
            alone,
            LoraConfig(r=recorded.config.actor_rollout_ref.model.lora_rank, target_modules=["0"]),
        )
    drawn, found = (
        [p for n, p in each.named_parameters() if ".lora_" in f".{n}"] for each in (own, module)
    )
    if not all(torch.equal(*pair) for pair in zip(drawn, found, strict=True)):
        raise Wrong(
            f"the adapter of {name} does not begin with the weights that trainer.seed draws: the "
            "run cannot be repeated"
        )


class Prompt(NamedTuple):
    """The number of a conversation's first tokens, which are given, and its images."""

    length: int
    images: Sequence[str]


def _scores(recorded: RecordedStep, actor: OpenEngine, sample: Sample, recomputes: bool) -> _Scored:
    """Scores of a sample by the weights of its tokens' versions. recomputes: keys and values after
    a weight sync."""
    # else it has moved
    present = recorded.synced_version if recorded.synced_version == recorded.step else None
    older = recorded.run.older_weights
    weights = [
        PRESENT if version == present else older.of(version)
        for version in sample["versions"].tolist()
    ]
    known = torch.tensor([one is not None for one in weights])
    response = ids_of(sample).response
    policy = sample["response_mask"] > 0
    if sample["uid"] in recorded.plain and all(
        weights[i] is PRESENT for i in policy.nonzero()[:, 0].tolist()
    ):
        return recorded.plain[sample["uid"]], policy
    models = models_of(actor.model)
    runs = recorded.run.turns
    talks = conversations_of(sample)
    owners = dict(
        zip(
            (talk.name for talk in talks),
            policies_of_conversations(recorded.config, sample),
            strict=True,
        )
    )
    by_policy = {name: _of_policy(weights, name) for name in models}
    prompts = {
        talk.name: Prompt(own.given or len(own.prompt), own.images)
        for talk, own in zip(talks, sequences_of(sample), strict=True)
    }
    with torch.no_grad(), ExitStack() as plain:
        for model in models.values():
            plain.enter_context(plainly(model, compute_dtype=dtype_of(actor)))
        logits = torch.zeros(len(weights), vocabulary_of(actor.model))
        if recomputes:
            for talk in talks:
                start = max(talk.first + 1, 0)
                end = talk.first + len(talk.ids)
                model = models[owners[talk.name]]
                own = by_policy[owners[talk.name]]
                logits[start:end] = _over_own_keys(
                    runs, model, talk.ids, own[start:end], prompts[talk.name]
                )
        else:
            whole = talks[0]
            turns = [(turn.start, turn.end, turn.conversation) for turn in recorded.turns(sample)]
            # Each continuation begins with keys and values from its first token's weights, then
            # uses those of earlier tokens.
            for start, end, talk in turns or [(0, len(whole.ids) + whole.first, whole)]:
                known[start:end] = known[start:end].cummin(0).values
                model = models[owners[talk.name]]
                own = by_policy[owners[talk.name]]
                ids = talk.ids[: end - talk.first]
                logits[start:end] = _over_older_keys(
                    runs, model, ids, own[start:end], prompts[talk.name]
                )
    return plain_scores(
        logits, response, recorded.sampling_of_tokens(sample), numbers_of(sample)
    ), known & policy


def _of_policy(weights: Sequence[Weights | None], policy: str) -> list[Weights | None]:
    """The weights for the model of one of several policies; equal entries stay one object."""
    if not policy:
        return [*weights]
    own = {
        id(each): {
            name.removeprefix(f"{policy}."): w
            for name, w in each.items()
            if name.startswith(f"{policy}.")
        }
        for each in {id(each): each for each in weights if each}.values()
    }
    return [own[id(each)] if each else each for each in weights]


def _over_older_keys(
    turns: Turns,
    model: nn.Module,
    ids: Sequence[int],
    weights: Sequence[Weights | None],
    prompt: Prompt,
) -> Tensor:
    """Logits `(tokens, vocabulary)` that each token was drawn from, if the engine keeps keys and
    values over weight syncs: a position's keys and values come from the weights that drew the next
    token, the prompt's from those of the first token. Zeros from the first token with unknown
    weights on."""
    found = torch.zeros(len(weights), vocabulary_of(model))
    cache = DynamicCache(config=unwrapped(model).config)
    first = len(ids) - len(weights) - 1
    fed = 0
    done = 0
    for _, run in groupby(weights, key=id):
        own, *more = run
        if own is None:
            break
        until = done + 1 + len(more)
        new = ids[fed : first + until]
        seen = Prompt(0, ()) if fed else prompt
        logits = _forward(turns, model, own, new, seen, past_key_values=cache, use_cache=True)
        found[done:until] = logits[done - until :]
        fed = first + until
        done = until
    return found


def _over_own_keys(
    turns: Turns,
    model: nn.Module,
    ids: Sequence[int],
    weights: Sequence[Weights | None],
    prompt: Prompt,
) -> Tensor:
    """The same if all keys and values are recomputed after a weight sync."""
    found = torch.zeros(len(weights), vocabulary_of(model))
    start = len(ids) - len(weights) - 1
    for own in {id(one): one for one in weights if one is not None}.values():
        mine = torch.tensor([one is own for one in weights])
        logits = _forward(turns, model, own, ids[:-1], prompt, use_cache=False)
        found[mine] = logits[start:][mine]
    return found


def _forward(
    turns: Turns,
    model: nn.Module,
    weights: Weights,
    ids: Sequence[int],
    prompt: Prompt,
    **options: object,
) -> Tensor:
    """Logits of all positions, float32 on the CPU."""
    device = next(model.parameters()).device
    swapped = {name: weight.to(device) for name, weight in weights.items()}
    with own_pass(
        model, torch.tensor([list(ids)], device=device), prompt.length, (prompt.images,)
    ) as given:
        inputs = {**given, **options}
        output: Any = (
            functional_call(model, swapped, kwargs=inputs)
            if swapped
            else turns.run(model, **inputs)
        )
    logits: Tensor = output.logits[0]
    return logits.float().cpu()


def _fits_better(recorded: RecordedStep, others: Mapping[str, _Scored]) -> None:
    """Below float32, rounding hides keys and values of other weights, but not which rule fits.
    others: by the other."""
    gaps = [torch.zeros(0, 2).double()]
    for sample in (sample for sample in recorded.samples if sample["uid"] in others):
        (own, known), (other, too) = recorded.drawn[sample["uid"]], others[sample["uid"]]
        later = (
            known & too & (sample["versions"] > sample["versions"][sample["versions"] >= 0].min())
        )
        found = doubles(sample["rollout_log_probs"])
        gaps.append(
            torch.stack([(found - each.log_probs).abs()[later] for each in (own, other)], -1)
        )
    mean, by_other = torch.cat(gaps).mean(0).tolist()
    if sum(map(len, gaps)) >= LEAST_TOKENS and mean > max(2 * by_other, EXACT[0]):
        raise Wrong(
            f"after a weight sync within a response the engine's log-probs differ by {mean:.3g} "
            "from those over keys "
            f"and values as kv_on_update={recorded.config.actor_rollout_ref.rollout.kv_on_update} "
            "has them, and by "
            f"{by_other:.3g} from those as the other rule has them"
        )


def _same(recorded: RecordedStep, sample: Sample, scores: PlainScores, known: Tensor) -> None:
    gap = (doubles(sample["rollout_log_probs"]) - scores.log_probs).abs()[known]
    mean, largest = limits = recorded.limit(EXACT, ROUNDED)
    if is_beyond(gap, limits):
        token = int(known.nonzero()[int(gap.argmax()), 0])
        raise Wrong(
            f"the engine's log-probs of the tokens of sample {sample['uid']} differ by "
            f"{float(gap.mean()):.3g} on "
            f"average from those of the weights of the tokens' versions, by {float(gap.max()):.3g} "
            f"at token {token} of "
            f"version {int(sample['versions'][token])} (limits {mean:g}, {largest:g}; the engine "
            "has version "
            f"{recorded.synced_version}). Likely causes: weights or an adapter that were not sent, "
            "not loaded or are "
            "scaled otherwise, a version that changes before or after them, keys and values of "
            "other weights"
        )


EXACT_DRAW = 1e-3
ROUNDED_DRAW = 0.1
ROUNDINGS = 4.0
"""The limit is this many times `moved_draws`, if that exceeds `ROUNDED_DRAW`."""
WIDEST = 0.25
"""With a wider limit, draws of another stream would pass too often."""
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


@check(
    "draws",
    "every token, or number of an action, is the one that the sample's own random stream (seed, "
    "epoch, row, sample, "
    "position) draws from the policy of its version, by inverse CDF in vocabulary order, and has "
    "the log-prob of that "
    "distribution; of an engine with random numbers of its own, tokens are inside of top_k, top_p "
    "and min_p, and on "
    "average as likely as the policy's entropy implies (else a warning)",
    needs="tokens that are not greedy; in float32 for the log-prob",
    limit=f"{EXACT_DRAW:g} of probability, no token (bfloat16: {ROUNDED_DRAW:g}, or {ROUNDINGS:g} "
    "times the measured "
    "effect of rounding, a tenth of the tokens)",
)
def audit_sampled_tokens(recorded: RecordedStep) -> str | None:
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
    found = list[_Draw]()
    unlike = ""
    for sample in recorded.samples:
        prompt_group = recorded.prompt_group(sample)
        if sample["uid"] not in recorded.drawn or prompt_group is None:
            continue
        scores, known = recorded.drawn[sample["uid"]]
        row, (epoch, _) = prompt_group.row, recorded.place_of(prompt_group)
        stream = Stream(recorded.config.trainer.seed, prompt_group.stream, epoch, row)
        turns = [
            (turn.request, turn.start, turn.end, turn.conversation)
            for turn in recorded.turns(sample)
        ]
        by_the_config = GenerateRequest((), (), recorded.sampling(sample), stream)
        whole = conversations_of(sample)[0]
        for request, start, end, talk in turns or [
            (by_the_config, 0, len(sample["response_ids"]), whole)
        ]:
            own = stream.fork(talk.name)
            if request.params.greedy:
                return "greedy draws are not repeated"
            if request.stream != own:
                raise Wrong(
                    f"sample {sample['uid']} drew from the stream of {request.stream}, but its own "
                    f"is {own}"
                )
            _by_the_config(recorded, request.params, sample["domain"], talk.name)
            if request.num_drawn < int((sample["versions"][max(talk.first, 0) : start] >= 0).sum()):
                recorded.run.warn(
                    "later turns of a sample reuse the random numbers of earlier turns: a request "
                    "to the "
                    "rollout engine must give in num_drawn the number of tokens sampled before"
                )
            key = _key(own, index_of(sample))
            for position in (start + known[start:end].nonzero()[:, 0]).tolist():
                low = float(scores.below[position])
                mass = float(scores.mass[position])
                uniform = _uniform(key, request.num_drawn + position - start)
                found.append(_Draw(sample["uid"], position, low, low + mass, uniform))
                likely = (
                    math.log(max(mass, TINY))
                    if "action_values" not in sample
                    else scores.log_probs[position]
                )
                gap = float(sample["sampling_log_probs"][position] - likely)
                if (
                    (mass > TINY or "action_values" in sample)
                    and recorded.run.is_exact
                    and not abs(gap) <= EXACT[1]
                ):
                    unlike = (
                        unlike
                        or f"of token {position} of sample {sample['uid']} is {gap:+.3g} away from"
                    )
    if not found:
        return "no sample whose row is known was scored again"
    limit, allowed = (
        (EXACT_DRAW, 0.0) if recorded.run.is_exact else (ROUNDED_DRAW, 2 + 0.1 * len(found))
    )
    if not recorded.run.is_exact and len(_missed(found, limit)) > allowed:
        limit = max(limit, ROUNDINGS * moved_draws(recorded))
        if limit > WIDEST:
            return "rounding moves this model's draws too far to distinguish streams"
    missed = _missed(found, limit)
    if len(missed) > allowed:
        first = missed[0]
        raise Wrong(
            f"{len(missed)} of {len(found)} tokens are not what the samples' random streams draw "
            "from the policy; "
            f"token {first.position} of sample {first.uid} needs a draw in "
            f"[{first.low - limit:.4f}, "
            f"{first.high + limit:.4f}], but its stream gives {first.uniform:.4f}. Samples share a "
            "stream, or tokens "
            "are drawn from a distribution other than the trained one: by other weights, without "
            "their adapter, over "
            "keys and values of older weights, at another temperature, or cut by top_k, top_p and "
            "min_p otherwise"
        )
    if unlike:
        raise Wrong(
            f"sampling_log_probs {unlike} that of the distribution that the token was drawn from"
        )
    return None


def _follows_the_policy(recorded: RecordedStep) -> None:
    """Without the random numbers: check that tokens are inside of top_k, top_p and min_p, and,
    without these, that all audited tokens so far are on average as likely as the policy's entropy
    says. Warns of the latter, since filters of groups move it a little."""
    scored = [
        (each, *recorded.drawn[each["uid"]])
        for each in recorded.samples
        if each["uid"] in recorded.drawn
    ]
    outside = sum(int((scores.mass[known] == 0).sum()) for _, scores, known in scored)
    total = sum(int(known.sum()) for *_, known in scored)
    if outside > (1 if recorded.run.is_exact else 2 + 0.1 * total):
        raise Wrong(
            f"{outside} of {total} tokens are outside of what the config's top_k, top_p and min_p "
            "leave: the engine "
            "ignores them, or computes with other weights"
        )
    sums = recorded.run.state.setdefault("likelihood", [0.0, 0.0, 0.0])
    for sample, scores, known in scored:
        params = [each for _, each, _ in recorded.sampling_of_tokens(sample)]
        if all(
            (p.top_k, p.top_p, p.min_p, p.repetition_penalty) == (-1, 1.0, 0.0, 1.0) for p in params
        ):
            now = (
                known.sum(),
                (scores.log_probs + scores.entropy)[known].sum(),
                scores.variance[known].sum(),
            )
            sums[:] = (KEPT * before + float(more) for before, more in zip(sums, now, strict=True))
    number = sums[0]
    moved = abs(sums[1])
    variance = sums[2]
    if moved**2 > UNLIKELY * (variance + LARGEST * moved / 3) and moved > MOVED * math.sqrt(
        variance * number
    ):
        recorded.run.warn(
            f"audited tokens are on average {'likelier' if sums[1] > 0 else 'less likely'} than "
            "the policy's entropy "
            "implies: the engine draws at another temperature, or from another distribution, than "
            "the config sets"
        )


def remember_marked(recorded: RecordedStep) -> None:
    """Count the tokens of each version that was synced since this process began."""
    run = recorded.run
    versions = recorded.batch.flat("versions")
    found, counts = versions[versions > run.inputs.version.step].unique(return_counts=True)
    run.marked.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))


def audit_marked(recorded: RecordedStep) -> str | None:
    """Check that no more tokens are marked with a version than the engines have drawn while they
    had it. Each rank that shares the step calls this, and makes the comparison if all engines are
    theirs."""
    run = recorded.run
    if not run.spec.plan.generates:
        return NOT_APPLICABLE
    if recorded.config.actor_rollout_ref.rollout.workflow is not None or not recorded.is_ours(
        "responses"
    ):
        return "branches repeat tokens, and so may a user's node"
    drawn = dict(getattr(run.resources.rollout, "num_tokens_of_version", {}))
    every = run.ranks.gather((drawn, run.marked))
    if sum("rollout" in rank.engines for rank in run.spec.plan.ranks) > sum(
        bool(own) for own, _ in every
    ):
        return (
            "an engine does not count its tokens by version, or is on a worker that does not train"
        )
    for version in sorted({number for _, marked in every for number in marked}):
        num_drawn, num_marked = (sum(each[i].get(version, 0) for each in every) for i in (0, 1))
        if num_marked > num_drawn:
            raise Wrong(
                f"{num_marked} trained tokens are marked with weight version {version}, but the "
                "engines drew "
                f"{num_drawn} tokens while they had it: tokens drawn after a weight sync keep an "
                "older version, or "
                "have one that the engine did not have yet"
            )
    return None


def moved_draws(recorded: RecordedStep) -> float:
    """How much probability moves between the policy's precision and float32: the root mean square,
    over the tokens of the audited samples, of the change in the mass of the tokens before them in
    the vocabulary. 0 if the model can be run in only one precision, because its train engine does
    not expose it, or its weights are sharded."""
    actor = recorded.run.resources.actor
    samples = audited_samples(recorded)
    if not isinstance(actor, OpenEngine) or not samples:
        return 0.0
    rounded, exact = (
        policy_scores(recorded, actor, samples, dtype) for dtype in (None, torch.float32)
    )
    moved = torch.cat([rounded[uid].below - exact[uid].below for uid in rounded])
    return float(moved.square().mean().sqrt())


@dataclass(frozen=True)
class _Draw:
    """A token of a sample, the range of uniform numbers that draw it, and the number from the
    sample's stream."""

    uid: str
    position: int
    low: float
    high: float
    uniform: float


def _missed(draws: list[_Draw], limit: float) -> list[_Draw]:
    return [draw for draw in draws if not draw.low - limit <= draw.uniform <= draw.high + limit]


def _by_the_config(
    recorded: RecordedStep, params: SamplingParams, domain: str, conversation: str
) -> None:
    settings = recorded.config.actor_rollout_ref.rollout
    own = recorded.config.data.domains.get(domain)
    agents = agent_sampling(recorded.config, conversation)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    # user turns may end elsewhere
    for name in (*names, *(("stop",) if recorded.is_ours("responses") else ())):
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
            both = f"samples {twin['uid']} and {sample['uid']}"
            raise Wrong(
                f"{both} are the same response, with probability e^{nats:.0f}: they share a random "
                "stream"
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
