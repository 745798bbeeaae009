"""Something breaks while answers are under way: the run goes on, or ends in time with one message;
it loses nothing."""

import json
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.e2e.cli_runs import CliRun, children_of, is_alive
from tests.e2e.runs import Playground
from tests.e2e.survivors import audit, records
from tests.ledger_audit import verify

pytestmark = pytest.mark.slow

# A pipeline of the user's whose file plants the fault that FAULT names; a file `fired` tells that
# it was met.
PROGRAM = """
import asyncio, itertools, os, pathlib, statistics, time
from distflow import NodeRole, Pipeline, node
from distflow.pipelines import nodes, policy_gradient
from distflow.rollout.embedded import engine
from distflow.runtime.sample_queue.local import LocalSampleQueue

FOLDER, FAULT = pathlib.Path(__file__).parent, os.environ["FAULT"]
times = itertools.count(1)


def fired(row=None):
    (FOLDER / "fired").write_text(str(row))


def is_time():
    "Neither at once, nor at the end."
    return next(times) == 9


def engine_step(error, num_times=1):
    "As if its own code raised it: that is no fault of the user's."
    raised, names = itertools.count(1), {"whole": engine.EmbeddedEngine.step}

    def check():
        if next(times) >= 40 and next(raised) <= num_times:
            fired()
            return error

    names["check"] = check
    code = '''def step(self):
    error = check()
    if error is not None:
        raise error
    whole(self)
'''
    exec(compile(code, engine.__file__, "exec"), names)
    engine.EmbeddedEngine.step = names["step"]


def engine_late(late):
    took = []

    async def generate(self, request, whole=engine.EmbeddedEngine.generate):
        if len(took) >= 8 and not (FOLDER / "fired").exists():
            fired(request.stream.row)
            await late(took)
        started = time.monotonic()
        result = await whole(self, request)
        took.append(time.monotonic() - started)
        return result
    engine.EmbeddedEngine.generate = generate


async def fifty_times(took):
    (FOLDER / "usual_s").write_text(str(statistics.median(took)))
    await asyncio.sleep(50 * statistics.median(took))


def engine_refuses(num_times):
    "The answers to one prompt, so many times."
    refused, names = itertools.count(1), {"whole": engine.EmbeddedEngine.generate}

    def refuses(request):
        if request.stream.row == 7 and next(refused) <= num_times:
            fired()
            return True

    names["refuses"] = refuses
    code = '''async def generate(self, request):
    if refuses(request):
        raise RuntimeError("no slot")
    return await whole(self, request)
'''
    exec(compile(code, engine.__file__, "exec"), names)
    engine.EmbeddedEngine.generate = names["generate"]


def edge_put():
    def end_groups(self, ended, whole=LocalSampleQueue.end_groups):
        if is_time():
            fired()
            raise MemoryError("no room for the group")
        whole(self, ended)
    LocalSampleQueue.end_groups = end_groups


async def for_ever(*_):
    await asyncio.Event().wait()


def failing(how):
    @node(writes=(), role=NodeRole.DYNAMIC_SAMPLING, reads=("scores",))
    async def faulty(scores):
        if is_time():
            fired()
            await how()
    return faulty


def raises(error):
    async def fails():
        raise error
    return fails


@node(writes=(), role=NodeRole.DYNAMIC_SAMPLING, reads=("scores",))
def plain_exit(scores):
    if is_time():
        fired()
        raise SystemExit(3)


@node(writes=(), role=NodeRole.DYNAMIC_SAMPLING, reads=("scores",))
async def always(scores):
    if next(times) >= 9:
        fired()
        raise ValueError("of no use")


PLANTED = {
    "step_memory": lambda: engine_step(MemoryError("the cache")),
    "step_runtime": lambda: engine_step(RuntimeError("a kernel")),
    "step_exit": lambda: engine_step(SystemExit(3)),
    "step_always": lambda: engine_step(RuntimeError("a kernel"), 10**9),
    "lost_request": lambda: engine_late(for_ever),
    "slow_request": lambda: engine_late(fifty_times),
    "refused_twice": lambda: engine_refuses(2),
    "refused_thrice": lambda: engine_refuses(3),
    "edge_put": edge_put,
}
NODES = {
    "node_exit": failing(raises(SystemExit(3))),
    "node_interrupt": failing(raises(KeyboardInterrupt())),
    "node_memory": failing(raises(MemoryError("the node"))),
    "node_sleeps": failing(for_ever),
    "plain_exit": plain_exit,
    "node_always": always,
}


def make(config):
    if FAULT in PLANTED and not hasattr(LocalSampleQueue, "planted"):
        LocalSampleQueue.planted = True
        PLANTED[FAULT]()
    pipeline = Pipeline("faulty")
    policy_gradient.roll_out_and_score(pipeline, config)
    if FAULT in NODES:
        pipeline.add_node("faulty", NODES[FAULT])
    policy_gradient.prepare_training_data(pipeline, config)
    policy_gradient.estimate_advantages(pipeline, config)
    pipeline.add_node("actor_train", nodes.train_actor)
    return pipeline.build()
"""
NUM_ROWS = 24
STALENESS = 2
OTHERWISE = "reward.domains={default: {timeout_s: 30}}"
"""Verifiers have more time than a function of the user that is a node."""
PLACES = {(0, row) for row in range(NUM_ROWS)}


