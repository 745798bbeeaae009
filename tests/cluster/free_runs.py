"""The first token in which two runs that answer for themselves differ, and whether rounding
explains it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from distflow.observe.crash_safe_files import JSON
from distflow.observe.run_reader import read_samples, sample_steps
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from tests.e2e.runs import Run
from tests.tiny_models import tiny_tokenizer

EOS = 2


@dataclass(frozen=True)
class Difference:
    """step: from 1. token: its place in the response. here, there: the two tokens. probabilities:
    of each in its own run. noise: the largest difference of a log-prob between the two runs'
    weights over what they have in common before it. apart: by how much no draw gives both tokens,
    as a share of all draws."""

    step: int
    uid: str
    token: int
    here: int
    there: int
    probabilities: tuple[float, float]
    noise: float
    apart: float

    @property
    def is_rounding(self) -> bool:
        """One draw gives the one token here and the other there: log-probs that are off by `noise`
        move the bounds of a token by no more than that."""
        return self.apart <= self.noise

    def __str__(self) -> str:
        mine, other = self.probabilities
        return (
            f"step {self.step}, sample {self.uid}, token {self.token}: {self.here} (probability "
            f"{mine:.6f}) and "
            f"{self.there} ({other:.6f}); noise of log-probs {self.noise:.2g}, apart "
            f"{self.apart:.2g}"
        )


def first_difference(one: Run, other: Run) -> Difference | None:
    """By steps, then samples. Both runs drew from the whole distribution at temperature 1."""
    for step in sample_steps(one.folder):
        here = by_uid(one, step)
        there = by_uid(other, step)
        assert here.keys() == there.keys(), f"other prompts in step {step}"
        differing = [uid for uid in here if here[uid][1] != there[uid][1]]
        if differing:
            return _reward_counts(one, other, step, differing[0], here, there)
    return None


Answered = tuple[list[int], list[int]]
"""A prompt and its answer."""


def by_uid(run: Run, step: int) -> dict[str, Answered]:
    rows = {str(row["uid"]): row for row in read_samples(run.folder, step)}
    return {uid: (_ids(rows[uid]["prompt"]), _answer(rows[uid])) for uid in sorted(rows)}


def _answer(row: dict[str, JSON]) -> list[int]:
    """One token a character; one that is not shown ends it."""
    ids = _ids(row["response"])
    return ids + [EOS] * (int(str(row["response_length"])) - len(ids))


def _ids(text: object) -> list[int]:
    found: list[int] = tiny_tokenizer()(str(text)).input_ids
    return found


def _reward_counts(
    one: Run, other: Run, step: int, uid: str, here: dict[str, Answered], there: dict[str, Answered]
) -> Difference:
    models = [_model(run, step - 1) for run in (one, other)]
    noise = max(float((a - b).abs().max()) for a, b in _in_common(models, here, there))
    prompt, mine = here[uid]
    place = _shared(mine, there[uid][1])
    mine = mine[place]
    theirs = there[uid][1][place]
    laws = [_log_probs(model, prompt, here[uid][1][:place])[-1].exp() for model in models]
    bounds = [
        (float(law[:token].sum()), float(law[: token + 1].sum()))
        for law, token in zip(laws, (mine, theirs), strict=True)
    ]
    apart = max(0.0, max(low for low, _ in bounds) - min(high for _, high in bounds))
    probabilities = (float(laws[0][mine]), float(laws[1][theirs]))
    return Difference(step, uid, place, mine, theirs, probabilities, noise, apart)


def _in_common(
    models: list[PreTrainedModel], here: dict[str, Answered], there: dict[str, Answered]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Log-probs `(tokens, vocabulary)` of both models behind each start that both runs have."""
    for uid, (prompt, answer) in here.items():
        same = answer[: _shared(answer, there[uid][1])]
        if same:
            first, second = (_log_probs(model, prompt, same[:-1]) for model in models)
            yield first, second


def _shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@torch.no_grad()
def _log_probs(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Tensor:
    """Of what follows the prompt, and each token of the answer: `(1 + tokens, vocabulary)`,
    float64."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 :]
    return logits.double().log_softmax(-1)


def _model(run: Run, step: int) -> PreTrainedModel:
    """With the weights after so many steps."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        run.config.actor_rollout_ref.model.path
    )
    if step:
        weights = CheckpointStore(run.folder / "checkpoints").load(step).load("actor")
        own = {
            name.removeprefix("model."): w
            for name, w in weights.items()
            if name.startswith("model.")
        }
        model.load_state_dict(own, strict=False)
    return model.eval()
