"""Known answers, beside the reward that must judge them rightly."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """A response whose score is known: `good` ones score 1, the others 0, unless another score is named."""

    response: str
    ground_truth: object
    good: bool
    extra_info: dict[str, object] = field(default_factory=dict)
    score: float | None = None

    @property
    def expected(self) -> float:
        return float(self.good) if self.score is None else self.score
