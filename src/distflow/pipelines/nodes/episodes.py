"""The rollout node of workflows: it runs a group's episodes side by side, each with a chat of its own, and the reward
node that takes their scores."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.builtin_names import PROMPT_CHAT
from distflow.config import Config
from distflow.config.compose.key_usage import peek
from distflow.data.sample import Sample, Segment
from distflow.environments.chat import Chat, Limits, Prompt, Reply
from distflow.environments.tool_calls import format_of
from distflow.environments.turn_tokens import TurnTokens
from distflow.environments.workflows import Row, Workflow, load_workflow
from distflow.errors import users_place
from distflow.graph import NodeOutput, NodeRole, node, node_factory
from distflow.pipelines.nodes.rollout import SAMPLED_FIELDS, policy_segment
from distflow.rewards.router import RewardOutcome, RewardRouter
from distflow.rewards.score import ACC, Error, Score, in_episode, read_score
from distflow.rollout.engine import GenerateRequest, Generation, RolloutEngine, SamplingParams
from distflow.runtime.audit_protocol import on_return
from distflow.runtime.compiled_node import NodeContext
from distflow.runtime.prompt_group import Group
from distflow.runtime.user_calls.async_calls import deadline_paused
from distflow.runtime.user_calls.sync_calls import DeadlinePassed

_SHARES_WITHIN_S = 0.01
"""How long the first request of a group waits for those of its other episodes, with which it shares the prefill."""

Outcome = RewardOutcome | None


@node_factory
@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
def run_workflow(config: Config) -> Callable[..., object]:
    """The node for `rollout.workflow`. Raises UserError for one that cannot be used."""
    settings = config.actor_rollout_ref.rollout
    workflow = load_workflow(str(settings.workflow), settings.workflow_kwargs)
    node = run_scored_episodes if workflow.scores else run_episodes
    return partial(node, workflow=workflow, timeout_s=config.reward.timeout_s)


@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def run_scored_episodes(
    group: Group,
    rollout: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    reward_fn: RewardRouter,
    ctx: NodeContext,
    *,
    workflow: Workflow,
    timeout_s: float,
) -> NodeOutput:
    """Episodes of a workflow that calls the reward functions. timeout_s: of an episode, without the time in which it
    waits for the policy or the reward functions."""
    return await _Episodes(group, rollout, tokenizer, ctx, workflow, timeout_s, reward_fn).run()


@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def run_episodes(
    group: Group,
    rollout: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    ctx: NodeContext,
    *,
    workflow: Workflow,
    timeout_s: float,
) -> NodeOutput:
    """Episodes of a workflow that scores them itself."""
    return await _Episodes(group, rollout, tokenizer, ctx, workflow, timeout_s, None).run()


class _Requests:
    """Sends the requests of a group's episodes to the engine; equal prompts share one, and so their prefill.

    in_rounds: those of a round are sent together, when every episode has asked or ended: so what is decoded together
    depends on no timing. failure: what the engine raised.
    """

    def __init__(self, group: Group, rollout: RolloutEngine, in_rounds: bool) -> None:
        self._group, self._rollout, self._in_rounds = group, rollout, in_rounds
        self._num_running = len(group)
        self._asked: dict[tuple[tuple[int, ...], SamplingParams, int], dict[int, asyncio.Future[Generation]]] = {}
        self._sent: set[asyncio.Task[None]] = set()
        self._closed = False
        self.failure: Exception | None = None

    async def ask(
        self, index: int, prompt: tuple[int, ...], max_tokens: int, stop: tuple[str, ...], num_drawn: int
    ) -> tuple[Segment, str]:
        """See `distflow.environments.chat.Generate`. index: of the episode's sample."""
        own = self._group.params
        params = replace(own, max_tokens=max_tokens, stop=tuple(dict.fromkeys((*own.stop, *stop))))
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        with deadline_paused():
            waiting = self._asked.setdefault((prompt, params, num_drawn), {})
            waiting[index] = future
            if sum(map(len, self._asked.values())) >= self._num_running or (num_drawn and not self._in_rounds):
                self._send()
            elif not self._in_rounds:
                asyncio.get_running_loop().call_later(_SHARES_WITHIN_S, self._send)
            try:
                made = await future
            finally:
                del waiting[index]  # of a workflow that waits no longer
        return policy_segment(made), made.finish_reason

    def ended(self) -> None:
        """An episode asks no more."""
        self._num_running -= 1
        if self._asked and sum(map(len, self._asked.values())) >= self._num_running:
            self._send()

    def close(self) -> None:
        """Withdraw what was sent, and send nothing more."""
        self._closed = True
        for task in self._sent:
            task.cancel()

    def _send(self) -> None:
        asked, self._asked = [] if self._closed else [item for item in self._asked.items() if item[1]], {}
        for (prompt, params, num_drawn), waiting in sorted(asked, key=lambda item: min(item[1])):
            indices = tuple(sorted(waiting))
            request = GenerateRequest(prompt, indices, params, self._group.stream, num_drawn)
            task = asyncio.ensure_future(self._generate(request, waiting))
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)

    async def _generate(self, request: GenerateRequest, waiting: Mapping[int, "asyncio.Future[Generation]"]) -> None:
        try:
            made = {each.sample: each for each in (await self._rollout.generate(request)).generations}
            for index, future in waiting.items():
                if not future.done():
                    future.set_result(made[index])
        except Exception as error:  # whatever it is, the episodes that wait must end
            self.failure = error
        finally:
            for future in waiting.values():
                future.cancel()  # no effect if it is done


