"""One trajectory: append-only segments of token ids, which are never re-tokenised; and hooks that
record the messages, tokens and rewards of its episode where they enter or leave our code."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

Owner = Literal["prompt", "policy", "tool", "environment", "unused"]


@dataclass(frozen=True)
class Segment:
    """Token ids with one owner. Policy segments have one log-prob and one weight version per token.
    Unused ones were drawn, but had no effect: actions after the end of an episode.

    images: the paths of a prompt's images, in the order of their placeholders (see
    `data/images.py`).
    values: of continuous actions, one per token, unclipped; empty for other tokens. log_probs:
    under softmax(logits / T), or log-densities of the values. sampling_log_probs: after truncations
    and penalties. reward: this turn's part of the episode's score. turn: one more than that of the
    episode's latest reply when this one was requested, which orders replies in time; those
    requested at once share it.
    """

    owner: Owner
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    sampling_log_probs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    reward: float = 0.0
    turn: int = 0
    images: tuple[str, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        expected = len(self.token_ids) if self.owner == "policy" else 0
        for name in ("log_probs", "sampling_log_probs", "versions"):
            if len(getattr(self, name)) != expected:
                raise ValueError(
                    f"a {self.owner} segment of {len(self.token_ids)} tokens needs {expected} "
                    f"{name}"
                )
        if len(self.values) not in (0, expected):
            raise ValueError(
                f"a {self.owner} segment of {len(self.token_ids)} tokens has {len(self.values)} "
                "values"
            )


ENV_ERROR = "env_error"
"""Finish reason of an episode whose simulator failed."""
LIMIT_REASONS = ("length", "context", "max_turns", "max_steps")
"""Finish reasons of samples that a limit ended."""


@dataclass
class Sample:
    """A trajectory for one prompt, whose first segment is the prompt.

    uid: "<group number>-<sample index>". group_index: the group number. episode: index of its
    episode in the group. agent: the one with these turns. forks: if the episode's conversation
    branched, the name of each further conversation and the position of its first token in the
    response, where they follow the first one, end to end. last_turn: the policy segment that was
    the last in time, since there may be several conversations. conversation: the messages, for
    display. valid: False once it has a reward error. outcome: the score from a workflow, if there
    is one. rejected: the workflow wants it dropped. head: the fields of the `ActionHead` that drew
    its values.
    """

    uid: str
    group_index: int
    segments: list[Segment]
    episode: int = field(default=0, kw_only=True)
    agent: str = field(default="policy", kw_only=True)
    forks: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)
    last_turn: int = field(default=-1, kw_only=True)
    conversation: tuple[Mapping[str, str], ...] = field(default=(), kw_only=True)
    prompt: str = ""
    response: str = ""
    domain: str = "default"
    ground_truth: object = None
    extra_info: Mapping[str, object] = field(default_factory=dict)
    finish_reason: str = "stop"
    valid: bool = True
    outcome: object = field(default=None, kw_only=True)
    rejected: bool = field(default=False, kw_only=True)
    head: Mapping[str, float] | None = field(default=None, kw_only=True)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.segments[0].token_ids

    @property
    def response_segments(self) -> list[Segment]:
        """All segments after the first prompt."""
        return self.segments[1:]

    @property
    def longest_response(self) -> int:
        """Tokens of its longest conversation after the first prompt."""
        lengths = list[int]()
        for segment in self.segments:
            if segment.owner == "prompt":
                lengths.append(0)
            else:
                lengths[-1] += len(segment.token_ids)
        return max(lengths)

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", "context", "max_steps")


on_event: ContextVar[Callable[..., None] | None] = ContextVar("on_event", default=None)
"""Called in the tasks of an episode with the kind of each event and its values:

- turn: the conversation's name, whether it uses the template, the workflow's content, the tools,
  the reply's tokens
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
"""Called on the event loop with each token of the task's request while it is drawn, if the engine
tells."""


def note_event(kind: str, *values: object) -> None:
    if (note := on_event.get()) is not None:
        note(kind, *values)
