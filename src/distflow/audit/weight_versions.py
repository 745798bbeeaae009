"""Checks: the rollout engine computes with the trainer's weights; the weights of a token's version give the log-prob
that the engine reported for it."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache

from distflow.audit.check_base import NOT_APPLICABLE, RecordedStep, Sample, Wrong, check, doubles, is_builtin
from distflow.audit.log_probs import audited_samples, dtype_of, ids_of, is_beyond
from distflow.audit.model_forward import PlainScores, Turns, Weights, model_of, plain_scores, plainly, vocabulary_of
from distflow.audit.recorded_calls import OpenEngine
from distflow.models.lora import unwrapped

EXACT, ROUNDED = (1e-3, 3e-2), (0.15, 5.0)
LEAST_TOKENS = 16
_Scored = tuple[PlainScores, Tensor]
"""Scores of a sample's tokens, and a mask of the tokens that have one."""
PRESENT: Weights = {}
"""Stands for the policy's present weights."""


@check(
    "weights",
    "the rollout engine's tensors are the trainer's of the same version, cast to its dtype; only adapters are "
    "trained, on all linear layers with target_modules=all-linear; without adapters frozen weights are a warning",
    needs="an engine on this worker; no unmerged adapter",
    limit="equal hashes of sampled elements of each tensor",
)
def audit_weights(recorded: RecordedStep) -> str | None:
    _trained_and_adapted(recorded)
    resources = recorded.run.resources
    if resources.rollout is None or resources.actor is None:
        return "the rollout engine is on another worker" if recorded.is_written("rollout_log_probs") else NOT_APPLICABLE
    version = recorded.synced_version
    if not recorded.sent_hashes:
        return "no weights were synced, or an adapter is applied unmerged, on the trainer's own storage"
    engine_hashes = recorded.run.engine_hashes()
    different = [name for name, own in recorded.sent_hashes.items() if engine_hashes.get(name) != own]
    if different:
        raise Wrong(
            f"the rollout engine serves version {version}, but {len(different)} of its tensors are not the "
            f"trainer's of that version ({', '.join(different[:4])}): they were not sent, or not loaded"
        )
    return None


@check(
    "versions",
    "the engine's log-prob of a token equals that of the weights of its version, over keys and values as "
    "`kv_on_update` requires; the other rule does not fit better; old weights are kept for the audit",
    needs="tokens of the current weights, or of weights that were kept",
    limit=f"mean {EXACT[0]:g}, largest {EXACT[1]:g} (bfloat16: {ROUNDED[0]:g}, {ROUNDED[1]:g})",
)
def audit_versions(recorded: RecordedStep) -> str | None:
    if not recorded.is_written("rollout_log_probs"):
        return NOT_APPLICABLE
    actor = recorded.run.resources.actor
    if not isinstance(actor, OpenEngine):
        return "the train engine does not expose its model"
    recomputes, others = recorded.config.actor_rollout_ref.rollout.kv_on_update == "recompute", dict[str, _Scored]()
    for sample in audited_samples(recorded):
        recorded.drawn[sample["uid"]] = _scores(recorded, actor, sample, recomputes)
        if not recorded.run.is_exact and len(set(sample["versions"].tolist())) > 1:
            others[sample["uid"]] = _scores(recorded, actor, sample, not recomputes)
    if not any(bool(known.any()) for _, known in recorded.drawn.values()):
        return "no token of the drawn samples is of weights that were kept"
    if not recorded.is_ours("rollout_log_probs") and not any(map(recorded.turns, recorded.samples)):
        return "a user's node writes rollout_log_probs"
    if not recorded.run.is_exact and bool(((v := recorded.batch.flat("versions"))[v >= 0] == recorded.step).all()):
        return None  # below float32 rounding may be large, and is weighed: these are compared in every step
    for sample in recorded.samples:
        if sample["uid"] in recorded.drawn:
            _same(recorded, sample, *recorded.drawn[sample["uid"]])
    _fits_better(recorded, others)
    return None


def _trained_and_adapted(recorded: RecordedStep) -> None:
    """All weights are trained (but sinusoids of positions), or of adapters all and nothing else. An adapter is scaled
    by alpha over rank."""
    settings, actor = recorded.config.actor_rollout_ref.model, recorded.run.resources.actor
    model, adapts = model_of(actor), settings.lora_rank > 0
    if model is None or not is_builtin(type(actor)):
        return
    trained = {name: p.requires_grad for name, p in model.named_parameters() if "position" not in name}
    if odd := [name for name in trained if trained[name] != (not adapts or ".lora_" in name)]:
        what = (
            f"{odd[0]} and {len(odd) - 1} more of the policy's weights are {'trained' if trained[odd[0]] else 'frozen'}"
        )
        if adapts:
            raise Wrong(f"{what}, but adapters and nothing else should be trained")
        recorded.run.warn(f"{what}, and no key freezes any: this is correct only if the model's own code freezes them")
    expected, modules = settings.lora_alpha / max(settings.lora_rank, 1), dict(unwrapped(model).named_modules())
    for name, module in modules.items():
        for scale in getattr(module, "scaling", {}).values() if hasattr(module, "get_delta_weight") else ():
            if abs(scale - expected) > 1e-6 * expected:
                raise Wrong(f"the adapter of {name} is scaled by {scale:g}, but lora_alpha / lora_rank is {expected:g}")
    head = unwrapped(model).get_output_embeddings()
    found = [name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head]
    plain = [name for name in found if not re.search(r"\.base_layer$|\.lora_", name)]
    if adapts and settings.target_modules == "all-linear" and plain:
        raise Wrong(f"target_modules is all-linear, but {plain[0]} and {len(plain) - 1} more have no adapter")


