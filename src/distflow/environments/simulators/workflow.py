"""The workflow `simulator`: the policy acts in a simulator. Each decision is a conversation of its own, whose prompt
shows the observation, and whose reply is a chunk of actions."""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from distflow.data.images import keep_pixels
from distflow.data.sample import ENV_ERROR
from distflow.environments.chat import Chat, ChatError
from distflow.environments.environment_workflow import seed_of
from distflow.environments.simulators.action_tokens import ActionTokens, action_bounds
from distflow.environments.simulators.protocol import Observation
from distflow.environments.simulators.worker_pool import Episode, SimulatorPool
from distflow.environments.workflows import Row
from distflow.errors import UserError, hint

MAX_STEPS, NO_ACTION = "max_steps", "no_action"
_BOUNDS = ("low", "high", "statistics", "unnorm_key", "action_dim")
_ACTIONS = ("bins", *_BOUNDS, "action_chunks_len", "first_token", "execute")


class SimulatorWorkflow:
    """Shows the policy each observation, and executes the actions of its reply, until the episode ends, or a reply has
    a token that is no action. The score is 1 for a success, else 0."""

    def __init__(
        self,
        *,
        env: str = "gridreach",
        env_kwargs: Mapping[str, Any] | None = None,
        actions: Mapping[str, Any],
        prompt: str = "{images}{instruction}",
        score: str = "success",
        step_timeout: float = 30.0,
        num_workers: int = 2,
    ) -> None:
        """env: see `simulator_maker`. actions: see `ActionTokens` and `action_bounds`. prompt: of a decision; it may
        have {images}, {instruction} and {state}. score: success or return, the sum of the rewards. step_timeout:
        seconds of `reset` and of a chunk. Raises UserError."""
        self._options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if unknown := next((name for name in actions if name not in _ACTIONS), None):
            raise UserError(f"actions.{unknown}: no such option{hint(unknown, _ACTIONS)}")
        if score not in ("success", "return"):
            raise UserError(f"score={score}: set it to success or return")
        self._actions, self._bounds = dict(actions), action_bounds(actions)
        self._codec: ActionTokens | None = None
        self._prompt, self._score, self._ids = prompt, score, dict[object, tuple[int, ...]]()
        self._chunk = int(actions.get("action_chunks_len", 8))
        self._execute = int(actions.get("execute", self._chunk))
        if not 1 <= self._execute <= self._chunk:
            raise UserError(f"actions.execute={self._execute}: set it to 1 to {self._chunk} steps of each chunk")
        if num_workers < 1:
            raise UserError(f"num_workers={num_workers}: set it to at least 1")
        self._pool = SimulatorPool(env, dict(env_kwargs or {}), num_workers, step_timeout)
        weakref.finalize(self, self._pool.close)

    def __reduce__(self) -> tuple[object, ...]:
        """In another process it has its own workers."""
        return partial(type(self), **self._options), ()

    async def __call__(self, chat: Chat, row: Row) -> dict[str, Any]:
        """Play an episode. Raises CallFailed, an error of the episode, if the simulator fails."""
        if chat.templated:
            raise ChatError("the prompts of a simulator are plain text: set data.prompt_format=text")
        if self._codec is None:
            self._codec = self._action_tokens(chat)
        chat.finish_reason = ENV_ERROR  # until it has ended
        told = {**row.extra_info, "ground_truth": row.ground_truth}
        with chat.clock_stopped():
            episode = await self._pool.begin(seed_of(row), told)
        try:
            return await self._play(chat, episode, self._codec)
        finally:
            with chat.clock_stopped():
                await episode.close()

    async def _play(self, chat: Chat, episode: Episode, codec: ActionTokens) -> dict[str, Any]:
        frames, num_steps, total, success, reason, decisions = list[str](), 0, 0.0, False, "", 0
        step_rewards = list[list[float]]()
        while not reason:
            paths = _store_images(episode.seen, chat)
            frames += paths[:1]
            talk = chat.fork(()) if decisions else chat
            reply = await talk.ask(self._encoded(chat, episode.seen, paths), max_tokens=codec.num_tokens, images=paths)
            decisions += 1
            chunk = codec.decode(reply.token_ids)[: self._execute]
            talk.finish_reason = ENV_ERROR
            steps: list[bool] = []
            step_rewards.append([])
            if len(chunk):
                with chat.clock_stopped():
                    result = await episode.step(chunk.tolist())
                steps = result["success"]
                step_rewards[-1] = result["rewards"] if self._score == "return" else _first(steps, success)
                num_steps, total = num_steps + len(steps), total + sum(result["rewards"])
                success = success or any(steps)
                reason = "stop" if result["terminated"][-1] else MAX_STEPS if result["truncated"][-1] else ""
            used = len(steps) * codec.dim
            if not reason and len(chunk) < self._execute:
                reason, used = NO_ACTION, min(used + codec.dim, len(reply.token_ids))
            talk.keep(used)
            talk.finish_reason = reason or "stop"
        if decisions and (last := _store_images(episode.seen, chat)):
            frames.append(last[0])
        facts = {"success": float(success), "env_steps": num_steps, "episode_len": decisions, "return": total}
        extra = {"frames": frames, "instruction": episode.seen.instruction, "step_rewards": step_rewards}
        return {"score": facts[self._score], "acc": float(success), **facts, "extra": extra}

    def _encoded(self, chat: Chat, seen: Observation, paths: Sequence[str]) -> tuple[int, ...]:
        """The prompt's tokens. Those of an image depend on its size alone."""
        state = " ".join(f"{each:.3g}" for each in seen.state) if "{state}" in self._prompt else ""
        sizes = tuple(image.shape for image in seen.images.values())
        if (key := (seen.instruction, state, sizes)) not in self._ids:
            marks = chat.tokens.image_mark * len(paths) if paths else ""
            text = self._prompt.format(images=marks, instruction=seen.instruction, state=state)
            ids = chat.tokens.with_images(text, paths) if paths else chat.tokens.of_text(text, begins=True)
            if state:  # it hardly ever occurs again
                return ids
            self._ids[key] = ids
        return self._ids[key]

    def _action_tokens(self, chat: Chat) -> ActionTokens:
        """Raises ChatError if the model's vocabulary has no such tokens."""
        low, high, is_quantiles = self._bounds
        if (number := len(low) * self._chunk) > chat.limits.response:
            raise ChatError(f"a chunk of actions has {number} tokens: set data.max_response_length to that, at least")
        bins, first = int(self._actions.get("bins", 256)), self._actions.get("first_token")
        number = chat.tokens.vocabulary - bins if first is None else first
        token = chat.tokens.token_id(number) if isinstance(number, str) else int(number)
        if not 0 <= token <= chat.tokens.vocabulary - bins:
            size = f"{bins} tokens from {token}"
            raise ChatError(f"actions: the tokenizer has {chat.tokens.vocabulary} tokens, not {size} (first_token)")
        return ActionTokens(low, high, bins, token, self._chunk, is_quantiles)


def _first(steps: Sequence[bool], before: bool) -> list[float]:
    """1 at the step of the episode's first success."""
    return [float(won and not before and not any(steps[:place])) for place, won in enumerate(steps)]


def _store_images(seen: Observation, chat: Chat) -> list[str]:
    """The paths of the observation's images in the run's folder."""
    return [keep_pixels(image, chat.image_store) for image in seen.images.values()]
