"""The workflow `environment`: the model plays an environment with gymnasium's or OpenEnv's `reset`
and `step`."""

import hashlib
import weakref
from collections.abc import Mapping
from typing import Any, cast

from distflow.environments import environment_adapters
from distflow.environments.chat import Chat, Reply
from distflow.environments.user_code_process import MadeByOptions, ProcessServer, options_of
from distflow.environments.workflows import Row


class EnvironmentWorkflow(MadeByOptions):
    """Sends the model each observation and takes its reply as the action, until the environment
    ends the episode or after `max_turns` actions. The score is the sum of the rewards, each of
    which belongs to its turn."""

    def __init__(
        self,
        *,
        env: str,
        env_kwargs: Mapping[str, Any] | None = None,
        max_turns: int = 16,
        timeout_s: float = 30.0,
    ) -> None:
        """env: module:Class, file.py:function, a gymnasium id, or the address of an OpenEnv server.
        timeout_s: of each `reset` and `step`. Raises UserError."""
        self._options = options_of(locals())
        kind = "TextEnv"
        if env.startswith(("http://", "https://")):
            kind = "OpenEnv"

        target = f"{environment_adapters.__name__}:{kind}"
        self._server = ProcessServer(target, {"env": env, "options": dict(env_kwargs or {})})
        weakref.finalize(self, self._server.close)
        self._max_turns = max_turns
        self._timeout_s = timeout_s

    async def __call__(self, chat: Chat, row: Row) -> float:
        """Play an episode. Raises CallFailed, an error of the episode, if the environment fails."""
        seed = seed_of(row)
        told = {**row.extra_info, "ground_truth": row.ground_truth}
        with chat.clock_stopped():
            process = await self._server.fork(seed)

        try:
            with chat.clock_stopped():
                first = str(await process.call("reset", self._timeout_s, seed=seed, options=told))

            reply = await _begin(chat, row, first)
            total = 0.0
            while reply.finish_reason == "stop":  # a truncated reply is not an action
                with chat.clock_stopped():
                    step = await process.call("step", self._timeout_s, text=reply.text)
                observation, reward, has_ended = cast(tuple[str, float, bool], step)
                total += reward
                chat.reward(reward)
                if has_ended:
                    break
                if chat.turns >= self._max_turns:
                    chat.finish_reason = "max_turns"
                    break

                reply = await chat.ask(observation)

            with chat.clock_stopped():
                await process.call("close", self._timeout_s)
        finally:
            process.close()

        return total


async def _begin(chat: Chat, row: Row, observation: str) -> Reply:
    """Ask for the first action: the observation continues the prompt, within its last message if
    that is the user's."""
    if not chat.templated:
        return await chat.ask(f"{row.prompt}{observation}")
    *before, last = row.prompt.messages
    if last["role"] != "user":
        return await chat.ask([*before, last, {"role": "user", "content": observation}])
    return await chat.ask([*before, {**last, "content": f"{last['content']}\n\n{observation}"}])


def seed_of(row: Row) -> int:
    """The seed in the row's column `seed`, else one derived from the row: the same for all episodes
    of a group."""
    found = row.extra_info.get("seed")
    if isinstance(found, int):
        return found

    text = repr((str(row.prompt), row.ground_truth, sorted(row.extra_info.items(), key=str)))
    encoded = text.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(encoded, digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