@dataclass
class _Episodes:
    """The episodes of a group."""

    group: Group
    rollout: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    ctx: NodeContext
    workflow: Workflow
    timeout_s: float
    reward_fn: RewardRouter | None
    requests: _Requests = field(init=False)
    tokens: TurnTokens = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        config, group = self.ctx.config, self.group
        in_rounds = config.async_.max_staleness == 0 and not self.ctx.validating
        self.requests = _Requests(group, self.rollout, in_rounds)
        kwargs = template_kwargs(config, group.row.domain)
        self.tokens = TurnTokens(self.tokenizer, group.params.stop_token_ids, kwargs)

    async def run(self) -> NodeOutput:
        """One sample for each episode, in order."""
        episodes = [asyncio.ensure_future(self._episode(index)) for index in self.group.wanted]
        try:
            samples = await asyncio.gather(*episodes)
        finally:
            self.requests.close()
            if left := [episode for episode in episodes if not episode.done()]:
                for episode in left:
                    if not episode.cancelling():  # a second time would cut its end short
                        episode.cancel()
                await asyncio.wait(left)
        if self.requests.failure is not None:
            raise self.requests.failure
        ended = [sample for sample in samples if len(sample.segments) > 1]
        turns = sum(segment.owner == "policy" for sample in ended for segment in sample.segments)
        given = [s for sample in ended for s in sample.response_segments if s.owner != "policy"]
        metrics = {
            "episodes/turns": turns / len(samples),
            "episodes/given_tokens": sum(len(segment.token_ids) for segment in given) / len(samples),
            "episodes/rejected": sum(sample.rejected for sample in samples) / len(samples),
            **self.counts,
        }
        return NodeOutput(list(samples), metrics)

    async def _episode(self, index: int) -> Sample:
        group, row = self.group, self.group.row
        extra: dict[str, Any] = dict(row.extra_info or {})
        messages = extra.pop(PROMPT_CHAT, None)
        longest = group.params.max_tokens
        limits = Limits(longest, self.ctx.config.data.max_prompt_length + longest)
        chat = Chat(self.tokens, partial(self.requests.ask, index), limits, templated=messages is not None)
        chat.clock_stopped = deadline_paused
        prompt = Prompt(row.prompt_text, row.prompt_ids, messages or ())
        told = Row(prompt, row.ground_truth, row.domain, extra)
        try:
            outcome = await self._outcome(chat, told, index)
        finally:
            self.requests.ended()
        self.counts.update(chat.counts)
        return self._sample(index, chat, outcome)

    async def _outcome(self, chat: Chat, row: Row, index: int) -> Outcome:
        """What the workflow returned. An error of it, by name, is no score. Raises what the engine raised."""
        reward = partial(self._reward, chat, index) if self.reward_fn is not None else None
        work = partial(self.workflow, chat, row, reward)
        try:
            returned = await self.ctx.call_user(work, self.timeout_s, index)
            if (record := on_return.get()) is not None:
                record((chat.token_ids, returned))
            outcome = read_outcome(returned)
        except DeadlinePassed as late:
            return self._error(f"an episode did not end within {self.timeout_s:g} s (reward.timeout_s){late}")
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            if self.requests.failure is not None:
                raise self.requests.failure from None
            return self._error("it has cancelled itself")
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # the border to user code
            place = f" (at {found})" if (found := users_place(error)) else ""
            return self._error(f"{type(error).__name__}: {error}{place}"[:1000])
        if outcome is not None and not chat.num_drawn:
            return self._error("an episode ended without a token of the policy: it must await chat.ask")
        return outcome

    def _error(self, what: str) -> RewardOutcome:
        return RewardOutcome(Error(f"workflow {self.workflow.name}: {what}"))

    async def _reward(self, chat: Chat, index: int, reply: Reply | str | None = None) -> RewardOutcome:
        """A workflow's `reward_fn`: scores of the run's reward functions for a reply (the last one), or a text."""
        assert self.reward_fn is not None
        in_episode.set(True)
        sample = self._sample(index, chat, None)
        text = reply.text if isinstance(reply, Reply) else sample.response if reply is None else reply
        (outcome,) = await self.reward_fn([replace(sample, response=text)])
        return outcome

    def _sample(self, index: int, chat: Chat, outcome: Outcome) -> Sample:
        text = chat.last.text if chat.last is not None else ""
        for segment in reversed(chat.segments):
            if segment.owner == "policy":
                text = self.tokens.decode(segment.token_ids)
                break
        sample = self.group.sample(index, None, text, chat.finish_reason)
        own = chat.segments or sample.segments
        has_score = outcome is not None and isinstance(outcome.reward_result, Score)
        return replace(sample, segments=own, outcome=outcome, valid=has_score, rejected=outcome is None)


