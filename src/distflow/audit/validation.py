"""Check: a validation generated for every prompt as configured, and reports its samples' scores; or
it reports the loss of the data's responses."""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distflow.audit.audited_step.engine_weights_and_draws import TWIN_NATS
from distflow.audit.audited_step.episodes import wrong_end
from distflow.audit.audited_step.groups_responses_and_masks import accuracies, parts_of_domain
from distflow.audit.audited_step.log_probs import EXACT, ROUNDED, forward_samples, is_beyond
from distflow.audit.check import Wrong, check, doubles, is_builtin
from distflow.audit.model_forward import (
    MAX_LOGITS,
    Numbers,
    log_probs_of,
    normals_of,
    vocabulary_of,
)
from distflow.audit.record_groups_and_updates import GroupRecord, OpenEngine
from distflow.audit.recorded_step import AuditedRun
from distflow.config import Config
from distflow.config.derived_settings import response_limit
from distflow.data.encoded_prompts import PromptRow
from distflow.errors import TrustError
from distflow.models.sharding import is_spread
from distflow.rollout.engine import SamplingParams, Stream
from distflow.runtime.checkpoint.files import DamagedError, by_age, read_manifest
from distflow.runtime.checkpoint.find_checkpoint import CHECKPOINTS

LIMIT = 1e-6
Facts = list[dict[str, Any]]


@dataclass(frozen=True)
class Validated:
    """A validation. version: of the weights that must have generated. rows: of `sample_facts`, from
    all workers; or the number of tokens of each row's response and their loss. step: number of
    steps before it."""

    run: AuditedRun
    version: int
    rows: Facts
    metrics: Mapping[str, float]
    step: int = 0


def sample_facts(run: AuditedRun, records: Sequence[GroupRecord], rows: Facts) -> Facts:
    """The known facts of each requested sample; `wrong` is empty, or the reason. rows: of the
    samples file."""
    shown = {(row["set"], row["kind"], row["uid"]): row for row in rows}
    found = Facts()
    writers = [
        node.fn for node in run.pipeline.nodes if {"responses", "scores"} & {*node.contract.writes}
    ]
    has_workflow = run.spec.config.actor_rollout_ref.rollout.workflow is not None
    is_ours = all(map(is_builtin, writers))
    sets = {chosen.name: chosen.rows for chosen in run.spec.validation}
    for record in records:
        group, (_, name, kind) = record.prompt_group, record.prompt_group.stream.split("/")
        asked = sets[name][group.row]
        drawn_row = random.Random(group.version).randrange(len(sets[name]))
        for i in range(group.group_size):
            row = shown.get((name, kind, f"{group.group_id}-{i}"), {})
            facts = {"set": name, "kind": kind, "row": group.row, "sample": i}
            facts |= {"domain": asked.domain, "tag": asked.tag}
            has_score = row.get("score") is not None and not row.get("errors")
            right = (row["acc"] or 0.0) >= 1 - LIMIT if has_score else None
            wrong = _wrong_score(run.spec.config, record, asked, row, is_ours and not has_workflow)
            wrong = wrong or _wrong_episode(run, record, i, row)
            wrong = wrong or (_wrong_request(run, record, asked) if is_ours else "")
            facts |= {"right": right, "versions": row.get("versions", []), "wrong": wrong}
            if kind == "greedy" and record.generated and group.row == drawn_row:
                request, result = record.generated[0]
                made = result[0]
                head = vars(own) if (own := request.params.head) is not None else {}
                facts["drawn"] = (
                    request.prompt_ids,
                    tuple(made.token_ids),
                    request.images,
                    tuple(made.values),
                    head,
                )
            found.append(facts)
    return found


def _wrong_score(
    config: Config, record: GroupRecord, asked: PromptRow, row: Mapping[str, Any], is_ours: bool
) -> str:
    if not row:
        return ""
    own = (row["response"], asked.ground_truth)
    if (row["prompt"], row["ground_truth"]) != (asked.prompt_text, asked.ground_truth):
        return "has the prompt or ground truth of another"
    given = [
        (part, score)
        for part, call, score in record.scored
        if (call.get("solution_str"), call.get("ground_truth")) == own
    ]
    stated = accuracies(parts_of_domain(config, asked.domain), given)
    by_sample = (
        is_ours and record.scored and all("solution_str" in call for _, call, _ in record.scored)
    )
    if (
        row["acc"] is None
        or not (given or by_sample)
        or any(abs(row["acc"] - each) < 1e-4 for each in stated)
    ):
        return ""
    return "has the accuracy of another"


