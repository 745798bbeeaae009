"""The time line of one step: the work of each rank."""

from dataclasses import dataclass

from distflow.graph import BoundPipeline
from distflow.planning.layouts import Ranks
from distflow.planning.plan import Plan, dp_groups_of
from distflow.planning.step_times import StepTimes

GENERATE = "generate"
SYNC = "weight sync"
REWARDS = "rewards"
REST = "the rest of the step"


@dataclass(frozen=True)
class Bar:
    """Work of some ranks."""

    ranks: Ranks
    what: str
    start: float
    """Seconds since the step began."""
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def make_time_line(times: StepTimes, pipeline: BoundPipeline) -> tuple[Bar, ...]:
    """A step in the steady state. Nodes begin when those before them are done and their ranks are
    free; ranks that only generate work on the next step meanwhile, if samples may be stale."""
    generation = _generation(times)
    generated = generation[-1].end if generation else 0.0
    training = _training(times, pipeline, 0.0 if times.overlaps else generated)
    bars = generation + training

    sync = times.sync()
    if sync:
        begin = max((bar.end for bar in bars), default=0.0)
        receivers = [bar.ranks for bar in generation]
        for ranks in dict.fromkeys([*dp_groups_of(times.plan)[:1], *receivers]):
            bars.append(Bar(ranks, SYNC, begin, begin + sync))

    return tuple(sorted(bars, key=lambda bar: (bar.start, bar.ranks)))


def _generation(times: StepTimes) -> list[Bar]:
    ranks = _generating(times.plan)
    if not ranks:
        return []

    bars = [Bar(ranks, GENERATE, 0.0, times.generate())]
    if scoring := times.rewards():
        bars.append(Bar(ranks, REWARDS, bars[0].end, bars[0].end + scoring))
    return bars


def _generating(plan: Plan) -> Ranks:
    """The ranks that only generate; without any, those that generate and train."""
    if plan.generating_only or not plan.generates:
        return plan.generating_only
    for dp_group in dp_groups_of(plan):
        if "rollout" in plan.ranks[dp_group[0]].engines:
            return dp_group
    return ()


def _training(times: StepTimes, pipeline: BoundPipeline, start: float) -> list[Bar]:
    plan = times.plan
    bars = []
    free = dict.fromkeys(dp_groups_of(plan), start)
    ends: dict[str, float] = {}
    for node in pipeline.training_nodes:
        # A node without an engine takes no time: its end is that of what it waits for.
        ready = max((ends[dep] for dep in node.deps if dep in ends), default=start)
        ends[node.node_id] = ready
        if not node.engines:
            continue

        for ranks in free:
            if node.node_id not in plan.ranks[ranks[0]].training_nodes:
                continue
            begin = max(ready, free[ranks])
            free[ranks] = begin + times.node(node)
            bars.append(Bar(ranks, node.node_id, begin, free[ranks]))
            ends[node.node_id] = max(ends[node.node_id], free[ranks])

    if rest := times.rest():
        bars += [Bar(ranks, REST, begin, begin + rest) for ranks, begin in free.items()]
    return bars
