"""How a table says that a key matters: what is changed, and which outcome must be what
afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distflow.launch.make_spec import make_spec
from tests.e2e.keys.lab import Lab

Look = Callable[[Lab, str, Sequence[str]], Any]
Check = Callable[[Any, Any], None]


def a_run(lab: Lab, base: str, changes: Sequence[str]) -> Any:
    """A whole run of the pipeline."""
    return lab.run(base, changes)


def the_spec(lab: Lab, base: str, changes: Sequence[str]) -> Any:
    """A run that is ready and never starts."""
    folder = f"trainer.default_local_dir={lab.folder}/never"
    return make_spec(lab.load(base, (*changes, folder)), say=lambda line: None)


def the_prompts(lab: Lab, base: str, changes: Sequence[str]) -> Any:
    """(training prompts, validation prompts), or the error that reading them raises."""
    try:
        return lab.prompts(base, changes)
    except ValueError as error:
        return error


def the_policy(lab: Lab, base: str, changes: Sequence[str]) -> Any:
    """The model as it is before training, or the error that loading it raises."""
    try:
        return lab.policy(base, changes)
    except ValueError as error:
        return error


def the_config(lab: Lab, base: str, changes: Sequence[str]) -> Any:
    """The config, for what needs nothing else."""
    return lab.config(base, changes)


QUICK_LOOKS = (the_spec, the_prompts, the_policy, the_config)  # others run the pipeline


@dataclass(frozen=True)
class Case:
    """One key that matters.

    change: the overrides that change it (a key in front of which others must be taken back comes
    with them).
    outcome: what changes, in words. check: (before, after) → AssertionError where it did not.
    base: the pipeline. given: overrides on both sides. look: what is made of each side's config.
    """

    key: str
    change: str | tuple[str, ...]
    outcome: str
    check: Check
    base: str = "grpo"
    given: tuple[str, ...] = ()
    look: Look = a_run

    @property
    def changes(self) -> tuple[str, ...]:
        return (self.change,) if isinstance(self.change, str) else self.change


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Numbers or tensors are equal up to rounding."""
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(wanted, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


def differ(before: Any, after: Any, at_least: float = 1e-4) -> None:
    """Numbers that are clearly not the same."""
    gap = (
        (torch.as_tensor(before, dtype=torch.float64) - torch.as_tensor(after, dtype=torch.float64))
        .abs()
        .max()
    )
    assert gap > at_least, f"{before} and {after} are the same up to {float(gap):.2g}"


def refused(*words: str) -> Check:
    """The run before worked; the one after is refused with these words."""

    def check(before: Any, after: Any) -> None:
        assert error_of(before) is None, error_of(before)
        said = str(error_of(after))
        assert all(word in said for word in words), said

    return check


def allowed(*words: str) -> Check:
    """The run before is refused with these words; the one after works."""
    return lambda before, after: refused(*words)(after, before)


def error_of(side: Any) -> Exception | None:
    """What a side raised."""
    return side if isinstance(side, Exception) else getattr(side, "error", None)


def aggregate(per_token: Tensor, mask: Tensor, mode: str, scale: float = 1.0) -> float:
    """A loss per token as one number, by the definition of each mode."""
    per_token = per_token.double()
    mask = mask.double()
    sums = (per_token * mask).sum(-1)
    lengths = mask.sum(-1)
    if mode == "token-mean":
        return float(sums.sum() / lengths.sum())
    if mode == "seq-mean-token-sum":
        return float(sums.mean())
    if mode == "seq-mean-token-mean":
        return float((sums / lengths).mean())
    assert mode == "seq-mean-token-sum-norm"
    return float((sums / scale).mean())
