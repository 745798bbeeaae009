"""One trajectory: append-only segments of token ids, which are never re-tokenised; and hooks that
record the messages, tokens and rewards of its episode where they enter or leave our code."""

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal

Owner = Literal["prompt", "policy", "tool", "environment", "unused"]
"""Whose tokens they are. Unused ones were drawn by the policy, but had no effect: actions after the
end of an episode."""

FinishReason = Literal["stop", "length", "abort"]
"""A stop token or string; the maximum length; or an abort by new weights (`KVOnUpdate`)."""


@dataclass(frozen=True)
class Segment:
    """Token ids with one owner. Those of the policy are what an engine returns for one sample of a
    request, with one log-prob and one weight version per token, including the stop token."""

    owner: Owner
    token_ids: tuple[int, ...]
    rollout_log_probs: tuple[float, ...] = ()
    """Under softmax(logits / T), before truncations and penalties; or log-densities of the
    values."""
    sampling_log_probs: tuple[float, ...] = ()
    """Under the distribution that the tokens were drawn from, after truncations and penalties."""
    versions: tuple[int, ...] = ()
    """The step of the weights that produced each token."""
    top_ids: tuple[tuple[int, ...], ...] = ()
    """If requested: the likeliest tokens where each token was drawn, in the order of their
    probability."""
    top_log_probs: tuple[tuple[float, ...], ...] = ()
    """Of `top_ids`, as `sampling_log_probs`."""
    reward: float = 0.0
    """This turn's part of the episode's score."""
    turn: int = 0
    """One more than that of the episode's latest reply when this one was requested, which orders
    replies in time; those requested at once share it."""
    images: tuple[str, ...] = ()
    """Paths of a prompt's images, in the order of their placeholders (see `data/images.py`)."""
    values: tuple[float, ...] = ()
    """Numbers that the tokens stand for, unclipped; empty for other tokens."""
    sample: int = 0
    """The index of the requested sample."""
    finish_reason: FinishReason | None = None
    """Why the engine ended; None for tokens that it did not draw."""
    num_cached_tokens: int | None = None
    """Prompt tokens with keys and values from an earlier request; None if the engine does not
    report it."""

    @staticmethod
    def drawn(
        sample: int,
        token_ids: Iterable[int],
        rollout_log_probs: Iterable[float],
        sampling_log_probs: Iterable[float],
        versions: Iterable[int],
        finish_reason: FinishReason,
        num_cached_tokens: int | None = None,
        values: Iterable[float] = (),
        top_ids: Iterable[Iterable[int]] = (),
        top_log_probs: Iterable[Iterable[float]] = (),
    ) -> "Segment":
        """What an engine drew for a sample."""
        return Segment(
            "policy",
            tuple(token_ids),
            tuple(rollout_log_probs),
            tuple(sampling_log_probs),
            tuple(versions),
            tuple(map(tuple, top_ids)),
            tuple(map(tuple, top_log_probs)),
            values=tuple(values),
            sample=sample,
            finish_reason=finish_reason,
            num_cached_tokens=num_cached_tokens,
        )

    def __post_init__(self) -> None:
        expected = len(self.token_ids) if self.owner == "policy" else 0
        for name in ("rollout_log_probs", "sampling_log_probs", "versions"):
            if len(getattr(self, name)) != expected:
                raise ValueError(
                    f"a {self.owner} segment of {len(self.token_ids)} tokens needs {expected} "
                    f"{name}"
                )

        for name in ("values", "top_ids", "top_log_probs"):
            number = len(getattr(self, name))
            if number not in (0, expected):
                raise ValueError(
                    f"a {self.owner} segment of {len(self.token_ids)} tokens has {number} {name}"
                )

    def part(self, tokens: slice) -> "Segment":
        """The same with these of its tokens alone."""
        return replace(self, **{name: getattr(self, name)[tokens] for name in OF_TOKENS})


OF_TOKENS = (
    "token_ids",
    "rollout_log_probs",
    "sampling_log_probs",
    "versions",
    "top_ids",
    "top_log_probs",
    "values",
)
"""The fields of a segment with one entry for each token."""

ENV_ERROR = "env_error"
"""Finish reason of an episode whose simulator failed."""
LIMIT_REASONS = ("length", "context", "max_turns", "max_steps")
"""Finish reasons of samples that a limit ended."""


@dataclass
class Sample:
    """A trajectory for one prompt, whose first segment is the prompt."""

    uid: str
    """ "<group number>-<sample index>"."""
    group_index: int
    """The group number."""
    segments: list[Segment]
    prompt: str = ""
    response: str = ""
    domain: str = "default"
    ground_truth: object = None
    extra_info: Mapping[str, object] = field(default_factory=dict)
    finish_reason: str = "stop"
    """The engine's for its last segment, or the limit that ended the episode."""
    valid: bool = True
    """False once it has a reward error."""
    _: KW_ONLY
    episode: int = 0
    """The index of its episode in the group."""
    agent: str = "policy"
    """The one with these turns."""
    forks: tuple[tuple[str, int], ...] = ()
    """If the episode's conversation branched: the name of each further conversation and the
    position of its first token in the response, where they follow the first one, end to end."""
    last_turn: int = -1
    """The policy segment that was the last in time, since there may be several conversations."""
    conversation: tuple[Mapping[str, str], ...] = ()
    """The messages, for display."""
    outcome: object = None
    """The score from a workflow, if there is one."""
    rejected: bool = False
    """The workflow wants it dropped."""
    head: Mapping[str, float] | None = None
    """The name and the fields of the head that drew its values."""

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

- turn: the conversation's name, the workflow's content, the reply's tokens
- kept: the conversation's name, how many tokens of its last reply had an effect
- paid: the conversation's name, the reward of its last turn
- judged: the text to be scored; None for the last reply
"""


def note_event(kind: str, *values: object) -> None:
    if (note := on_event.get()) is not None:
        note(kind, *values)
