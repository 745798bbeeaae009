"""Check: the engine has the trainer's weights. It generates greedily for fixed prompts, through the
normal path."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distflow.algorithms.mismatch_check import Tolerance, mismatch
from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Sample, Segment
from distflow.errors import TrustError
from distflow.rollout.engine import GenerateRequest, RolloutEngine, SamplingParams, Stream
from distflow.runtime.resources import Resources
from distflow.runtime.spec import Spec
from distflow.training.engine import TrainEngine
from distflow.training.multi_policy_engine import MultiPolicyTrainer


@dataclass
class Canary:
    """Compares engine and trainer at the start, and after every `frequency` weight syncs (0:
    never); an engine that `shares_weights` with the trainer only at the start, since every batch is
    compared there anyway. agents: one of each trained policy, if there are several: each policy
    responds to the prompts. temperature_of: that of an agent. images: of each prompt, if prompts
    have images."""

    NUM_PROMPTS: ClassVar[int] = 4
    NUM_TOKENS: ClassVar[int] = 16
    NUM_GIVEN: ClassVar[int] = 24
    """Least tokens of a prompt: an engine keeps the keys and values of whole blocks, usually of 16
    tokens, and finds a block only if the next prompt is longer."""
    GROWTH: ClassVar[float] = 5.0

    rollout: RolloutEngine
    actor: TrainEngine
    prompts: Sequence[tuple[int, ...]]
    sampling: SamplingParams
    tolerance: Tolerance
    frequency: int
    shares_weights: bool
    temperature_of: Callable[[str], float]
    agents: Mapping[str, str] = field(default_factory=dict)
    images: Sequence[tuple[str, ...]] = ()
    _limits: tuple[float, float] | None = None
    _num_synced: int = 0

    def is_due(self, at_start: bool) -> bool:
        """Whether the canary is due; call once per weight sync."""
        if at_start or self.frequency == 0:
            return self.frequency > 0
        self._num_synced += 1
        return not self.shares_weights and self._num_synced % self.frequency == 0

    def compare(self, responses: Batch, at_start: bool) -> dict[str, float]:
        """Score the engine's tokens with the trainer. Raises TrustError if the weights differ.

        At the start the limit of the mean |Δ log-prob| is the one that stops any run. Later the
        limits of mean and maximum are `GROWTH` times the values at the start, but at least the
        tolerance and ten times the tolerance.
        """
        scored = self.actor.forward(responses, ("log_probs",))
        gap = mismatch(
            responses.flat("rollout_log_probs"),
            scored.flat("log_probs"),
            responses.flat("response_mask"),
        )
        mean = gap["mismatch/mean_abs"]
        largest = gap["mismatch/max_abs"]
        limits = self._limits
        least = self.tolerance.mean

        if limits is None or at_start:
            limits = (self.tolerance.hold, float("inf"))
            self._limits = (max(self.GROWTH * mean, least), max(self.GROWTH * largest, 10 * least))

        if not (mean <= limits[0] and largest <= limits[1]):
            raise TrustError(
                "canary: on fixed prompts the log-probs of engine and trainer differ by "
                f"{mean:.3g} on average, {largest:.3g} at most (limits {limits[0]:.3g} and "
                f"{limits[1]:.3g}). Likely causes: weights that did not arrive, KV kept from older "
                "weights, a prefix cache not keyed by version, another temperature"
            )

        return {"canary/mean_abs": mean, "canary/max_abs": largest}

    async def generate_responses(self) -> Batch:
        """The engine's greedy responses to the fixed prompts."""
        agents = self.agents or {"": ""}
        responses = []
        for policy, agent in agents.items():
            for row in range(len(self.prompts)):
                responses.append(self._response(row, agent, policy))

        return Batch.from_samples(await asyncio.gather(*responses))

    async def _response(self, row: int, agent: str, policy: str) -> Sample:
        prompt = self.prompts[row]
        images = self.images[row] if self.images else ()
        params = replace(
            self.sampling,
            max_tokens=min(self.NUM_TOKENS, self.sampling.max_tokens),
            greedy=True,
            temperature=self.temperature_of(agent),
        )

        # The next canary would detect keys and values of this one if they outlived their weights.
        stream = Stream(0, "canary", 0, row)
        request = GenerateRequest(
            prompt, (0,), params, stream, may_continue=True, policy=policy, images=images
        )
        (response,) = await self.rollout.generate(request)

        given = Segment("prompt", prompt, images=images)
        drawn = Segment(
            "policy",
            tuple(response.token_ids),
            tuple(response.rollout_log_probs),
            tuple(response.sampling_log_probs),
            tuple(response.versions),
        )
        if not agent:
            return Sample(f"{row}-0", row, [given, drawn])

        return Sample(f"{row}-0", row, [given, given, drawn], forks=((agent, 0),))


def make_canary(spec: Spec, resources: Resources) -> Canary:
    """The canary of a worker that trains and generates."""
    assert resources.rollout is not None and resources.actor is not None
    longest = spec.config.data.max_prompt_length + max(
        spec.sampling.max_tokens - Canary.NUM_TOKENS, 0
    )

    return Canary(
        resources.rollout,
        resources.actor,
        [_prompt(row, longest) for row in spec.rows[: Canary.NUM_PROMPTS]],
        replace(spec.sampling, stop_token_ids=resources.stop_token_ids),
        spec.tolerance,
        spec.config.trust.canary_freq,
        spec.shares_weights,
        spec.temperature_of_agent,
        resources.actor.agents if isinstance(resources.actor, MultiPolicyTrainer) else {},
        [row.images for row in spec.rows[: Canary.NUM_PROMPTS]],
    )


def _prompt(row: PromptRow, longest: int) -> tuple[int, ...]:
    """The row's prompt; one without images is repeated to `Canary.NUM_GIVEN` tokens, if `longest`
    permits."""
    ids = tuple(row.prompt_ids)
    wanted = 0 if row.images else min(Canary.NUM_GIVEN, longest)
    return (ids * wanted)[:wanted] if len(ids) < wanted else ids
