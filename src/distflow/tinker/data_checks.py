"""Clients' mistakes that no request fails by: in the data of a pass, with the datum, and in a step
with the data before it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from distflow.tinker.draws import Draw, Draws
from distflow.tinker.messages import Datum

Floats = NDArray[np.float32]
_SENT_WITHIN: Final = 0.05
"""Nats between a log-prob that was drawn and the one that comes back: clients may round it."""
_SAME_WEIGHTS_WITHIN: Final = 0.1
"""Nats between engine and trainer, in the mean over the tokens of a datum."""
_FAR: Final = math.log(10)


@dataclass(frozen=True, eq=False)
class TrainedDatum:
    """A datum of a pass, with what the pass and the engine say of it."""

    token_ids: NDArray[np.int64]
    """`(n + 1,)`: its tokens, and the last target."""
    targets: NDArray[np.int64]
    """`(n,)`, like all below."""
    factors: Floats
    """By which its tokens count: advantages, or weights."""
    log_probs: Floats
    """Of the trained model."""
    sent: Floats | None
    """The log-probs that came with it; None if its loss reads none."""
    draws: Sequence[Draw]
    """The samples that it contains."""

    @property
    def prompt_length(self) -> int:
        """Of what is before the first sample, or the first target that counts."""
        if self.draws:
            return self.draws[0].prompt_length
        counting = self.factors.nonzero()[0]
        return int(counting[0]) + 1 if len(counting) else len(self.targets)

    def log_ratios(self) -> Floats:
        """The model's log-probs less those sent, of the targets that count; none without any."""
        if self.sent is None:
            return np.zeros(0, np.float32)
        counting = self.factors != 0.0
        return self.log_probs[counting] - self.sent[counting]


def trained_datum(datum: Datum, log_probs: Tensor, draws: Draws) -> TrainedDatum:
    """Of several targets at a place the first stands for all, with the sum of their factors."""
    length = len(datum.token_ids)
    inputs = {name: each.numpy().reshape(length, -1) for name, each in datum.inputs.items()}
    targets = inputs["target_tokens"][:, 0]
    token_ids = np.append(datum.token_ids.numpy(), targets[-1:])
    sent = inputs["logprobs"][:, 0] if "logprobs" in inputs else None
    ones = np.ones((length, 1), np.float32)
    factors = inputs.get("advantages", inputs.get("weights", ones)).sum(1)
    own = log_probs.float().cpu().reshape(length, -1)[:, 0].numpy()
    chosen = [_nearest(equal, sent) for equal in draws.within(token_ids)]
    return TrainedDatum(token_ids, targets, factors, own, sent, chosen)


def _nearest(equal: Sequence[Draw], sent: Floats | None) -> Draw:
    """The one of equal samples whose log-probs came back; of several the last."""
    if sent is None:
        return equal[-1]
    return min(reversed(equal), key=lambda draw: np.abs(_sent_for(draw, sent)).sum())


def _sent_for(draw: Draw, sent: Floats) -> Floats:
    """What was sent less what was drawn, at the targets of the sample."""
    first = draw.prompt_length - 1
    found: Floats = sent[first : first + len(draw.log_probs)] - draw.log_probs
    return found


def mistake_in(datum: TrainedDatum, model_id: str, version: int) -> tuple[str, str] | None:
    """The name of a mistake, and a sentence. version: the steps that the model has done."""
    if len(set(datum.targets.tolist())) > 1 and np.array_equal(datum.targets, datum.token_ids[:-1]):
        return "not_shifted", "target_tokens equal model_input: each target is the next token"

    if datum.sent is None:
        if not datum.factors.any():
            return "trains_nothing", "its weights are all 0: it trains nothing"
        return None

    for draw in datum.draws:
        gaps = _sent_for(draw, datum.sent)
        first = draw.prompt_length - 1
        counts = datum.factors[first : first + len(gaps)] != 0.0
        is_other = counts & (np.abs(gaps) > _SENT_WITHIN)
        if is_other.any():
            place = int(is_other.argmax())
            return (
                "other_logprobs",
                f"logprobs[{first + place}] is {datum.sent[first + place]:.3f}, but the engine "
                f"drew this token with {draw.log_probs[place]:.3f}: send the log-probs of the "
                "sample, each at the place of its target",
            )

    return _ratio_mistake(datum, model_id, version)


def _ratio_mistake(datum: TrainedDatum, model_id: str, version: int) -> tuple[str, str] | None:
    ratios = datum.log_ratios()
    gap = float(np.abs(ratios).mean()) if len(ratios) else 0.0
    drawn_by = {(draw.model_id, draw.version) for draw in datum.draws}
    if drawn_by == {(model_id, version)} and gap > _SAME_WEIGHTS_WITHIN:
        why = f"engine and trainer differ by {gap:.2f} nats a token"
        temperature = datum.draws[0].temperature
        if temperature != 1.0:
            why = f"it was drawn at temperature {temperature:g}, and is trained at 1"
        return "ratios", f"its ratios are not 1 although the newest weights drew it: {why}"

    if gap > _FAR:
        said = f"its logprobs are {gap:.1f} nats a token from the model's"
        return "ratios", f"{said}: ratios this far from 1 say nothing of it"
    return None


def mistakes_of_step(
    data: Sequence[TrainedDatum], learning_rate: float, grad_norm: float
) -> Mapping[str, str]:
    """Sentences by the names of mistakes. data: of all passes since the last step."""
    found = {}
    if data and not any(each.factors.any() for each in data):
        found["trains_nothing"] = f"advantages or weights of all {len(data)} data are 0"
    elif grad_norm == 0.0:
        found["no_gradient"] = "the gradient is 0"
    if learning_rate == 0.0:
        found["no_learning_rate"] = "learning_rate is 0: it changes nothing"
    return found
