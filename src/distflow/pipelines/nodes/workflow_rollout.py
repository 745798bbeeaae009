"""The rollout node of workflows, which runs a group's episodes concurrently, each with its own
chat, and the reward node that takes their scores."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.builtin_names import WORKFLOWS
from distflow.config import Config
from distflow.data.sample import LIMIT_REASONS, Sample, Segment, note_event, on_event
from distflow.environments.chat import Chat, Limits, Reply
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.user_code_process import ServerGivenUp, ServerLost
from distflow.environments.workflows import (
    Workflow,
    load_workflow,
    make_workflow,
    row_of,
)
from distflow.errors import UserError, users_place
from distflow.graph import NodeOutput, NodeRole, node, node_factory
from distflow.pipelines.nodes.rollout_reward_filter import SAMPLED_FIELDS
from distflow.pipelines.nodes.send_episode_requests import EpisodeRequests
from distflow.rewards.pool.pool import GivenUp
from distflow.rewards.reward_results import (
    ACC,
    OF_WORKFLOW,
    Error,
    Score,
    in_episode,
    read_extra,
    read_score,
    with_value,
)
from distflow.rewards.router import RewardOutcome, RewardRouter
from distflow.rollout.engine import RolloutEngine, SamplingParams
from distflow.runtime.compiled_node import NodeContext
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.user_calls import DeadlinePassed, deadline_paused
from distflow.user_values import finite_number

_SINGLE_TURN = "single_turn"
_LONGEST_TURN_S = 1e6
_DRAWN_AT = attrgetter("drawn_at")
"""Sorts conversations by their last tokens: a reply without room, which has none, may follow."""

Outcome = RewardOutcome | None


@node_factory
@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
def run_workflow(config: Config) -> Callable[..., object]:
    """The node for `rollout.workflow`. Raises UserError for an unusable one."""
    settings = config.actor_rollout_ref.rollout
    workflow = load_workflow(str(settings.workflow), settings.workflow_kwargs).check_agents(
        settings.agents
    )
    if settings.n % workflow.num_rows:
        rows = (
            f"each episode of '{workflow.name}' returns {workflow.num_rows} samples "
            "(gconfig.n_samples)"
        )
        raise UserError(f"actor_rollout_ref.rollout.n={settings.n}: {rows}: set a multiple of that")
    node = run_scored_episodes if workflow.scores else run_episodes
    is_tried = config.trust.check_rewards and settings.workflow not in WORKFLOWS
    return partial(
        node, workflow=replace(workflow, is_tried=is_tried), timeout_s=config.reward.timeout_s
    )


def workflow_of_call(workflow: object, config: Config, has_rewards: bool) -> Workflow:
    """The workflow of a call of a user's own loop. has_rewards: the run has reward functions.
    Raises UserError."""
    made = make_workflow(str(getattr(workflow, "__name__", type(workflow).__name__)), workflow, {})
    if config.actor_rollout_ref.rollout.workflow is None:
        raise UserError(
            "this run has no episodes: pass a workflow to distflow.rollouts(..., workflow=...) as "
            "well"
        )
    made.check_agents(config.actor_rollout_ref.rollout.agents)
    if made.scores and not has_rewards:
        what = f"the workflow {made.name} calls reward functions, and this run has none"
        raise UserError(
            f"{what}: pass one with the parameter reward_fn to distflow.rollouts(..., "
            "workflow=...) as well"
        )
    return made


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
    """Episodes of a workflow that calls the reward functions. timeout_s: of an episode, excluding
    time waiting for the policy or the reward functions."""
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
    requests: EpisodeRequests = field(init=False)
    tokens: TurnTokens = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    own_scores: bool = field(init=False)
    note: Callable[..., None] | None = field(default_factory=on_event.get)

    def __post_init__(self) -> None:
        config = self.ctx.config
        group = self.group
        if isinstance(group.row.workflow, Workflow):  # from a call of the user's own loop
            self.workflow = group.row.workflow
        in_rounds = config.async_.max_staleness == 0 and not self.ctx.validating
        take_turn = partial(self.ctx.call_user, partial(asyncio.sleep, 0), _LONGEST_TURN_S)
        may_continue = self.workflow.name != _SINGLE_TURN
        more = may_continue, self._policy_of, self._params_of, self.workflow.num_rows
        self.requests = EpisodeRequests(group, self.rollout, in_rounds, take_turn, *more)
        kwargs = template_kwargs(config, group.row.domain)
        self.tokens = TurnTokens(self.tokenizer, group.params.stop_token_ids, kwargs)
        # samples are made for each call of a reward function too
        self.written = cache(self.tokens.written)
        self.agents: Mapping[str, Any] = config.actor_rollout_ref.rollout.agents
        self.own_scores = config.algorithm.agent_rewards != "shared"

    def _policy_of(self, conversation: str) -> str:
        """The policy of the conversation's agent if agents have several policies; else ""."""
        owners = {each.policy for each in self.agents.values()}
        agent = self._agent_of(conversation)
        return "" if agent is None or len(owners) < 2 else str(agent.policy)

    def _agent_of(self, conversation: str) -> Any:
        """The `AgentConfig` of the conversation's agent; None without agents."""
        return self.agents.get(
            conversation.partition(".")[0], next(iter(self.agents.values()), None)
        )

    def _params_of(self, conversation: str) -> SamplingParams:
        """The sampling of the conversation's agent. In validation all agents have that of
        `rollout.val_kwargs`."""
        agent = self._agent_of(conversation)
        own = {} if agent is None or self.ctx.validating else agent.sampling
        return replace(self.group.params, **own) if own else self.group.params

    async def run(self) -> NodeOutput:
        """The samples of the episodes, in order."""
        rows = self.workflow.num_rows
        firsts = dict.fromkeys(index - index % rows for index in self.group.wanted)
        episodes = [
            asyncio.ensure_future(self._episode(range(first, first + rows))) for first in firsts
        ]
        try:
            samples = [sample for own in await asyncio.gather(*episodes) for sample in own]
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
        owners = Counter[bool]()
        for segment in (each for sample in ended for each in sample.response_segments):
            owners[segment.owner == "policy"] += len(segment.token_ids)
        reasons = Counter(sample.finish_reason for sample in samples)
        metrics = {
            "episodes/turns": turns / len(samples),
            "episodes/drawn_tokens": owners[True] / len(samples),
            "episodes/given_tokens": owners[False] / len(samples),
            "episodes/branches": sum(len(sample.forks) for sample in samples) / len(samples),
            "episodes/rejected": sum(sample.rejected for sample in samples) / len(samples),
            **{
                f"episodes/ended/{reason}": reasons[reason] / len(samples)
                for reason in LIMIT_REASONS
            },
            **self.counts,
        }
        if prompted := self.requests.num_prompt_tokens:
            metrics["episodes/prefix_cache_hit_rate"] = self.requests.num_cached_tokens / prompted
        return NodeOutput(list(samples), metrics)

    async def _episode(self, indices: Sequence[int]) -> list[Sample]:
        """indices: of its samples, which in validation may not all be wanted."""
        row = self.group.row
        first = indices[0]
        if self.note is not None:
            on_event.set(partial(self.note, first))
        told = row_of(row, self.ctx.config.data.prompt_key, self.ctx.config.data.answer_key)
        chats = [self._chat(index, templated=bool(told.prompt.messages)) for index in indices]
        work = partial(self.workflow, self.workflow.chats(chats, self.agents), told)
        try:
            outcomes = await self._outcomes(chats, work, first)
        finally:
            self.requests.ended(first)
        samples = list[Sample]()
        for index, chat, outcome in zip(indices, chats, outcomes, strict=True):
            if self.agents:
                called = {each.agent for each in chat.conversations if each.turns}
                chat.counts["episodes/idle_agents"] += len(self.agents) - len(called)
            if index in self.group.wanted:
                chat.counts.update(
                    f"episodes/branched/{each.why}" for each in self._trained(chat) if each.why
                )
                self.counts.update(chat.counts)
                samples.append(self._sample(index, chat, self._penalised(chat, outcome)))
        return samples

    def _chat(self, index: int, templated: bool) -> Chat:
        group = self.group
        longest = self.group.params.max_tokens
        limits = Limits(longest, self.ctx.config.data.max_prompt_length + longest)
        chat = Chat(self.tokens, self.requests.ask, limits, templated=templated)
        chat.image_store = self.ctx.config.trainer.run_dir / "data" / "images"
        chat.clock_stopped = lambda on="environment": deadline_paused(on)
        chat.version = group.prompt_group.version
        if not self.ctx.validating:
            chat.sampling = {
                name: getattr(group.params, name)
                for name in ("temperature", "top_p", "top_k", "greedy")
            }
        self.requests.connect(index, chat)
        return chat

    def _penalised(self, chat: Chat, outcome: Outcome) -> Outcome:
        """The outcome with the part `limit`, the penalty of the limit that ended the episode."""
        penalties = vars(self.ctx.config.reward.limit_penalty)
        if (
            outcome is None
            or not isinstance(outcome.reward_result, Score)
            or not any(penalties.values())
        ):
            return outcome
        reason = (self._trained(chat) or chat.conversations)[-1].finish_reason
        added = -float(penalties.get(reason, 0.0))
        result = with_value(outcome.reward_result, outcome.reward_result.value + added)
        return replace(
            outcome, reward_result=result, parts={**outcome.parts, "limit": Score(added)}
        )

    async def _outcomes(
        self, chats: Sequence[Chat], work: Callable[..., Awaitable[object]], first: int
    ) -> list[Outcome]:
        """The workflow's outcome for each sample. Its own error, by name, gives no score. Raises
        what the engine raised, and what is no fault of the episode. work: receives the run's reward
        functions."""
        reward = partial(self._reward, chats[0], first) if self.reward_fn is not None else None
        try:
            returned = self.workflow.results(
                await self.ctx.call_user(partial(work, reward), self.timeout_s, first)
            )
            return [
                self._outcome(chat, result, first + number)
                for number, (chat, result) in enumerate(zip(chats, returned, strict=True))
            ]
        except DeadlinePassed as late:
            error = self._error(
                f"an episode did not end within {self.timeout_s:g} s (reward.timeout_s){late}"
            )
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            if self.requests.failure is not None:
                raise self.requests.failure from None
            error = self._error("it has cancelled itself")
        except (GivenUp, ServerLost, ServerGivenUp):
            raise
        except BaseException as err:  # the boundary to user code
            place = f" (at {found})" if (found := users_place(err)) else ""
            hint = ": is `await` missing?" if "coroutine" in str(err) else ""
            error = self._error(f"{type(err).__name__}: {err}{hint}{place}"[:1000])
        return [error for _ in chats]

    def _outcome(self, chat: Chat, returned: object, index: int) -> Outcome:
        if self.own_scores:
            returned = self._by_agent(chat, returned)
        segments, _ = self._laid_out(chat)
        if self.note is not None:
            self.note(
                index,
                "returned",
                tuple(token for each in segments for token in each.token_ids),
                returned,
            )
        outcome = read_outcome(returned)
        if outcome is not None and not self._trained(chat):
            who = " of an agent that is trained" if self.agents else ""
            return self._error(
                f"an episode ended without a token of the policy: it must await chat.ask{who}"
            )
        return outcome

    def _trained(self, chat: Chat) -> list[Chat]:
        """The episode's conversations that drew a token to train on; the one with the last reply is
        the last."""
        talks = [each for each in chat.conversations if each.num_drawn]
        return [each for each in talks if not self.agents or self.agents[each.agent].trainable]

    def _by_agent(self, chat: Chat, returned: object) -> object:
        """The episode's result, after putting each trained agent's score on its own replies: what
        it earned by `chat.reward` on those, the rest on its last one. Raises ValueError if an agent
        has no score."""
        if returned is None or (isinstance(returned, RewardOutcome) and returned.score is None):
            return returned
        talks = self._trained(chat)
        last = {each.agent: each for each in sorted(talks, key=_DRAWN_AT)}
        if not isinstance(returned, Mapping) or not {*last} <= {*returned} <= {*self.agents, ACC}:
            names = ", ".join(f"{name!r}: ..." for name in self.agents)
            rule = (
                f"algorithm.agent_rewards={self.ctx.config.algorithm.agent_rewards} needs a score "
                "of each agent"
            )
            raise ValueError(f"{rule}: return {{{names}}}, without other parts")
        own = {agent: read_score(returned[agent]).value for agent in last}
        for agent, talk in last.items():
            earned = [
                segment.reward for each in talks if each.agent == agent for segment in each.segments
            ]
            talk.reward(own[agent] - math.fsum(earned))
        return {**returned, "score": math.fsum(own.values())}

    def _error(self, what: str) -> RewardOutcome:
        return RewardOutcome(Error(f"{OF_WORKFLOW}{self.workflow.name}: {what}"))

    async def _reward(
        self, chat: Chat, index: int, reply: Reply | str | None = None
    ) -> RewardOutcome:
        """A workflow's `reward_fn`: scores of the run's reward functions for a reply (the last by
        default) or text."""
        assert self.reward_fn is not None
        in_episode.set(True)
        note_event("judged", reply.text if isinstance(reply, Reply) else reply)
        sample = self._sample(index, chat, None)
        text = (
            reply.text if isinstance(reply, Reply) else sample.response if reply is None else reply
        )
        with self.requests.scoring(index):
            (outcome,) = await self.reward_fn([replace(sample, response=text)])
        return outcome

    def _laid_out(self, chat: Chat) -> tuple[list[Segment], list[tuple[str, int]]]:
        """All conversations of the episode with tokens to train on, end to end, the first one
        first; and the name and the start of each other one."""
        is_first = not self.agents or self.agents[chat.agent].trainable
        segments = [
            *(is_first and chat.segments or [Segment("prompt", tuple(self.group.row.prompt_ids))])
        ]
        forks = list[tuple[str, int]]()
        for fork in sorted((each for each in self._trained(chat) if each.name), key=self._place):
            forks.append((fork.name, sum(len(segment.token_ids) for segment in segments[1:])))
            segments += fork.segments
        return segments, forks

    def _sample(self, index: int, chat: Chat, outcome: Outcome) -> Sample:
        talks = self._trained(chat)
        last = (talks or chat.conversations)[-1]
        in_time = sorted(talks, key=_DRAWN_AT)
        drawn = []
        for each in in_time:
            for s in each.segments:
                if s.owner == "policy" and s.token_ids:
                    drawn.append(s)
        text = (
            self.tokens.decode(drawn[-1].token_ids)
            if drawn
            else last.last.text
            if last.last is not None
            else ""
        )
        sample = self.group.sample(index, None, text, last.finish_reason)
        segments, forks = self._laid_out(chat)
        has_score = outcome is not None and isinstance(outcome.reward_result, Score)
        turns = [segment for segment in segments if segment.owner == "policy" and segment.token_ids]
        return replace(
            sample,
            last_turn=next((i for i, segment in enumerate(turns) if segment is drawn[-1]), -1),
            segments=segments,
            forks=tuple(forks),
            conversation=tuple(self._said(chat)),
            outcome=outcome,
            valid=has_score,
            rejected=outcome is None,
            head=chat.head,
        )

    def _place(self, chat: Chat) -> tuple[int, list[int]]:
        """Sort key of conversations: by agent, then by the numbers of the forks."""
        agent = [*self.agents].index(chat.agent) if self.agents else 0
        return agent, [int(number) for number in chat.name.split(".") if number.isdecimal()]

    def _said(self, chat: Chat) -> list[dict[str, str]]:
        """The messages for display: one conversation after another; several agents' in the order in
        which they speak."""
        said = list[tuple[int, dict[str, str]]]()
        for talk in sorted(
            (each for each in chat.conversations if each.num_drawn or each is chat), key=self._place
        ):
            fork = talk.name.removeprefix(talk.agent).removeprefix(".")
            names = {
                name: value
                for name, value in (("agent", talk.agent), ("fork", fork), ("why", talk.why))
                if value
            }
            for place, own in enumerate(talk.segments):
                turn = next(
                    (later.turn for later in talk.segments[place:] if later.owner == "policy"), 0
                )
                said.append(
                    (turn, {"owner": own.owner, "text": self.written(own.token_ids), **names})
                )
        return [
            turn for _, turn in (sorted(said, key=lambda each: each[0]) if self.agents else said)
        ]