def _scores(recorded: RecordedStep, actor: OpenEngine, sample: Sample, recomputes: bool) -> _Scored:
    """Of a sample by the weights of its tokens' versions. recomputes: keys and values after a weight sync."""
    present = recorded.synced_version if recorded.synced_version == recorded.step else None  # else it has moved since
    older = recorded.run.older_weights
    weights = [PRESENT if version == present else older.of(version) for version in sample["versions"].tolist()]
    known = torch.tensor([one is not None for one in weights])
    (prompt, response), policy = ids_of(sample), sample["response_mask"] > 0
    if sample["uid"] in recorded.plain and all(weights[i] is PRESENT for i in policy.nonzero()[:, 0].tolist()):
        return recorded.plain[sample["uid"]], policy
    model, runs = actor.model, recorded.run.turns
    with torch.no_grad(), plainly(model, compute_dtype=dtype_of(actor)):
        if recomputes:
            logits = _over_own_keys(runs, model, [*prompt, *response], weights)
        else:
            logits = torch.zeros(len(weights), vocabulary_of(model))
            turns = [(turn.start, turn.end) for turn in recorded.turns(sample)]
            # Each begins over keys and values of its first token's weights, and goes on over those of earlier tokens'.
            for start, end in turns or [(0, len(weights))]:
                known[start:end] = known[start:end].cummin(0).values
                ids = [*prompt, *response[:end]]
                logits[start:end] = _over_older_keys(runs, model, ids, weights[start:end])
    return plain_scores(logits, response, recorded.sampling(sample)), known & policy


def _over_older_keys(turns: Turns, model: nn.Module, ids: Sequence[int], weights: Sequence[Weights | None]) -> Tensor:
    """Logits `(tokens, vocabulary)` that each token was drawn from, if the engine keeps keys and values over weight
    syncs: a position has keys and values by the weights that drew the next token, the prompt by those of the first
    token. Zeros from the first token with unknown weights on."""
    found, cache = torch.zeros(len(weights), vocabulary_of(model)), DynamicCache(config=unwrapped(model).config)
    first, fed, done = len(ids) - len(weights) - 1, 0, 0
    for _, run in groupby(weights, key=id):
        own, *more = run
        if own is None:
            break
        until = done + 1 + len(more)
        logits = _forward(turns, model, own, ids[fed : first + until], past_key_values=cache, use_cache=True)
        found[done:until] = logits[done - until :]
        fed, done = first + until, until
    return found


def _over_own_keys(turns: Turns, model: nn.Module, ids: Sequence[int], weights: Sequence[Weights | None]) -> Tensor:
    """The same if all keys and values are recomputed after a weight sync."""
    found, start = torch.zeros(len(weights), vocabulary_of(model)), len(ids) - len(weights) - 1
    for own in {id(one): one for one in weights if one is not None}.values():
        mine = torch.tensor([one is own for one in weights])
        found[mine] = _forward(turns, model, own, ids[:-1], use_cache=False)[start:][mine]
    return found


def _forward(turns: Turns, model: nn.Module, weights: Weights, ids: Sequence[int], **options: object) -> Tensor:
    """Logits of all positions, float32 on the CPU."""
    device = next(model.parameters()).device
    swapped = {name: weight.to(device) for name, weight in weights.items()}
    inputs = {"input_ids": torch.tensor([list(ids)], device=device), **options}
    output: Any = functional_call(model, swapped, kwargs=inputs) if swapped else turns.run(model, **inputs)
    logits: Tensor = output.logits[0]
    return logits.float().cpu()


def _fits_better(recorded: RecordedStep, others: Mapping[str, _Scored]) -> None:
    """Below float32 rounding hides keys and values of other weights, but not which rule fits. others: by the other."""
    gaps = [torch.zeros(0, 2).double()]
    for sample in (sample for sample in recorded.samples if sample["uid"] in others):
        (own, known), (other, too) = recorded.drawn[sample["uid"]], others[sample["uid"]]
        later = known & too & (sample["versions"] > sample["versions"][sample["versions"] >= 0].min())
        found = doubles(sample["rollout_log_probs"])
        gaps.append(torch.stack([(found - each.log_probs).abs()[later] for each in (own, other)], -1))
    mean, by_other = torch.cat(gaps).mean(0).tolist()
    if sum(map(len, gaps)) >= LEAST_TOKENS and mean > max(2 * by_other, EXACT[0]):
        raise Wrong(
            f"after a weight sync within a response the engine's log-probs differ by {mean:.3g} from those over keys "
            f"and values as kv_on_update={recorded.config.actor_rollout_ref.rollout.kv_on_update} has them, and by "
            f"{by_other:.3g} from those as the other rule has them"
        )


def _same(recorded: RecordedStep, sample: Sample, scores: PlainScores, known: Tensor) -> None:
    gap = (doubles(sample["rollout_log_probs"]) - scores.log_probs).abs()[known]
    mean, largest = limits = recorded.limit(EXACT, ROUNDED)
    if is_beyond(gap, limits):
        token = int(known.nonzero()[int(gap.argmax()), 0])
        raise Wrong(
            f"the engine's log-probs of the tokens of sample {sample['uid']} differ by {float(gap.mean()):.3g} on "
            f"average from those of the weights of the tokens' versions, by {float(gap.max()):.3g} at token {token} of "
            f"version {int(sample['versions'][token])} (limits {mean:g}, {largest:g}; the engine has version "
            f"{recorded.synced_version}). Likely causes: weights or an adapter that were not sent, not loaded or are "
            "scaled otherwise, a version that changes before or after them, keys and values of other weights"
        )
