"""A judge that runs as an engine of the run: a language model that writes the score of a
response."""

import asyncio
import gc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.rewards.judge_prompt import (
    RESPONSE_CHARACTERS,
    fill_template,
    score_at_end,
)
from distflow.rollout.engine import GenerateRequest, RolloutEngine, SamplingParams, Stream
from distflow.training.engine import Collective, OneRank
from distflow.training.torch_engine import FrozenWeights, TorchScorer


@dataclass(eq=False, repr=False)
class Judge(FrozenWeights):
    """Scores the responses of a whole step at once, by the most likely answer to the filled
    template.

    make_engine: a rollout engine over the model. Each step makes one, so that between steps only
    the weights take memory. None if the weights are sharded: then the ranks of `group`, each with
    its own responses, run the model equally often. max_positions: tokens of a question and its
    answer; None if the model has no limit.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    make_engine: Callable[[], RolloutEngine] | None
    template: str
    params: SamplingParams
    max_positions: int | None
    group: Collective = field(default_factory=OneRank)

    def score(self, batch: Batch) -> list[dict[str, object]]:
        """For each response, `score` from 0 to 1 and `reason`; or `error`, which never counts as a
        score of 0."""
        found = dict[int, dict[str, object]]()
        wanted = dict[int, list[int]]()
        for row in range(len(batch)):
            question = self._question(batch, row)
            if isinstance(question, str):
                found[row] = {"error": question}
            else:
                wanted[row] = question
        if self.make_engine is None:
            replies = self._write_together(list(wanted.values()))
        else:
            replies = self._write(wanted) if wanted else []
        for row, reply in zip(wanted, replies, strict=True):
            found[row] = self._read(reply)
        return [found[row] for row in range(len(batch))]

    def _write(self, wanted: Mapping[int, list[int]]) -> list[list[int]]:
        """The tokens of each reply."""
        requests = [
            GenerateRequest(tuple(ids), (0,), self.params, Stream(0, "judge", 0, row))
            for row, ids in wanted.items()
        ]
        # this thread may have a running loop, e.g. in a notebook
        with ThreadPoolExecutor(1) as thread:
            results = thread.submit(asyncio.run, self._generate(requests)).result()
        return [list(result[0].token_ids) for result in results]

    @torch.no_grad()
    def _write_together(self, questions: list[list[int]]) -> list[list[int]]:
        """The same by sharded weights, with transformers' `generate`, some questions at a time."""
        scorer = TorchScorer(self.model)
        width = max(map(len, questions), default=0) + self.params.max_tokens
        size = max(1, scorer.max_tokens // width)
        parts = [questions[start : start + size] for start in range(0, len(questions), size)]
        parts += [[]] * (int(self.group.max(float(len(parts)))) - len(parts))
        return [reply for part in parts for reply in self._continue(part, scorer.device)]

    def _continue(self, questions: list[list[int]], device: torch.device) -> list[list[int]]:
        rows = questions or [[0]]
        longest, stops = (
            max(map(len, rows)),
            torch.tensor(self.params.stop_token_ids, device=device),
        )
        padded = [[(0, 0)] * (longest - len(row)) + [(token, 1) for token in row] for row in rows]
        ids, mask = torch.tensor(padded, device=device).unbind(-1)

        def all_ended(ids: Tensor, scores: Tensor, **_: object) -> Tensor:
            is_open = bool(questions) and not bool(
                torch.isin(ids[:, longest:], stops).any(-1).all()
            )
            return torch.full((len(ids),), self.group.max(float(is_open)) == 0, device=device)

        generate: Any = self.model.generate
        options: dict[str, object] = {
            "max_new_tokens": self.params.max_tokens,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        options |= {
            "do_sample": False,
            "num_beams": 1,
            "repetition_penalty": 1.0,
            "synced_gpus": False,
        }
        found = generate(
            input_ids=ids, attention_mask=mask, stopping_criteria=[all_ended], **options
        )
        replies: list[list[int]] = found[: len(questions), longest:].tolist()
        ends = [
            [at for at, token in enumerate(reply) if token in self.params.stop_token_ids]
            for reply in replies
        ]
        return [
            reply[: end[0] + 1] if end else reply for reply, end in zip(replies, ends, strict=True)
        ]

    async def _generate(self, requests: list[GenerateRequest]) -> list[tuple[Segment, ...]]:
        assert self.make_engine is not None
        engine = self.make_engine()
        try:
            async with engine:
                return list(await asyncio.gather(*map(engine.generate, requests)))
        finally:
            del engine
            gc.collect()  # its parts reference each other

    def _question(self, batch: Batch, row: int) -> list[int] | str:
        """The tokens of the model's question, or why it cannot be asked."""
        extra, truth = (
            batch[name][row] if name in batch else None for name in ("extra_info", "ground_truth")
        )
        response = str(batch["responses"][row])
        for token in self.tokenizer.get_added_vocab():  # no added token may end the question
            response = (
                response.replace(token, f"{token[:1]} {token[1:]}") if len(token) > 1 else response
            )
        values = {
            **(extra or {}),
            "prompt": batch["prompts"][row],
            "response": response,
            "ground_truth": truth,
        }
        try:
            text = fill_template(self.template, values, RESPONSE_CHARACTERS)
        except ValueError as error:
            return str(error)
        tokenizer: Any = self.tokenizer  # its methods have too many types to annotate
        if self.tokenizer.chat_template:
            message = {"role": "user", "content": text}
            text = tokenizer.apply_chat_template(
                [message], tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(text, add_special_tokens=not self.tokenizer.chat_template, verbose=False)[
            "input_ids"
        ]
        longest = (self.max_positions or len(ids) + self.params.max_tokens) - self.params.max_tokens
        return (
            ids
            if len(ids) <= longest
            else f"the judge reads {longest} tokens, and was to read {len(ids)}"
        )

    def _read(self, reply: list[int]) -> dict[str, object]:
        try:
            return score_at_end(str(self.tokenizer.decode(reply, skip_special_tokens=True)))
        except ValueError as error:
            return {"error": str(error)}
