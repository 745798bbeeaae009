"""Check: a validation generated for every prompt as configured, by the newest weights, and each
sample has its own score; or the loss of the data's responses is the model's."""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distflow.checks.check import Wrong, check, is_builtin
from distflow.checks.draws import TWIN_NATS
from distflow.checks.group_records import GroupRecord
from distflow.checks.log_probs import EXACT, ROUNDED, forward_samples, is_beyond
from distflow.checks.plain_forward import (
    MAX_LOGITS,
    Numbers,
    log_probs_of,
    normals_of,
    vocabulary_of,
)
from distflow.checks.recorded_step import CheckedRun
from distflow.checks.rewards import accuracies
from distflow.checks.samples import Sample, doubles
from distflow.checks.update_records import OpenEngine
from distflow.config.derived_settings import response_limit
from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Segment
from distflow.models.sharding import is_spread
from distflow.rewards.reward_results import RIGHT
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream

LIMIT = 1e-6
ACCURACY_LIMIT = 1e-4
Facts = list[dict[str, Any]]


@dataclass(frozen=True)
class Validated:
    """A validation."""

    run: CheckedRun
    version: int
    """Of the weights that must have generated."""
    rows: Facts
    """Of `sample_facts`, from all workers; or the number of tokens of each row's response and their
    loss."""
    metrics: Mapping[str, float]


def sample_facts(run: CheckedRun, records: Sequence[GroupRecord], rows: Facts) -> Facts:
    """The known facts of each requested sample; `wrong` is empty, or the reason. rows: of the
    samples file."""
    shown = {(row["set"], row["kind"], row["uid"]): row for row in rows}
    writers = list[Any]()
    for node in run.pipeline.nodes:
        if {"responses", "scores"} & {*node.contract.writes}:
            writers.append(node.fn)
    is_ours = all(map(is_builtin, writers))
    sets = {chosen.name: chosen.rows for chosen in run.spec.validation}
    found = Facts()
    for record in records:
        group = record.prompt_group
        _, name, kind = group.stream.split("/")
        asked = sets[name][group.row]
        drawn_row = random.Random(group.version).randrange(len(sets[name]))
        wrong_request = _wrong_request(run, record, asked) if is_ours else ""
        for i in range(group.group_size):
            row = shown.get((name, kind, f"{group.group_id}-{i}"), {})
            facts = {"set": name, "kind": kind, "row": group.row, "sample": i}
            facts["versions"] = row.get("versions", [])
            facts["is_right"] = _is_right(row)
            facts["wrong"] = _wrong_score(record, asked, row) or wrong_request
            if kind == "greedy" and record.generated and group.row == drawn_row:
                facts["drawn"] = _drawn(*record.generated[0])
            found.append(facts)
    return found


def _is_right(row: Mapping[str, Any]) -> bool | None:
    """None without a score."""
    has_score = row.get("score") is not None and not row.get("errors")
    return (row["acc"] or 0.0) >= RIGHT if has_score else None


def _drawn(request: GenerateRequest, result: Sequence[Segment]) -> tuple[Any, ...]:
    """Prompt, tokens, images, numbers and head of the response."""
    made = result[0]
    head = vars(request.params.head) if request.params.head is not None else {}
    return request.prompt_ids, tuple(made.token_ids), request.images, tuple(made.values), head


def _wrong_score(record: GroupRecord, asked: PromptRow, row: Mapping[str, Any]) -> str:
    if not row:
        return ""
    if (row["prompt"], row["ground_truth"]) != (asked.prompt_text, asked.ground_truth):
        return "has the prompt or ground truth of another"
    is_known = bool(record.scored) and all("solution_str" in call for _, call, _ in record.scored)
    if row["acc"] is None or not is_known or row.get("errors"):
        return ""
    stated = accuracies(record, row["response"])
    if not stated and len(record.events) > 0:  # a workflow decides what is scored
        return ""
    if any(abs(row["acc"] - own) < ACCURACY_LIMIT for own in stated):
        return ""
    return "has the accuracy of another"


