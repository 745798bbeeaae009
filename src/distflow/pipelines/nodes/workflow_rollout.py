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
    workflow = load_workflow(str(settings.workflow), settings.workflow_kwargs)
    workflow.check_agents(settings.agents)
    if settings.n % workflow.num_rows:
        raise UserError(
            f"actor_rollout_ref.rollout.n={settings.n}: each episode of '{workflow.name}' returns "
            f"{workflow.num_rows} samples (gconfig.n_samples): set a multiple of that"
        )
    is_tried = config.trust.check_rewards and settings.workflow not in WORKFLOWS
    workflow = replace(workflow, is_tried=is_tried)
    node = run_scored_episodes if workflow.scores else run_episodes
    return partial(node, workflow=workflow, timeout_s=config.reward.timeout_s)


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
        self.requests = EpisodeRequests(
            group,
            self.rollout,
            in_rounds,
            take_turn,
            may_continue,
            self._policy_of,
            self._params_of,
            self.workflow.num_rows,
        )
        kwargs = template_kwargs(config, group.row.domain)
        self.tokens = TurnTokens(self.tokenizer, group.params.stop_token_ids, kwargs)
        # samples are made for each call of a reward function too
        self.written = cache(self.tokens.written)
        self.agents: Mapping[str, Any] = config.actor_rollout_ref.rollout.agents
        self.own_scores = config.algorithm.agent_rewards != "shared"

    def _policy_of(self, conversation: str) -> str:
        """The policy of the conversation's agent if agents have several policies; else ""."""
        policies = {each.policy for each in self.agents.values()}
        agent = self._agent_of(conversation)
        if agent is None or len(policies) < 2:
            return ""
        return str(agent.policy)

    def _agent_of(self, conversation: str) -> Any:
        """The `AgentConfig` of the conversation's agent; None without agents."""
        first_agent = next(iter(self.agents.values()), None)
        return self.agents.get(conversation.partition(".")[0], first_agent)

    def _params_of(self, conversation: str) -> SamplingParams:
        """The sampling of the conversation's agent. In validation all agents have that of
        `rollout.val_kwargs`."""
        agent = self._agent_of(conversation)
        if agent is None or self.ctx.validating or not agent.sampling:
            return self.group.params
        return replace(self.group.params, **agent.sampling)

    async def run(self) -> NodeOutput:
        """The samples of the episodes, in order."""
        rows = self.workflow.num_rows
        firsts = dict.fromkeys(index - index % rows for index in self.group.wanted)
        episodes = list[asyncio.Task[list[Sample]]]()
        for first in firsts:
            episodes.append(asyncio.create_task(self._episode(range(first, first + rows))))
        samples = list[Sample]()
        try:
            for own in await asyncio.gather(*episodes):
                samples += own
        finally:
            self.requests.close()
            await _end(episodes)
        if self.requests.failure is not None:
            raise self.requests.failure
        return NodeOutput(list(samples), self._metrics(samples))

    def _metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Means over the samples."""
        totals = Counter[str]()
        for sample in samples:
            totals["episodes/branches"] += len(sample.forks)
            totals["episodes/rejected"] += sample.rejected
            totals[f"episodes/ended/{sample.finish_reason}"] += 1
            if len(sample.segments) < 2:  # It has no response.
                continue
            totals["episodes/turns"] += sum(part.owner == "policy" for part in sample.segments)
            for segment in sample.response_segments:
                who = "drawn" if segment.owner == "policy" else "given"
                totals[f"episodes/{who}_tokens"] += len(segment.token_ids)
        names = ["turns", "drawn_tokens", "given_tokens", "branches", "rejected"]
        names += [f"ended/{reason}" for reason in LIMIT_REASONS]
        metrics: dict[str, float] = {}
        for name in names:
            metrics[f"episodes/{name}"] = totals[f"episodes/{name}"] / len(samples)
        metrics |= self.counts
        num_prompt_tokens = self.requests.num_prompt_tokens
        if num_prompt_tokens:
            hit_rate = self.requests.num_cached_tokens / num_prompt_tokens
            metrics["episodes/prefix_cache_hit_rate"] = hit_rate
        return metrics

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
                for each in self._trained(chat):
                    if each.why:
                        chat.counts[f"episodes/branched/{each.why}"] += 1
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
            params = group.params
            chat.sampling = {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "greedy": params.greedy,
            }
        self.requests.connect(index, chat)
        return chat

    def _penalised(self, chat: Chat, outcome: Outcome) -> Outcome:
        """The outcome with the part `limit`, the penalty of the limit that ended the episode."""
        penalties = vars(self.ctx.config.reward.limit_penalty)
        if outcome is None or not any(penalties.values()):
            return outcome
        result = outcome.reward_result
        if not isinstance(result, Score):
            return outcome
        last = (self._trained(chat) or chat.conversations)[-1]
        added = -float(penalties.get(last.finish_reason, 0.0))
        return replace(
            outcome,
            reward_result=with_value(result, result.value + added),
            parts={**outcome.parts, "limit": Score(added)},
        )

    async def _outcomes(
        self, chats: Sequence[Chat], work: Callable[..., Awaitable[object]], first: int
    ) -> list[Outcome]:
        """The workflow's outcome for each sample. Its own error, by name, gives no score. Raises
        what the engine raised, and what is no fault of the episode. work: receives the run's reward
        functions."""
        reward = None
        if self.reward_fn is not None:
            reward = partial(self._reward, chats[0], first)
        try:
            returned = await self.ctx.call_user(partial(work, reward), self.timeout_s, first)
            results = self.workflow.results(returned)
            outcomes = list[Outcome]()
            for number, (chat, result) in enumerate(zip(chats, results, strict=True)):
                outcomes.append(self._outcome(chat, result, first + number))
            return outcomes
        except DeadlinePassed as late:
            error = self._error(
                f"an episode did not end within {self.timeout_s:g} s (reward.timeout_s){late}"
            )
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            if self.requests.failure is not None:
                raise self.requests.failure from None
            error = self._error("it has cancelled itself")
        except (GivenUp, ServerLost, ServerGivenUp):
            raise
        except BaseException as err:  # the boundary to user code
            what = f"{type(err).__name__}: {err}"
            if "coroutine" in str(err):
                what += ": is `await` missing?"
            place = users_place(err)
            if place:
                what += f" (at {place})"
            error = self._error(what[:1000])
        return [error for _ in chats]

    def _outcome(self, chat: Chat, returned: object, index: int) -> Outcome:
        if self.own_scores:
            returned = self._by_agent(chat, returned)
        outcome = read_outcome(returned)
        result = None if outcome is None else outcome.reward_result
        if self.note is not None and isinstance(result, Score):
            self.note(index, "returned", result.value)
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
            raise ValueError(
                f"algorithm.agent_rewards={self.ctx.config.algorithm.agent_rewards} needs a score "
                f"of each agent: return {{{names}}}, without other parts"
            )
        scores = {agent: read_score(returned[agent]).value for agent in last}
        earned: dict[str, list[float]] = {}
        for talk in talks:
            earned.setdefault(talk.agent, []).extend(part.reward for part in talk.segments)
        for agent, talk in last.items():
            talk.reward(scores[agent] - math.fsum(earned[agent]))
        return {**returned, "score": math.fsum(scores.values())}

    def _error(self, what: str) -> RewardOutcome:
        return RewardOutcome(Error(f"{OF_WORKFLOW}{self.workflow.name}: {what}"))

    async def _reward(
        self, chat: Chat, index: int, reply: Reply | str | None = None
    ) -> RewardOutcome:
        """A workflow's `reward_fn`: scores of the run's reward functions for a reply (the last by
        default) or text."""
        assert self.reward_fn is not None
        in_episode.set(True)
        text = reply.text if isinstance(reply, Reply) else reply
        note_event("judged", text)
        sample = self._sample(index, chat, None)
        if text is not None:
            sample = replace(sample, response=text)
        with self.requests.scoring(index):
            (outcome,) = await self.reward_fn([sample])
        return outcome

    def _laid_out(self, chat: Chat) -> tuple[list[Segment], list[tuple[str, int]]]:
        """All conversations of the episode with tokens to train on, end to end, the first one
        first; and the name and the start of each other one."""
        segments = list[Segment]()
        if not self.agents or self.agents[chat.agent].trainable:
            segments += chat.segments
        if not segments:
            segments.append(Segment("prompt", tuple(self.group.row.prompt_ids)))
        forks = list[tuple[str, int]]()
        others = [each for each in self._trained(chat) if each.name]
        for fork in sorted(others, key=self._place):
            start = sum(len(segment.token_ids) for segment in segments[1:])
            forks.append((fork.name, start))
            segments += fork.segments
        return segments, forks

    def _sample(self, index: int, chat: Chat, outcome: Outcome) -> Sample:
        talks = self._trained(chat)
        last_talk = (talks or chat.conversations)[-1]
        last_drawn: Segment | None = None
        for talk in sorted(talks, key=_DRAWN_AT):
            for segment in talk.segments:
                if segment.owner == "policy" and segment.token_ids:
                    last_drawn = segment
        text = ""
        if last_drawn is not None:
            text = self.tokens.decode(last_drawn.token_ids)
        elif last_talk.last is not None:
            text = last_talk.last.text
        segments, forks = self._laid_out(chat)
        last_turn = -1
        turns = [each for each in segments if each.owner == "policy" and each.token_ids]
        for number, turn in enumerate(turns):
            if turn is last_drawn:
                last_turn = number
        return replace(
            self.group.sample(index, None, text, last_talk.finish_reason),
            last_turn=last_turn,
            segments=segments,
            forks=tuple(forks),
            conversation=tuple(self._said(chat)),
            outcome=outcome,
            valid=outcome is not None and isinstance(outcome.reward_result, Score),
            rejected=outcome is None,
            head=chat.head,
        )

    def _place(self, chat: Chat) -> tuple[int, list[int]]:
        """Sort key of conversations: by agent, then by the numbers of the forks."""
        agent = list(self.agents).index(chat.agent) if self.agents else 0
        forks = [int(number) for number in chat.name.split(".") if number.isdecimal()]
        return agent, forks

    def _said(self, chat: Chat) -> list[dict[str, str]]:
        """The messages for display: one conversation after another; several agents' in the order in
        which they speak."""
        said = list[tuple[int, dict[str, str]]]()  # with the turn to which it belongs
        talks = [each for each in chat.conversations if each.num_drawn or each is chat]
        for talk in sorted(talks, key=self._place):
            names = {
                "agent": talk.agent,
                "fork": talk.name.removeprefix(talk.agent).removeprefix("."),
                "why": talk.why,
            }
            names = {name: value for name, value in names.items() if value}
            messages = list[tuple[int, dict[str, str]]]()
            turn = 0
            for segment in reversed(talk.segments):
                if segment.owner == "policy":
                    turn = segment.turn
                text = self.written(segment.token_ids)
                messages.append((turn, {"owner": segment.owner, "text": text, **names}))
            said += reversed(messages)
        if self.agents:
            said.sort(key=lambda each: each[0])
        return [message for _, message in said]


async def _end(episodes: Sequence[asyncio.Task[list[Sample]]]) -> None:
    """Cancel the episodes that have not ended, and wait for their end."""
    left = [episode for episode in episodes if not episode.done()]
    for episode in left:
        if not episode.cancelling():  # a second time would cut its end short
            episode.cancel()
    if left:
        await asyncio.wait(left)


def read_outcome(returned: object) -> Outcome:
    """The outcome of an episode's result: a number, a mapping of parts by name (their sum is the
    score, unless one is called `score`; `extra` is only shown), the result of `reward_fn`, or None,
    which rejects it. Raises ValueError for anything else."""
    if returned is None:
        return None
    if isinstance(returned, RewardOutcome):
        _check_finite(returned)
        return returned
    if not isinstance(returned, Mapping):
        score = read_score(returned)
        return RewardOutcome(score, {}, score.value)
    parts = dict[str, float]()
    for name, part in returned.items():
        if name not in ("score", ACC, "extra"):
            parts[str(name)] = finite_number(part, where=f" as '{name}'")
    if not parts and "score" not in returned:
        raise ValueError("it returned a mapping without a part")
    total = returned["score"] if "score" in returned else math.fsum(parts.values())
    value = finite_number(total)
    accuracy = value
    if ACC in returned:
        accuracy = finite_number(returned[ACC], where=f" as '{ACC}'")
    score = Score(value, read_extra(returned.get("extra", {})))
    return RewardOutcome(score, {name: Score(part) for name, part in parts.items()}, accuracy)


def _check_finite(outcome: RewardOutcome) -> None:
    """Raises ValueError: a workflow may have changed the outcome."""
    if not isinstance(outcome.reward_result, Score):
        return
    finite_number(outcome.accuracy, where=f" as '{ACC}'")
    for name, value in outcome.scores().items():
        finite_number(value, where=f" as '{name}'")
    finite_number(outcome.reward_result.value)


def template_kwargs(config: Config, domain: str) -> dict[str, object]:
    """Further arguments of the chat template, the same as for the data set's prompts."""
    thinks = config.data.enable_thinking
    own = config.data.domains.get(domain)
    if own is not None and own.enable_thinking is not None:
        thinks = own.enable_thinking
    return {"enable_thinking": thinks, **config.data.apply_chat_template_kwargs}
