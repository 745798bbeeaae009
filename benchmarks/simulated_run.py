"""Simulates runs by discrete events. The scheduler is the run's own (`Coordinator`,
`GroupsByWorker`): it decides which groups start, which form a step, and what a crash or a resume
does with them. Devices, reward functions and failures are replaced by the seconds that `Costs`
gives.

An engine decodes continuously: each response that it runs gains a token in every decode step, and
others wait for a slot. Engines stop for a weight sync, and while they share their devices with
training that computes. A group is scored when all its responses are there. The seed and the group
id determine its lengths, whatever else happens, so two simulations differ only by what they are
told to differ in.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import exp, inf
from random import Random
from statistics import NormalDist

from distflow.errors import UserError
from distflow.planning.lengths import Lengths
from distflow.planning.model_memory import sizes_of
from distflow.planning.predicted_run import PredictedRun
from distflow.planning.time_line import GENERATE, REWARDS, SYNC
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.group_states import Places, PromptGroup
from distflow.scheduling.groups_by_rollout_worker import GroupsByWorker
from distflow.scheduling.ledger import Ledger

MOST_EVENTS = 50_000_000
FILTERED = "filtered"


def _no_time(_: Random) -> float:
    return 0.0


@dataclass(frozen=True)
class Costs:
    """Seconds of all that takes time: of a roofline (`costs_of`), or measured.

    decode: of one token of each of so many responses, at a mean number of tokens before it.
    prefill: of so many tokens of prompts. train: of the training nodes on a step of so many tokens.
    sync: of a weight sync. save: of a checkpoint, for which the training waits. reward, tool: drawn
    for each group, and for each response after its tokens. restart: until a lost process is there
    again.
    """

    decode: Callable[[int, float], float]
    prefill: Callable[[float], float]
    train: Callable[[float], float]
    sync: float = 0.0
    save: float = 0.0
    reward: Callable[[Random], float] = _no_time
    tool: Callable[[Random], float] = _no_time
    restart: float = 300.0


@dataclass(frozen=True)
class Setup:
    """engines, slots: rollout engines, and the responses that each runs at once. shared: whether
    they use the devices that train. reward_workers: groups that are scored at once, None for any
    number. filtered: share of the groups that a filter drops. engine_mtbf, training_mtbf: mean
    seconds between failures of one engine, and of any training process, after which the run resumes
    from its last checkpoint. recompute: whether a sync ends KV caches."""

    plan: DataPlan
    costs: Costs
    lengths: Lengths
    engines: int = 1
    slots: int = 1024
    shared: bool = False
    reward_workers: int | None = None
    filtered: float = 0.0
    engine_mtbf: float | None = None
    training_mtbf: float | None = None
    sync_every: int = 1
    recompute: bool = False
    seed: int = 0


@dataclass(frozen=True)
class SimulatedRun:
    """step_ends: seconds from the start to the release of each step, without those that a restart
    revoked. staleness: trained groups by age in steps. rollout_idle, training_idle: shares of the
    time in which an engine or the training waits, by what it waits for. slots_used: mean share of
    the engines' slots with a response. num_redone: steps that failures revoked."""

    step_ends: tuple[float, ...]
    staleness: Mapping[int, int]
    rollout_idle: Mapping[str, float]
    training_idle: Mapping[str, float]
    slots_used: float
    dropped: Mapping[str, int]
    num_aborted: int
    num_engine_failures: int
    num_restarts: int
    num_redone: int

    @property
    def step_seconds(self) -> float:
        """Of a step, without the first quarter, in which the queue fills."""
        first = min(len(self.step_ends) // 4, len(self.step_ends) - 1)
        before = self.step_ends[first - 1] if first else 0.0
        return (self.step_ends[-1] - before) / (len(self.step_ends) - first)


def costs_of(run: PredictedRun) -> Costs:
    """The seconds that the roofline gives; those of rewards and checkpoints are unknown to it.
    Training is in proportion to the tokens."""
    bars = [bar for bar in run.bars if bar.what not in (GENERATE, REWARDS, SYNC)]
    training = max((bar.end for bar in bars), default=0.0) - min(
        (bar.start for bar in bars), default=0.0
    )
    a_token = training / run.step_tokens
    times = run.times
    return Costs(times.decode_step, times.prefill, lambda tokens: a_token * tokens, times.sync())


def lognormal(mean: float, width: float, limit: int) -> tuple[float, ...]:
    """Lengths of equal shares, ascending, with this mean before they are cut at the limit."""
    normal = NormalDist()
    found = []
    for place in range(1000):
        at = normal.inv_cdf((place + 0.5) / 1000)
        found.append(min(limit, mean * exp(width * at - width**2 / 2)))
    return tuple(found)


def setup_of(run: PredictedRun, plan: DataPlan, **given: object) -> Setup:
    """Of a predicted run. plan: of its data. given: other fields. Raises UserError if the run
    generates nothing."""
    if not run.plan.generates:
        raise UserError(
            "a run that generates nothing has no schedule to simulate: its time line is exact"
        )

    settings = run.config.actor_rollout_ref
    fields: dict[str, object] = {
        "costs": costs_of(run),
        "engines": sizes_of(run.plan, "rollout").data,
        "slots": int(min(settings.rollout.max_num_seqs, run.times.cache_slots)),
        "shared": not run.plan.generating_only and not run.times.overlaps,
        "sync_every": settings.actor.model_update_frequency,
        "recompute": settings.rollout.kv_on_update != "keep",
    }

    # fields by name
    return Setup(plan, lengths=run.lengths, **(fields | given))  # type: ignore[arg-type]


def simulate(setup: Setup, ledger: Ledger | None = None) -> SimulatedRun:
    """The same setup gives the same result. ledger: is written as the run's. Raises UserError if
    the run cannot end."""
    return _Simulation(setup, ledger).run()


@dataclass(eq=False)
class _Group:
    """A group that runs. left: responses that are not there yet. lowest: version of the first
    token."""

    record: PromptGroup
    engine: "_Engine"
    random: Random
    left: int
    lowest: int | None = None
    tokens: int = 0


class _Engine:
    """clock: decode steps so far, at the time `since`; pace: seconds of the next ones. base: prompt
    tokens less the clock at the start, over all running responses, so that their tokens are base +
    clock · number."""

    def __init__(self, number: int, worker: int) -> None:
        self.number = number
        self.worker = worker

        # end, order, group, start, length
        self.running: list[tuple[float, int, _Group, float, int]] = []
        self.waiting = deque[tuple[_Group, int]]()
        self.clock = self.since = self.pace = self.base = 0.0
        self.stamp = 0
        self.is_up = True

    def advance(self, now: float) -> None:
        if now > self.since:
            self.clock += (now - self.since) / self.pace if self.running and self.pace else 0.0
            self.since = now


class _Simulation:
    def __init__(self, setup: Setup, ledger: Ledger | None) -> None:
        self.setup = setup
        self.costs = setup.costs
        self.coordinator = Coordinator(setup.plan, ledger)
        self.saved = self.coordinator.snapshot()
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.order = count()
        self.now = 0.0
        self.random = Random(setup.seed)
        self.workers = GroupsByWorker([str(number) for number in range(setup.engines)], 0)
        self.engines = [_Engine(number, number) for number in range(setup.engines)]
        self.groups: dict[int, _Group] = {}
        self.places: dict[_Engine, Places] = {}
        self.surplus: list[_Group] = []
        self.to_score = deque[_Group]()
        self.num_scored = 0

        # of the engines' weights; of the training processes
        self.version = 0
        self.attempt = 0
        self.state = "waits"  # or trains, syncs, saves, restarts
        self.num_running = 0
        self.slot_seconds = 0.0
        self.num_down = 0
        self.rollout_idle = defaultdict[str, float](float)
        self.training_idle = defaultdict[str, float](float)
        self.busy = set[_Engine]()
        self.step_ends: list[float] = []
        self.ages: list[Counter[int]] = []
        self.num_failed = self.num_restarts = self.num_redone = 0

    def run(self) -> SimulatedRun:
        self._fail_later()
        self._next()

        for _ in range(MOST_EVENTS):
            if self.coordinator.finished and self.state == "waits":
                return self._result()
            if not self.events:
                raise UserError("the simulated run waits for groups that cannot start")

            time, _order, action, words = heappop(self.events)
            self._account(time)
            action(*words)

        raise UserError(
            f"the simulated run has not ended after {MOST_EVENTS:,} events: simulate fewer steps"
        )

    def _at(self, seconds: float, action: Callable[..., None], *words: object) -> None:
        heappush(self.events, (self.now + seconds, next(self.order), action, words))

    def _result(self) -> SimulatedRun:
        total = self.now or 1.0
        counts = self.coordinator.checked_counts()
        engine_seconds = total * self.setup.engines
        return SimulatedRun(
            tuple(self.step_ends),
            dict(sum(self.ages, Counter[int]())),
            {cause: seconds / engine_seconds for cause, seconds in self.rollout_idle.items()},
            {cause: seconds / total for cause, seconds in self.training_idle.items()},
            self.slot_seconds / engine_seconds / self.setup.slots,
            counts.dropped,
            counts.aborted,
            self.num_failed,
            self.num_restarts,
            self.num_redone,
        )

    def _account(self, time: float) -> None:
        """Count the waits until then."""
        seconds = time - self.now
        self.now = time
        if seconds <= 0:
            return

        self.slot_seconds += seconds * self.num_running * self._generates
        if self.state == "waits":
            self.training_idle["rollout" if self.num_running else "rewards"] += seconds
        elif self.state in ("syncs", "restarts"):
            self.training_idle["weights" if self.state == "syncs" else "a restart"] += seconds

        if self.setup.shared and self.state in ("trains", "saves"):
            return

        up = self.setup.engines - self.num_down
        idle = up if self.state == "syncs" else up - len(self.busy)

        cause = {"syncs": "weights", "restarts": "a restart"}.get(self.state, "the staleness bound")
        if self.setup.plan.max_staleness == 0 and self.state not in ("syncs", "restarts"):
            generating = "longer responses" if self.num_running else "rewards"
            cause = generating if self.state == "waits" else "training"

        for each, number in ((cause, idle), ("a restart", self.num_down)):
            if number:
                self.rollout_idle[each] += seconds * number

    @property
    def _generates(self) -> bool:
        return self.state not in ("syncs", "restarts") and not (
            self.setup.shared and self.state in ("trains", "saves")
        )

    # the training loop

    def _next(self) -> None:
        """The training asks for the next step."""
        self.state = "waits"
        if self.setup.shared:
            self._resume_engines()
        self._progress()

    def _progress(self) -> None:
        """Start what may start: groups, and the step if it is complete."""
        self._issue()
        if self.state != "waits" or self.coordinator.finished:
            return

        step = self.coordinator.step
        numbers = self.coordinator.ready(step)
        if numbers is None:
            return

        self.workers.take(numbers)
        self.state = "trains"
        if self.setup.shared:
            self._pause_engines()
        groups = [self.coordinator.queue.prompt_group(number) for number in numbers]
        tokens = sum(group.num_tokens for group in groups)
        self.ages.append(Counter(step - (group.lowest_version or 0) for group in groups))
        self._at(self.costs.train(tokens), self._trained, self.attempt)

    def _trained(self, attempt: int) -> None:
        if attempt == self.attempt:
            self.state = "syncs"
            sends = (self.coordinator.step + 1) % self.setup.sync_every == 0
            self._pause_engines()
            self._at(self.costs.sync if sends else 0.0, self._synced, attempt, sends)

    def _synced(self, attempt: int, sent: bool) -> None:
        if attempt != self.attempt:
            return

        step = self.coordinator.step
        self.version = step + 1 if sent else self.version
        self.coordinator.release(step, sent)
        self.step_ends.append(self.now)
        self.state = "saves"
        if not self.setup.shared:
            self._resume_engines(recomputes=sent and self.setup.recompute)

        if "save" in self.coordinator.due:
            self._at(self.costs.save, self._keep_checkpoint, attempt, self.coordinator.snapshot())
            self._issue()
        else:
            self._next()

    def _keep_checkpoint(self, attempt: int, snapshot: Mapping[str, object]) -> None:
        if attempt == self.attempt:
            self.saved = snapshot  # type: ignore[assignment]  # of the coordinator
            self._next()

    # the rollout loop

    def _issue(self) -> None:
        """At staleness 0 groups start only while the training waits."""
        if self.state == "restarts" or (
            self.setup.plan.max_staleness == 0 and self.state != "waits"
        ):
            return
        if self.num_down == self.setup.engines:
            return

        issued: dict[_Engine, list[PromptGroup]] = {}
        for record in self.coordinator.issue_groups(self.version):
            engine = self.engines[int(self.workers.assign(record.group_id, record.attempt))]
            self.workers.fetch(engine.worker)
            issued.setdefault(engine, []).append(record)

        for engine, records in issued.items():
            if self.setup.plan.oversampling and not self.setup.plan.max_staleness:
                self.places[engine] = Places(records)
                self.surplus = [group for group in self.surplus if self._holds(group)]

            engine.advance(self.now)
            for record in records:
                random = Random(self.setup.seed << 40 ^ record.group_id << 8 ^ record.attempt)
                group = self.groups[record.group_id] = _Group(
                    record, engine, random, record.group_size
                )
                lengths = [
                    round(random.choice(self.setup.lengths.responses))
                    for _ in range(record.group_size)
                ]
                engine.waiting.extend((group, length) for length in lengths)
                engine.since += self.costs.prefill(self.setup.lengths.prompt)

            self._fill(engine)
            if engine in self.places and self.places[engine].is_full:  # none of its groups counts
                self._abort_rest(engine)

    def _fill(self, engine: _Engine) -> None:
        """Give waiting responses the free slots, and find when the next one ends."""
        while engine.waiting and len(engine.running) < self.setup.slots:
            group, length = engine.waiting.popleft()
            group.lowest = self.version if group.lowest is None else group.lowest
            heappush(
                engine.running,
                (engine.clock + length, next(self.order), group, engine.clock, length),
            )
            engine.base += self.setup.lengths.prompt - engine.clock
            self.num_running += 1

        if not engine.running:
            self.busy.discard(engine)
            return

        self.busy.add(engine)
        engine.stamp += 1

        if self._generates:
            left = engine.running[0][0] - engine.clock
            context = engine.base / len(engine.running) + engine.clock + left / 2
            engine.pace = self.costs.decode(len(engine.running), context)
            until = max(0.0, engine.since - self.now) + left * engine.pace
            self._at(until, self._decoded, engine, engine.stamp)

    def _decoded(self, engine: _Engine, stamp: int) -> None:
        """The shortest responses of an engine have ended."""
        if stamp != engine.stamp:
            return

        engine.clock = engine.running[0][0]
        engine.since = self.now

        ended = list[tuple[_Group, int]]()
        while engine.running and engine.running[0][0] <= engine.clock:
            _, _, group, start, length = heappop(engine.running)
            engine.base -= self.setup.lengths.prompt - start
            self.num_running -= 1
            ended.append((group, length))

        self._fill(engine)
        for group, length in ended:
            seconds = self.costs.tool(group.random)
            if seconds:
                self._at(seconds, self._responded, group, length)
            else:
                self._responded(group, length)

    def _responded(self, group: _Group, length: int) -> None:
        group.left -= 1
        group.tokens += length + round(self.setup.lengths.prompt)
        if not group.left and self._holds(group):
            self.to_score.append(group)
            self._score()

    def _score(self) -> None:
        most = self.setup.reward_workers
        while self.to_score and (most is None or self.num_scored < most):
            self.num_scored += 1
            group = self.to_score.popleft()
            self._at(self.costs.reward(group.random), self._scored, group)

    def _scored(self, group: _Group) -> None:
        self.num_scored -= 1
        self._score()
        if not self._holds(group):
            return

        dropped = group.random.random() < self.setup.filtered
        places = self.places.get(group.engine)
        if places is None or dropped or places.has_place(group.record):
            self._end(group, dropped)
        else:  # it is aborted when the step is full, unless a place is left over
            self.surplus.append(group)

        if places is not None:
            for other in [
                each for each in self.surplus if self._holds(each) and places.has_place(each.record)
            ]:
                if other.engine is group.engine and places.has_place(other.record):
                    self._end(other, dropped=False)

            if places.is_full:
                self._abort_rest(group.engine)

        self._progress()

    def _end(self, group: _Group, dropped: bool) -> None:
        number = group.record.group_id
        if dropped:
            self.coordinator.drop(number, FILTERED)
        else:
            self.coordinator.complete(number, group.tokens, group.lowest)

        del self.groups[number]
        self.workers.end(number, complete=not dropped)
        if group.engine in self.places:
            self.places[group.engine].end(group.record, not dropped)

    def _abort_rest(self, engine: _Engine) -> None:
        """The places of an engine's batch are full."""
        left = [group for group in self.groups.values() if group.engine is engine]
        self.coordinator.abort([group.record.group_id for group in left])
        for group in left:
            self.workers.end(group.record.group_id, complete=False)
            self._forget(group.record)

    def _holds(self, group: _Group) -> bool:
        return self.groups.get(group.record.group_id) is group

    def _forget(self, record: PromptGroup) -> None:
        """A group was ended: its responses leave the engine."""
        group = self.groups.pop(record.group_id, None)
        if group is None:  # it was complete
            return

        engine = group.engine
        engine.advance(self.now)
        engine.waiting = deque(each for each in engine.waiting if each[0] is not group)
        kept = [each for each in engine.running if each[2] is not group]
        self.num_running -= len(engine.running) - len(kept)
        heapify(kept)
        engine.running = kept
        engine.base = sum(self.setup.lengths.prompt - each[3] for each in kept)
        engine.stamp += 1
        self._fill(engine)

    def _pause_engines(self) -> None:
        for engine in self.busy:
            engine.advance(self.now)
            engine.stamp = engine.stamp + 1
            engine.pace = inf

    def _resume_engines(self, recomputes: bool = False) -> None:
        for engine in sorted(self.busy, key=lambda engine: engine.number):
            engine.since = max(engine.since, self.now)
            if recomputes:
                engine.since += self.costs.prefill(engine.base + engine.clock * len(engine.running))
            self._fill(engine)

    # failures

    def _fail_later(self) -> None:
        setup = self.setup
        if setup.engine_mtbf:
            self._at(self.random.expovariate(setup.engines / setup.engine_mtbf), self._lose_engine)
        if setup.training_mtbf:
            self._at(self.random.expovariate(1 / setup.training_mtbf), self._restart)

    def _lose_engine(self) -> None:
        """Its groups start again elsewhere, also those that are complete and that no step has
        taken."""
        self._at(
            self.random.expovariate(self.setup.engines / (self.setup.engine_mtbf or inf)),
            self._lose_engine,
        )
        engine = self.random.choice(self.engines)
        if not engine.is_up or self.state == "restarts":
            return

        _, running, stored = self.workers.lose(engine.worker)
        for number in running:
            self.coordinator.retry(number)
            del self.groups[number]

        for number in stored:
            self.coordinator.lose(number)
        self._clear(engine)
        engine.is_up = False
        self.num_failed = self.num_failed + 1
        self.num_down = self.num_down + 1
        self._at(self.costs.restart, self._replace, engine, self.attempt)
        self._progress()

    def _replace(self, engine: _Engine, attempt: int) -> None:
        if attempt == self.attempt:
            engine.worker = self.workers.join(str(engine.number))
            engine.is_up = True
            engine.since = self.now
            self.workers.ask(engine.worker, self.version)
            self.num_down -= 1
            self._progress()

    def _restart(self) -> None:
        """A training process is lost: all processes start again, and resume from the last
        checkpoint."""
        self._at(self.random.expovariate(1 / (self.setup.training_mtbf or inf)), self._restart)
        if self.state != "restarts":
            self.state = "restarts"
            self.attempt = self.attempt + 1
            self.num_restarts = self.num_restarts + 1

            for engine in self.engines:
                self._clear(engine)
                engine.is_up = True

            self.groups.clear()
            self.to_score.clear()
            self.num_down = 0
            self._at(self.costs.restart, self._resume)

    def _resume(self) -> None:
        self.coordinator = Coordinator(self.setup.plan, snapshot=self.saved)
        self.version = self.coordinator.step
        self.num_redone += len(self.step_ends) - self.version
        del self.step_ends[self.version :], self.ages[self.version :]
        self.workers = GroupsByWorker(
            [str(number) for number in range(self.setup.engines)], self.version
        )

        for engine in self.engines:
            engine.worker = engine.number
            engine.since = self.now

        self._next()

    def _clear(self, engine: _Engine) -> None:
        self.num_running -= len(engine.running)
        engine.running = []
        engine.waiting = deque()
        engine.base = 0.0
        engine.stamp += 1
        self.busy.discard(engine)
        self.places.pop(engine, None)