def _wrong_request(run: CheckedRun, record: GroupRecord, asked: PromptRow) -> str:
    """Why a request contradicts the config, or improbable samples are equal, i.e. share a random
    stream; else empty."""
    group = record.prompt_group
    config = run.spec.config
    rollout = config.actor_rollout_ref.rollout
    _, name, kind = group.stream.split("/")
    own = config.data.domains.get(name)
    wanted = SamplingParams(
        response_limit(config, name if own else ""),
        stop=tuple(rollout.stop if own is None or own.stop is None else own.stop),
        stop_token_ids=run.resources.stop_token_ids,
        greedy=kind == "greedy",
    )
    if kind == "sampled":
        val = rollout.val_kwargs
        wanted = replace(wanted, temperature=val.temperature, top_p=val.top_p, top_k=val.top_k)
    expected = (wanted, Stream(config.trainer.seed, group.stream, group.version, group.row))
    for request, result in record.generated:
        params = request.params
        stream = request.stream
        if rollout.workflow is not None:  # it decides where a turn ends
            ends = ("max_tokens", "stop", "stop_token_ids", "head")
            params = replace(params, **{name: getattr(wanted, name) for name in ends})
            stream = replace(stream, name=stream.name.partition("/fork ")[0])
        if (params, stream) != expected:
            return f"was generated by {(params, stream)}, which should be {expected}"
        if rollout.workflow is not None:  # it decides its prompts
            continue
        rare = list[tuple[int, ...]]()
        for made in result:
            if sum(made.sampling_log_probs) < TWIN_NATS:
                rare.append(tuple(made.token_ids))
        is_its_own = (request.prompt_ids, request.images) == (asked.prompt_ids, asked.images)
        if not is_its_own or len(set(rare)) < len(rare):
            return (
                "was generated from different tokens than its prompt's, or shares a random stream: "
                "it has a duplicate"
            )
    return ""


@check(
    "validation",
    "each validation prompt was generated once as configured, greedily or sampled, by the newest "
    "weights, and scored against its own ground truth; the tokens of a drawn greedy response are "
    "the most likely ones; the reported accuracies of greedy and sampled responses, and numbers "
    "without a score, are those of the recorded scores; on one row a loss, or the scores of a "
    "reward model, equal those of the model's own forward pass",
    needs="for requests and scores the built-in nodes",
    limit=f"{LIMIT:g}",
)
def check_validation(seen: Validated) -> str | None:
    is_loss = "sft/val_loss" in seen.metrics
    is_pairs = "rm/val_loss" in seen.metrics
    _check_places(seen, "loss" if is_loss else "pair" if is_pairs else "")
    for row in seen.rows:
        who = f"sample {row['sample']} of row {row['row']} of '{row['set']}' ({row['kind']})"
        if wrong := row["wrong"] or (_wrong_tokens(seen, row) if is_loss else ""):
            raise Wrong(f"{who} {wrong}")
        if set(row["versions"]) - {seen.version}:
            raise Wrong(
                f"{who} is of weight version {row['versions']}, and {seen.version} is the newest"
            )
        if "drawn" in row:
            _check_greedy(seen, row)
    if is_loss:
        _check_loss(seen)
    elif is_pairs:
        _check_pair(seen)
    else:
        _check_right(seen)
    return None


def _check_places(seen: Validated, only: str) -> None:
    """Each prompt was asked for as often as the config says. only: the kind of rows without
    generation."""
    settings = seen.run.spec.config.actor_rollout_ref.rollout.val_kwargs
    numbers = {only: 1} if only else {"greedy": int(settings.greedy), "sampled": settings.n}
    wanted = Counter[tuple[str, str, int, int]]()
    for chosen in seen.run.spec.validation:
        for kind, number in numbers.items():
            for row in range(len(chosen.rows)):
                wanted.update((chosen.name, kind, row, sample) for sample in range(number))
    found = Counter((row["set"], row["kind"], row["row"], row["sample"]) for row in seen.rows)
    for place in (wanted - found) + (found - wanted):
        name, kind, prompt, sample = place
        raise Wrong(
            f"sample {sample} of row {prompt} of '{name}' ({kind}) was requested {found[place]} "
            "times instead of once"
        )


def _check_right(seen: Validated) -> None:
    """The accuracy over everything, and the number of samples without a score."""
    kinds = {row["kind"] for row in seen.rows}
    own = [bool(row["is_right"]) for row in seen.rows if row["kind"] == min(kinds)]
    expected = {
        "val/errors": float(sum(row["is_right"] is None for row in seen.rows)),
        "val_correct/all/mean": sum(own) / max(len(own), 1),
    }
    for name, counted in expected.items():
        _check_metric(seen, name, counted)


def _check_metric(seen: Validated, name: str, counted: float) -> None:
    reported = seen.metrics.get(name, math.nan)
    if not abs(reported - counted) <= LIMIT:
        raise Wrong(
            f"{name} is reported as {reported:g}, but {counted:g} by the recorded scores of its "
            "samples"
        )


def _row_of(seen: Validated, row: Mapping[str, Any]) -> PromptRow:
    sets = {chosen.name: chosen.rows for chosen in seen.run.spec.validation}
    return sets[row["set"]][row["row"]]