def read_outcome(returned: object) -> Outcome:
    """The outcome of an episode's result: a number, a mapping of parts by name (their sum is the
    score, unless one is called `score`; `extra` is only shown), the result of `reward_fn`, or None,
    which rejects it. Raises ValueError for anything else."""
    if isinstance(returned, RewardOutcome):
        numbers = {ACC: returned.accuracy, **returned.scores()}
        for name, value in numbers.items() if isinstance(returned.reward_result, Score) else ():
            finite_number(value, where=f" as '{name}'")
        if isinstance(returned.reward_result, Score):
            finite_number(returned.reward_result.value)
    if returned is None or isinstance(returned, RewardOutcome):
        return returned
    if not isinstance(returned, Mapping):
        score = read_score(returned)
        return RewardOutcome(score, {}, score.value)
    named = {
        str(name): part for name, part in returned.items() if name not in ("score", ACC, "extra")
    }
    parts = {name: finite_number(part, where=f" as '{name}'") for name, part in named.items()}
    if not parts and "score" not in returned:
        raise ValueError("it returned a mapping without a part")
    value = finite_number(returned["score"] if "score" in returned else math.fsum(parts.values()))
    accuracy = finite_number(returned[ACC], where=f" as '{ACC}'") if ACC in returned else value
    score = Score(value, *read_extra(returned.get("extra", {})))
    return RewardOutcome(score, {name: Score(part) for name, part in parts.items()}, accuracy)


def template_kwargs(config: Config, domain: str) -> dict[str, object]:
    """Further arguments of the chat template, the same as for the data set's prompts."""
    own = config.data.domains.get(domain)
    thinks = (
        own.enable_thinking
        if own is not None and own.enable_thinking is not None
        else config.data.enable_thinking
    )
    return {"enable_thinking": thinks, **config.data.apply_chat_template_kwargs}