def _wrong_episode(run: AuditedRun, record: GroupRecord, index: int, row: Mapping[str, Any]) -> str:
    turns = sum(bool(event[0] == "turn" and event[-1]) for event in record.events.get(index, ()))
    if not turns or not row or row["errors"] is not None or row["acc"] is None:
        return ""
    rollout = run.spec.config.actor_rollout_ref.rollout
    return wrong_end(rollout, row["domain"], turns, row["finish_reason"], row["acc"])


def _wrong_request(run: AuditedRun, record: GroupRecord, asked: PromptRow) -> str:
    """Why a request contradicts the config, or improbable samples are equal, i.e. share a random
    stream; else empty."""
    group = record.prompt_group
    config = run.spec.config
    (_, name, kind), rollout = group.stream.split("/"), config.actor_rollout_ref.rollout
    own = config.data.domains.get(name)
    val = rollout.val_kwargs
    wanted = SamplingParams(
        response_limit(config, name if own else ""),
        stop=tuple(rollout.stop if own is None or own.stop is None else own.stop),
        stop_token_ids=run.resources.stop_token_ids,
        greedy=kind == "greedy",
    )
    if kind == "sampled":
        wanted = replace(wanted, temperature=val.temperature, top_p=val.top_p, top_k=val.top_k)
    expected = (wanted, Stream(config.trainer.seed, group.stream, group.version, group.row))
    for request, result in record.generated:
        params = request.params
        stream = request.stream
        # a workflow itself decides its prompts and where a turn ends
        if rollout.workflow is not None:
            own_ends = {
                name: getattr(wanted, name)
                for name in ("max_tokens", "stop", "stop_token_ids", "head")
            }
            params = replace(params, **own_ends)
            stream = replace(stream, name=stream.name.partition("/fork ")[0])
        if (params, stream) != expected:
            return f"was generated by {(params, stream)}, which should be {expected}"
        if rollout.workflow is not None:
            continue
        rare = [
            tuple(each.token_ids) for each in result if sum(each.sampling_log_probs) < TWIN_NATS
        ]
        asked_for = (request.prompt_ids, request.images)
        if asked_for != (asked.prompt_ids, asked.images) or len(set(rare)) < len(rare):
            return (
                "was generated from different tokens than its prompt's, or shares a random stream: "
                "it has a duplicate"
            )
    return ""


@check(
    "validation",
    "each validation prompt was generated once as configured, greedily or sampled, by the newest "
    "weights, and "
    "scored against its own ground truth; episodes of built-in workflows end as they may; the "
    "tokens of a drawn "
    "greedy response are the most likely ones; the reported accuracies follow from the recorded "
    "scores; a loss is the "
    "mean over all tokens of the data's responses; on one row it, or the scores of a reward model, "
    "equal those of the "
    "model's own forward pass; trainer.keep_best compares checkpoints by these numbers",
    needs="for requests and scores the built-in nodes",
    limit=f"{LIMIT:g}",
)
def audit_validation(seen: Validated) -> str | None:
    is_loss = "sft/val_loss" in seen.metrics
    settings = seen.run.spec.config.actor_rollout_ref.rollout.val_kwargs
    numbers = {"greedy": int(settings.greedy), "sampled": settings.n}
    if is_loss or "rm/val_loss" in seen.metrics:
        numbers = {"loss" if is_loss else "pair": 1}
    places = [
        (chosen.name, kind, row, sample)
        for chosen in seen.run.spec.validation
        for kind, number in numbers.items()
        for row in range(len(chosen.rows))
        for sample in range(number)
    ]
    found = Counter((row["set"], row["kind"], row["row"], row["sample"]) for row in seen.rows)
    for name, kind, prompt, sample in (Counter(places) - found) + (found - Counter(places)):
        times = found[name, kind, prompt, sample]
        raise Wrong(
            f"sample {sample} of row {prompt} of '{name}' ({kind}) was requested {times} times "
            "instead of once"
        )
    sets = {chosen.name: chosen.rows for chosen in seen.run.spec.validation}
    for row in seen.rows:
        who = f"sample {row['sample']} of row {row['row']} of '{row['set']}' ({row['kind']})"
        if wrong := row["wrong"] or (
            _wrong_tokens(sets[row["set"]][row["row"]], row) if is_loss else ""
        ):
            raise Wrong(f"{who} {wrong}")
        if set(row["versions"]) - {seen.version}:
            raise Wrong(
                f"{who} is of weight version {row['versions']}, and {seen.version} is the newest"
            )
    if is_loss or "rm/val_loss" in seen.metrics:
        (_check_loss if is_loss else _check_pair)(seen, sets)
    for row in seen.rows:
        if "drawn" in row:
            _check_greedy(seen, row)
    expected = _metrics(seen.rows)
    for name in sorted(expected.keys() | seen.metrics.keys()):
        reported = seen.metrics.get(name, math.nan)
        counted = expected.get(name, math.nan)
        if not abs(reported - counted) <= LIMIT:
            raise Wrong(
                f"{name} is reported as {reported:g}, but {counted:g} by the recorded scores of "
                "its samples"
            )
    _check_kept(seen)
    return None