@pytest.fixture
def ground(tmp_path):
    ground = Playground(tmp_path, num_rows=NUM_ROWS)
    (tmp_path / "faulty.py").write_text(PROGRAM)
    return ground


def start(ground: Playground, fault: str, *overrides: str) -> CliRun:
    (ground.folder / "fired").unlink(missing_ok=True)
    keys = (
        f"async.max_staleness={STALENESS}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.timeout_s=60",
        *(
            ("reward.timeout_s=1", OTHERWISE)
            if fault == "node_sleeps"
            else ("reward.timeout_s=30",)
        ),
        "trainer.save_freq=1",
        "trainer.total_epochs=1",
        "trust.check_rewards=false",
        "trust.check_freq=0",
        "trust.canary_freq=0",
        f"dag.pipeline={ground.folder}/faulty.py:make",
    )

    return CliRun(
        ground.folder / "log",
        ["train", "grpo", *ground.overrides("run", *keys, *overrides)],
        {"FAULT": fault},
    )


def unharmed(ground: Playground) -> dict[str, int]:
    """How many groups were dropped, by reason, where all others were trained once and in time."""
    verify(ground.folder / "run" / "ledger.jsonl")
    return Counter(audit(ground.folder / "run", STALENESS, PLACES).dropped.values())


ENDS = {
    "step_always": (
        1,
        (
            "the last 4 prompt groups all failed, so the run cannot progress; the first error: "
            "node 'rollout"
        ),
    ),
    "lost_request": (
        1,
        "the rollout engine EmbeddedEngine hangs: it was asked for 2 samples of row ",
    ),
    "edge_put": (1, "the rollout loop has failed: MemoryError: no room for the group"),
    "node_always": (
        2,
        (
            "the last 8 prompt groups all failed, so the run cannot progress; the first error: "
            "node 'faulty'"
        ),
    ),
}
"""Exit status and message."""
QUICK = (
    "step_memory",
    "step_exit",
    "refused_thrice",
    "node_sleeps",
    "lost_request",
    "edge_put",
    "node_always",
)


def some_slow(names: Iterable[str]) -> list[ParameterSet]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("fault", some_slow(ENDS))
def test_a_run_that_cannot_go_on_ends_with_one_message_and_is_resumed(ground, fault):
    status, message = ENDS[fault]
    patience = ("actor_rollout_ref.rollout.timeout_s=2",) if fault == "lost_request" else ()
    run = start(ground, fault, *patience)

    children: list[int] = []
    while run.running:
        children += children_of(run.pid)
        time.sleep(0.05)

    assert run.status() == status and message in run.said(), run.said()
    assert (ground.folder / "fired").exists()
    assert run.said().count("distflow: ") == 1 and "Traceback" not in run.said()
    assert not any(is_alive(pid) for pid in children)
    verify(ground.folder / "run" / "ledger.jsonl")

    assert (again := start(ground, "none", *patience)).status() == 0, again.said()

    # Those of a step that was saved before it was seen that all fail.
    assert set(unharmed(ground)) <= {"error", "max_retries"}


def test_a_rollout_fifty_times_slower_is_trained_at_last(ground):
    run = start(ground, "slow_request")
    assert run.status() == 0, run.said()
    assert unharmed(ground) == {}
    late = ticket_of(ground, row=int((ground.folder / "fired").read_text()))
    (slow,) = [s for s in group_spans(ground) if s["group_id"] == late]
    assert slow["t1"] - slow["t0"] >= 50 * float((ground.folder / "usual_s").read_text())
    (step,) = [
        r["step"]
        for r in records(ground.folder / "run")
        if r["kind"] == "consumed" and late in r["group_ids"]
    ]
    assert 0 <= step - 1 - slow["version"] <= STALENESS
    overtook = [s for s in group_spans(ground) if s["group_id"] > late and s["t1"] < slow["t1"]]
    assert overtook, "others went on meanwhile"


def ticket_of(ground: Playground, row: int) -> int:
    (found,) = {
        r["group_id"]
        for r in records(ground.folder / "run")
        if r["kind"] == "issued" and r["row"] == row
    }
    return int(found)


def group_spans(ground: Playground) -> list[dict[str, Any]]:
    return [span for span in spans(ground, "rollout") if span["kind"] == "group"]


def spans(ground: Playground, actor: str) -> list[dict[str, Any]]:
    return list(
        map(
            json.loads,
            (ground.folder / "run" / "spans" / f"{actor}.jsonl").read_text().splitlines(),
        )
    )
