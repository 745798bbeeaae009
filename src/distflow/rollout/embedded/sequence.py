"""One sample on its way: its prompt, what it has drawn so far, and how it ends."""

from dataclasses import dataclass, field
from typing import NamedTuple

from distflow.rollout.engine import FinishReason, GenerateRequest, Generation, SamplingParams
from distflow.rollout.randomness import sample_key


class Law(NamedTuple):
    """The part of `SamplingParams` that shapes the distribution: rows with equal ones are drawn together."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    greedy: bool


@dataclass(eq=False)
class Sequence:
    """Compared by identity. key: of its random stream, in which it has drawn `num_drawn` numbers in earlier turns;
    request: which call of `generate` it belongs to."""

    request: int
    sample: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    law: Law
    key: int
    num_drawn: int = 0
    token_ids: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    sampling_log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens that the next one depends on."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def position(self) -> int:
        """Where the last token stands, which is the next one to be fed to the model."""
        return len(self.prompt_ids) + len(self.token_ids) - 1

    def append(self, token_id: int, rollout_log_prob: float, sampling_log_prob: float, version: int) -> None:
        self.token_ids.append(token_id)
        self.rollout_log_probs.append(rollout_log_prob)
        self.sampling_log_probs.append(sampling_log_prob)
        self.versions.append(version)

    def generation(self) -> Generation:
        assert self.finish_reason is not None, "an unfinished sequence has no generation"
        return Generation(
            self.sample,
            self.token_ids,
            self.rollout_log_probs,
            self.sampling_log_probs,
            self.versions,
            self.finish_reason,
        )


def sequences_of(number: int, request: GenerateRequest) -> list[Sequence]:
    """One sequence for each wanted sample."""
    params = request.params
    law = Law(params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty, params.greedy)
    return [
        Sequence(number, sample, request.prompt_ids, params, law, sample_key(request.stream, sample), request.num_drawn)
        for sample in request.samples
    ]