def _check_kept(seen: Validated) -> None:
    """Check that each checkpoint has the metric of its step's validation, and that the best of them
    still exists."""
    run = seen.run
    name = seen.run.spec.keep_best
    if name is None or run.inputs.ports.everyone.rank:
        return
    known = run.validated
    kept = dict[int, float]()
    for path in by_age(run.spec.run_dir / CHECKPOINTS):
        with suppress(DamagedError):  # it is being removed
            if (manifest := read_manifest(path)).metric is not None and manifest.step in known:
                kept[manifest.step] = manifest.metric
                run.saved.add(manifest.step)
    for step, metric in kept.items():
        if abs(metric - known[step]) > LIMIT:
            raise Wrong(
                f"the checkpoint of step {step} is compared by {metric:g} for trainer.keep_best, "
                f"but {name} was "
                f"{abs(known[step]):g} in its validation"
            )
    best = max((known[step] for step in run.saved), default=-math.inf)
    if kept and max(kept.values()) < best - LIMIT:
        raise Wrong(
            f"trainer.keep_best removed the best checkpoint: its {name} was {abs(best):g}, which "
            "is better than in all "
            "that are left"
        )
    known[seen.step] = -seen.metrics[name] if name.endswith("loss") else seen.metrics[name]


def _check_loss(seen: Validated, sets: Mapping[str, Sequence[PromptRow]]) -> None:
    """Check that the loss of a drawn row is that of the trained model's own forward."""
    actor = seen.run.resources.actor
    if not isinstance(actor, OpenEngine) or is_spread(actor.model):
        return
    row = random.Random(seen.version).choice(seen.rows)
    answer = sets[row["set"]][row["row"]]
    ids = list(answer.response_ids or ())
    images = [answer.images] if answer.images else []
    sample = {
        "prompt_ids": torch.tensor(answer.prompt_ids),
        "response_ids": torch.tensor(ids),
        "images": images,
    }
    if not ids or (len(answer.prompt_ids) + len(ids)) * vocabulary_of(actor.model) > MAX_LOGITS:
        return
    (log_probs,) = forward_samples(
        seen.run, actor, [sample], lambda logits, _: log_probs_of(logits, ids, 1.0)
    )
    spans = answer.turns or ((0, len(ids)),)
    expected = -float(sum(log_probs[start:end].sum() for start, end in spans))
    if not abs(row["loss"] - expected) <= (EXACT if seen.run.is_exact else ROUNDED)[0] * max(
        row["tokens"], 1
    ):
        raise Wrong(
            f"row {row['row']} of '{row['set']}' has the loss {row['loss']:.6g}, but "
            f"{expected:.6g} by the model's own "
            "forward: it is of other weights, another temperature or other tokens"
        )


def _check_pair(seen: Validated, sets: Mapping[str, Sequence[PromptRow]]) -> None:
    """Check that the scores of a drawn pair are those of the last tokens by the reward model's own
    forward."""
    actor = seen.run.resources.actor
    row = random.Random(seen.version).choice(seen.rows)
    if not isinstance(actor, OpenEngine) or is_spread(actor.model):
        return
    answer = sets[row["set"]][row["row"]]
    for name, ids in (
        ("chosen", answer.response_ids or ()),
        ("rejected", answer.rejected_ids or ()),
    ):
        # Row i of the output is that of the token before response token i: one more token gives
        # that of the last.
        sample = {
            "prompt_ids": torch.tensor(answer.prompt_ids),
            "response_ids": torch.tensor([*ids, 0]),
            "images": [],
        }
        (score,) = forward_samples(
            seen.run, actor, [sample], lambda logits, _: float(logits[-1, 0])
        )
        if not abs(row[name] - score) <= (EXACT if seen.run.is_exact else ROUNDED)[0] * max(
            abs(score), 1.0
        ):
            raise Wrong(
                f"the {name} text of row {row['row']} of '{row['set']}' has the score "
                f"{row[name]:.6g}, but {score:.6g} "
                "by the model's own forward at its last token: it is of another token or text, or "
                "of other weights"
            )


