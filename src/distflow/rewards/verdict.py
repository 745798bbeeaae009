"""What a verifier answers: a score, or why there is none. A timeout or an error is never a score of 0."""

from dataclasses import dataclass, field

from distflow.observe.jsonlines import JSON


@dataclass(frozen=True)
class Score:
    """A finite score; `extra` holds whatever else the verifier wants shown with the sample."""

    value: float
    extra: dict[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeout:
    """The verifier was killed at its deadline."""

    after_s: float

    def __str__(self) -> str:
        return f"no verdict within {self.after_s:g} s"


@dataclass(frozen=True)
class Error:
    """The verifier raised, crashed or answered something that is no finite number."""

    reason: str

    def __str__(self) -> str:
        return self.reason


Verdict = Score | Timeout | Error
