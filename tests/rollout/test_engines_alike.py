"""What every rollout engine must do, asked of each engine that there is; and engines that do not,
which are found."""

import asyncio
import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distflow.data.sample import Segment
from distflow.errors import UserError
from distflow.rollout.conformance import FIRST as FIRST_WEIGHTS
from distflow.rollout.conformance import (
    MAY_REFUSE,
    PROPERTIES,
    Finding,
    chance,
    check_engine,
)
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.embedded.decode_steps import DeviceOptions
from distflow.rollout.engine import GenerateRequest, RolloutEngine, SamplingParams
from distflow.rollout.engine_bench import Bench, distribution
from distflow.rollout.engine_weights import stripe_hashes
from distflow.rollout.hf_engine import HFEngine
from distflow.rollout.servers.fleet import Fleet
from distflow.rollout.servers.http_engine import HttpEngine
from distflow.rollout.servers.sglang_engine import SGLangEngine
from distflow.rollout.servers.vllm_engine import VllmEngine
from distflow.scheduling.group_states import Version
from tests.rollout.drive import FIRST, Served, make_model
from tests.rollout.servers import test_vllm
from tests.rollout.servers.sglang_server import Running

Make = Callable[[Any, PreTrainedTokenizerFast], RolloutEngine]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, after three special ones: characters other than ASCII take several."""
    vocabulary = {name: index for index, name in enumerate(["<pad>", "<bos>", "<eos>"])}
    vocabulary |= {
        letter: 3 + index
        for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def tiny(family: str, **changes: Any) -> Any:
    return make_model(family, vocab_size=259, **changes)


def embedded(**options: Any) -> Make:
    return lambda model, tokenizer: EmbeddedEngine(
        model, tokenizer, version=FIRST, max_num_seqs=64, **options
    )


def hf(model: Any, tokenizer: PreTrainedTokenizerFast) -> RolloutEngine:
    return HFEngine(model, tokenizer, version=FIRST)


class BehindServer(SGLangEngine):
    """With the server that it asks."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerFast, **options: Any) -> None:
        # other weights, until it has those of the engine
        served = make_model("llama", seed=9, vocab_size=259)
        self.server = Running(
            served, tokenizer, enable_deterministic_inference=True, enable_memory_saver=True
        )
        super().__init__(
            model, tokenizer, version=FIRST, url=self.server.url, free_cache_engine=True, **options
        )

    async def __aenter__(self) -> HttpEngine:
        self.server.__enter__()
        return await super().__aenter__()

    async def __aexit__(self, *exception: object) -> None:
        await super().__aexit__(*exception)
        self.server.__exit__()


def sglang(**options: Any) -> Make:
    return lambda model, tokenizer: Served(BehindServer(model, tokenizer, **options))


