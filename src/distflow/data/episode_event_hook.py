"""Hooks for recording the messages and rewards of an episode where they enter or leave our code, and its tokens."""

from collections.abc import Callable
from contextvars import ContextVar

on_event: ContextVar[Callable[..., None] | None] = ContextVar("on_event", default=None)
"""Called in the tasks of an episode with the kind of each event and its values:

- turn: the conversation's name, whether it uses the template, the workflow's content, the tools, the reply's tokens
- forked: the fork's name, its initial tokens, the messages of its history
- limit: the conversation's name, what its call asked for (max_tokens, stops), the reply's tokens
- kept: the conversation's name, how many tokens of its last reply had an effect
- paid: the conversation's name, the reward of its last turn
- called: a method of the process with user code, the arguments, the result
- answered: a tool of the model, the text that answers its call
- judged: the text to be scored; None for the last reply
- returned: all tokens of the episode, and its workflow's result
"""

on_token: ContextVar[Callable[[int], None] | None] = ContextVar("on_token", default=None)
"""Called on the event loop with each token of the task's request while it is drawn, if the engine tells."""


def note_event(kind: str, *values: object) -> None:
    if (note := on_event.get()) is not None:
        note(kind, *values)
