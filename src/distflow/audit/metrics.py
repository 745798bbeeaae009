"""Check: what a step reports is of its own samples and updates."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

from distflow.audit.recorded_data import RecordedStep, Wrong, check, doubles

LIMIT = 1e-4


@check(
    "metrics",
    "the reported mean score, length, truncated share and staleness are those of the step's samples, and the metrics "
    "of its updates are means over its mini-batches",
    needs="metrics of the built-in nodes",
    limit=f"{LIMIT:g} relative",
)
def audit_metrics(recorded: RecordedStep) -> str | None:
    _compare(recorded, (*_of_samples(recorded), *_of_updates(recorded)))
    return None


def audit_staleness(recorded: RecordedStep) -> str | None:
    """Of the metrics that a step has once it is released."""
    _compare(recorded, _of_versions(recorded))
    return None


def _compare(recorded: RecordedStep, wanted: Iterable[tuple[str, float]]) -> None:
    for name, expected in wanted:
        found = recorded.metrics.get(name, expected)
        if repr(found) != repr(expected) and not abs(found - expected) <= LIMIT * abs(expected) + 1e-6:
            raise Wrong(
                f"the metric {name} is reported as {found:.6g}, but of the step's own samples and updates it is "
                f"{expected:.6g}: it is of other samples or steps, over padding, or unweighted. Weights are not "
                "affected, but do not trust this run's curves; repair what computes the metric"
            )


def _of_samples(recorded: RecordedStep) -> Iterator[tuple[str, float]]:
    """Over all ranks, each of which calls it; the score of samples that have one."""
    batch, lengths = recorded.batch, recorded.batch.lengths("response")
    rows, valid = torch.arange(len(batch)).repeat_interleave(lengths), batch["valid"].bool()
    own = {"samples": len(batch), "tokens": int(lengths.sum()), "truncated": batch["finish_reason"].count("length")}
    counted = (batch.flat("response_mask") > 0) & valid[rows]
    if "token_level_scores" in batch:
        own |= {"valid": int(valid.sum()), "score": float(doubles(batch.flat("token_level_scores"))[counted].sum())}
    every = recorded.run.ranks.sum({name: float(number) for name, number in own.items()})
    yield "rollout/avg_response_length", every["tokens"] / every["samples"]
    yield "rollout/truncated", every["truncated"] / every["samples"]
    if every.get("valid"):
        yield "reward/mean_score", every["score"] / every["valid"]


def _of_versions(recorded: RecordedStep) -> Iterator[tuple[str, float]]:
    """The staleness of generated tokens, over all ranks, each of which calls it."""
    versions = recorded.batch.flat("versions")
    ages = (recorded.step - versions)[versions >= 0]
    every = recorded.run.ranks.sum({"generated": float(len(ages)), "stale": float(ages.sum())})
    if every["generated"]:
        yield "async/version_diff/mean", every["stale"] / every["generated"]


def _of_updates(recorded: RecordedStep) -> Iterator[tuple[str, float]]:
    """Of roles that one built-in node trains: means over mini-batches that had tokens, or counts of all."""
    names = [getattr(step.node.fn, "keywords", {}).get("name") for step in recorded.run.training_steps]
    for role in {update.role for update in recorded.updates}:
        prefix = role if role in names else "rm" if "rm" in names else "sft"
        updates, found = [update.metrics for update in recorded.updates_of(role)], defaultdict[str, list[float]](list)
        for metrics in [each for each in updates if not each.get("empty")] or updates:
            for name, value in metrics.items():
                found[name].append(value)
        for name, values in found.items() if names.count(prefix) == 1 else ():
            if name not in ("skipped", "empty"):
                yield f"{prefix}/{name}", math.fsum(values) / len(values)
