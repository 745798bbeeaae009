"""Versions of the weights are sampled from by one engine over the base, each by its own law."""

import asyncio
import copy
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distflow.models.loading import load_model
from distflow.models.lora import merge_adapter
from distflow.models.row_adapters import make_row_adaptable
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.engine import SamplingParams, Stream
from distflow.rollout.hf_engine import HFEngine
from distflow.tinker.sampler import SampleRequest, Samplers
from tests.models.test_row_adapters import write_adapter
from tests.rollout.drive import FIRST
from tests.tiny_models import tiny_tokenizer, write_tiny_model

pb = pytest.importorskip("tinker.proto.tinker_public_pb2")

PROMPT = (5, 9, 7, 8)
ENGINES: dict[str, Callable[..., Any]] = {"embedded": EmbeddedEngine, "hf": HFEngine}


class Made:
    """Makes engines over a tiny model, and knows over which checkpoints."""

    def __init__(self, folder: Path, engine: str = "embedded") -> None:
        self.base = load_model(write_tiny_model(folder / "base", "qwen3"))
        self.over: list[Path | None] = []
        self._make = ENGINES[engine]

    def __call__(self, checkpoint: Path | None) -> Any:
        self.over.append(checkpoint)
        model = self.merged(checkpoint)
        if checkpoint is None:
            make_row_adaptable(model)
        return self._make(model, tiny_tokenizer(), version=FIRST)

    def merged(self, checkpoint: Path | None) -> Any:
        model = copy.deepcopy(self.base)
        return merge_adapter(model, str(checkpoint)) if checkpoint else model


def sampled(made: Made, waves: Sequence[Sequence[Path | None]]) -> list[Any]:
    """Answers to requests for each checkpoint; those of a wave come at once."""
    request = SampleRequest(PROMPT, 2, SamplingParams(max_tokens=6), 1, True, 2, 0)

    async def run() -> list[Any]:
        found = []
        with ThreadPoolExecutor(1) as scoring:
            samplers = Samplers(made, scoring)
            for wave in waves:
                asked = []
                for row, folder in enumerate(wave):
                    asked.append(samplers.sample(folder, request, Stream(1, "serve", 0, row)))
                for body in await asyncio.gather(*asked):
                    found.append(pb.SampleResponse.FromString(body))
            await samplers.close()
        return found

    return asyncio.run(run())


@torch.no_grad()
def check(model: Any, answer: Any) -> None:
    """That log-probs of the prompt and of what was drawn are this model's."""
    prompt = np.frombuffer(answer.prompt_logprobs, np.float32)
    top = np.frombuffer(answer.topk_prompt_logprobs.logprobs, np.float32).reshape(-1, 2)
    for sequence in answer.sequences:
        drawn = np.frombuffer(sequence.tokens, np.int32).tolist()
        ids = torch.tensor([[*PROMPT, *drawn]])
        log_probs = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        own = log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist()
        split = len(PROMPT) - 1
        assert math.isnan(prompt[0])
        assert prompt[1:] == pytest.approx(own[:split], abs=1e-4)
        assert np.frombuffer(sequence.logprobs, np.float32) == pytest.approx(own[split:], abs=1e-4)
        assert top[1:] == pytest.approx(log_probs[:split].topk(2).values.numpy(), abs=1e-4)


def versions(made: Made, folder: Path, count: int) -> list[Path]:
    for number in range(count):
        write_adapter(made.base, folder / str(number), rank=2 + number, seed=number)
    return [folder / str(number) for number in range(count)]


@pytest.mark.parametrize("engine", ENGINES)
def test_versions_are_sampled_at_once_by_one_engine(tmp_path: Path, engine: str) -> None:
    made = Made(tmp_path, engine)
    wave = [*versions(made, tmp_path, 3), None]
    for folder, answer in zip(wave, sampled(made, [wave]), strict=True):
        check(made.merged(folder), answer)
    assert made.over == [None]


def test_a_version_that_left_memory_is_read_again(tmp_path: Path) -> None:
    made = Made(tmp_path)
    folders = versions(made, tmp_path, 12)
    answers = sampled(made, [[folder] for folder in (*folders, folders[0])])
    assert answers[0] == answers[-1]


def test_a_checkpoint_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    made = Made(tmp_path)
    (folder,) = versions(made, tmp_path, 1)

    class Wave(list[Path | None]):
        """Before its requests come the checkpoint is written again."""

        def __iter__(self) -> Any:
            write_adapter(made.base, folder, rank=3, seed=7)
            os.utime(folder, ns=(0, 10**9))
            return super().__iter__()

    first, second = sampled(made, [[folder], Wave([folder])])
    assert first != second
    check(made.merged(folder), second)


def test_what_is_no_plain_adapter_is_merged_in_an_engine_of_its_own(tmp_path: Path) -> None:
    made = Made(tmp_path)
    plain, other = versions(made, tmp_path, 2)
    place = other / "adapter_config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "use_rslora": True}))
    wave = [plain, other, other, None]
    for folder, answer in zip(wave, sampled(made, [wave]), strict=True):
        check(made.merged(folder), answer)
    assert made.over == [None, other]


def test_an_engine_that_could_not_be_made_is_made_when_it_is_asked_for_again(
    tmp_path: Path,
) -> None:
    made = Made(tmp_path)
    fails = [True]

    def make(checkpoint: Path | None) -> Any:
        if fails.pop():
            raise MemoryError("17 bytes")
        return made(checkpoint)

    fails[:0] = [False]
    request = SampleRequest(PROMPT, 1, SamplingParams(max_tokens=2), 1, False, 0, 0)

    async def run() -> None:
        with ThreadPoolExecutor(1) as scoring:
            samplers = Samplers(make, scoring)
            with pytest.raises(MemoryError, match="17"):
                await samplers.sample(None, request, Stream(1, "serve", 0, 0))
            assert await samplers.sample(None, request, Stream(1, "serve", 0, 0))
            await samplers.close()

    asyncio.run(run())