def _check_greedy(seen: Validated, row: Mapping[str, Any]) -> None:
    """Each token of a drawn greedy response is the most likely one by the trained model's own
    forward; each number of an action is the mean."""
    run, (prompt, ids, images, values, head), actor = (
        seen.run,
        row["drawn"],
        seen.run.resources.actor,
    )
    is_known = (
        isinstance(actor, OpenEngine)
        and not is_spread(actor.model)
        and not run.spec.config.dag.policies
    )
    # else the weights may have moved since
    if not is_known or run.spec.update_frequency > 1 or not ids:
        return
    assert isinstance(actor, OpenEngine)
    if (len(prompt) + len(ids)) * vocabulary_of(actor.model) > MAX_LOGITS:
        return
    run.bring()
    tokens = torch.tensor(ids)
    sample = {
        "prompt_ids": torch.tensor(prompt),
        "response_ids": tokens,
        "images": [images] if images else [],
    }

    def gap_of(logits: Tensor, _: object) -> Tensor:
        if values:
            numbers = Numbers(torch.tensor(values, dtype=torch.float64), head)
            return (normals_of(logits.cpu(), tokens, numbers).mean - numbers.values).abs()
        return logits.amax(-1) - logits.gather(-1, tokens.to(logits.device)[:, None])[:, 0]

    (gap,) = forward_samples(run, actor, [sample], gap_of)
    if is_beyond(gap := doubles(gap), EXACT if run.is_exact else ROUNDED):
        raise Wrong(
            f"the greedy response to row {row['row']} of '{row['set']}' has another token than the "
            "most likely one at "
            f"token {int(gap.argmax())}, which is e^{float(gap.max()):.3g} times as likely: it was "
            "sampled, or is of "
            "other weights"
        )


def _wrong_tokens(answer: PromptRow, row: Mapping[str, Any]) -> str:
    wanted = sum(
        end - start for start, end in answer.turns or ((0, len(answer.response_ids or ())),)
    )
    return (
        f"counts {row['tokens']} tokens, but the response has {wanted}"
        if row["tokens"] != wanted
        else ""
    )


def _metrics(rows: Facts) -> dict[str, float]:
    """Accuracies by domain and by tag, each recounted from the samples, or the mean loss per
    token."""
    if any(row["kind"] == "loss" for row in rows):
        return {
            "sft/val_loss": math.fsum(row["loss"] for row in rows)
            / sum(row["tokens"] for row in rows)
        }
    if any(row["kind"] == "pair" for row in rows):
        margins = [row["chosen"] - row["rejected"] for row in rows]
        sums = [
            math.fsum(map(of, margins))
            for of in (lambda x: math.log1p(math.exp(-x)), lambda x: x > 0, float)
        ]
        return {
            f"rm/val_{name}": x / len(rows)
            for name, x in zip(("loss", "accuracy", "margin"), sums, strict=True)
        }
    kinds = {row["kind"] for row in rows}
    pairs = {(row["domain"], row["tag"]) for row in rows}
    parts = {"all": rows}
    domains_of_tag = Counter(tag for _, tag in pairs)
    for row in rows:
        domain = row["domain"]
        tag = row["tag"]
        names = {domain, tag} if any(other != "default" for other, _ in pairs) else {tag}
        names |= {f"{domain}/{tag}"} if domains_of_tag[tag] > 1 and tag else set()
        for name in names - {"all", ""}:
            parts.setdefault(name, []).append(row)
    found = {"val/errors": float(sum(row["right"] is None for row in rows))}
    for name, own in parts.items():
        # greedy ones, if there are any
        mean = [bool(row["right"]) for row in own if row["kind"] == min(kinds)]
        found[f"val_correct/{name}/mean"] = sum(mean) / len(mean)
        sampled = [row for row in own if row["kind"] == "sampled"]
        prompts = Counter((row["set"], row["row"]) for row in sampled)
        right = Counter((row["set"], row["row"]) for row in sampled if row["right"])
        n = max(prompts.values(), default=0)
        for k in {n, *(2**i for i in range(n.bit_length()))} if n else ():
            missed = [
                math.prod((n - right[each] - i) / (n - i) for i in range(k)) for each in prompts
            ]
            found[f"val_correct/{name}/pass@{k}"] = 1 - sum(missed) / len(missed)
            found[f"val_correct/{name}/mean@{n}"] = right.total() / prompts.total()
    return found


def check_end(condition: str, metrics: Mapping[str, float], ends: bool, step: int) -> None:
    """Check that the run ends after the step if trainer.stop_when is met, and only then."""
    name, sign, bound = condition.split()
    found = metrics.get(name, math.nan)
    limit = float(bound)
    is_met = (found > limit if ">" in sign else found < limit) or ("=" in sign and found == limit)
    if is_met != ends:
        what = "ends, though it is not" if ends else "goes on, though it is"
        raise TrustError(
            f"after step {step + 1} {name} is {found:g}, and the run {what} {sign} {limit:g} "
            "(trainer.stop_when): "
            "correct the code that compares them"
        )
