"""The next rows by a function of the user's, from what the run knows of its rows (`data.sampler`).

At staleness 0 they depend only on the seed and on the steps before, so that a resumed run draws the
same ones.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distflow.errors import UserError
from distflow.import_target import load_function, users_code

KEY = "data.sampler"

SAMPLER = 2
"""The stream of its random numbers, beside those of `keyed_permutation`."""

_TRIAL_SCORES = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class RowHistory:
    """What the run knows of each row, after the last step: arrays of `(num_rows,)`."""

    times_drawn: NDArray[np.int64]
    """Including groups that run."""
    mean_score: NDArray[np.float64]
    """Of all its groups that ended, each with the mean of its responses; NaN without a score."""
    last_score: NDArray[np.float64]
    """Of its last such group."""
    last_step: NDArray[np.int64]
    """The step in which that group ended, counted from 1; 0 without a score."""


class RowSampler:
    """Draws rows, and remembers their scores."""

    def __init__(
        self, target: str, num_rows: int, seed: int, saved: dict[str, Any] | None = None
    ) -> None:
        """target: the function, which is loaded when it is first called. saved: to continue."""
        self._target = target
        self._num_rows = num_rows
        self._seed = seed
        state = saved or {"calls": 0, "next": [], "rows": {}}
        self._num_calls = int(state["calls"])
        self._next = deque[int](state["next"])
        self._rows = {int(row): list(values) for row, values in state["rows"].items()}
        """Of the rows that were drawn: times drawn, number of scores, their sum, the last score,
        and its step."""
        self._scores: dict[int, tuple[int, float]] = {}
        """Row and score of the groups that ended since the last step, by group id."""

    def draw(self, wanted: int) -> list[tuple[int, int]]:
        """The next rows, each with the number of times that it was drawn before. Raises UserError
        if the function returns something else than rows or weights."""
        while len(self._next) < wanted:
            self._next.extend(self._ask(wanted - len(self._next)))

        drawn = []
        for _ in range(wanted):
            row = self._next.popleft()
            known = self._rows.setdefault(row, [0, 0, 0.0, 0.0, 0])
            drawn.append((known[0], row))
            known[0] += 1
        return drawn

    def note(self, group_id: int, row: int, score: float | None) -> None:
        """Note the mean score of a group that has ended."""
        if score is not None and row < self._num_rows:
            self._scores[group_id] = (row, score)

    def end_step(self, step: int) -> None:
        """Take the noted scores into the history, whatever the order in which the groups ended."""
        for _, (row, score) in sorted(self._scores.items()):
            known = self._rows[row]
            known[1:] = [known[1] + 1, known[2] + score, score, step]
        self._scores.clear()

    def saved(self) -> dict[str, Any]:
        """JSON to continue from, after `end_step`."""
        rows = {str(row): list(values) for row, values in self._rows.items()}
        return {"calls": self._num_calls, "next": list(self._next), "rows": rows}

    def history(self) -> RowHistory:
        times_drawn = np.zeros(self._num_rows, np.int64)
        means = np.full(self._num_rows, np.nan)
        last = np.full(self._num_rows, np.nan)
        steps = np.zeros(self._num_rows, np.int64)
        for row, (times, num_scores, total, score, step) in self._rows.items():
            times_drawn[row] = times
            if num_scores:
                means[row] = total / num_scores
                last[row] = score
                steps[row] = step
        return RowHistory(times_drawn, means, last, steps)

    def _ask(self, count: int) -> list[int]:
        function: Callable[..., object] = load_function(self._target)
        counter = np.array([0, 0, self._num_calls, 0], np.uint64)
        key = np.array([self._seed, SAMPLER], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
        self._num_calls += 1
        with users_code(f"{KEY}={self._target}:"):
            returned = function(self.history(), count, generator)
        return self._rows_of(returned, count, generator)

    def _rows_of(self, returned: object, count: int, generator: np.random.Generator) -> list[int]:
        """The rows that the function returned, or rows drawn by the weights that it returned."""
        with users_code(f"{KEY}={self._target} must return one array:"):
            values = np.asarray(returned)

        wrong = ""
        if values.ndim != 1 or values.dtype.kind not in "iuf":
            wrong = f"an array of shape {values.shape} and type {values.dtype}"
        elif values.dtype.kind != "f":
            outside = values[(values < 0) | (values >= self._num_rows)]
            if not len(values):
                wrong = "no row"
            elif len(outside):
                wrong = f"row {outside[0]}, and rows are 0 to {self._num_rows - 1}"
        elif len(values) != self._num_rows:
            wrong = f"{len(values):,} weights for {self._num_rows:,} rows"
        elif not (np.isfinite(values) & (values >= 0)).all():
            first = int(np.argmin(np.isfinite(values) & (values >= 0)))
            wrong = f"the weight {values[first]} for row {first}"
        elif not values.any():
            wrong = "only weights of 0"

        if wrong:
            raise UserError(
                f"{KEY}={self._target} returned {wrong}: return a weight for each of the "
                f"{self._num_rows:,} rows (floats of 0 or more), or numbers of rows (integers)"
            )

        if values.dtype.kind != "f":
            return [int(row) for row in values]

        weights = values.astype(np.float64) / values.max()
        repeats = bool(np.count_nonzero(weights) < count)
        chances = weights / weights.sum()
        return generator.choice(self._num_rows, count, replace=repeats, p=chances).tolist()


def try_sampler(target: str, num_rows: int, count: int) -> None:
    """Call the function as at the start and after a step. Raises UserError for what a run could not
    use."""
    sampler = RowSampler(target, num_rows, seed=0)
    for step in (1, 2):
        for place, (_, row) in enumerate(sampler.draw(count)):
            sampler.note(place, row, _TRIAL_SCORES[place % len(_TRIAL_SCORES)])
        sampler.end_step(step)