class FleetBehindServers(Fleet):
    """Of two servers."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerFast, **options: Any) -> None:
        super().__init__([BehindServer(model, tokenizer, **options) for _ in range(2)])


def vllm(model: Any, tokenizer: PreTrainedTokenizerFast) -> RolloutEngine:
    python = str(test_vllm.PYTHON)
    return Served(VllmEngine(model, tokenizer, version=FIRST, python=python, num_threads=1))


PAGES = DeviceOptions(page_tokens=8, num_pages=400)
ENGINES: dict[str, tuple[Make, str, dict[str, Any]]] = {
    "embedded": (embedded(), "llama", {}),
    "embedded, recompute": (
        embedded(kv_on_update="recompute"),
        "qwen3",
        {"tie_word_embeddings": True},
    ),
    "embedded, abort": (embedded(kv_on_update="abort"), "llama", {"num_key_value_heads": 1}),
    "embedded, step by step": (embedded(enforce_eager=True), "qwen2", {}),
    "embedded, as on a device": (embedded(on_device=PAGES), "qwen3", {}),
    "hf": (hf, "qwen3", {}),
    "sglang": (sglang(), "llama", {}),
    "sglang, fleet": (FleetBehindServers, "llama", {}),
    "vllm": (vllm, "llama", {"head_dim": 32}),
}
MARKS = {
    "embedded": (),
    "sglang": (pytest.mark.slow, pytest.mark.by_hand),
    "vllm": test_vllm.pytestmark,
}
"""Of engines; the others are slow. A fleet asks each of its servers what `sglang` is asked."""
TOP_K_ALONE = {"top_p", "min_p", "repetition_penalty"}
UNSUPPORTED = {"sglang": TOP_K_ALONE, "sglang, fleet": TOP_K_ALONE}
IN_FLIGHT = {
    "embedded, recompute": "recompute",
    "sglang": "recompute",
    "sglang, fleet": "recompute",
    "vllm": "recompute",
}


def check(
    make: Make, model: Any, names: Iterable[str] = PROPERTIES, num_prompts: int = 10
) -> dict[str, Finding]:
    """Findings by name, of an engine on a copy of the model."""
    tokenizer = byte_tokenizer()

    async def run() -> dict[str, Finding]:
        async with make(copy.deepcopy(model), tokenizer) as engine:
            bench = Bench(engine, model, tokenizer, 64, 1e-4, torch.float32, num_prompts)
            return {found.name: found async for found in check_engine(bench, names)}

    return asyncio.run(run())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in ENGINES]
)
def test_it_does_what_every_engine_must(name: str) -> None:
    make, family, changes = ENGINES[name]
    findings = check(make, tiny(family, **changes))
    others = {found.name: found for found in findings.values() if found.outcome != "held"}
    assert set(others) == UNSUPPORTED.get(name, set()), others
    assert all(found.outcome == "not supported" for found in others.values())
    assert set(findings) == set(PROPERTIES)
    met = IN_FLIGHT.get(name, "abort" if name.endswith("abort") else "keep")
    assert findings["weights in flight"].text.startswith(met)


@pytest.mark.slow
def test_sglang_aborts_what_new_weights_meet_where_it_is_to() -> None:
    found = check(
        sglang(kv_on_update="abort"),
        tiny("llama"),
        [FIRST_WEIGHTS, "weights in flight", "pause"],
    )
    assert {each.outcome for each in found.values()} == {"held"}
    assert found["weights in flight"].text.startswith("abort;")


# Engines that are wrong in one thing each.


class Wrong(HFEngine):
    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(model, tokenizer, version=FIRST)

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        result = await super().generate(self.altered(request))
        return tuple(self.told(generation, request) for generation in result)

    def altered(self, request: GenerateRequest) -> GenerateRequest:
        return request

    def told(self, generation: Segment, request: GenerateRequest) -> Segment:
        return generation


def with_params(request: GenerateRequest, **params: Any) -> GenerateRequest:
    return replace(request, params=replace(request.params, **params))


class IgnoresTemperature(Wrong):
    def altered(self, request: GenerateRequest) -> GenerateRequest:
        return with_params(request, temperature=1.0)


class ReportsAnotherTemperature(Wrong):
    """It draws as it should."""

    def told(self, generation: Segment, request: GenerateRequest) -> Segment:
        heat = request.params.temperature
        return replace(
            generation, rollout_log_probs=[one * heat for one in generation.rollout_log_probs]
        )


class DrawsTheLikeliest(Wrong):
    def altered(self, request: GenerateRequest) -> GenerateRequest:
        return with_params(request, greedy=request.params.max_tokens == 1 or request.params.greedy)


class DrawsWhenGreedy(Wrong):
    def altered(self, request: GenerateRequest) -> GenerateRequest:
        return with_params(request, greedy=False)


class ReportsThePolicyForTheDraws(Wrong):
    def told(self, generation: Segment, request: GenerateRequest) -> Segment:
        return replace(generation, sampling_log_probs=generation.rollout_log_probs)


class CutsAnotherTopP(Wrong):
    def altered(self, request: GenerateRequest) -> GenerateRequest:
        return with_params(request, top_p=max(request.params.top_p - 0.1, 1e-3))


class MissesStops(Wrong):
    def altered(self, request: GenerateRequest) -> GenerateRequest:
        return with_params(request, stop=(), stop_token_ids=())


class KnowsOneSeed(Wrong):
    def altered(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, stream=replace(request.stream, seed=0))


class SwapsSamples(Wrong):
    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        return (await super().generate(request))[::-1]


class ReportsNothingANumber(Wrong):
    def told(self, generation: Segment, request: GenerateRequest) -> Segment:
        return replace(generation, rollout_log_probs=[float("nan")] * len(generation.token_ids))


class LosesAVersion(Wrong):
    def told(self, generation: Segment, request: GenerateRequest) -> Segment:
        return replace(generation, versions=generation.versions[1:])


class ReportsTheOldVersion(Wrong):
    def told(self, generation: Segment, request: GenerateRequest) -> Segment:
        return replace(generation, versions=[max(step - 1, 1) for step in generation.versions])


class GeneratesInAPause(Wrong):
    async def pause(self, release: bool = False) -> None:
        pass

    async def resume(self) -> None:
        pass


class TakesWhateverLength(Wrong):
    def altered(self, request: GenerateRequest) -> GenerateRequest:
        return with_params(request, max_tokens=min(request.params.max_tokens, 100))


class KeepsTheOldWeights(Wrong):
    """Its receipt and its hashes are of those that it was sent."""

    async def load_weights(self, version: Version, weights: Any) -> Any:
        if weights is not None and version.step > 1:
            weights, self.said = None, stripe_hashes(weights)
            return replace(
                await super().load_weights(version, None), hashes=self.said, version_only=False
            )
        return await super().load_weights(version, weights)

    async def hashes(self) -> dict[str, str]:
        return getattr(self, "said", None) or await super().hashes()


class HasOtherWeights(Wrong):
    async def load_weights(self, version: Version, weights: Any) -> Any:
        sent = weights if weights is None else [(name, weight + 1e-6) for name, weight in weights]
        receipt = await super().load_weights(version, sent)
        return replace(receipt, hashes=stripe_hashes(weights or ()))


class TakesOlderVersions(Wrong):
    async def load_weights(self, version: Version, weights: Any) -> Any:
        return await super().load_weights(max(version, self.version), weights)


class Breaks(Wrong):
    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        raise KeyError("output_ids")


FAULTS: list[tuple[type[Wrong], str, str]] = [
    (IgnoresTemperature, "log-probs", "log-probs differ"),
    (ReportsAnotherTemperature, "log-probs", "log-probs differ"),
    (DrawsTheLikeliest, "draws", "frequencies of 1000 draws"),
    (DrawsWhenGreedy, "greedy tokens", "less likely than the likeliest"),
    (ReportsThePolicyForTheDraws, "top_k", "log-probs differ"),
    (CutsAnotherTopP, "top_p", "log-probs differ"),
    (MissesStops, "stop token ids", "should have at 'stop'"),
    (MissesStops, "stop strings", "should have at 'stop'"),
    (KnowsOneSeed, "seeds", "give the same tokens"),
    (SwapsSamples, "seeds", "were asked for"),
    (ReportsNothingANumber, "log-probs", "not finite"),
    (LosesAVersion, "log-probs", "versions"),
    (ReportsTheOldVersion, "new weights", "log-probs differ"),
    (GeneratesInAPause, "pause", "generated during a pause"),
    (TakesWhateverLength, "limits", "no UserError"),
    (KeepsTheOldWeights, "new weights", "log-probs differ"),
    (HasOtherWeights, FIRST_WEIGHTS, "hashes are not of the weights sent"),
    (TakesOlderVersions, "new weights", "the older version"),
    (Breaks, "top_k", "KeyError: 'output_ids'"),
]


@pytest.mark.parametrize(
    ("fault", "name", "text"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_an_engine_that_does_not_is_found(fault: type[Wrong], name: str, text: str) -> None:
    *_, found = check(fault, tiny("llama"), [FIRST_WEIGHTS, name]).values()
    assert found.outcome == "failed" and text in found.text, found


def test_what_an_engine_refuses_is_not_supported_where_it_may_be() -> None:
    class Refuses(Wrong):
        async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
            raise UserError("cannot be had from this server")

    findings = check(Refuses, tiny("llama"), [FIRST_WEIGHTS, "log-probs", "top_k"])
    assert [found.outcome for found in findings.values()] == ["held", "failed", "not supported"]
    assert set(MAY_REFUSE) <= set(PROPERTIES)


def test_the_chance_is_that_of_a_chi_square() -> None:
    """Of 5 degrees of freedom P(> 11.07) is 0.05; a die of 600 throws with this square."""
    counts = torch.tensor([100.0, 100, 100, 100, 100 + 23.526, 100 - 23.526])
    assert chance(counts, torch.full((6,), 1 / 6).double()) == pytest.approx(0.05, abs=1e-3)
    assert chance(torch.tensor([1000.0, 0]), torch.tensor([1.0, 0.0])) == 1.0


def test_the_distribution_is_cut_as_transformers_cuts_it() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    wanted = SamplingParams(
        1, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.4
    )
    seen = [3, 7, 7, 11]
    from distflow.rollout.hf_engine import _warpers

    scores = logits[None]
    for warper in _warpers(wanted):
        scores = warper(torch.tensor([seen]), scores)
    torch.testing.assert_close(distribution(logits, seen, wanted), scores[0].softmax(-1))
