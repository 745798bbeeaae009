"""What an episode says, is told and is paid, where each enters or leaves our code, for whoever records it."""

from collections.abc import Callable
from contextvars import ContextVar

on_event: ContextVar[Callable[..., None] | None] = ContextVar("on_event", default=None)
"""Called in the tasks of an episode with the kind of each event and its values:

- turn: the conversation's name, whether it uses the template, what the workflow said, the tools, the reply's tokens
- forked: the fork's name, the tokens that it begins with, the messages of its history
- paid: the conversation's name, the reward of its last turn
- called: a method of the process with the user's code, the arguments, what it returned
- judged: the text that the workflow had scored; None is its last reply
- returned: all tokens of the episode, and what its workflow returned
"""


def note_event(kind: str, *values: object) -> None:
    if (note := on_event.get()) is not None:
        note(kind, *values)
