"""Check: the weights of a token's version give the log-prob that the engine reported."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache

from distflow.checks.check import NOT_APPLICABLE, Wrong, check
from distflow.checks.kept_weights import Weights
from distflow.checks.log_probs import (
    dtype_of,
    ids_of,
    is_beyond,
    scored_samples,
    sequences_of,
)
from distflow.checks.plain_forward import PlainScores, plain_scores, plainly, vocabulary_of
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.samples import Conversation, Sample, conversations_of, doubles
from distflow.checks.sharded_passes import ShardedPasses
from distflow.checks.update_records import OpenEngine
from distflow.config.derived_settings import policy_of_conversation
from distflow.models.image_inputs import own_pass
from distflow.models.lora import unwrapped
from distflow.training.multi_policy_engine import models_of

EXACT = (1e-3, 3e-2)
ROUNDED = (0.15, 5.0)
Scored = tuple[PlainScores, Tensor]
"""Scores of a sample's tokens, and a mask of tokens with a score."""
PRESENT: Weights = {}
"""Stands for the policy's current weights."""


class Prompt(NamedTuple):
    """The first tokens of a conversation, which are given."""

    length: int
    images: Sequence[str]


@check(
    "versions",
    "the engine's log-prob of a token equals that of the weights of its version, over keys and "
    "values as `kv_on_update` requires",
    needs="tokens of the current weights, or of weights that were kept",
    limit=f"mean {EXACT[0]:g}, largest {EXACT[1]:g} (bfloat16: {ROUNDED[0]:g}, {ROUNDED[1]:g})",
)
def check_versions(recorded: RecordedStep) -> str | None:
    if not recorded.is_written("rollout_log_probs"):
        return NOT_APPLICABLE

    actor = recorded.run.resources.actor
    if not isinstance(actor, OpenEngine):
        return "the train engine does not expose its model"

    recomputes = recorded.config.actor_rollout_ref.rollout.kv_on_update == "recompute"
    for sample in scored_samples(recorded):
        uid = sample["uid"]
        recorded.drawn[uid] = _scores(recorded, actor, sample, recomputes)

    if not any(bool(known.any()) for _, known in recorded.drawn.values()):
        return "no token of the drawn samples is of weights that were kept"
    if not recorded.is_ours("rollout_log_probs") and not any(map(recorded.turns, recorded.samples)):
        return "a user's node writes rollout_log_probs"

    versions = recorded.batch.flat("versions")
    is_new = bool((versions[versions >= 0] == recorded.step).all())
    if is_new and not recorded.run.is_exact:
        # below float32, rounding may be large, but is corrected; every step compares these
        return None

    for sample in recorded.samples:
        if sample["uid"] in recorded.drawn:
            _same(recorded, sample, *recorded.drawn[sample["uid"]])

    return None


def _scores(recorded: RecordedStep, actor: OpenEngine, sample: Sample, recomputes: bool) -> Scored:
    """Scores of a sample by the weights of its tokens' versions. recomputes: keys and values after
    a weight sync."""
    weights = _weights_of_tokens(recorded, sample)
    known = torch.tensor([one is not None for one in weights])
    policy = sample["response_mask"] > 0
    is_present = all(weights[i] is PRESENT for i in policy.nonzero()[:, 0].tolist())
    if is_present and sample["uid"] in recorded.plain:
        return recorded.plain[sample["uid"]], policy

    models = models_of(actor.model)
    by_policy = {name: _of_policy(weights, name) for name in models}
    prompts = dict[str, Prompt]()
    for talk, ids in zip(conversations_of(sample), sequences_of(sample), strict=True):
        prompts[talk.name] = Prompt(ids.given or len(ids.prompt), ids.images)

    score = _over_own_keys if recomputes else _over_older_keys
    logits = torch.zeros(len(weights), vocabulary_of(actor.model))
    with torch.no_grad(), ExitStack() as plain:
        for model in models.values():
            plain.enter_context(plainly(model, compute_dtype=dtype_of(actor)))

        for start, end, talk in _pieces(recorded, sample, recomputes):
            if not recomputes:
                known[start:end] = known[start:end].cummin(0).values
            owner = policy_of_conversation(recorded.config, talk.name)
            logits[start:end] = score(
                recorded.run.passes,
                models[owner],
                talk.ids[: end - talk.first],
                by_policy[owner][start:end],
                prompts[talk.name],
            )

    sampling = recorded.sampling_of_tokens(sample)
    response = ids_of(sample).response
    return plain_scores(logits, response, sampling), known & policy


