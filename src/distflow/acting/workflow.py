"""The workflow `simulator`: the policy acts in a simulator. Each decision is a conversation of its
own, whose prompt shows the observation, and whose reply is a chunk of actions."""

import time
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distflow.acting.action_tokens import (
    ActionTokens,
    ContinuousActions,
    action_bounds,
    denoising_steps,
    draws_numbers,
)
from distflow.acting.simulator import Observation
from distflow.acting.worker_pool import Episode, SimulatorPool
from distflow.data.images import keep_pixels
from distflow.data.sample import ENV_ERROR
from distflow.environments.chat import Chat, ChatError
from distflow.environments.environment_workflow import seed_of
from distflow.environments.user_code_process import MadeByOptions, options_of
from distflow.environments.workflows import Row
from distflow.errors import UserError, hint

MAX_STEPS = "max_steps"
NO_ACTION = "no_action"
T = TypeVar("T")
_BOUNDS = ("low", "high", "statistics", "unnorm_key", "action_dim")
_STATE = ("bins", *_BOUNDS, "first_token")
_FLOW = ("denoising_steps", "noise")
_ACTIONS = (*_STATE, "action_chunks_len", "execute", "head", *_FLOW)
HEADS = ("action_tokens", "gaussian", "flow_sde")
"""What draws an action: a bin of each dimension, its number from a normal distribution, or from
noise, in steps."""


@dataclass
class _Played:
    """What an episode has been so far."""

    reason: str = ""
    """Why it ended; empty while it goes on."""
    success: bool = False
    num_steps: int = 0
    """Env steps that were executed."""
    total: float = 0.0
    """The sum of the simulator's rewards."""
    frames: list[str] = field(default_factory=list)
    """The paths of the first image of each observation."""
    step_rewards: list[list[float]] = field(default_factory=list)
    """The parts of the score, by decision and env step."""

    def add(self, result: Mapping[str, Any]) -> None:
        """Count an executed chunk. result: `ChunkResult` by name."""
        self.num_steps += len(result["success"])
        self.total += sum(result["rewards"])
        self.success = self.success or any(result["success"])

        if result["terminated"][-1]:
            self.reason = "stop"
        elif result["truncated"][-1]:
            self.reason = MAX_STEPS


