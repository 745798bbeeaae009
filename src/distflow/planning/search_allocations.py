"""Searches the allocation with the shortest steps among all that fit: which devices generate and
train, by which engine, divided how, at which staleness."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from distflow.builtin_names import ROLLOUT_ENGINES, TRAIN_ENGINES
from distflow.config import Config
from distflow.config.keys.schema import with_values
from distflow.errors import UserError, count_of
from distflow.planning.plan import dp_groups_of
from distflow.planning.predicted_run import PredictedRun

AUTO = "auto"
"""The value of `trainer.allocation` that asks for a search."""
STRATEGY = "actor_rollout_ref.actor.strategy"
STALENESS = "async.max_staleness"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
Change = tuple[tuple[str, object], ...]
"""Keys with new values."""
RAY: Change = (("trainer.launcher", "ray"),)
"""What every allocation needs."""
_TENSOR = (1, 2, 4, 8)
_MOST_SPLITS = 64


@dataclass(frozen=True)
class Choices:
    """What a search varies."""

    config: Config
    """Without an allocation."""
    num_devices: int
    strategy: str | None = None
    """The train engine; None for all."""
    staleness: tuple[int, ...] = (0,)
    """The values of `async.max_staleness`."""
    may_recompute: bool = False
    """Whether activation checkpointing may be switched on if nothing fits without it."""


@dataclass(frozen=True)
class Candidate:
    """An allocation, a staleness, and what is predicted for them."""

    text: str
    staleness: int
    run: PredictedRun
    more: Change = ()
    """Keys that it needs besides."""

    @property
    def change(self) -> Change:
        return (("trainer.allocation", self.text), (STALENESS, self.staleness), *RAY, *self.more)

    @property
    def rank(self) -> tuple[float, int, bool, int, str]:
        """The key by which candidates are ordered: shorter steps, by more than a thousandth, then
        less staleness, then shared devices, then the shorter text."""
        seconds = float(f"{self.run.step_seconds:.3g}")
        return seconds, self.staleness, "+" in self.text, len(self.text), self.text

    def line(self) -> str:
        """The allocation, the time of its step, its memory, and what is idle."""
        run = self.run
        facts = f"{run.fullest.peak / 1e9:.1f} GB"

        generating = run.plan.generating_only
        if generating:
            training = dp_groups_of(run.plan)[0]
            facts += f", rollout idle {run.idle(generating):.0%}"
            facts += f", training idle {run.idle(training):.0%}"

        return f"{run.step_seconds:.3g} s  {self.text} {STALENESS}={self.staleness}  ({facts})"


@dataclass(frozen=True)
class Search:
    best: tuple[Candidate, ...]
    """By rank, at most ten."""
    num_tried: int
    num_fitting: int

    def why(self) -> str:
        """Why the first is the first, as a sentence."""
        first = self.best[0]
        fits = f"{self.num_fitting} of {count_of(self.num_tried, 'allocation')} fit"
        if first.more:
            fits += f" with {CHECKPOINTING}=true, and none without it"
        longest = max(first.run.bars, key=lambda bar: bar.seconds)

        return (
            f"{first.text} {STALENESS}={first.staleness}: {fits}, and its step is the shortest; "
            f"most of the work is {longest.what} ({longest.seconds:.3g} s)"
        )


def search_allocations(
    choices: Choices,
    predict: Callable[[Config], PredictedRun],
    is_allowed: Callable[[Change], bool],
) -> Search:
    """All allocations of the devices, or of many devices those whose shares are multiples of a
    64th; the same config gives the same result. predict: of a config with one. is_allowed: whether
    the config's rules accept a change.

    If none fits, the same with activation checkpointing, if `choices` allow it. Raises UserError if
    none fits then, with the one that lacks least.
    """
    more: Change = ()
    tried = list(_candidates(choices, predict, more))
    if choices.may_recompute and not any(each.run.fits for each in tried):
        more = ((CHECKPOINTING, True),)
        tried = list(_candidates(choices, predict, more))

    if not tried:
        raise UserError(
            f"trainer.allocation={AUTO}: the pipeline has no allocation of {choices.num_devices} "
            "devices"
        )

    fitting = sorted((each for each in tried if each.run.fits), key=lambda each: each.rank)
    allowed = (each for each in fitting if is_allowed(each.change))
    best = tuple(islice(allowed, 10))
    if best:
        return Search(best, len(tried), len(fitting))

    with_it = f", with {CHECKPOINTING}=true either" if more else ""
    nearest = min(tried, key=lambda each: (each.run.fullest.peak, each.rank))
    raise UserError(
        f"trainer.allocation={AUTO}: none of {count_of(len(tried), 'allocation')} of "
        f"{choices.num_devices} devices fits{with_it}; the nearest is {nearest.text}, but "
        f"{nearest.run.excess()}; {nearest.run.advice()}"
    )


def _candidates(
    choices: Choices, predict: Callable[[Config], PredictedRun], more: Change
) -> Iterator[Candidate]:
    for trainer, text in allocations(choices):
        size = re.search(r"\[rollout\]:d\d+t(\d+)", text)
        keys: dict[str, object] = {
            "trainer.allocation": text,
            STRATEGY: trainer,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": int(size[1]) if size else 1,
            **dict((*RAY, *more)),
        }

        for staleness in choices.staleness:
            try:
                run = predict(with_values(choices.config, {**keys, STALENESS: staleness}))
            except UserError:  # the pipeline, or the layers of a model, cannot be divided so
                break
            yield Candidate(text, staleness, run, more)


def allocations(choices: Choices) -> Iterator[tuple[str, str]]:
    """(train engine, expression): generation and training on the same devices, or on separate ones
    in every proportion. The rollout engine is the config's; train engines are those that are
    implemented."""
    total = choices.num_devices
    rollout = choices.config.actor_rollout_ref.rollout.name
    unit = max(1, total // _MOST_SPLITS)
    shares = [(total, total, "|")]

    shares += [(split, total - split, "+") for split in range(unit, total, unit)]
    for generating, training, sign in shares:
        for own in _sizes(generating, ROLLOUT_ENGINES[rollout].sizes):
            for trainer, theirs in _trainers(training, choices.strategy):
                yield trainer, f"{rollout}[rollout]:{own}{sign}{trainer}[actor]:{theirs}"


def _trainers(num_devices: int, strategy: str | None) -> Iterator[tuple[str, str]]:
    """(train engine, sizes)."""
    for name, entry in TRAIN_ENGINES.items():
        is_wanted = entry.target and strategy in (None, name)
        if is_wanted and (name != "fsdp" or num_devices > 1):
            for sizes in _sizes(num_devices, entry.sizes):
                yield name, sizes


def _sizes(num_devices: int, letters: str) -> Iterator[str]:
    """Data and tensor sizes with that product, tensor parts within a machine."""
    for tensor in _TENSOR if "t" in letters else (1,):
        if num_devices % tensor == 0:
            yield f"d{num_devices // tensor}" + (f"t{tensor}" if tensor > 1 else "")
