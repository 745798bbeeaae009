"""Ragged batches and a plain loss for the tests of train engines."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distflow.data.batch import Batch

# (prompt, response) lengths: the shortest prompts and responses there can be, and none at all
RAGGED = ((1, 1), (5, 9), (1, 14), (12, 1), (3, 0), (8, 8), (2, 5), (7, 3))


def ragged_batch(
    lengths: Sequence[tuple[int, int]] = RAGGED, seed: int = 0, vocabulary: int = 99
) -> Batch:
    """Random ids; a random mask, old log-probs, advantages and returns on the responses."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = torch.tensor(list(lengths), dtype=torch.int64).reshape(-1, 2).unbind(1)
    batch = Batch(prompts, responses)
    num_tokens = int(responses.sum())
    batch["uid"] = [f"{row}-0" for row in range(len(batch))]
    batch["prompt_ids"] = torch.randint(3, vocabulary, (int(prompts.sum()),), generator=generator)
    batch["response_ids"] = torch.randint(3, vocabulary, (num_tokens,), generator=generator)
    batch["response_mask"] = (torch.rand(num_tokens, generator=generator) < 0.8).float()
    batch["advantages"] = torch.randn(num_tokens, generator=generator)
    batch["returns"] = torch.randn(num_tokens, generator=generator)

    return batch


class TokenMeanLoss:
    """−mean(advantage · log-prob) − c · mean(entropy), or ½ mean((value − return)²), over the
    mask's tokens."""

    def __init__(
        self, outputs: tuple[str, ...] = ("log_probs", "entropy"), entropy_coef: float = 0.3
    ) -> None:
        self.outputs = outputs
        self.entropy_coef = entropy_coef

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"tokens": float(batch.flat("loss_mask").sum())}

    def __call__(self, outputs: Mapping[str, Tensor], micro: Batch, counts: dict[str, float]):
        per_token = self.per_token(
            {name: out[micro.mask("response").to(out.device)] for name, out in outputs.items()},
            micro,
        )
        total = (per_token * micro.flat("loss_mask")).sum()
        return total / max(counts["tokens"], 1.0), {"total": float(total.detach())}

    def per_token(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        if "values" in outputs:
            return 0.5 * (outputs["values"] - batch.flat("returns")) ** 2
        loss = -batch.flat("advantages") * outputs["log_probs"]
        return loss - self.entropy_coef * outputs["entropy"] if "entropy" in outputs else loss

    def finish(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float]:
        return {"mean": sums["total"] / max(counts["tokens"], 1.0) if sums else 0.0}


def plain_outputs(model, batch: Batch, temperature: float = 1.0) -> dict[str, Tensor]:
    """Flat outputs by one plain forward of each sequence alone, from full logits, with gradient."""
    found: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
    for row in range(len(batch)):
        sample = batch.select([row])
        prompt = int(sample.lengths("prompt"))
        ids = sample.flat("input_ids")
        logits = (
            model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits[0]
            / temperature
        )
        log_probs = logits.log_softmax(-1)

        for position in range(prompt, len(ids)):
            before = log_probs[position - 1]
            found["log_probs"].append(before[ids[position]])
            found["entropy"].append(-(before.exp() * before).sum())

    return {
        name: torch.stack(values) if values else torch.zeros(0) for name, values in found.items()
    }


def plain_log_probs_at(model, batch: Batch, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """The log-probs of `ids` `(response tokens, k)` in place of each response token, by one plain
    forward of each sequence alone, from full logits, with gradient."""
    found = []
    for row, own in enumerate(ids.split(batch.lengths("response").tolist())):
        sample = batch.select([row])
        sequence = sample.flat("input_ids")
        start = int(sample.lengths("prompt")) - 1
        logits = model(input_ids=sequence[None]).logits[0, start : start + len(own)]
        found.append((logits / temperature).log_softmax(-1).gather(1, own))

    return torch.cat(found)


def plain_values(model, batch: Batch) -> Tensor:
    """Flat values by one plain forward of each sequence alone: of the position before each response
    token."""
    values = []
    for row in range(len(batch)):
        sample = batch.select([row])
        prompt = int(sample.lengths("prompt"))
        ids = sample.flat("input_ids")
        values.append(model(input_ids=ids[None]).logits[0, prompt - 1 : len(ids) - 1, 0])

    return torch.cat(values)
