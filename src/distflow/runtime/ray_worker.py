"""A worker as an actor: a process that runs its rank's part of the plan."""

import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distflow import __version__
from distflow.flow.ticket import Version
from distflow.observe.terminal import TerminalView
from distflow.rollout.engine import Receipt
from distflow.runtime import faults
from distflow.runtime.begin import Start, note_early_end, note_resume, open_store, write_facts
from distflow.runtime.callbacks import Callbacks
from distflow.runtime.engine_watch import write_stacks
from distflow.runtime.ports import Ports
from distflow.runtime.ports.arriving_weights import Arrivals
from distflow.runtime.ports.local_weights import LocalWeights
from distflow.runtime.ports.streamed_weights import StreamedWeights
from distflow.runtime.ports.torch_collective import TorchCollective
from distflow.runtime.ports.weights import WeightPort
from distflow.runtime.process_groups import ProcessGroups, backend_of
from distflow.runtime.ray_coordinator import Standing
from distflow.runtime.ray_edge import AgreedStop, RayEdge
from distflow.runtime.ray_exchange_port import RayExchange
from distflow.runtime.ray_groups import answer, shorten, shortened
from distflow.runtime.ray_members import Members
from distflow.runtime.ray_weights import Fleet, RayWeights, carrier_of
from distflow.runtime.recorder import Recorder
from distflow.runtime.resources import build_resources
from distflow.runtime.saved import restore, set_generators
from distflow.runtime.spec import Spec
from distflow.runtime.teams import kept_share, team_layout
from distflow.runtime.validation import Answers
from distflow.runtime.weight_buckets import Sent
from distflow.runtime.worker import Worker
from distflow.training.collective import Collective, OneRank


@dataclass(frozen=True)
class Home:
    """The driver's folder, from which paths and modules are named, and where it finds modules."""

    folder: str
    module_paths: tuple[str, ...]

    @staticmethod
    def of_driver() -> "Home":
        return Home(os.getcwd(), tuple(sys.path))

    def enter(self) -> None:
        """As far as this machine has it: what is missing is told by whoever needs it."""
        with suppress(OSError):
            os.chdir(self.folder)
        sys.path += [path for path in self.module_paths if path not in sys.path]


@dataclass(frozen=True)
class Place:
    """A worker among the others. rank: in the plan. teams: the ranks that learn the same together, those of each in
    order; see `learning_teams`. generators: the ranks that generate. threads: of torch. generator: its number among
    those that generate, one that comes in place of another has a new one; of one that does not, none that is asked
    for."""

    rank: int
    teams: tuple[tuple[int, ...], ...]
    generators: tuple[int, ...]
    threads: int
    home: Home
    generator: int = -1

    @property
    def learners(self) -> tuple[int, ...]:
        return tuple(rank for team in self.teams for rank in team)

    @property
    def team(self) -> tuple[int, ...]:
        """Its own; empty for a worker that does not learn."""
        return next((team for team in self.teams if self.rank in team), ())

    @property
    def leads(self) -> bool:
        """What is true of all is told by this one."""
        return self.rank == self.learners[0]

    @property
    def first(self) -> int:
        """The place of its team's first rank among those that learn."""
        return self.learners.index(self.team[0]) if self.team else -1

    @property
    def part(self) -> int:
        """Its number in the run's folder: the one that leads has the first."""
        order = [*self.learners, *(rank for rank in self.generators if rank not in self.learners)]
        return order.index(self.rank)


class PeersLate(RuntimeError):
    """Another rank did not come to what all do together."""


_OTHERS_ARE_LATE = "Timed out waiting"  # gloo's words


@dataclass(frozen=True)
class Built:
    """What the resources of a worker turned out to be. version: of its distflow."""

    version: str
    facts: dict[str, object]
    num_parameters: int