def read_outcome(returned: object) -> Outcome:
    """The result of an episode: a number, a mapping of parts by name (their sum is the score, unless one is called
    `score`), what `reward_fn` gave, or None, by which it is rejected. Raises ValueError for anything else."""
    if isinstance(returned, RewardOutcome):
        read_score(returned.accuracy)
        if isinstance(returned.reward_result, Score):
            read_score(returned.reward_result.value)
    if returned is None or isinstance(returned, RewardOutcome):
        return returned
    if not isinstance(returned, Mapping):
        value, extra = read_score(returned)
        return RewardOutcome(Score(value, extra), {}, value)
    parts = {str(name): read_score(part)[0] for name, part in returned.items() if name not in ("score", ACC)}
    if not parts and "score" not in returned:
        raise ValueError("it returned a mapping without a part")
    value, _ = read_score(returned["score"] if "score" in returned else sum(parts.values()))
    accuracy = read_score(returned[ACC])[0] if ACC in returned else value
    return RewardOutcome(Score(value), {name: Score(part) for name, part in parts.items()}, accuracy)


def describe_turns(config: Config, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> str:
    """What the chat template does between turns. Raises UserError where it cannot be used."""
    tokens = TurnTokens(tokenizer, stop_ids, template_kwargs(config, ""))
    settings = config.actor_rollout_ref.rollout
    if settings.workflow == "tools":
        template = tokens.tool_template([{}])
        if settings.workflow_kwargs.get("format") is None:
            format_of(template)
    return tokens.describe()


def template_kwargs(config: Config, domain: str) -> dict[str, object]:
    """Further arguments of the chat template, as the data set's prompts were rendered with."""
    own = peek(config.data).domains.get(domain)
    thinks = own.enable_thinking if own is not None and own.enable_thinking is not None else config.data.enable_thinking
    return {"enable_thinking": thinks, **config.data.apply_chat_template_kwargs}
