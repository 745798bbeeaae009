"""The agents of an episode: each has its own conversation, and the workflow awaits any of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn, Protocol

from distflow.data.episode_event_hook import note_event
from distflow.environments.chat import Chat, ChatError
from distflow.errors import hint

KEY = "actor_rollout_ref.rollout.agents"


class Agent(Protocol):
    """An agent as declared in the config."""

    @property
    def system_prompt(self) -> str: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def stop(self) -> tuple[str, ...]: ...


class Agents(dict[str, Chat]):
    """The agents' chats by name, in the order of the config. Raises ChatError for an unknown name."""

    def __missing__(self, name: object) -> NoReturn:
        raise ChatError(f"agents[{name!r}]: {KEY} has no agent of that name{hint(str(name), self)}")


def begin_agents(chat: Chat, agents: Mapping[str, Agent]) -> Agents:
    """The chats of an episode's agents. chat: its first conversation, which becomes that of the first agent."""
    chats = Agents()
    for name, settings in agents.items():
        own = replace(chat, name=name, segments=[], messages=[]) if chats else chat
        own.agent, own.max_tokens, own.stop = name, settings.max_tokens, settings.stop
        own.messages = [{"role": "system", "content": settings.system_prompt}] if settings.system_prompt else []
        note_event("forked", own.name, (), list(own.messages))
        own.forked(own)
        chats[name] = own
    return chats
