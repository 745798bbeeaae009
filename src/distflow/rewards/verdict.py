"""What a verifier answers: a score, or why there is none. A timeout or an error is never a score of 0."""

from dataclasses import dataclass, field

from distflow.observe.jsonlines import JSON
from distflow.observe.verdicts import TIMED_OUT

CUT = "cut_tokens"
"""What a verifier calls the number of tokens that it did not read, beside its score."""


@dataclass(frozen=True)
class Score:
    """A finite score; `extra` holds whatever else the verifier wants shown beside it, and is no part of the verdict."""

    value: float
    extra: dict[str, JSON] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Timeout:
    """The verifier was killed at its deadline. part: of the reward, where several are told apart."""

    after_s: float
    part: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{TIMED_OUT} {self.after_s:g} s" + (f" from {self.part}" if self.part else "")


@dataclass(frozen=True)
class Error:
    """The verifier raised, crashed or answered something that is no finite number."""

    reason: str

    def __str__(self) -> str:
        return self.reason


Verdict = Score | Timeout | Error
