"""Decode steps that are chained on a device: its random numbers, graphs against single kernels, and
who waits."""

import asyncio
import warnings

import numpy as np
import pytest
import torch

from distflow.data.sample import Segment
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.embedded.decode_state import state_of, uniforms
from distflow.rollout.embedded.decode_steps import DeviceOptions
from distflow.rollout.engine import GenerateRequest
from distflow.rollout.random_draws import uniforms as host_uniforms
from tests.rollout.drive import (
    generate_all,
    make_engine,
    make_model,
    prompt_of,
    request_of,
    run_all,
    with_engine,
)

pytestmark = pytest.mark.gpu
LAWS = (
    {},
    {"top_p": 0.9},
    {"top_k": 20, "min_p": 0.02},
    {"repetition_penalty": 1.2},
    {"greedy": True},
)


def requests(**params) -> list[GenerateRequest]:
    lengths = (3, 17, 1, 70)
    return [
        request_of(prompt_of(length), (0, 1, 2), row, max_tokens=40 + 20 * row, **params)
        for row, length in enumerate(lengths)
    ]


def engine_of(device: torch.device, graphs: bool) -> EmbeddedEngine:
    return make_engine(
        make_model().to(device), max_num_seqs=9, on_device=DeviceOptions(graphs=graphs)
    )


def num_graphs(engine: EmbeddedEngine) -> int:
    """The number of CUDA graphs recorded since the start."""
    steps = engine._steps
    return 0 if steps is None else steps.graphs.num_recorded


def test_a_cuda_device_has_its_steps_chained_and_enforce_eager_its_kernels_launched(device):
    if device.type != "cuda":
        pytest.skip("wants a CUDA device")
    for eager in (False, True):
        engine = make_engine(make_model().to(device), enforce_eager=eager)
        run_all(engine, [request_of(prompt_of(5), max_tokens=30)])
        assert (num_graphs(engine) == 0) == eager


def test_uniform_numbers_are_those_of_the_host(device):
    generator = np.random.default_rng(1)
    keys = [
        0,
        1,
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
        *generator.integers(0, 1 << 64, 20_000, dtype=np.uint64).tolist(),
    ]
    positions = generator.integers(0, 1 << 32, len(keys)).tolist()
    states = torch.tensor(
        [state_of(*pair) for pair in zip(keys, positions, strict=True)], device=device
    )
    expected = host_uniforms(np.array(keys, dtype=np.uint64), np.array(positions, dtype=np.int64))
    assert uniforms(states).tolist() == expected.tolist()


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_graphs_give_the_bits_that_single_kernels_give(device, law):
    answers: list[list[tuple[Segment, ...]]] = []
    for graphs in (False, True):
        engine = engine_of(device, graphs)
        answers.append(run_all(engine, requests(**law)))
        if device.type == "cuda":
            assert (num_graphs(engine) > 0) == graphs

    assert answers[0] == answers[1]


def test_weights_that_lie_elsewhere_are_followed(device):
    engine, other = engine_of(device, True), make_model(seed=1)
    expected = run_all(make_engine(other), requests())

    async def story(engine: EmbeddedEngine) -> None:
        await generate_all(engine, requests())
        await engine.pause()
        for own, new in zip(engine.model.parameters(), other.parameters(), strict=True):
            own.data = new.data.to(device, copy=True)
        await engine.resume()

        found = await asyncio.gather(*(engine.generate(request) for request in requests()))
        for one, theirs in zip(found, expected, strict=True):
            for ours, wanted in zip(one, theirs, strict=True):
                assert ours.token_ids == wanted.token_ids
                assert ours.rollout_log_probs == pytest.approx(wanted.rollout_log_probs, abs=1e-4)

    with_engine(engine, story)


@pytest.mark.parametrize("graphs", [False, True])
def test_no_step_but_the_first_waits_for_the_device(device, graphs):
    """However many tokens are drawn."""
    if device.type != "cuda":
        pytest.skip("wants CUDA, which tells when something waits for it")

    counts = []
    for max_tokens in (20, 60):

        async def story(engine: EmbeddedEngine, max_tokens: int = max_tokens) -> None:
            request = request_of(prompt_of(5), (0, 1, 2), max_tokens=max_tokens)
            await engine.generate(request)  # allocates, records
            torch.cuda.set_sync_debug_mode("warn")

            try:
                with warnings.catch_warnings(record=True) as waits:
                    warnings.simplefilter("always")
                    await engine.generate(request)
            finally:
                torch.cuda.set_sync_debug_mode("default")

            counts.append(len([each for each in waits if "synchronizing" in str(each.message)]))

        with_engine(engine_of(device, graphs), story)

    assert counts[0] == counts[1]
