"""Killed at any moment while answers are under way, a run loses no prompt, trains none twice and
none too late."""

import random
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from distflow.observe.run_reader import read_metrics
from tests.e2e.cli_runs import CliRun, Left, children_of, is_alive
from tests.e2e.runs import Playground
from tests.e2e.survivors import Survivors, audit, records

pytestmark = pytest.mark.slow

# A pipeline that kills its own process when it comes to a point for the n-th time: KILL_AT=point:n.
# Its engine never answers the n-th request: HELD=n.
KILLED = """
import asyncio, itertools, os, signal
from distflow.scheduling.ledger import Ledger
from distflow.pipelines.grpo import grpo_pipeline as make
from distflow.rollout import engine_weights as weights_module
from distflow.rollout.embedded import engine
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.sample_queue.local import LocalSampleQueue
from distflow.runtime.weight_sync.same_process_weights import LocalWeights
from distflow.training.torch_engine import TorchTrainEngine

planted, _, at = os.environ.get("KILL_AT", ":0").partition(":")
times = itertools.count(1)


def reached(point):
    if point.startswith(planted) and planted and next(times) == int(at):
        os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, point):
    whole = getattr(owner, name)

    def planted(*arguments, **options):
        reached(point)
        return whole(*arguments, **options)

    setattr(owner, name, planted)


def copy_weights(model, weights, whole=weights_module.copy_weights):
    def each():
        for pair in weights:
            reached("copying")
            yield pair
    return whole(model, each())


def append(self, kind, whole=Ledger.append, **fields):
    if kind in ("issued", "consumed", "version", "complete"):
        if planted == f"torn {kind}" and next(times) == int(at):
            self._file.write(b'{"t":1,"restart":0,"kind":"is')
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    whole(self, kind, **fields)


def begin(self, step, whole=CheckpointStore.begin):
    checkpoint, self.on_point = whole(self, step), reached
    return checkpoint


def writing(self, step, whole=CheckpointStore.writing):
    checkpoint, self.on_point = whole(self, step), reached
    return checkpoint


async def generate(self, request, whole=engine.EmbeddedEngine.generate, requests=itertools.count(1)):
    if next(requests) == int(os.environ.get("HELD", "0")):
        await asyncio.Event().wait()
    return await whole(self, request)


if not hasattr(LocalWeights, "deadly"):
    LocalWeights.deadly, engine.EmbeddedEngine.generate = True, generate
    weights_module.copy_weights, Ledger.append, CheckpointStore.begin = copy_weights, append, begin
    CheckpointStore.writing = writing
    before(LocalWeights, "commit", "publishing")
    before(LocalSampleQueue, "end_groups", "putting")
    before(LocalSampleQueue, "release", "releasing")
    before(engine.EmbeddedEngine, "step", "decoding")
    before(TorchTrainEngine, "train_step", "training")
"""  # noqa: E501

POINTS = {
    "start": 1,
    "copying": 60,
    "publishing": 4,
    "decoding": 250,
    "putting": 16,
    "training": 4,
    "releasing": 4,
    "torn issued": 20,
    "torn complete": 14,
    "torn consumed": 3,
    "torn version": 3,
    "part actor": 3,
    "part live": 3,
    "part run": 3,
    "manifest": 3,
    "renamed": 3,
    "removing": 2,
}
"""Where a run may be killed, and within how many times that it comes there."""

NUM_ROWS = 18
NUM_EPOCHS = 3
STALENESS = 2
PLACES = {(epoch, row) for epoch in range(NUM_EPOCHS) for row in range(NUM_ROWS)}


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("async_resume"), num_rows=NUM_ROWS)
    (ground.folder / "killed.py").write_text(KILLED)
    return ground


def start(
    ground: Playground, name: str, *overrides: str, flags: tuple[str, ...] = (), **environment: str
) -> CliRun:
    """Long answers by chance: one token in a hundred ends one. Nothing is learned, so that a prompt
    has the same answers at any version."""
    keys = (
        f"async.max_staleness={STALENESS}",
        "actor_rollout_ref.actor.optim.lr=0",
        "actor_rollout_ref.rollout.n=2",
        "data.max_response_length=60",
        f"trainer.total_epochs={NUM_EPOCHS}",
        "trainer.save_freq=1",
        "trust.check_rewards=false",
        "trust.check_freq=0",
        "trust.canary_freq=0",
        f"dag.pipeline={ground.folder}/killed.py:make",
    )
    arguments = ["train", "grpo", *flags, *ground.overrides(name, *keys, *overrides)]

    return CliRun(ground.folder / f"{name}.log", arguments, environment)


def finish(ground: Playground, name: str, *overrides: str, flags: tuple[str, ...] = ()) -> Path:
    run = start(ground, name, *overrides, flags=flags)
    assert run.status() == 0, run.said()
    return ground.folder / name


@pytest.fixture(scope="module")
def undisturbed(ground):
    return audit(finish(ground, "undisturbed"), STALENESS, PLACES)


def hunted(ground: Playground, name: str, kills: list[str]) -> Path:
    """A run that was killed at each of these points, in the folder that the last start of it ended
    in."""
    for kill in kills:
        run = start(ground, name, KILL_AT=kill)
        assert run.status() == -9, f"it was not killed at {kill}: {run.said()}"
    return finish(ground, name)


def same_account(folder: Path, undisturbed: Survivors) -> None:
    """Nothing was lost or trained twice, and of each prompt the same answers were trained on: kills
    favour none."""
    survived = audit(folder, STALENESS, PLACES)
    assert survived.dropped == undisturbed.dropped == {}
    assert survived.lengths == undisturbed.lengths
    assert max(map(max, survived.lengths.values())) > 3 * min(
        map(min, survived.lengths.values())
    ), "no long tail"
    assert len(set(survived.step.values())) == len(set(undisturbed.step.values()))


