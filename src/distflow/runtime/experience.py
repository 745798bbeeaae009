"""The experience plane: asyncio tasks, one for each prompt group, from ticket to rewarded and filtered group."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.config.errors import UserError
from distflow.data.batch import Batch
from distflow.flow.ticket import Ticket
from distflow.graph import BoundNode, Drop
from distflow.rollout.engine import GenerateRequest, GenerateResult, RolloutEngine
from distflow.runtime.blame import NodeError, node_error
from distflow.runtime.context import NodeContext, prompts_of
from distflow.runtime.invoke import merge_output, run_node
from distflow.runtime.local_edge import Failure, LocalEdge
from distflow.runtime.plain_calls import PlainCalls
from distflow.training.collective import Collective

NO_VERDICTS = "too_few_verdicts"


class SubmissionGate:
    """Counts the groups of a wave that have handed their request to the engine, or ended without one."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._waiting: set[asyncio.Task[None] | None] = set()
        self._all_in = asyncio.Event()

    def expect(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Begin a wave of these group tasks."""
        self._waiting = set(tasks)
        self._all_in = asyncio.Event()
        for task in tasks:
            task.add_done_callback(self._arrived)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """The engine's `generate`; its request is in the engine's queue before this yields for the first time."""
        pending = asyncio.ensure_future(self._engine.generate(request))
        try:
            await asyncio.sleep(0)
            self._arrived(asyncio.current_task())
            return await pending
        finally:
            pending.cancel()

    async def all_in(self) -> None:
        """Wait until every group of the wave has arrived."""
        if self._waiting:
            await self._all_in.wait()

    def _arrived(self, task: asyncio.Task[Any] | None) -> None:
        self._waiting.discard(task)
        if not self._waiting:
            self._all_in.set()


@dataclass
class ExperiencePlane:
    """Runs the experience nodes of a program on groups.

    context: makes the context of a node that works for a ticket, by ticket and node id.
    timeout_s: what a plain function may take for each sample.
    """

    nodes: tuple[BoundNode, ...]
    engines: Mapping[str, Any]
    context: Callable[[Ticket, str], NodeContext]
    reduce: Collective
    timeout_s: float
    plain_calls: PlainCalls = field(default_factory=PlainCalls)

    async def group(self, ticket: Ticket, engines: Mapping[str, Any]) -> Batch | Drop:
        """One group from its prompts to its rewards; `Drop` where a node dropped it. Raises NodeError."""
        batch: Batch | None = None
        for node in self.nodes:
            ctx = self.context(ticket, node.node_id)
            if batch is None:
                assert ctx.group is not None
                batch = prompts_of(ctx.group)
            deadline_s = self.timeout_s * len(batch)
            try:
                output = await run_node(node, batch, engines, ctx, self.reduce, self.plain_calls, deadline_s)
            except NodeError:
                raise
            except (Exception, SystemExit) as err:  # the edge of a user's code
                raise node_error(node, err) from err
            if isinstance(output, Drop):
                return output
            batch, _ = merge_output(node, batch, output)
        assert batch is not None, "a program has at least one experience-plane node"
        return batch

    async def loop(self, edge: LocalEdge) -> None:
        """consumes tickets · waits for credits · unblocked by released steps and dropped groups · produces groups

        A wave is submitted in ticket order to a paused engine that then resumes, so that what shares a decode step
        never depends on timing.
        """
        rollout = self.engines.get("rollout")
        async for wave in edge.waves():
            if rollout is None:
                await asyncio.gather(*(self._run_group(t, edge, self.engines) for t in wave))
                continue
            gate = SubmissionGate(rollout)
            engines = {**self.engines, "rollout": gate}
            await rollout.pause()
            tasks = [asyncio.create_task(self._run_group(t, edge, engines)) for t in wave]
            gate.expect(tasks)
            try:
                await gate.all_in()
                await rollout.resume()
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _run_group(self, ticket: Ticket, edge: LocalEdge, engines: Mapping[str, Any]) -> None:
        """Never raises: whatever a node does costs its own group only, and is recorded."""
        started = time.time()
        try:
            result = await self.group(ticket, engines)
        except NodeError as err:
            edge.drop(ticket, "error", started, Failure(str(err), isinstance(err, UserError)))
            return
        if isinstance(result, Drop):
            failure = Failure(result.detail, users=True) if result.reason == NO_VERDICTS else None
            edge.drop(ticket, result.reason, started, failure)
        else:
            edge.put(ticket, result, started)
