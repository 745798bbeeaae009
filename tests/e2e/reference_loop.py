"""GRPO and PPO once more, in plain torch and transformers: one sequence at a time, no packing, no
engine. It trains on the token groups that a run recorded and reads nothing else of them, so that
every number of the run can be compared."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from distflow.config import Config
from distflow.scheduling.data_plan import minibatches


class Sample(NamedTuple):
    ids: Tensor
    prompt_length: int
    group: int
    valid: bool
    score: float


def read_step(path: Path) -> list[Sample]:
    kept = load_file(path)
    prompts = kept["column.prompt_ids"].split(kept["lengths.prompt"].tolist())
    both = ("column.response_ids", "column.token_level_scores")
    responses, scores = (kept[name].split(kept["lengths.response"].tolist()) for name in both)
    groups = kept["column.group_index"].tolist()
    valid = kept["column.valid"].tolist()
    rows = zip(prompts, responses, groups, valid, scores, strict=True)

    return [
        Sample(torch.cat([p, r]), len(p), group, ok, float(s.sum())) for p, r, group, ok, s in rows
    ]


class Trained:
    """A model with AdamW, a cosine schedule with warm-up, and clipping."""

    def __init__(self, model, settings, optim, updates: int) -> None:
        self.model = model
        self.settings = settings
        self.optim = optim
        self.updates = updates
        self.done = 0
        self.adamw = torch.optim.AdamW(
            model.parameters(), 0.0, optim.betas, optim.eps, optim.weight_decay
        )

    def update(self, per_token: Tensor) -> dict[str, float]:
        warmup = int(self.optim.warmup_ratio * self.updates)
        falling = 0.5 + 0.5 * math.cos(
            math.pi * (self.done - warmup) / max(1, self.updates - warmup)
        )
        self.adamw.param_groups[0]["lr"] = self.optim.lr * (
            self.done / warmup if self.done < warmup else falling
        )
        self.done += 1
        self.adamw.zero_grad()
        per_token.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self.adamw.step()

        return {
            "loss": per_token.mean().item(),
            "grad_norm": norm.item(),
            "scale": per_token.abs().mean().item(),
        }


class ReferenceLoop:
    def __init__(self, config: Config, num_steps: int) -> None:
        self.config = config
        self.settings = config.actor_rollout_ref.actor
        path = config.actor_rollout_ref.model.path
        updates = num_steps * math.ceil(
            config.data.train_batch_size / self.settings.ppo_mini_batch_size
        )
        policy, self.ref = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2)
        )
        self.actor = Trained(
            policy, self.settings, self.settings.optim, updates * self.settings.ppo_epochs
        )
        self.critic = None
        c = config.critic

        if config.algorithm.adv_estimator == "gae":
            value = AutoModelForTokenClassification.from_pretrained(c.model.path, num_labels=1)
            self.critic = Trained(value, c, c.optim, updates * c.ppo_epochs)

    def step(self, number: int, samples: list[Sample]) -> dict[str, list[dict[str, float]]]:
        """By role: loss, gradient norm and mean |per-token loss| of each update."""
        with torch.no_grad():
            old = [self.log_probs(self.actor.model, s)[0] for s in samples]
            ref = [self.log_probs(self.ref, s)[0] for s in samples]
            values = [self.values(s) for s in samples] if self.critic else []

        advantages, returns = (
            self.gae(samples, old, ref, values) if self.critic else (self.grpo(samples), [])
        )
        actor = self.train(self.actor, samples, number, self.policy_loss, old, ref, advantages)
        critic = self.critic and self.train(
            self.critic, samples, number, self.value_loss, values, returns
        )

        return {"actor": actor, **({"critic": critic} if critic else {})}

    def train(
        self, trained: Trained, samples: list[Sample], number: int, loss, *columns
    ) -> list[dict[str, float]]:
        groups = [s.group for s in samples]
        epochs = range(trained.settings.ppo_epochs)
        numbers = (self.settings.ppo_mini_batch_size, self.config.trainer.seed, number)
        parts = [part for e in epochs for part in minibatches(len(samples), groups, *numbers, e)]
        terms = [
            [(samples[i], *(c[i] for c in columns)) for i in part if samples[i].valid]
            for part in parts
        ]

        return [trained.update(torch.cat([loss(*term) for term in part])) for part in terms]

    def log_probs(self, model, sample: Sample) -> tuple[Tensor, Tensor]:
        logits = model(input_ids=sample.ids[None]).logits[0, sample.prompt_length - 1 : -1]
        every = (logits / self.config.actor_rollout_ref.rollout.temperature).log_softmax(-1)
        return every.gather(-1, sample.ids[sample.prompt_length :, None])[:, 0], -(
            every.exp() * every
        ).sum(-1)

    def values(self, sample: Sample) -> Tensor:
        return self.critic.model(input_ids=sample.ids[None]).logits[
            0, sample.prompt_length - 1 : -1, 0
        ]

    def grpo(self, samples: list[Sample]) -> list[float]:
        of_group = {
            s.group: [x.score for x in samples if x.group == s.group and x.valid] for s in samples
        }
        scores = {
            group: torch.tensor(scores, dtype=torch.float64) for group, scores in of_group.items()
        }

        return [
            float((s.score - scores[s.group].mean()) / (scores[s.group].std() + 1e-6))
            for s in samples
        ]

    def gae(self, samples, old, ref, values) -> tuple[list[Tensor], list[Tensor]]:
        a = self.config.algorithm
        advantages = []
        for sample, before, frozen, value in zip(samples, old, ref, values, strict=True):
            reward = (frozen - before).double() * (a.kl_ctrl.kl_coef if a.use_kl_in_reward else 0.0)
            reward[-1] += sample.score
            following = 0.0
            row = [0.0]
            for r, v in zip(reward.tolist()[::-1], value.tolist()[::-1], strict=True):
                following, row = v, [r + a.gamma * following - v + a.gamma * a.lam * row[0], *row]
            advantages.append(torch.tensor(row[:-1]).double())

        returns = [(a + v).float() for a, v in zip(advantages, values, strict=True)]
        judged = torch.cat([a for a, s in zip(advantages, samples, strict=True) if s.valid])
        return [
            ((a - judged.mean()) * (judged.var() + 1e-8).rsqrt()).float() for a in advantages
        ], returns

    def policy_loss(self, sample: Sample, old: Tensor, ref: Tensor, advantage) -> Tensor:
        a, (new, entropy) = self.settings, self.log_probs(self.actor.model, sample)
        ratio = (new - old).exp()
        low = a.clip_ratio_low or a.clip_ratio
        high = a.clip_ratio_high or a.clip_ratio
        advantage = torch.as_tensor(advantage).expand(ratio.shape)
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * a.clip_ratio_c), loss)
        kl = ((ref - new).exp() - (ref - new) - 1).clamp(max=10) if a.use_kl_loss else 0.0

        return loss - a.entropy_coef * entropy + a.kl_loss_coef * kl

    def value_loss(self, sample: Sample, old: Tensor, target: Tensor) -> Tensor:
        new = self.values(sample)
        near = self.config.critic.cliprange_value
        return (
            torch.maximum((new - target) ** 2, (new.clamp(old - near, old + near) - target) ** 2)
            / 2
        )
