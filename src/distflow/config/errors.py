"""Errors of a user's mistake: the message says what was wrong, where, and what to do; the exit status is 2."""

from collections.abc import Sequence
from dataclasses import dataclass


class UserError(ValueError):
    """A mistake in what the user gave (config, data, model folder, reward); never a fault of ours."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config.

    places: what is involved, each as (what it is, where it was written), e.g. ("trainer.seed", "run.yaml:7").
    """

    places: tuple[tuple[str, str], ...]
    what: str
    advice: str = ""

    def __str__(self) -> str:
        lines = [f"  {subject} ({where})" for subject, where in self.places]
        lines += [f"      {line}" for line in self.what.splitlines()]
        if self.advice:
            lines.append(f"      → {self.advice}")
        return "\n".join(lines)


class ConfigError(UserError):
    """All that is wrong with a config, at once. `problems` holds the parts of the message."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        count = "one problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count} in the config\n" + "\n".join(str(problem) for problem in self.problems))
