"""Workflows of AReaL's form, as its users write them: RLVRWorkflow and MultiTurnWorkflow with what
they use."""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass
class GenerationHyperparameters:
    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = int(1e8)
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] | None = None
    frequency_penalty: float = 0.0

    def new(self, **changed: Any) -> "GenerationHyperparameters":
        return replace(self, **changed)


@dataclass
class ModelRequest:
    rid: str
    input_ids: list[int]
    gconfig: GenerationHyperparameters
    tokenizer: Any = None


class AsyncRewardWrapper:
    def __init__(self, reward_fn: Callable[..., float]) -> None:
        self.reward_fn = reward_fn

    async def __call__(self, *args: Any, **kwargs: Any) -> float:
        await asyncio.sleep(0)
        return float(self.reward_fn(*args, **kwargs))


def concat_padded_tensors(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    longest = max(row["attention_mask"].shape[1] for row in rows)

    def padded(values: torch.Tensor) -> torch.Tensor:
        return (
            torch.nn.functional.pad(values, (0, longest - values.shape[1]))
            if values.dim() > 1
            else values
        )

    return {name: torch.cat([padded(row[name]) for row in rows]) for name in rows[0]}


def token_ids(tokenizer: Any, messages: list[dict[str, str]], **kwargs: Any) -> list[int]:
    if tokenizer.chat_template is None:  # the models of the tests read plain text
        return list(tokenizer(messages[-1]["content"])["input_ids"])
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs))


class RLVRWorkflow:
    def __init__(self, reward_fn: Any, gconfig: GenerationHyperparameters, tokenizer: Any) -> None:
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        input_ids = token_ids(self.tokenizer, data["messages"], add_generation_prompt=True)
        n_samples = self.gconfig.n_samples
        req = ModelRequest(
            uuid.uuid4().hex, input_ids, self.gconfig.new(n_samples=1), self.tokenizer
        )
        resps = await asyncio.gather(*[engine.agenerate(req) for _ in range(n_samples)])
        assert engine.get_version() >= 0
        prompt_str = self.tokenizer.decode(input_ids)

        results = []
        for resp in resps:
            seq = resp.input_tokens + resp.output_tokens
            logprobs = [0.0] * resp.input_len + resp.output_logprobs
            loss_mask = [0] * resp.input_len + [1] * resp.output_len
            versions = [-1] * resp.input_len + resp.output_versions
            completions_str = self.tokenizer.decode(resp.output_tokens)
            reward = await self.async_reward_fn(
                prompt_str, completions_str, resp.input_tokens, resp.output_tokens, **data
            )
            res = {
                "input_ids": torch.tensor(seq, dtype=torch.int32),
                "loss_mask": torch.tensor(loss_mask, dtype=torch.int32),
                "logprobs": torch.tensor(logprobs, dtype=torch.float32),
                "versions": torch.tensor(versions, dtype=torch.int32),
                "attention_mask": torch.ones(len(seq), dtype=torch.bool),
                "rewards": torch.tensor(reward, dtype=torch.float32),
            }
            results.append({k: v.unsqueeze(0) for k, v in res.items()})

        return concat_padded_tensors(results)


class MultiTurnWorkflow:
    def __init__(
        self,
        reward_fn: Any,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int,
        turn_discount: float,
        feedback: list[int],
    ) -> None:
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.multi_turn_prompt_ids = feedback
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(
        self, engine: Any, data: dict[str, Any]
    ) -> dict[str, torch.Tensor] | None:
        seq: list[int] = []
        logprobs: list[float] = []
        loss_mask: list[int] = []
        versions: list[int] = []
        input_ids = token_ids(self.tokenizer, data["messages"], add_generation_prompt=True)
        rid = uuid.uuid4().hex

        t = 0
        reward = 0.0
        discount = 1.0
        while reward == 0 and t < self.max_turns:
            req = ModelRequest(rid, input_ids, self.gconfig.new(n_samples=1), self.tokenizer)
            resp = await engine.agenerate(req)
            prompt_str = self.tokenizer.decode(input_ids)
            completions_str = self.tokenizer.decode(resp.output_tokens)
            reward = await self.async_reward_fn(
                prompt_str, completions_str, resp.input_tokens, resp.output_tokens, **data
            )
            input_len = len(resp.input_tokens) - len(seq)
            assert len(seq) == 0 or resp.input_tokens[:-input_len] == seq
            seq += resp.input_tokens[-input_len:] + resp.output_tokens
            logprobs += [0.0] * input_len + resp.output_logprobs
            loss_mask += [0] * input_len + [1] * resp.output_len
            versions += [-1] * input_len + resp.output_versions

            t += 1
            if reward == 0 and t < self.max_turns:
                input_ids = input_ids + resp.output_tokens
                if resp.output_tokens and resp.output_tokens[-1] != self.tokenizer.eos_token_id:
                    input_ids = [*input_ids, self.tokenizer.eos_token_id]
                input_ids = input_ids + self.multi_turn_prompt_ids
                discount *= self.turn_discount

        res = {
            "input_ids": torch.tensor(seq),
            "logprobs": torch.tensor(logprobs),
            "loss_mask": torch.tensor(loss_mask),
            "versions": torch.tensor(versions),
            "rewards": torch.tensor(float(reward * discount)),
            "attention_mask": torch.ones(len(seq), dtype=torch.bool),
        }
        return concat_padded_tensors([{k: v.unsqueeze(0) for k, v in res.items()}])


def reward(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    return float(sum(completion_ids) % 3 == 0)