def _open_actor(seen: Validated) -> OpenEngine | None:
    """The train engine, if this rank alone can run its model."""
    actor = seen.run.resources.actor
    return actor if isinstance(actor, OpenEngine) and not is_spread(actor.model) else None


def _sample(prompt: Sequence[int], response: Sequence[int], images: Sequence[str] = ()) -> Sample:
    return {
        "prompt_ids": torch.tensor(prompt),
        "response_ids": torch.tensor(response),
        "images": [images] if images else [],
    }


def _check_loss(seen: Validated) -> None:
    """The loss is the mean over all tokens, and that of a drawn row is that of the trained model's
    own forward."""
    total = math.fsum(row["loss"] for row in seen.rows)
    _check_metric(seen, "sft/val_loss", total / sum(row["tokens"] for row in seen.rows))
    actor = _open_actor(seen)
    row = random.Random(seen.version).choice(seen.rows)
    answer = _row_of(seen, row)
    ids = list(answer.response_ids or ())
    if actor is None or not ids:
        return
    if (len(answer.prompt_ids) + len(ids)) * vocabulary_of(actor.model) > MAX_LOGITS:
        return
    sample = _sample(answer.prompt_ids, ids, answer.images)
    (log_probs,) = forward_samples(
        seen.run, actor, [sample], lambda logits, _: log_probs_of(logits, ids, 1.0)
    )
    spans = answer.turns or ((0, len(ids)),)
    expected = -float(sum(log_probs[start:end].sum() for start, end in spans))
    if not abs(row["loss"] - expected) <= _limits(seen)[0] * max(row["tokens"], 1):
        raise Wrong(
            f"row {row['row']} of '{row['set']}' has the loss {row['loss']:.6g}, but "
            f"{expected:.6g} by the model's own forward: it is of other weights, another "
            "temperature or other tokens"
        )


def _check_pair(seen: Validated) -> None:
    """The scores of a drawn pair are those of the last tokens by the reward model's own forward."""
    actor = _open_actor(seen)
    row = random.Random(seen.version).choice(seen.rows)
    answer = _row_of(seen, row)
    if actor is None:
        return
    for name, ids in (("chosen", answer.response_ids), ("rejected", answer.rejected_ids)):
        # Row i of the output is that of the token before response token i: one more token gives
        # that of the last.
        sample = _sample(answer.prompt_ids, [*(ids or ()), 0])
        (score,) = forward_samples(
            seen.run, actor, [sample], lambda logits, _: float(logits[-1, 0])
        )
        if not abs(row[name] - score) <= _limits(seen)[0] * max(abs(score), 1.0):
            raise Wrong(
                f"the {name} text of row {row['row']} of '{row['set']}' has the score "
                f"{row[name]:.6g}, but {score:.6g} by the model's own forward at its last token: "
                "it is of another token or text, or of other weights"
            )


def _check_greedy(seen: Validated, row: Mapping[str, Any]) -> None:
    """Each token of a drawn greedy response is the most likely one by the trained model's own
    forward; each number of an action is the mean."""
    run = seen.run
    actor = _open_actor(seen)
    prompt, ids, images, values, head = row["drawn"]
    if actor is None or run.spec.config.dag.policies or not ids:
        return
    if run.spec.update_frequency > 1:  # the weights may have moved since
        return
    if (len(prompt) + len(ids)) * vocabulary_of(actor.model) > MAX_LOGITS:
        return
    run.bring()
    tokens = torch.tensor(ids)

    def gap_of(logits: Tensor, _: object) -> Tensor:
        if values:
            numbers = Numbers(torch.tensor(values, dtype=torch.float64), head)
            return (normals_of(logits.cpu(), tokens, numbers).mean - numbers.values).abs()
        return logits.amax(-1) - logits.gather(-1, tokens.to(logits.device)[:, None])[:, 0]

    (gap,) = forward_samples(run, actor, [_sample(prompt, ids, images)], gap_of)
    gap = doubles(gap)
    if is_beyond(gap, _limits(seen)):
        raise Wrong(
            f"the greedy response to row {row['row']} of '{row['set']}' has another token than the "
            f"most likely one at token {int(gap.argmax())}, which is e^{float(gap.max()):.3g} "
            "times as likely: it was sampled, or is of other weights"
        )


def _limits(seen: Validated) -> tuple[float, float]:
    return EXACT if seen.run.is_exact else ROUNDED


def _wrong_tokens(seen: Validated, row: Mapping[str, Any]) -> str:
    answer = _row_of(seen, row)
    spans = answer.turns or ((0, len(answer.response_ids or ())),)
    wanted = sum(end - start for start, end in spans)
    if row["tokens"] == wanted:
        return ""
    return f"counts {row['tokens']} tokens, but the response has {wanted}"