class WorkerActor:
    """`build`, then `run`; what weights come meanwhile, on threads of their own."""

    def __init__(self, spec: Spec, place: Place, coordinator: Any, meeting: Path, exchange: Any = None) -> None:
        """coordinator, exchange: handles of their actors; no exchange where nothing goes from team to team. meeting: a
        file over which those that learn find each other."""
        os.umask(0o077)
        place.home.enter()
        faults.arm(place.rank)
        self._spec, self._place, self._coordinator, self._meeting = spec, place, coordinator, meeting
        self._exchange = exchange
        self._stop, self._arrivals = AgreedStop(), Arrivals()
        self._members = Members(partial(self.note, "warning"))
        self._recorder: Future[Recorder] = Future()
        self._entered: Future[Worker] = Future()

    def build(self) -> Built:
        """Engines and services. Raises UserError."""
        faults.reach("build")
        try:
            torch.set_num_threads(self._place.threads)
            self._spec.program()  # which loads the modules of the user
            self._join()
            self._resources = build_resources(
                self._spec.factories, self._spec.plan.ranks[self._place.rank], self._data, self._mesh
            )
        except BaseException as err:
            shorten(err)
            raise
        return Built(__version__, dict(self._resources.facts), self._resources.num_parameters)

    def run(self, start: Start, differences: list[str], others: Mapping[int, Any]) -> int:
        """The whole run, as far as this worker has a part in it; the steps consumed in all.

        differences: from the checkpoint. others: the workers that generate and do not learn, by rank, for the one that
        leads.
        """
        spec, place = self._spec, self._place
        standing: Standing = answer(self._coordinator.standing.remote())
        state = restore(start.checkpoint, self._resources)[0] if start.checkpoint else {}
        tell = self._coordinator.tell.remote
        with Recorder(
            spec,
            standing.total_steps,
            standing.incarnation,
            start.resumed_at,
            _told(tell) if place.leads else Callbacks(),
            part=place.part,
            view=cast(TerminalView, RemoteView(tell, place)),
            speaks=not place.team or place.rank == place.team[0],
            share=kept_share(spec.plan, place.teams, place.rank),
        ) as recorder:
            if place.leads:
                write_facts(spec, self._resources.facts, recorder, standing.total_steps)
                if start.checkpoint:
                    note_resume(recorder, start.checkpoint, differences)
            self._recorder.set_result(recorder)
            for rank, worker in others.items():
                self._members.join(rank, worker)
            ports = self._ports(recorder, sends=bool(others))
            stop, version = self._stop, standing.version
            with Worker(
                spec, place.rank, self._resources, ports, recorder, open_store(spec), stop, state, version
            ) as worker:
                set_generators(start.checkpoint, spec.options.seed, place.part)
                self._entered.set_result(worker)
                with self._telling_failure():
                    steps = worker.learning_loop() if place.team else worker.serve()
            if place.leads:
                self._note_end(recorder, standing.total_steps)
        return steps

    def take(self, version: Version, number: int, sent: Sent, wanted: str) -> str | None:
        """See `Arrivals`."""
        return self._arrivals.take(version, number, sent, wanted)

    def serve(self, version: Version, num_buckets: int | None) -> Receipt:
        """See `Arrivals`."""
        return self._arrivals.serve(version, num_buckets)

    def alive(self) -> None:
        """Answered on a thread of its own, whatever the others are at."""

    def join(self, rank: int, worker: Any) -> None:
        """A worker that generates has come in place of one that is gone."""
        self._members.join(rank, worker)
        self._coordinator.tell_of_newcomers.remote()

    def serving(self) -> list[int]:
        """Ranks of the other workers that serve the newest weights."""
        return list(self._members.serving())

    def where(self) -> str:
        """What its learning thread is at, for people."""
        return f"in step {self._entered.result().step + 1}, phase '{self._recorder.result().phases.now}'"

    def note(self, kind: str, message: str) -> None:
        """Into the run's events, once they are open."""
        self._recorder.result().note(kind, message)

    def write_stacks(self, path: Path) -> None:
        """Append what all threads of this process are at."""
        write_stacks(path)

    def validate(self, step: int, part: int, num_parts: int) -> Answers:
        """See `Worker`."""
        return self._entered.result().validate(step, part, num_parts)

    def _join(self) -> None:
        """The process groups of all that learn, of its team, and of those of it that have samples of their own, and a
        mesh of the team where weights are sharded."""
        place, learners = self._place, self._place.learners
        self._everyone: Collective = OneRank()
        self._collective: Collective = self._everyone
        self._data: Collective = self._everyone
        self._mesh: DeviceMesh | None = None
        shards = self._spec.config.actor_rollout_ref.actor.strategy == "fsdp"
        if not place.team or (len(learners) == 1 and not shards):
            return
        if len({rank.node for rank in self._spec.plan.ranks}) == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else has to reach it
        device = torch.device(self._spec.plan.ranks[place.rank].device).type
        # A file, not a port: who cannot read the run's folder cannot take part.
        store, timeout = (
            dist.FileStore(str(self._meeting), len(learners)),
            timedelta(seconds=self._spec.options.peers_timeout_s),
        )
        dist.init_process_group(
            backend_of(self._spec.plan),
            timeout=timeout,
            store=store,
            rank=learners.index(place.rank),
            world_size=len(learners),
        )
        groups, layout = ProcessGroups(self._spec.plan, place.teams, timeout), team_layout(self._spec.plan, place.team)
        self._everyone, self._collective = TorchCollective(), TorchCollective(groups.of(place.team))
        self._data = TorchCollective(groups.of(layout.line("data", place.rank)))
        if shards:
            self._mesh = groups.mesh(place.team, layout, place.rank, device)

    def _ports(self, recorder: Recorder, sends: bool) -> Ports:
        place, waits = self._place, recorder.waits
        awaits = not place.team and "rollout" in self._spec.plan.ranks[place.rank].engines
        ready = self._arrivals.ready if awaits else None
        edge = RayEdge(self._coordinator, place.generator, place.first, waits, self._stop, ready)
        if not place.team:
            return Ports(edge, None, self._arrivals, self._collective, self._data, self._everyone, self._abort)
        own: WeightPort = LocalWeights(waits) if self._mesh is None else StreamedWeights(waits)
        exchange = RayExchange(self._exchange, waits) if self._exchange is not None else None
        ports = Ports(edge, None, own, self._collective, self._data, self._everyone, self._abort, exchange=exchange)
        if not (place.leads and sends):
            return ports
        fleet = Fleet(self._members, carrier_of(self._spec), self._spec.options.engine_timeout_s, waits)
        return replace(ports, weights=RayWeights(own, fleet), validate=self._members.validate)

    @contextmanager
    def _telling_failure(self) -> Iterator[None]:
        """Before this worker leaves, and so cancels what it has begun: others then wait no more."""
        try:
            yield
        except RuntimeError as err:
            if _OTHERS_ARE_LATE in str(err):  # not told to them: the driver finds out who of them it is
                raise PeersLate(f"worker {self._place.rank} has waited for the others in vain: {err}") from err
            self._fail(err)
            raise
        except BaseException as err:
            self._fail(err)
            raise

    def _abort(self, error: BaseException) -> None:
        """What generates here has ended. A worker that cancels it is leaving, and had told why if it failed."""
        if not isinstance(error, CancelledError):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        shorten(error)
        self._coordinator.fail.remote(error)
        if self._exchange is not None:
            self._exchange.fail.remote(error)

    def _note_end(self, recorder: Recorder, total_steps: int) -> None:
        standing: Standing = answer(self._coordinator.standing.remote())
        if standing.finished and not self._stop.wanted:
            note_early_end(recorder, standing.account, standing.version.step, total_steps)
        recorder.status = "stopped" if self._stop.wanted and not standing.finished else "finished"


class RemoteView:
    """The driver's `TerminalView`, of which a worker that does not lead shows what it notes alone."""

    def __init__(self, tell: Any, place: Place) -> None:
        self._tell, self._place = tell, place

    def note(self, kind: str, message: str) -> None:
        where = "" if self._place.leads else f"worker {self._place.rank}: "
        self._tell("note", kind, where + shortened(message))

    def sample(self, prompt: str, response: str, score: float | None) -> None:
        self._leader("sample", prompt[:_MOST_SHOWN], response[:_MOST_SHOWN], score)

    def __getattr__(self, name: str) -> Any:
        return partial(self._leader, name)

    def _leader(self, method: str, *arguments: Any) -> None:
        if self._place.leads:
            self._tell(method, *arguments)


_MOST_SHOWN = 1000


def _told(tell: Any) -> Callbacks:
    """The user's functions live in the driver."""

    def on_step(step: int, metrics: dict[str, float]) -> None:
        tell("on_step", step, metrics)

    def on_validation(step: int, metrics: dict[str, float]) -> None:
        tell("on_validation", step, metrics)

    def on_save(step: int, path: Path) -> None:
        tell("on_save", step, path)

    return Callbacks(on_step, on_validation, on_save)
