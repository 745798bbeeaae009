"""The rollout node of workflows, which runs a group's episodes concurrently, each with its own
chat."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.builtin_names import WORKFLOWS
from distflow.config import Config
from distflow.data.sample import LIMIT_REASONS, Sample, note_event, on_event
from distflow.environments.chat import Chat, Limits, Reply
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.user_code_process import ServerGivenUp, ServerLost
from distflow.environments.workflows import (
    Workflow,
    load_workflow,
    make_workflow,
    row_of,
)
from distflow.errors import UserError, describe_fault
from distflow.graph import NodeOutput, NodeRole, node, node_factory
from distflow.pipelines.nodes.episode_outcome import Outcome, read_outcome
from distflow.pipelines.nodes.episode_sample import EpisodeSamples, by_last_reply
from distflow.pipelines.nodes.sample_responses import SAMPLED_FIELDS
from distflow.pipelines.nodes.send_episode_requests import EpisodeRequests
from distflow.rewards.pool.pool import GivenUp
from distflow.rewards.reward_results import (
    ACC,
    OF_WORKFLOW,
    Error,
    Score,
    in_episode,
    read_score,
    with_value,
)
from distflow.rewards.router import RewardOutcome, RewardRouter
from distflow.rollout.engine import RolloutEngine, SamplingParams
from distflow.runtime.node_context import NodeContext
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.user_calls import DeadlinePassed, deadline_paused

_SINGLE_TURN = "single_turn"
_LONGEST_TURN_S = 1e6


@node_factory
@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
def run_workflow(config: Config) -> Callable[..., object]:
    """The node for `rollout.workflow`. Raises UserError for an unusable one."""
    settings = config.actor_rollout_ref.rollout
    workflow = load_workflow(str(settings.workflow), settings.workflow_kwargs)
    workflow.check_agents(settings.agents)
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


class _Episodes:
    """The episodes of a group."""

    def __init__(
        self,
        group: Group,
        rollout: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        ctx: NodeContext,
        workflow: Workflow,
        timeout_s: float,
        reward_fn: RewardRouter | None,
    ) -> None:
        config = ctx.config
        self.group = group
        self.ctx = ctx
        self.workflow = workflow
        if isinstance(group.row.workflow, Workflow):  # from a call of the user's own loop
            self.workflow = group.row.workflow
        self.timeout_s = timeout_s
        self.reward_fn = reward_fn
        self.agents: Mapping[str, Any] = config.actor_rollout_ref.rollout.agents
        self.requests = EpisodeRequests(
            group,
            rollout,
            in_rounds=config.async_.max_staleness == 0 and not ctx.validating,
            take_turn=partial(ctx.call_user, partial(asyncio.sleep, 0), _LONGEST_TURN_S),
            may_continue=self.workflow.name != _SINGLE_TURN,
            policy_of=self._policy_of,
            params_of=self._params_of,
        )
        kwargs = template_kwargs(config, group.row.domain)
        self.tokens = TurnTokens(tokenizer, group.params.stop_token_ids, kwargs)
        self.samples = EpisodeSamples(group, self.tokens, self.agents)
        self.counts = Counter[str]()
        self.note = on_event.get()

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
        episodes = [asyncio.create_task(self._episode(index)) for index in self.group.wanted]
        try:
            samples = await asyncio.gather(*episodes)
        finally:
            self.requests.close()
            await _end(episodes)

        if self.requests.failure is not None:
            raise self.requests.failure
        return NodeOutput(samples, self._metrics(samples))

    def _metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Means over the samples, the counts of their chats, and how much of the prompts was in the
        engine's cache."""
        totals = Counter[str]()
        for sample in samples:
            totals["branches"] += len(sample.forks)
            totals["rejected"] += sample.rejected
            totals[f"ended/{sample.finish_reason}"] += 1

            for segment in sample.response_segments:
                if segment.owner == "policy":
                    totals["turns"] += 1
                    totals["drawn_tokens"] += len(segment.token_ids)
                else:
                    totals["given_tokens"] += len(segment.token_ids)

        names = ["turns", "drawn_tokens", "given_tokens", "branches", "rejected"]
        names += [f"ended/{reason}" for reason in LIMIT_REASONS]
        metrics = {f"episodes/{name}": totals[name] / len(samples) for name in names}
        metrics |= self.counts

        num_prompt_tokens = self.requests.num_prompt_tokens
        if num_prompt_tokens:
            hit_rate = self.requests.num_cached_tokens / num_prompt_tokens
            metrics["episodes/prefix_cache_hit_rate"] = hit_rate

        return metrics

    async def _episode(self, index: int) -> Sample:
        if self.note is not None:
            on_event.set(partial(self.note, index))
        data = self.ctx.config.data
        row = row_of(self.group.row, data.prompt_key, data.answer_key)
        chat = self._chat(index, templated=bool(row.prompt.messages))

        if self.reward_fn is None:
            reward = None
        else:
            reward = partial(self._reward, chat, index)

        work = partial(self.workflow, self.workflow.talk(chat, self.agents), row, reward)
        try:
            outcome = await self._outcome(chat, work, index)
        finally:
            self.requests.ended(index)

        if self.agents:
            called = {each.agent for each in chat.conversations if each.turns}
            chat.counts["episodes/idle_agents"] += len(self.agents) - len(called)

        self.counts.update(chat.counts)
        return self.samples.sample(index, chat, self._penalised(chat, outcome))

    def _chat(self, index: int, templated: bool) -> Chat:
        params = self.group.params
        context = self.ctx.config.data.max_prompt_length + params.max_tokens
        chat = Chat(self.tokens, self.requests.ask, Limits(params.max_tokens, context), templated)
        chat.image_store = self.ctx.config.trainer.run_dir / "data" / "images"
        chat.clock_stopped = lambda on="environment": deadline_paused(on)
        chat.version = self.group.prompt_group.version

        if not self.ctx.validating:
            names = ("temperature", "top_p", "top_k", "greedy")
            chat.sampling = {name: getattr(params, name) for name in names}

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

        last = (self.samples.trained(chat) or chat.conversations)[-1]
        added = -float(penalties.get(last.finish_reason, 0.0))
        return replace(
            outcome,
            reward_result=with_value(result, result.value + added),
            parts={**outcome.parts, "limit": Score(added)},
        )

    async def _outcome(
        self, chat: Chat, work: Callable[[], Awaitable[object]], index: int
    ) -> Outcome:
        """The outcome of the workflow's call. Its own error, by name, gives no score. Raises what
        the engine raised, and what is no fault of the episode."""
        try:
            returned = await self.ctx.call_user(work, self.timeout_s, index)
            return self._read(chat, returned, index)
        except DeadlinePassed as late:
            return self._error(
                f"an episode did not end within {self.timeout_s:g} s (reward.timeout_s){late}"
            )
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            if self.requests.failure is not None:
                raise self.requests.failure from None
            return self._error("it has cancelled itself")
        except (GivenUp, ServerLost, ServerGivenUp):
            raise
        except BaseException as error:  # the boundary to user code
            return self._error(describe_fault(error))

    def _read(self, chat: Chat, returned: object, index: int) -> Outcome:
        """The outcome of an episode that has ended. Raises ValueError for a wrong result."""
        if self.ctx.config.algorithm.agent_rewards != "shared":
            returned = self._by_agent(chat, returned)
        outcome = read_outcome(returned)
        if outcome is None:
            return None

        if self.note is not None and isinstance(outcome.reward_result, Score):
            self.note(index, "returned", outcome.reward_result.value)

        if not self.samples.trained(chat):
            who = " of an agent that is trained" if self.agents else ""
            return self._error(
                f"an episode ended without a token of the policy: it must await chat.ask{who}"
            )

        return outcome

    def _by_agent(self, chat: Chat, returned: object) -> object:
        """The episode's result, after putting each trained agent's score on its own replies: what
        it earned by `chat.reward` on those, the rest on its last one. Raises ValueError if an agent
        has no score."""
        if returned is None or (isinstance(returned, RewardOutcome) and returned.score is None):
            return returned

        talks = self.samples.trained(chat)
        last = {each.agent: each for each in by_last_reply(talks)}
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
        sample = self.samples.sample(index, chat, None)
        if text is not None:
            sample = replace(sample, response=text)
        with self.requests.scoring(index):
            (outcome,) = await self.reward_fn([sample])
        return outcome


async def _end(episodes: Sequence[asyncio.Task[Sample]]) -> None:
    """Cancel the episodes that have not ended, and wait for their end."""
    left = [episode for episode in episodes if not episode.done()]
    for episode in left:
        if not episode.cancelling():  # a second time would cut its end short
            episode.cancel()
    if left:
        await asyncio.wait(left)


def template_kwargs(config: Config, domain: str) -> dict[str, object]:
    """Further arguments of the chat template, the same as for the data set's prompts."""
    thinks = config.data.enable_thinking
    own = config.data.domains.get(domain)
    if own is not None and own.enable_thinking is not None:
        thinks = own.enable_thinking
    return {"enable_thinking": thinks, **config.data.apply_chat_template_kwargs}
