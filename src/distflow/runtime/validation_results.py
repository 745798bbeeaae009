"""The results of a validation, and their metrics."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import comb

from distflow.data.dataset_columns import DEFAULT_DOMAIN
from distflow.errors import UserError
from distflow.runtime.sample_rows import SampleRows

Labels = tuple[str, str]
"""Domain and tag of a prompt."""
Outcomes = dict[Labels, list[list[bool]]]
"""By domain and tag: for each prompt, whether each of its responses is right."""


@dataclass(frozen=True)
class ValidationResults:
    """Results on validation prompts."""

    greedy: Outcomes
    sampled: Outcomes
    errors: int
    """Responses without a score, which count as wrong."""
    rows: SampleRows
    """With its `set` and `kind` ("greedy" or "sampled") each."""

    @staticmethod
    def joined(parts: Sequence["ValidationResults"]) -> "ValidationResults":
        """The results of several parts of the same prompts."""
        greedy = _join_outcomes([part.greedy for part in parts])
        sampled = _join_outcomes([part.sampled for part in parts])
        rows = list(chain.from_iterable(part.rows for part in parts))
        return ValidationResults(greedy, sampled, sum(part.errors for part in parts), rows)

    def metrics(self) -> dict[str, float]:
        """`val_correct/*` and `val/errors`.

        `mean` is the share of greedy responses that are right (of sampled ones if none is greedy);
        `mean@n` and `pass@k` are estimated from the n sampled responses to each prompt, for k = n
        and the powers of two below.
        """
        found = {"val/errors": float(self.errors)}
        for name, groups in _by_name(self.greedy or self.sampled).items():
            found[f"val_correct/{name}/mean"] = sum(map(sum, groups)) / sum(map(len, groups))

        for name, groups in _by_name(self.sampled).items():
            n = len(groups[0])
            found[f"val_correct/{name}/mean@{n}"] = sum(map(sum, groups)) / (n * len(groups))
            for k in sorted({2**i for i in range(n.bit_length())} | {n}):
                chances = [pass_at_k(n, sum(group), k) for group in groups]
                found[f"val_correct/{name}/pass@{k}"] = sum(chances) / len(groups)

        return found

    def num_prompts(self) -> dict[str, int]:
        """The number of greedy responses over which each `val_correct/NAME/mean` is computed."""
        found = _by_name(self.greedy)
        return {f"val_correct/{name}/mean": len(groups) for name, groups in found.items()}


def _join_outcomes(parts: Sequence[Outcomes]) -> Outcomes:
    whole: Outcomes = {}
    for part in parts:
        for labels, groups in part.items():
            whole.setdefault(labels, []).extend(groups)
    return whole


def _by_name(outcomes: Outcomes) -> dict[str, list[list[bool]]]:
    """The outcomes under each name of `validation_names`."""
    found = defaultdict[str, list[list[bool]]](list)
    for name, own in validation_names(outcomes).items():
        for labels in own:
            found[name] += outcomes[labels]
    return found


def validation_names(found: Iterable[Labels]) -> dict[str, list[Labels]]:
    """The names in metrics, with the domains and tags that each covers: "all"; every domain, if
    rows name any; every tag; and DOMAIN/TAG, for a tag of several domains. Raises UserError if one
    name stands for different prompts."""
    labels = list(dict.fromkeys(found))
    of_domain = defaultdict[str, list[Labels]](list)
    of_tag = defaultdict[str, list[Labels]](list)
    for domain, tag in labels:
        of_domain[domain].append((domain, tag))
        if tag:
            of_tag[tag].append((domain, tag))

    sets = [("all", labels)] if labels else []
    if set(of_domain) != {DEFAULT_DOMAIN}:
        sets += of_domain.items()

    for tag, own in of_tag.items():
        sets.append((tag, own))
        if len(own) > 1:
            sets += [(f"{domain}/{tag}", [(domain, tag)]) for domain, _ in own]

    names = dict[str, list[Labels]]()
    for name, own in sets:
        if names.setdefault(name, own) != own:
            raise UserError(
                f"the accuracy val_correct/{name}/mean would be over two sets of rows: rename the "
                f"tag '{name}' (column data.tag_key), or the domain"
            )

    return names


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that one of k responses is right: 1 − C(n − c, k) / C(n, k)
    (arXiv:2107.03374, equation 1)."""
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)