def test_killed_four_times_a_run_trains_every_prompt_once(ground, undisturbed):
    kills = ["putting:9", "part run:2", "copying:60", "torn complete:7"]
    folder = hunted(ground, "four", kills)
    same_account(folder, undisturbed)
    assert Left(folder).checkpoint.step == 14


def moment(draw: random.Random) -> str:
    point = draw.choice(list(POINTS))
    return f"{point}:{draw.randint(1, POINTS[point])}"


@pytest.fixture(scope="module")
def cut(ground):
    """A run that was killed behind its fifth checkpoint, with complete groups in the queue and
    others under way."""
    assert start(ground, "cut", KILL_AT="renamed:5", HELD="23").status() == -9
    live = Left(ground.folder / "cut").run["coordinator"]["live"]
    assert {group["complete"] for group in live} == {True, False}
    return ground.folder / "cut"


def copied(cut: Path, name: str) -> str:
    shutil.copytree(cut, cut.parent / name)
    return name


def test_complete_groups_are_trained_as_they_were_and_begun_ones_start_again(ground, cut):
    left = Left(cut).run["coordinator"]
    folder = finish(ground, copied(cut, "as_they_were"))
    audit(folder, STALENESS, PLACES)
    issued = {r["group_id"]: r for r in records(folder) if r["kind"] == "issued"}

    for group in left["live"]:
        again = issued[group["prompt_group"]["group_id"]]
        assert (again["restart"] == left["restart"]) == group["complete"]
        assert again["attempt"] == group["prompt_group"]["attempt"] + (not group["complete"])


@pytest.mark.parametrize("staleness", [0, 1, 5])
def test_a_run_goes_on_with_another_bound(ground, cut, undisturbed, staleness):
    """What no step can train on in time any more is dropped, with that reason, and nothing else
    is."""
    name = copied(cut, f"bound-{staleness}")
    folder = finish(
        ground,
        name,
        f"async.max_staleness={staleness}",
        flags=("--allow-change", "async.max_staleness"),
    )
    survived = audit(folder, 5, PLACES)
    live = Left(cut).run["coordinator"]["live"]
    stale = [
        g
        for g in live
        if g["complete"] and min(g["version"], g["prompt_group"]["version"]) + staleness < 5
    ]
    assert len(survived.dropped) >= len(stale) and set(survived.dropped.values()) <= {"stale"}
    assert staleness < STALENESS or not survived.dropped
    counted = [
        values["async/stale_data_count"]
        for (_, kind), values in all_metrics(folder)
        if kind == "train"
    ]
    assert counted[-1] == len(survived.dropped)
    assert survived.lengths == {place: undisturbed.lengths[place] for place in survived.step}
    late = {place: age for place, age in survived.ages.items() if survived.step[place] > 5}
    assert max(late.values()) <= staleness


def all_metrics(folder: Path) -> list[tuple[tuple[int, str], dict[str, float]]]:
    return [((record.step, record.kind), dict(record.values)) for record in read_metrics(folder)]


@pytest.mark.parametrize("batch", [pytest.param(3, marks=pytest.mark.slow), 6])
def test_a_run_goes_on_with_another_batch_size(ground, cut, batch):
    keys = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
    allowed = tuple(flag for key in keys for flag in ("--allow-change", key))
    name = copied(cut, f"batch-{batch}")
    folder = finish(ground, name, *(f"{key}={batch}" for key in keys), flags=allowed)
    survived = audit(folder, STALENESS, PLACES)
    assert set(survived.dropped.values()) <= {"stale"} and (batch < 4 or not survived.dropped)
    sizes = Counter(survived.step.values())
    assert {sizes[step] for step in range(1, 6)} == {4} and {
        sizes[step] for step in range(6, max(sizes))
    } == {batch}


@pytest.mark.slow
def test_a_synchronous_run_goes_on_asynchronously_and_back(ground):
    allow = ("--allow-change", "async.max_staleness")
    assert (
        start(ground, "there_and_back", "async.max_staleness=0", KILL_AT="renamed:3").status() == -9
    )
    assert start(ground, "there_and_back", flags=allow, KILL_AT="renamed:4").status() == -9
    folder = finish(ground, "there_and_back", "async.max_staleness=0", flags=allow)
    survived = audit(folder, STALENESS, PLACES)
    ages = {step: survived.ages[place] for place, step in survived.step.items()}
    assert {ages[step] for step in (1, 2, 3)} == {0} == {ages[step] for step in range(8, max(ages))}
    assert max(survived.ages.values()) > 0, "it never ran ahead"


def steps_journaled(folder: Path) -> int:
    path = folder / "ledger.jsonl"
    return path.read_bytes().count(b'"kind":"version"') if path.exists() else 0


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_stopped_run_saves_and_goes_on_with_what_was_under_way(ground, undisturbed, number):
    name = f"stopped-{number}"
    run = start(ground, name, "trainer.save_freq=99")
    run.wait_for(lambda: steps_journaled(ground.folder / name) >= 2)
    children = children_of(run.pid)
    assert children and run.send(number)
    assert (
        run.status() == 128 + number and "finishing this step, saving, then exiting" in run.said()
    ), run.said()
    assert not any(map(is_alive, children)) and "Traceback" not in run.said()
    left = Left(ground.folder / name)
    assert 2 <= left.checkpoint.step < 14 and left.run["coordinator"]["live"]
    same_account(finish(ground, name, "trainer.save_freq=99"), undisturbed)
