"""Continuous actions: engine and trainer give the same log-densities as a plain forward, packed or
not, and each level of the loss has the gradient of its definition."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.acting.action_head import ActionHead
from distflow.algorithms.objectives import PolicyObjective
from distflow.data.batch import Batch
from distflow.data.decisions import by_decision
from distflow.data.sample import Sample, Segment
from distflow.models.loading import load_model
from distflow.rollout.hf_engine import HFEngine
from distflow.training.torch_engine import TorchScorer
from tests.rollout.drive import FIRST, prompt_of, request_of, run_all
from tests.tiny_models import tiny_tokenizer, write_tiny_model

DIM = 2
CHUNK = 3
HEADS = {
    "gaussian": ActionHead(40, DIM),
    "flow_sde": ActionHead(20, DIM, steps=2, bins=4, noise=0.7),
}


def size_of(head: ActionHead) -> int:
    """Tokens of an action."""
    return DIM * (1 + head.steps)


def acted(model: Any, head: ActionHead, actions: tuple[int, ...] = (3, 2, 1, 0)) -> Batch:
    """An episode for each entry of `actions`, of two decisions, the second of which used so many of
    its chunk."""
    whole = size_of(head) * CHUNK
    used = [size_of(head) * number for number in actions]
    starts = [(prompt_of(5, n), prompt_of(3 + n, n + 9)) for n in range(len(used))]
    requests = [
        request_of(prompt, (n,), row=turn, max_tokens=whole, head=head)
        for n, own in enumerate(starts)
        for turn, prompt in enumerate(own)
    ]
    drawn = [r[0] for r in run_all(HFEngine(model, tiny_tokenizer(), version=FIRST), requests)]

    samples = list[Sample]()
    for n, (own, number) in enumerate(zip(starts, used, strict=True)):
        first = drawn[2 * n]
        second = drawn[2 * n + 1]
        cut = [
            Segment(
                "policy",
                *(each[:number] for each in (second.token_ids, second.rollout_log_probs)),
                second.rollout_log_probs[:number],
                second.versions[:number],
                values=second.values[:number],
            )
        ]
        left = [Segment("unused", second.token_ids[number:])] if number < whole else []
        segments = [
            Segment("prompt", own[0]),
            first,
            Segment("prompt", own[1]),
            *(cut if number else []),
            *left,
        ]
        samples.append(
            Sample(
                f"0-{n}",
                0,
                segments,
                episode=n,
                forks=(("1", whole),),
                head={"name": "actions", **vars(head)},
            )
        )

    batch = Batch.from_samples(samples)
    turns = [
        [0] * whole + [-1] * len(own[1]) + [1] * number + [-1] * (whole - number)
        for own, number in zip(starts, used, strict=True)
    ]
    batch["turn_index"] = torch.tensor([each for own in turns for each in own])
    batch["advantages"] = torch.linspace(-1, 1, int(batch.lengths("response").sum()))

    return batch


def by_hand(model: Any, batch: Batch, head: ActionHead) -> Tensor:
    """The log-densities of the policy's tokens, in float64, one conversation at a time; 0
    elsewhere."""
    found = list[Tensor]()
    ids = batch.flat("input_ids")
    lengths = batch.conversation_lengths().tolist()
    values = torch.zeros(len(ids)).double()
    mask = torch.zeros(len(ids))
    values[batch.response_positions()] = batch.flat("action_values").double()
    mask[batch.response_positions()] = batch.flat("response_mask")

    for own, numbers, drawn in zip(
        ids.split(lengths), values.split(lengths), mask.split(lengths), strict=True
    ):
        logits = model(input_ids=own[None], use_cache=False).logits[0].double()
        start = int(drawn.argmax())

        for place, token in enumerate(own.tolist()):
            if not drawn[place]:
                found.append(torch.zeros(()).double())
                continue

            if head.steps:
                mean, std = denoised(logits[place - 1], numbers[:place], place - start, head)
            else:
                mean = logits[place - 1, token]
                std = torch.exp(-3 + 2 * (torch.tanh(logits[place - 1, token + 1]) + 1))

            found.append(
                -0.5 * ((numbers[place] - mean) / std) ** 2
                - torch.log(std)
                - 0.5 * math.log(2 * math.pi)
            )

    return torch.stack(found)[batch.response_positions()]


def denoised(
    logits: Tensor, before: Tensor, number: int, head: ActionHead
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the number with this place in a chunk: of its noise, or by one
    Euler-Maruyama step from the number before it, with the velocity that reaches the action of the
    model's own logit at the time 1."""
    step = number % size_of(head) // DIM
    if step == 0:
        return torch.zeros(()).double(), torch.ones(()).double()

    now = (step - 1) / head.steps
    length = 1 / head.steps
    noisy = before[-DIM]
    action = logits[head.first + head.bins * number]
    velocity = (action - noisy) / (1 - now)

    return noisy + velocity * length, torch.tensor(head.noise * math.sqrt(length)).double()


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_engine_trainer_and_plain_forward_agree(tmp_path, family, max_tokens, head):
    model = load_model(write_tiny_model(tmp_path / "m", family))
    batch = acted(model, head)
    drawn = batch.flat("response_mask") > 0
    wanted = by_hand(model, batch, head).detach()
    scored = TorchScorer(model, max_tokens_per_micro_batch=max_tokens).forward(
        batch, ("log_probs", "entropy")
    )
    for found in (scored.flat("log_probs"), batch.flat("rollout_log_probs")):
        torch.testing.assert_close(found[drawn].double(), wanted[drawn], rtol=0, atol=1e-4)
    assert head.steps or wanted[drawn].max() > 0, "a density above 1, which no probability is"
    apart = TorchScorer(model).forward(by_decision(batch)[0], ("log_probs",))
    places = by_decision(batch)[1]
    torch.testing.assert_close(
        apart.flat("log_probs")[drawn[places]].double(),
        wanted[places][drawn[places]],
        rtol=0,
        atol=1e-4,
    )


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_each_level_has_the_gradient_of_its_definition(tmp_path, level, head):
    """Of the clipped ratio, in float64; episodes end at each action of a chunk."""
    model = load_model(
        write_tiny_model(tmp_path / "m", initializer_range=0.05), dtype=torch.float64
    )
    batch = acted(model, head)
    mask = batch.flat("response_mask") > 0
    turns = batch.flat("turn_index")
    now = by_hand(model, batch, head)
    old = (now.detach() - 0.1 * torch.cos(torch.arange(len(now)))).float()
    batch["old_log_probs"] = old
    unit = torch.arange(len(now))  # of each token
    rows = batch.rows()

    if level != "token":
        rank = torch.tensor(
            [
                sum(1 for b in range(a) if (rows[b], turns[b]) == (rows[a], turns[a]))
                for a in range(len(now))
            ]
        )
        unit = (rows * 10 + turns) * 10 + (rank // size_of(head) if level == "action" else 0)

    losses = list[Tensor]()
    for number in unit[mask].unique().tolist():
        own = mask & (unit == number)
        ratio = (now[own] - old.double()[own]).sum().exp()
        advantage = batch.flat("advantages").double()[own].mean()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))

    weights = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(torch.stack(losses).mean(), weights)
    objective = PolicyObjective(
        logprob_level=level, action_dim=size_of(head) if level == "action" else 1
    )
    outputs = TorchScorer(model).compute(batch, objective.outputs)
    padded = {name: batch.pad(each, "response") for name, each in outputs.items()}
    loss, _ = objective(padded, batch, objective.counts(batch))
    for ours, theirs in zip(torch.autograd.grad(loss, weights), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