def _pieces(
    recorded: RecordedStep, sample: Sample, recomputes: bool
) -> list[tuple[int, int, Conversation]]:
    """The parts of the response that are scored in one go: start, end and conversation. Without
    recomputed keys each turn is one, since it begins with keys and values from its first token's
    weights, then uses those of earlier tokens."""
    talks = conversations_of(sample)
    if recomputes:
        return [(max(talk.first + 1, 0), talk.first + len(talk.ids), talk) for talk in talks]

    turns = [(turn.start, turn.end, turn.conversation) for turn in recorded.turns(sample)]
    whole = talks[0]
    return turns or [(0, len(whole.ids) + whole.first, whole)]


def _weights_of_tokens(recorded: RecordedStep, sample: Sample) -> list[Weights | None]:
    """The weights of each token's version; None if they were not kept."""
    has_moved = recorded.synced_version != recorded.step

    weights = list[Weights | None]()
    for version in sample["versions"].tolist():
        if version == recorded.step and not has_moved:
            weights.append(PRESENT)
        else:
            weights.append(recorded.run.older_weights.of(version))

    return weights


def _of_policy(weights: Sequence[Weights | None], policy: str) -> list[Weights | None]:
    """The weights for the model of one of several policies; equal entries stay one object."""
    if not policy:
        return [*weights]

    prefix = f"{policy}."
    of_policy = dict[int, Weights]()
    for version in weights:
        if not version or id(version) in of_policy:
            continue

        own = {}
        for name, weight in version.items():
            if name.startswith(prefix):
                own[name.removeprefix(prefix)] = weight

        of_policy[id(version)] = own

    return [of_policy.get(id(version), version) for version in weights]


def _over_older_keys(
    passes: ShardedPasses,
    model: nn.Module,
    ids: Sequence[int],
    weights: Sequence[Weights | None],
    prompt: Prompt,
) -> Tensor:
    """Logits `(tokens, vocabulary)` that each token was drawn from, if the engine keeps keys and
    values over weight syncs: a position's keys and values come from the weights that drew the next
    token, the prompt's from those of the first token. Zeros from the first token with unknown
    weights on."""
    drawn_from = torch.zeros(len(weights), vocabulary_of(model))
    cache = DynamicCache(config=unwrapped(model).config)
    first = len(ids) - len(weights) - 1

    fed = 0
    done = 0
    for _, run in groupby(weights, key=id):
        version, *more = run
        if version is None:
            break

        until = done + 1 + len(more)
        new = ids[fed : first + until]
        logits = _forward(
            passes, model, version, new, prompt, past_key_values=cache, use_cache=True
        )
        drawn_from[done:until] = logits[done - until :]

        fed = first + until
        done = until
        prompt = Prompt(0, ())  # it is in the cache

    return drawn_from


def _over_own_keys(
    passes: ShardedPasses,
    model: nn.Module,
    ids: Sequence[int],
    weights: Sequence[Weights | None],
    prompt: Prompt,
) -> Tensor:
    """The same if all keys and values are recomputed after a weight sync."""
    drawn_from = torch.zeros(len(weights), vocabulary_of(model))
    start = len(ids) - len(weights) - 1

    for version in {id(one): one for one in weights}.values():
        if version is None:
            continue
        is_drawn_by_it = torch.tensor([one is version for one in weights])
        logits = _forward(passes, model, version, ids[:-1], prompt, use_cache=False)
        drawn_from[is_drawn_by_it] = logits[start:][is_drawn_by_it]

    return drawn_from


def _forward(
    passes: ShardedPasses,
    model: nn.Module,
    weights: Weights,
    ids: Sequence[int],
    prompt: Prompt,
    **options: object,
) -> Tensor:
    """Logits of all positions, float32 on the CPU."""
    device = next(model.parameters()).device
    swapped = {name: weight.to(device) for name, weight in weights.items()}

    row = torch.tensor([list(ids)], device=device)
    with own_pass(model, row, prompt.length, (prompt.images,)) as given:
        inputs = {**given, **options}
        output: Any
        if swapped:
            output = functional_call(model, swapped, kwargs=inputs)
        else:
            output = passes.run(model, **inputs)

    logits: Tensor = output.logits[0]
    return logits.float().cpu()


def _same(recorded: RecordedStep, sample: Sample, scores: PlainScores, known: Tensor) -> None:
    gap = (doubles(sample["rollout_log_probs"]) - scores.log_probs).abs()[known]
    mean, largest = limits = recorded.limit(EXACT, ROUNDED)
    if is_beyond(gap, limits):
        token = int(known.nonzero()[int(gap.argmax()), 0])
        raise Wrong(
            f"the engine's log-probs of the tokens of sample {sample['uid']} differ by "
            f"{float(gap.mean()):.3g} on average from those of the weights of the tokens' "
            f"versions, by {float(gap.max()):.3g} at token {token} of version "
            f"{int(sample['versions'][token])} (limits {mean:g}, {largest:g}; the engine has "
            f"version {recorded.synced_version}). Likely causes: weights or an adapter that were "
            "not sent, not loaded or are scaled otherwise, a version that changes before or after "
            "them, keys and values of other weights"
        )
