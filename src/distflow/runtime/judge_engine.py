"""A judge that runs as an engine of the run: a language model that writes the score of a
response."""

import asyncio
import gc
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.rewards.judge_prompt import (
    RESPONSE_CHARACTERS,
    fill_template,
    score_at_end,
)
from distflow.rollout.engine import GenerateRequest, RolloutEngine, SamplingParams, Stream
from distflow.training.torch_engine import FrozenWeights


@dataclass(eq=False, repr=False)
class Judge(FrozenWeights):
    """Scores the responses of a whole step at once, by the most likely answer to the filled
    template."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    make_engine: Callable[[], RolloutEngine]
    """Makes a rollout engine over the model, for each step anew: between steps only the weights
    take memory."""
    template: str
    params: SamplingParams
    max_positions: int | None
    """Of a question and its answer, in tokens; None if the model has no limit."""

    def score(self, batch: Batch) -> list[dict[str, object]]:
        """For each response, `score` from 0 to 1 and `reason`; or `error`, which never counts as a
        score of 0."""
        found = list[dict[str, object]]()
        requests = dict[int, GenerateRequest]()
        for row in range(len(batch)):
            try:
                question = self._question(batch, row)
            except ValueError as error:
                found.append({"error": str(error)})
                continue

            found.append({})
            stream = Stream(0, "judge", 0, row)
            requests[row] = GenerateRequest(tuple(question), (0,), self.params, stream)

        if not requests:
            return found

        # this thread may have a running loop, e.g. in a notebook
        with ThreadPoolExecutor(1) as thread:
            replies = thread.submit(asyncio.run, self._generate(requests.values())).result()
        for row, reply in zip(requests, replies, strict=True):
            found[row] = self._read(reply)
        return found

    async def _generate(self, requests: Iterable[GenerateRequest]) -> list[tuple[Segment, ...]]:
        engine = self.make_engine()
        try:
            async with engine:
                return list(await asyncio.gather(*map(engine.generate, requests)))
        finally:
            del engine
            gc.collect()  # its parts reference each other

    def _question(self, batch: Batch, row: int) -> list[int]:
        """The tokens of the model's question. Raises ValueError if it cannot be asked."""
        extra = None
        if "extra_info" in batch:
            extra = batch["extra_info"][row]

        truth = None
        if "ground_truth" in batch:
            truth = batch["ground_truth"][row]

        response = str(batch["responses"][row])
        for token in self.tokenizer.get_added_vocab():  # no added token may end the question
            if len(token) > 1:
                response = response.replace(token, f"{token[:1]} {token[1:]}")

        values = {
            **(extra or {}),
            "prompt": batch["prompts"][row],
            "response": response,
            "ground_truth": truth,
        }
        text = fill_template(self.template, values, RESPONSE_CHARACTERS)
        tokenizer: Any = self.tokenizer  # its methods have too many types to annotate

        is_chat = bool(self.tokenizer.chat_template)
        if is_chat:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )

        ids: list[int] = tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"]
        if self.max_positions is not None:
            longest = self.max_positions - self.params.max_tokens
            if len(ids) > longest:
                raise ValueError(f"the judge reads {longest} tokens, and was to read {len(ids)}")

        return ids

    def _read(self, reply: tuple[Segment, ...]) -> dict[str, object]:
        tokens = list(reply[0].token_ids)
        try:
            return score_at_end(str(self.tokenizer.decode(tokens, skip_special_tokens=True)))
        except ValueError as error:
            return {"error": str(error)}
