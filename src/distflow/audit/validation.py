"""Check: a validation asked every prompt as the config says, and reports what its samples scored."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distflow.audit.recorded_calls import GroupRecord
from distflow.audit.recorded_data import Wrong, check
from distflow.rewards.score import Score
from distflow.runtime.spec import Spec

LIMIT = 1e-6
Facts = list[dict[str, Any]]


@dataclass(frozen=True)
class Validated:
    """A validation. version: of the weights that must have generated. rows: of `sample_facts`, from all workers."""

    spec: Spec
    version: int
    rows: Facts
    metrics: Mapping[str, float]


def sample_facts(spec: Spec, records: Sequence[GroupRecord], rows: Facts) -> Facts:
    """What is known of each sample that was asked for. rows: of the samples file."""
    shown = {(row["set"], row["kind"], row["uid"]): row for row in rows}
    sets, found = {chosen.name: chosen.rows for chosen in spec.validation}, Facts()
    for record in records:
        group, (_, name, kind) = record.prompt_group, record.prompt_group.stream.split("/")
        asked = sets[name][group.row]
        for i in range(group.group_size):
            row: dict[str, Any] = shown.get((name, kind, f"{group.group_id}-{i}"), {})
            given = [result for _, call, result in record.scored if call.get("solution_str") == row.get("response")]
            accuracies = [each.extra.get("acc", each.value) for each in given if isinstance(each, Score)]
            is_own = not row or (row["prompt"], row["ground_truth"]) == (asked.prompt_text, asked.ground_truth)
            is_scored = row.get("acc") is None or not given or any(abs(row["acc"] - a) < 1e-4 for a in accuracies)
            params = [request.params for request, _ in record.generated]
            facts = {"set": name, "kind": kind, "row": group.row, "sample": i, "domain": asked.domain, "params": params}
            right = None if row.get("score") is None else (row["acc"] or 0.0) >= 1 - LIMIT
            versions = row.get("versions", [])
            found.append({**facts, "right": right, "versions": versions, "is_own": is_own, "is_scored": is_scored})
    return found


@check(
    "validation",
    "each validation prompt was asked once as the config says, greedily or sampled, by the newest weights, and scored "
    "beside its own ground truth; the reported accuracies are those of the recorded scores",
    needs="a validation by generated responses",
    limit=f"{LIMIT:g}",
)
def audit_validation(seen: Validated) -> str | None:
    if not any(name.startswith("val_correct/") for name in seen.metrics):
        return "a validation loss is not computed again"
    settings = seen.spec.config.actor_rollout_ref.rollout.val_kwargs
    numbers, sampled = {"greedy": int(settings.greedy), "sampled": settings.n}, ("temperature", "top_p", "top_k")
    places = [
        (chosen.name, kind, row, sample)
        for chosen in seen.spec.validation
        for kind, number in numbers.items()
        for row in range(len(chosen.rows))
        for sample in range(number)
    ]
    found = Counter((row["set"], row["kind"], row["row"], row["sample"]) for row in seen.rows)
    for name, kind, prompt, sample in (Counter(places) - found) + (found - Counter(places)):
        times = found[name, kind, prompt, sample]
        raise Wrong(
            f"sample {sample} of row {prompt} of '{name}' ({kind}) was asked for {times} times in place of once"
        )
    for row in seen.rows:
        who = f"sample {row['sample']} of row {row['row']} of '{row['set']}' ({row['kind']})"
        for params in row["params"]:
            own = [getattr(params, name) for name in sampled]
            if params.greedy != (row["kind"] == "greedy"):
                raise Wrong(f"{who} was generated {'greedily' if params.greedy else 'by sampling'}")
            if not params.greedy and own != [getattr(settings, name) for name in sampled]:
                raise Wrong(f"{who} was sampled with {', '.join(sampled)} = {own}, which is not val_kwargs")
        if set(row["versions"]) - {seen.version}:
            raise Wrong(f"{who} is of weight version {row['versions']}, and {seen.version} is the newest")
        if not row["is_own"] or not row["is_scored"]:
            raise Wrong(f"{who} has {'the accuracy' if row['is_own'] else 'the prompt or ground truth'} of another")
    expected = _metrics(seen.rows)
    for name in sorted(expected.keys() | seen.metrics.keys()):
        reported, counted = seen.metrics.get(name, math.nan), expected.get(name, math.nan)
        if not abs(reported - counted) <= LIMIT:
            raise Wrong(f"{name} is reported as {reported:g}, but {counted:g} by the recorded scores of its samples")
    return None


def _metrics(rows: Facts) -> dict[str, float]:
    """Accuracies by domain, each counted anew from the samples."""
    domains, kinds = {row["domain"] for row in rows}, {row["kind"] for row in rows}
    found = {"val/errors": float(sum(row["right"] is None for row in rows))}
    for domain in {"all", *(domains if domains != {"default"} else ())}:
        own = [row for row in rows if domain in ("all", row["domain"])]
        mean = [bool(row["right"]) for row in own if row["kind"] == min(kinds)]  # greedy, if any is
        found[f"val_correct/{domain}/mean"] = sum(mean) / len(mean)
        sampled = [row for row in own if row["kind"] == "sampled"]
        prompts = Counter((row["set"], row["row"]) for row in sampled)
        right = Counter((row["set"], row["row"]) for row in sampled if row["right"])
        n = max(prompts.values(), default=0)
        for k in {n, *(2**i for i in range(n.bit_length()))} if n else ():
            missed = [math.prod((n - right[each] - i) / (n - i) for i in range(k)) for each in prompts]
            found[f"val_correct/{domain}/pass@{k}"] = 1 - sum(missed) / len(missed)
            found[f"val_correct/{domain}/mean@{n}"] = right.total() / prompts.total()
    return found
