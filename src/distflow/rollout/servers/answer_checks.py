"""A server's answer for a sample, and the checks that it must pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from transformers import PreTrainedTokenizerBase

from distflow.data.sample import FinishReason, Segment
from distflow.errors import TrustError
from distflow.rollout.engine import SamplingParams
from distflow.rollout.stops import finish_reason
from distflow.scheduling.group_states import Version

_LEAST_LOG_PROB: Final = -9000.0  # servers write -9999 for NaN and -inf, which JSON does not have
_ROUNDING: Final = 1e-5


@dataclass(frozen=True)
class Answer:
    """An unchecked answer: fields of a `Segment`, with versions as labels. Values are as they
    came."""

    token_ids: Sequence[int]
    rollout_log_probs: Sequence[float]
    sampling_log_probs: Sequence[float]
    versions: Sequence[str]
    finish_reason: str


def label_of(version: Version) -> str:
    """The server's name for a version."""
    return f"{version.restart}.{version.step}"


def lie(who: str, what: str) -> TrustError:
    return TrustError(f"{who} answered {what}: its tokens cannot be trained on")


@dataclass(frozen=True)
class AnswerCheck:
    """who: the server. first, last: the oldest and the newest version that can have generated a
    part."""

    who: str
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    first: Version
    last: Version

    def segment(self, sample: int, params: SamplingParams, answer: Answer) -> Segment:
        """The answer for a sample. Raises TrustError for an invalid answer, TypeError for one of
        another form."""
        num_tokens = len(answer.token_ids)
        num_rollout = len(answer.rollout_log_probs)
        num_sampling = len(answer.sampling_log_probs)
        num_versions = len(answer.versions)
        if {num_rollout, num_sampling, num_versions} != {num_tokens}:
            counts = f"{num_rollout} and {num_sampling} log-probs, and {num_versions} versions"
            raise lie(self.who, f"{num_tokens} tokens with {counts}")
        if num_tokens > params.max_tokens:
            raise lie(
                self.who, f"{num_tokens} tokens where at most {params.max_tokens} were asked for"
            )

        ids = list(answer.token_ids)
        end, reason = self._end(ids, params, answer.finish_reason)
        rollout_log_probs = self._log_probs(answer.rollout_log_probs)
        sampling_log_probs = self._log_probs(answer.sampling_log_probs)
        versions = self._steps(answer.versions)

        if reason is None:
            ends = (
                f"that a response ends by '{answer.finish_reason}' after {end} of "
                f"{params.max_tokens} tokens"
            )
            raise lie(self.who, ends)

        return Segment.drawn(
            sample,
            ids[:end],
            rollout_log_probs[:end],
            sampling_log_probs[:end],
            versions[:end],
            reason,
        )

    def _log_probs(self, given: Sequence[object]) -> list[float]:
        found = list[float]()
        for value in given:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"a log-prob is {value!r:.40}")
            # An integer may have more digits than a float holds; comparing it is exact. NaN
            # compares with nothing.
            if not _LEAST_LOG_PROB < value <= _ROUNDING:
                bounds = f"each is above {_LEAST_LOG_PROB:g} and at most 0"
                raise lie(self.who, f"with invalid log-probs, such as {value!r:.40} ({bounds})")

            found.append(min(float(value), 0.0))

        return found

    def _steps(self, labels: Sequence[object]) -> list[int]:
        """The step of the weights of each token."""
        first = self.first
        last = self.last
        steps = {
            label_of(Version(first.restart, step)): step
            for step in range(first.step, last.step + 1)
        }
        steps[label_of(last)] = last.step

        found = list[int]()
        for label in labels:
            if not isinstance(label, str) or label not in steps:
                raise lie(
                    self.who,
                    f"with tokens of weights '{label!s:.40}' instead of '{label_of(last)}'",
                )
            if found and steps[label] < found[-1]:
                raise lie(self.who, f"with a token of weights '{label}' after one of newer weights")
            found.append(steps[label])

        return found

    def _end(
        self, ids: list[int], params: SamplingParams, said: str
    ) -> tuple[int, FinishReason | None]:
        """Where a response ends, and why; None if no condition of the request is met. Servers
        detect a stop string at different places, so anything after it is cut off here."""
        for token in ids:
            is_number = isinstance(token, int) and not isinstance(token, bool)
            if not (is_number and 0 <= token < self.vocab_size):
                raise lie(self.who, f"with a token {token!r:.40}, which the model does not have")

        ends_early = not set(params.stop_token_ids).isdisjoint(ids[:-1])
        if ends_early or (
            params.stop and any(text in self.tokenizer.decode(ids) for text in params.stop)
        ):
            for end in range(1, len(ids)):
                if finish_reason(ids[:end], params, self.tokenizer) == "stop":
                    return end, "stop"

        if said == "abort":
            return len(ids), "abort"
        return len(ids), finish_reason(ids, params, self.tokenizer) if ids else None
