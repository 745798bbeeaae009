"""The domains of a run: a row for each, and curves labelled by domain and by part of the reward.

`reward/PART/mean` is a part over all domains, `reward/DOMAIN/PART` that part in one: if a domain
has the name of a part, only the labels tell them apart.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from distflow.observe.findings.finding import Steps
from distflow.observe.report.chart_data import ChosenChart, Column

MAX_LINES = 12
MAX_ROWS = 100
_SCORE = "mean_score"
_FAILURES = ("errors", "timeouts")


class _Names(NamedTuple):
    """parts: of the reward, over all domains. of_domain: the parts of each."""

    domains: list[str]
    parts: list[str]
    of_domain: dict[str, list[str]]


def domain_table(steps: Steps) -> list[dict[str, Any]]:
    """A row for each domain, at most `MAX_ROWS`; empty without at least two.

    share: of all groups that were trained on. reward: over the first and the last tenth of the
    steps; accuracy, best: at the first and the last validation; `best` is pass@k for the largest k.
    calls: of reward functions in training; errors, timeouts: of these. dropped: groups by reason.
    None: not measured.
    """
    names = _find(set[str]().union(*steps.values()))
    if not names.domains:
        return []
    found: dict[str, list[float]] = {}
    for _, values in sorted(steps.items()):
        for name, value in values.items():
            found.setdefault(name, []).extend([value] if math.isfinite(value) else [])
    rows = [_row(domain, found) for domain in names.domains[:MAX_ROWS]]
    total = sum(row["groups"] or 0 for row in rows)
    for row in rows:
        row["share"] = row["groups"] / total if row["groups"] is not None and total else None
    return rows


def domain_charts(columns: Mapping[str, Column]) -> list[ChosenChart]:
    """A chart for each question on which domains differ, of at most `MAX_LINES` lines; none without
    two domains."""
    names = _find(columns)
    domains = names.domains

    def of_each(metric: str) -> dict[str, str]:
        return {metric.format(domain): domain for domain in domains}

    at_k: dict[str, str] = {}
    failed: dict[str, str] = {}
    dropped: dict[str, str] = {}
    made_of: list[tuple[str, str, dict[str, str]]] = []
    for domain in domains:
        at_k |= {name: f"{domain} {k}" for name, k in _at_k(domain, columns)}
        failed |= {f"domains/{domain}/{kind}": f"{domain} {kind}" for kind in _FAILURES}
        dropped |= {name: f"{domain}: {reason}" for name, reason in _dropped(domain, columns)}
        parts = _parts_of(domain, names, columns)
        made_of.append((f"What makes up the reward of {domain}?", "score", parts))
    parts = {f"reward/{part}/mean": part for part in names.parts}
    accuracy = of_each("val_correct/{}/mean")
    groups = of_each("domains/{}/groups")
    reward = of_each(f"reward/{{}}/{_SCORE}")
    questions = [
        ("In which domains does the accuracy rise?", "share correct", accuracy),
        ("For how many problems is one of k responses correct?", "pass@k", at_k),
        ("In which domains does the reward rise?", "score", reward),
        ("What do the parts of the reward score, over all domains?", "score", parts),
        *made_of,
        ("How many groups of a step does each domain have?", "groups", groups),
        ("How many reward errors are there, by domain?", "samples", failed),
        ("Which groups were dropped, by domain?", "groups since the start", dropped),
    ]
    charts: list[ChosenChart] = []
    for question, unit, labels in questions:
        shown = [name for name in labels if name in columns][:MAX_LINES]
        if not shown:
            continue
        chart: ChosenChart = {"question": question, "kind": "line", "unit": unit, "names": shown}
        chart["labels"] = {name: labels[name] for name in shown}
        if all(labels[name] in domains for name in shown):
            chart["colors"] = {name: domains.index(labels[name]) for name in shown}
        charts.append(chart)
    return charts


def domain_docs(columns: Iterable[str]) -> dict[str, str]:
    """Descriptions of mean rewards, since names such as `reward/code/code` are ambiguous. Empty
    without two domains."""
    names = _find(columns)
    docs = {
        f"reward/{part}/mean": f"mean of the part {part} of the reward, over all domains"
        for part in names.parts
    }
    for domain, parts in names.of_domain.items():
        docs[f"reward/{domain}/{_SCORE}"] = f"mean reward of the domain {domain}"
        docs |= {
            f"reward/{domain}/{part}": f"mean of the part {part} in the domain {domain}"
            for part in parts
        }
    return docs


def _find(names: Iterable[str]) -> _Names:
    """The names in the metrics; empty without two domains."""
    known = sorted(set(names))
    found = {
        match[1] for name in known if (match := re.fullmatch(r"(?:domains/(.+)/groups)", name))
    }
    found |= {
        match[1] for name in known if (match := re.fullmatch(r"val_correct/(.+)/mean", name))
    } - {"all"}
    domains = sorted(found)
    if len(domains) < 2:
        return _Names([], [], {})
    of_domain: dict[str, list[str]] = {domain: [] for domain in domains}
    # A part called "mean" is one of all domains too; else DOMAIN/mean is the part with the name of
    # the domain.
    tails = {_SCORE, *(() if "reward/mean/mean" in known else ("mean",))}
    longest_first = sorted(domains, key=len, reverse=True)
    in_domains = set()
    for name in known:
        domain = next(
            (domain for domain in longest_first if name.startswith(f"reward/{domain}/")), None
        )
        if domain is not None and (part := name.removeprefix(f"reward/{domain}/")) not in tails:
            of_domain[domain].append(part)
            in_domains.add(name)
    parts = [
        m[1]
        for name in known
        if name not in in_domains and (m := re.fullmatch(r"reward/(.+)/mean", name))
    ]
    return _Names(domains, parts, of_domain)


def _parts_of(domain: str, names: _Names, columns: Mapping[str, Column]) -> dict[str, str]:
    """Metrics of the parts in a domain; empty if the only part is the whole reward."""
    whole = f"reward/{domain}/{_SCORE}"
    labels = {f"reward/{domain}/{part}": part for part in names.of_domain[domain]}
    if len(labels) == 1 and [columns[name] for name in labels] == [columns.get(whole)]:
        return {}
    return labels


def _at_k(domain: str, names: Iterable[str]) -> list[tuple[str, str]]:
    """Only the largest k, e.g. `pass@8`; pass@1 is the accuracy."""
    found = [
        (int(m[1]), name)
        for name in names
        if (m := re.fullmatch(rf"val_correct/{re.escape(domain)}/pass@(\d+)", name))
    ]
    return [(name, f"pass@{k}") for k, name in sorted(found)[-1:] if k > 1]


def _dropped(domain: str, names: Iterable[str]) -> list[tuple[str, str]]:
    start = f"domains/{domain}/dropped/"
    return [(name, name.removeprefix(start)) for name in sorted(names) if name.startswith(start)]


def _row(domain: str, values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """values: by metric, in the order of the steps."""
    at_k = _at_k(domain, values)
    calls = values.get(f"domains/{domain}/calls")
    groups = values.get(f"domains/{domain}/groups")
    return {
        "name": domain,
        "groups": round(sum(groups)) if groups else None,
        "share": None,
        "reward": _tenths(values.get(f"reward/{domain}/{_SCORE}", ())),
        "accuracy": _ends(values.get(f"val_correct/{domain}/mean", ())),
        "k": int(at_k[0][1].removeprefix("pass@")) if at_k else 0,
        "best": _ends(values[at_k[0][0]]) if at_k else None,
        "calls": round(sum(calls)) if calls else None,
        "errors": round(sum(values.get(f"domains/{domain}/errors", ()))),
        "timeouts": round(sum(values.get(f"domains/{domain}/timeouts", ()))),
        "dropped": {
            reason: round(counts[-1])
            for name, reason in _dropped(domain, values)
            if (counts := values[name]) and counts[-1]
        },
    }


def _ends(values: Sequence[float]) -> list[float] | None:
    return [values[0], values[-1]][: len(values)] if values else None


def _tenths(values: Sequence[float]) -> list[float] | None:
    """Means of the first and of the last tenth; only one if there is one value."""
    size = max(len(values) // 10, 1)
    return (
        _ends([sum(part) / len(part) for part in (values[:size], values[-size:])][: len(values)])
        if values
        else None
    )