class SimulatorWorkflow(MadeByOptions):
    """Shows the policy each observation, and executes the actions of its reply, until the episode
    ends, or a reply has a token that is no action. The score is 1 for a success, else 0."""

    def __init__(
        self,
        *,
        env: str = "gridreach",
        env_kwargs: Mapping[str, Any] | None = None,
        actions: Mapping[str, Any],
        prompt: str = "{images}{instruction}",
        state_tokens: Mapping[str, Any] | None = None,
        score: str = "success",
        step_timeout: float = 30.0,
        num_workers: int = 2,
        gl: str | None = None,
    ) -> None:
        """env: see `simulator_maker`. actions: `head` (see `HEADS`), and the options of
        `ActionTokens`, `ContinuousActions` and `action_bounds`. prompt: of a decision; it may have
        {images}, {instruction} and {state}. state_tokens: bounds, bins and first token, as of
        actions; the state's numbers are added to the prompt as tokens. score: success or return,
        the sum of the rewards. step_timeout: seconds of `reset` and of a chunk. gl: how MuJoCo
        renders. Raises UserError."""
        self._options = options_of(locals())
        _check_known("actions", actions, _ACTIONS)
        _check_known("state_tokens", state_tokens or {}, _STATE)
        _check_head(actions)
        _check_choice("score", score, ("success", "return"))
        if gl is not None:
            _check_choice("gl", gl, ("egl", "osmesa", "none"))
        if num_workers < 1:
            raise UserError(f"num_workers={num_workers}: set it to at least 1")

        self._actions = dict(actions)
        self._bounds = action_bounds(actions)
        self._chunk = int(actions.get("action_chunks_len", 8))
        self._execute = int(actions.get("execute", self._chunk))

        if not 1 <= self._execute <= self._chunk:
            raise UserError(
                f"actions.execute={self._execute}: set it to 1 to {self._chunk} steps of each chunk"
            )

        self._state_tokens = dict(state_tokens or {})
        self._state_bounds = action_bounds(state_tokens) if state_tokens is not None else None
        self._codec: ActionTokens | ContinuousActions | None = None
        self._state_codec: ActionTokens | None = None
        self._prompt = prompt
        self._score = score
        self._ids = dict[object, tuple[int, ...]]()
        self._pool = SimulatorPool(env, dict(env_kwargs or {}), num_workers, step_timeout, gl)
        weakref.finalize(self, self._pool.close)

    async def __call__(self, chat: Chat, row: Row) -> dict[str, Any]:
        """Play an episode. Raises CallFailed, an error of the episode, if the simulator fails."""
        if chat.templated:
            raise ChatError(
                "the prompts of a simulator are plain text: set data.prompt_format=text"
            )

        if self._codec is None:
            self._codec = self._codecs(chat)
        if isinstance(self._codec, ContinuousActions):
            chat.head = self._codec.head
        chat.finish_reason = ENV_ERROR  # until it has ended
        told = {**row.extra_info, "ground_truth": row.ground_truth}
        with chat.clock_stopped():
            episode = await _timed(chat, "simulator", self._pool.begin(seed_of(row), told))

        try:
            played = _Played()
            while not played.reason:
                await self._decide(chat, episode, self._codec, played)
        finally:
            episode.close()

        if last := _store_images(episode.seen, chat):
            played.frames.append(last[0])
        facts = {
            "success": float(played.success),
            "env_steps": played.num_steps,
            "episode_len": len(played.step_rewards),
            "return": played.total,
        }
        extra = {
            "frames": played.frames,
            "instruction": episode.seen.instruction,
            "step_rewards": played.step_rewards,
        }

        return {"score": facts[self._score], "acc": float(played.success), **facts, "extra": extra}

    async def _decide(
        self,
        chat: Chat,
        episode: Episode,
        codec: ActionTokens | ContinuousActions,
        played: "_Played",
    ) -> None:
        """Ask the policy for a chunk of actions, and execute it."""
        paths = _store_images(episode.seen, chat)
        played.frames += paths[:1]
        talk = chat.fork(()) if played.step_rewards else chat
        ids = self._encoded(chat, episode.seen, paths)
        asked = talk.ask(ids, max_tokens=codec.num_tokens, images=paths)
        reply = await _timed(chat, "model", asked)
        talk.finish_reason = ENV_ERROR  # until its actions are executed

        if isinstance(codec, ContinuousActions):
            actions = codec.decode(talk.segments[-1].values)
        else:
            actions = codec.decode(reply.token_ids)

        chunk = actions[: self._execute]
        num_steps = 0
        rewards: list[float] = []
        if len(chunk):
            with chat.clock_stopped():
                result = await _timed(chat, "simulator", episode.step(chunk.tolist()))
            num_steps = len(result["success"])
            rewards = result["rewards"]
            if self._score == "success":
                rewards = _first(result["success"], played.success)
            played.add(result)

        played.step_rewards.append(rewards)
        size = codec.num_tokens // self._chunk  # of an action

        used = num_steps * size
        if not played.reason and len(chunk) < self._execute:
            played.reason = NO_ACTION
            used = min(used + size, len(reply.token_ids))

        talk.keep(used)
        talk.finish_reason = played.reason or "stop"

    def _codecs(self, chat: Chat) -> ActionTokens | ContinuousActions:
        """Those of actions and of states. Raises ChatError for a model without such tokens, or too
        short responses."""
        if self._state_bounds is not None:
            low, high, _ = self._state_bounds
            self._state_codec = _tokens_of(
                "state_tokens", chat, self._state_tokens, (low, high, True), 1
            )

        codec: ActionTokens | ContinuousActions
        if draws_numbers({"actions": self._actions}):
            codec = self._continuous(chat)
        else:
            codec = _tokens_of("actions", chat, self._actions, self._bounds, self._chunk)

        if codec.num_tokens > chat.limits.response:
            need = f"a chunk of actions has {codec.num_tokens} tokens"
            raise ChatError(f"{need}: set data.max_response_length to that, at least")

        return codec

    def _continuous(self, chat: Chat) -> ContinuousActions:
        low, high, _ = self._bounds
        steps = denoising_steps(self._actions)

        bins = 2
        noise = 0.0
        if steps:
            bins = self._actions.get("bins", 32)
            noise = float(self._actions.get("noise", 0.5))

        size = bins * len(low) * (1 + steps) * self._chunk
        first = _first_token("actions", chat, self._actions, size)
        return ContinuousActions(low, high, first, self._chunk, steps, bins, noise)

    def _encoded(self, chat: Chat, seen: Observation, paths: Sequence[str]) -> tuple[int, ...]:
        """The prompt's tokens. Those of an image depend on its size alone."""
        state = ""
        if "{state}" in self._prompt:
            state = " ".join(f"{each:.3g}" for each in seen.state)
        sizes = tuple(image.shape for image in seen.images.values())
        key = seen.instruction, state, sizes

        ids = self._ids.get(key)
        if ids is None:
            marks = chat.tokens.image_mark * len(paths) if paths else ""
            text = self._prompt.format(images=marks, instruction=seen.instruction, state=state)

            if paths:
                ids = chat.tokens.with_images(text, paths)
            else:
                ids = chat.tokens.of_text(text, begins=True)

            if not state:  # a state hardly ever occurs again
                self._ids[key] = ids

        if (codec := self._state_codec) is None:
            return ids
        if len(seen.state) != codec.dim:
            raise ChatError(
                f"state_tokens: the state has {len(seen.state)} numbers, and the bounds {codec.dim}"
            )

        return (*ids, *codec.encode(seen.state.astype(float)[None]))


