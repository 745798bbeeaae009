"""Searches the allocation with the shortest steps among all that fit: which devices generate and
train, by which engine, divided how, at which staleness. Also finds the nearest change with which a
run fits that does not."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from distflow.builtin_names import ROLLOUT_ENGINES, TRAIN_ENGINES
from distflow.config import Config
from distflow.config.keys.schema import with_values
from distflow.errors import UserError, count_of
from distflow.planning.memory import samples_per_step, with_server_share, worker_memory
from distflow.planning.predicted_run import PredictedRun
from distflow.planning.simulate import SimulatedRun

AUTO = "auto"
"""The value of `trainer.allocation` that asks for a search."""
_TENSOR = (1, 2, 4, 8)
_MOST_SPLITS = 64
STRATEGY = "actor_rollout_ref.actor.strategy"
STALENESS = "async.max_staleness"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
_MOST_RESPONSES = 400_000  # of all simulations together, if there are more than ten
RAY = (("trainer.launcher", "ray"),)
"""What every allocation needs."""


@dataclass(frozen=True)
class Choices:
    """What a search varies. config: without an allocation. strategy: the train engine; None for
    all. staleness: the values of `async.max_staleness`. may_recompute: whether activation
    checkpointing may be switched on if nothing fits without it. recompute: it was."""

    config: Config
    num_devices: int
    strategy: str | None = None
    staleness: tuple[int, ...] = (0,)
    may_recompute: bool = False
    recompute: bool = False

    @property
    def keys(self) -> "Change":
        """What every allocation needs besides."""
        return ((CHECKPOINTING, True),) if self.recompute else ()


@dataclass(frozen=True)
class Candidate:
    """An allocation, a staleness, and what is predicted for them. simulated: None before it is one
    of the finalists. more: keys that it needs besides."""

    text: str
    staleness: int
    run: PredictedRun
    simulated: SimulatedRun | None = None
    more: "Change" = ()

    @property
    def change(self) -> "Change":
        return (("trainer.allocation", self.text), (STALENESS, self.staleness), *RAY, *self.more)

    @property
    def step_seconds(self) -> float:
        return self.simulated.step_seconds if self.simulated else self.run.step_seconds

    @property
    def rank(self) -> tuple[float, int, bool, int, str]:
        """The key by which candidates are ordered: shorter steps, by more than a thousandth, then
        less staleness, then shared devices, then the shorter text."""
        return (
            float(f"{self.step_seconds:.3g}"),
            self.staleness,
            "+" in self.text,
            len(self.text),
            self.text,
        )

    def line(self) -> str:
        """The allocation, the time of its step, the work in it by kind, and what waits."""
        run = self.run
        parts: dict[str, float] = {}
        for bar in run.bars:
            if not bar.why:
                parts[bar.what] = max(parts.get(bar.what, 0.0), bar.seconds)
        work = ", ".join(
            f"{what} {seconds:.3g}"
            for what, seconds in parts.items()
            if seconds >= 0.005 * run.step_seconds
        )
        found = self.simulated
        peak = f"{run.fullest.peak / 1e9:.1f} GB"
        idle = "" if found is None else f"; rollout idle {sum(found.rollout_idle.values()):.0%}"
        if found is not None and "+" in self.text:
            idle += f", training idle {sum(found.training_idle.values()):.0%}"
        return (
            f"{self.step_seconds:.3g} s  {self.text} {STALENESS}={self.staleness}  ({work}; "
            f"{peak}{idle})"
        )


@dataclass(frozen=True)
class Search:
    """best: by rank, at most ten. num_tried, num_fitting: of all."""

    best: tuple[Candidate, ...]
    num_tried: int
    num_fitting: int

    def why(self) -> str:
        """Why the first is the first, as a sentence."""
        first, *others = self.best
        fits = f"{self.num_fitting} of {count_of(self.num_tried, 'allocation')} fit"
        if first.more:
            fits += f" with {CHECKPOINTING}=true, and none without it"
        if not others:
            return f"{first.text}: {fits}"
        gain = others[0].step_seconds / first.step_seconds - 1
        ahead = (
            f"its step is {gain:.1%} shorter than the second's"
            if gain > 5e-4
            else "it is as fast as the second"
        )
        bars = [bar for bar in first.run.bars if not bar.why]
        longest = max(bars, key=lambda bar: bar.seconds)
        chosen = f"{first.text} {STALENESS}={first.staleness}"
        return (
            f"{chosen}: {fits}, and {ahead}; most of the work is {longest.what} "
            f"({longest.seconds:.3g} s)"
        )


def search_allocations(
    choices: Choices,
    predict: Callable[[Config], PredictedRun],
    simulated: Callable[[PredictedRun], SimulatedRun],
    is_allowed: Callable[["Change"], bool],
) -> Search:
    """All allocations of the devices, or of many devices those whose shares are multiples of a
    64th; the same config gives the same result. predict: of a config with one. Those with the
    shortest predicted steps are simulated: all, if a step has few responses; else at the least and
    the greatest staleness. is_allowed: whether the config's rules accept a change.

    If none fits, the same with activation checkpointing, if `choices` allow it. Raises UserError if
    none fits then, with the one that lacks least.
    """
    tried = list(_candidates(choices, predict))
    if not tried:
        raise UserError(
            f"trainer.allocation={AUTO}: the pipeline has no allocation of {choices.num_devices} "
            "devices"
        )
    if choices.may_recompute and not any(each.run.fits for each in tried):
        config = with_values(choices.config, {CHECKPOINTING: True})
        choices = replace(choices, config=config, may_recompute=False, recompute=True)
        return search_allocations(choices, predict, simulated, is_allowed)
    ends = {0, max(choices.staleness)}  # between them nothing differs but what is simulated
    fitting = sorted(
        (e for e in tried if e.run.fits), key=lambda each: (each.staleness not in ends, each.rank)
    )
    responses = samples_per_step(choices.config) * (4 + max(choices.staleness))
    most = max(10, _MOST_RESPONSES // responses)
    for start in range(0, len(fitting), most):
        finalists = (
            replace(each, simulated=simulated(each.run)) for each in fitting[start : start + most]
        )
        ranked = sorted(finalists, key=lambda each: each.rank)
        if best := tuple(islice((each for each in ranked if is_allowed(each.change)), 10)):
            return Search(best, len(tried), len(fitting))
    with_it = f", with {CHECKPOINTING}=true either" if choices.recompute else ""
    nearest = min(tried, key=lambda each: (each.run.fullest.peak, each.rank))
    raise UserError(
        f"trainer.allocation={AUTO}: none of {count_of(len(tried), 'allocation')} of "
        f"{choices.num_devices} devices "
        f"fits{with_it}; the nearest is {nearest.text}, but {nearest.run.excess()}; "
        f"`distflow plan ... 'trainer.allocation={nearest.text}'` looks for a change of other keys "
        "with which that one fits"
    )


def simulated_steps(config: Config) -> int:
    """Steps that show the steady state: the queue fills in the first ones."""
    return 4 + config.async_.max_staleness


def _candidates(choices: Choices, predict: Callable[[Config], PredictedRun]) -> Iterator[Candidate]:
    for trainer, text in allocations(choices):
        keys: dict[str, object] = {"trainer.allocation": text, STRATEGY: trainer, **dict(RAY)}
        size = re.search(r"\[rollout\]:d\d+t(\d+)", text)
        keys["actor_rollout_ref.rollout.tensor_model_parallel_size"] = int(size[1]) if size else 1
        found: dict[bool, PredictedRun] = {}  # above 0 only memory depends on the staleness
        for staleness in choices.staleness:
            config = with_values(choices.config, {**keys, STALENESS: staleness})
            try:
                run = found[staleness > 0] = found.get(staleness > 0) or predict(config)
            except UserError:  # the pipeline, or the layers of a model, cannot be divided so
                break
            times = run.times
            memory = worker_memory(
                run.plan, config, times.shapes, times.device, times.rates.libraries
            )
            yield Candidate(
                text, staleness, replace(run, config=config, workers=memory), more=choices.keys
            )


def allocations(choices: Choices) -> Iterator[tuple[str, str]]:
    """(train engine, expression): generation and training on the same devices, or on separate ones
    in every proportion. The rollout engine is the config's; train engines are those that are
    implemented."""
    total = choices.num_devices
    rollout = choices.config.actor_rollout_ref.rollout.name
    trainers = [
        n for n, entry in TRAIN_ENGINES.items() if entry.target and choices.strategy in (None, n)
    ]
    unit = max(1, total // _MOST_SPLITS)
    shares = [
        (total, total, "|"),
        *((split, total - split, "+") for split in range(unit, total, unit)),
    ]
    for generating, training, sign in shares:
        for own in _sizes(generating, ROLLOUT_ENGINES[rollout].sizes):
            for trainer in (name for name in trainers if name != "fsdp" or training > 1):
                for theirs in _sizes(training, TRAIN_ENGINES[trainer].sizes):
                    yield trainer, f"{rollout}[rollout]:{own}{sign}{trainer}[actor]:{theirs}"


def _sizes(num_devices: int, letters: str) -> Iterator[str]:
    """Data and tensor sizes with that product, tensor parts within a machine."""
    for tensor in _TENSOR if "t" in letters else (1,):
        if num_devices % tensor == 0:
            yield f"d{num_devices // tensor}" + (f"t{tensor}" if tensor > 1 else "")


Change = tuple[tuple[str, object], ...]
"""Keys with new values."""


def nearest_change(
    run: PredictedRun,
    again: Callable[[Config], PredictedRun],
    with_change: Callable[[Change], Config | None],
) -> Change | None:
    """The first change of the config with which the run fits: one key where that suffices, cheapest
    in time first, then several, then more devices; None if none does. with_change: the config with
    a change, checked; None if it is not allowed."""

    def predicted(config: Config | None) -> bool:
        try:
            return config is not None and again(config).fits
        except UserError:
            return False

    def fits(change: Change) -> bool:  # checking a whole config takes longer than a prediction
        return predicted(with_values(run.config, dict(change))) and predicted(with_change(change))

    singles = _changes(run)
    joined = dict[str, object]()
    changes = list(singles)
    for change in singles:
        joined |= change
        changes.append(tuple(joined.items()))
    found = next(filter(fits, [*changes, *_more_devices(run, joined)]), None)
    for part in found or ():
        rest = tuple(other for other in found or () if other != part)
        found = rest if rest and fits(rest) else found
    return found


def _changes(run: PredictedRun) -> list[Change]:
    """Changes of one key that need less memory and keep what is computed, cheapest in time
    first."""
    settings = run.config.actor_rollout_ref
    data = run.config.data
    longest = data.max_prompt_length + data.max_response_length
    found = list[Change]()
    limit = settings.actor.ppo_max_token_len_per_gpu or (4096 if run.device.is_cpu else 16384)
    while limit // 2 >= longest:
        limit //= 2
        found.append((("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", limit),))
    if not settings.model.enable_gradient_checkpointing:
        found.append(((CHECKPOINTING, True),))
    responses = settings.rollout.max_num_seqs
    while responses > 16:
        responses //= 2
        found.append((("actor_rollout_ref.rollout.max_num_seqs", responses),))
    servers = []
    for worker in run.workers:
        for i in worker.items:
            if i.in_server and i.what == "weights":
                servers.append(i)
    for share in (0.7, 0.5, 0.3) if servers else ():
        if share * run.device.memory > 1.2 * servers[0].num_bytes:  # else it would not start
            found.append((with_server_share(run.config, share),))
    if not run.device.is_cpu:
        found.append((("actor_rollout_ref.rollout.free_cache_engine", True),))
        for role in ("actor_rollout_ref.actor", "critic"):
            if role != "critic" or "critic" in run.plan.ranks[-1].engines:
                found += [
                    ((f"{role}.fsdp_config.{name}", True),)
                    for name in ("optimizer_offload", "param_offload")
                ]
    return found


def _more_devices(run: PredictedRun, others: Mapping[str, object]) -> list[Change]:
    """Sharded weights on as many devices and on more, with and without the other changes."""
    if run.config.trainer.allocation:
        return []
    found = list[Change]()
    trainer = run.config.trainer
    nodes = trainer.nnodes
    size = trainer.n_gpus_per_node
    for step in range(10):
        if step or nodes * size == 1:
            nodes, size = (nodes, 2 * size) if size < 8 else (2 * nodes, size)
        keys: dict[str, object] = {
            "actor_rollout_ref.actor.strategy": "fsdp",
            "trainer.n_gpus_per_node": size,
        }
        keys |= {"trainer.nnodes": nodes, "trainer.launcher": "ray"} if nodes > 1 else {}
        keys |= {"trainer.launcher": "ray"} if trainer.launcher == "local" else {}
        found += [tuple(keys.items()), tuple({**others, **keys}.items())]
    return found