def _check_known(where: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises UserError for an unknown option."""
    for name in options:
        if name not in known:
            raise UserError(f"{where}.{name}: no such option{hint(name, known)}")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises UserError for a value that is none of these."""
    if value not in choices:
        raise UserError(f"{name}={value}: set it to {' or '.join(choices)}")


def _check_head(actions: Mapping[str, Any]) -> None:
    """Raises UserError for an unknown head, and for options that it does not have."""
    head = actions.get("head", "action_tokens")
    _check_choice("actions.head", head, HEADS)
    if head == "gaussian" and actions.get("bins") is not None:
        raise UserError(f"actions.bins: head={head} draws numbers, without bins: set it to null")
    if head != "flow_sde":
        for name in _FLOW:
            if name in actions:
                raise UserError(f"actions.{name}: head={head} has no denoising steps: remove it")
        return

    sizes = (actions.get("denoising_steps", 4), actions.get("bins", 32))
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise UserError(
            f"actions: denoising_steps and bins are {sizes}: set them to whole numbers from 1 on"
        )


def _tokens_of(
    name: str,
    chat: Chat,
    options: Mapping[str, Any],
    bounds: tuple[tuple[float, ...], tuple[float, ...], bool],
    chunk: int,
) -> ActionTokens:
    """Raises ChatError if the model's vocabulary has no such tokens. bounds: and whether numbers
    beyond are clipped."""
    bins, (low, high, clips) = int(options.get("bins", 256)), bounds
    return ActionTokens(low, high, bins, _first_token(name, chat, options, bins), chunk, clips)


def _first_token(name: str, chat: Chat, options: Mapping[str, Any], size: int) -> int:
    """The id of the first of `size` tokens. Raises ChatError if the vocabulary has no such
    tokens."""
    first = options.get("first_token")
    number = chat.tokens.vocabulary - size if first is None else first
    token = chat.tokens.token_id(number) if isinstance(number, str) else int(number)

    if not 0 <= token <= chat.tokens.vocabulary - size:
        wanted = f"{size} tokens from {token}"
        raise ChatError(
            f"{name}: the tokenizer has {chat.tokens.vocabulary} tokens, not {wanted} (first_token)"
        )

    return token


async def _timed(chat: Chat, on: str, waits: Awaitable[T]) -> T:
    started = time.perf_counter()
    result = await waits
    chat.counts[f"acting/{on}_ms"] += round(1000 * (time.perf_counter() - started))
    return result


def _first(steps: Sequence[bool], before: bool) -> list[float]:
    """1 at the step of the episode's first success."""
    marks = [0.0] * len(steps)
    if True in steps and not before:
        marks[steps.index(True)] = 1.0
    return marks


def _store_images(seen: Observation, chat: Chat) -> list[str]:
    """The paths of the observation's images in the run's folder."""
    return [keep_pixels(image, chat.image_store) for image in seen.images.values()]
