"""Tests a running engine against the protocol of `rollout/engine.py`. The references are a plain
forward of transformers, and truncations computed here in float64."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor

from distflow.errors import UserError, count_of
from distflow.rollout.engine import SamplingParams
from distflow.rollout.engine_bench import Bench, Fails, distribution

NUM_DRAWS: Final = 1000
LEAST_CHANCE: Final = 1e-6
"""The least p-value accepted: one correct engine in a million fails."""
_QUIET_S: Final = 0.2
_DEADLINE_S: Final = 300.0
_HOT: Final[dict[str, Any]] = {"temperature": 1.5}


@dataclass(frozen=True)
class Finding:
    """One check's result."""

    name: str
    outcome: str
    """"held", "failed" or "not supported"."""
    text: str
    """Figures, or the reason."""


def chance(counts: Tensor, probs: Tensor) -> float:
    """The p-value of a chi-square test of the frequencies against the probabilities; rare tokens
    are pooled."""
    expected = probs * counts.sum()
    likely = expected >= 5
    observed = torch.cat((counts[likely], counts[~likely].sum()[None]))
    expected = torch.cat((expected[likely], expected[~likely].sum()[None]))
    observed = observed[expected >= 5]
    expected = expected[expected >= 5]
    if len(expected) < 2:
        return 1.0

    square = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1.0).double()
    return float(torch.special.gammaincc(freedom / 2, square / 2))


async def log_probs(bench: Bench) -> str:
    """Log-probs are right after prompts of all lengths, up to the longest possible."""
    quarter = bench.longest // 4 or 1
    most = bench.longest - bench.num_tokens
    lengths = sorted({1, 2, 3, quarter, bench.longest // 2, most})

    gaps = list[float]()
    for heat in (1.0, 0.7, 1.5):
        asked = [bench.ask(bench.prompt(length), (0, 1), temperature=heat) for length in lengths]
        for length, found in zip(lengths, await asyncio.gather(*asked), strict=True):
            prompt = bench.prompt(length)
            for each in found:
                gaps.append(bench.gap(prompt, each, bench.logits(prompt, each), temperature=heat))

    return f"{bench.within(gaps)}, prompts of {', '.join(map(str, lengths))} tokens"


async def greedy(bench: Bench) -> str:
    """A greedy response equals that of `hf`, up to the first near tie."""
    prompts = [bench.prompt(2 + row % 7, row) for row in range(bench.num_prompts)]
    most = min(8, bench.num_tokens)
    asked = [bench.ask(prompt, greedy=True, max_tokens=most) for prompt in prompts]

    num_ties = 0
    for prompt, (response,) in zip(prompts, await asyncio.gather(*asked), strict=True):
        logits = bench.logits(prompt, response)
        bench.within([bench.gap(prompt, response, logits)])
        chosen = logits.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
        behind = logits.amax(-1) - chosen
        if float(behind.max()) > 2 * bench.limit:
            raise Fails(f"a token is {float(behind.max()):.2g} nats less likely than the likeliest")
        num_ties += int((behind > 0).sum())

    return f"{count_of(len(prompts), 'prompt')}, {num_ties} near ties"


async def draws(bench: Bench, **params: Any) -> str:
    """Draws have the frequencies and the log-probs of the distribution that the parameters
    define."""
    prompt = bench.prompt(3)
    samples = tuple(range(50))
    rows = range(NUM_DRAWS // len(samples))
    asked = [bench.ask(prompt, samples, row, max_tokens=1, **params) for row in rows]
    drawn = list(chain.from_iterable(await asyncio.gather(*asked)))
    logits = bench.logits(prompt, drawn[0])
    by_token = {each.token_ids[0]: each for each in drawn}
    bench.within(bench.gap(prompt, each, logits, **params) for each in by_token.values())
    probs = distribution(logits[0], prompt, SamplingParams(1, **params))
    tokens = torch.tensor([each.token_ids[0] for each in drawn])

    found = chance(torch.bincount(tokens, minlength=len(probs)).double(), probs)
    if found < LEAST_CHANCE:
        raise Fails(
            f"the frequencies of {NUM_DRAWS} draws are not those of the distribution (p = "
            f"{found:.1e})"
        )

    longer = await bench.ask(prompt, (0, 1, 2, 3), row=NUM_DRAWS, **params)
    return f"{NUM_DRAWS} draws, p = {found:.2g}; {bench.compare(prompt, longer, **params)}"


async def stops(bench: Bench, by_text: bool) -> str:
    """A response ends with the token that completes its stop: one from the middle of the response
    that had none, or a piece of its text."""
    for row in range(64):
        prompt = bench.prompt(5, row)
        (free,) = await bench.ask(prompt, greedy=True)

        stop: dict[str, Any] = {"stop_token_ids": (free.token_ids[len(free.token_ids) // 2],)}
        if by_text:
            text = bench.text(free.token_ids)
            if not text:
                continue
            middle = len(text) // 2
            stop = {"stop": ("nowhere at all", text[middle : middle + 3])}

        found = await bench.ask(prompt, greedy=True, **stop)
        if found[0].finish_reason != "stop":
            raise Fails(f"a response continued where another had ended with {stop}")
        return f"after {len(found[0].token_ids)} tokens; {bench.compare(prompt, found)}"

    raise Fails("none of 64 greedy responses contains a text to stop at")


async def seeds(bench: Bench) -> str:
    """The request determines the draws: a sample is the same alone and in its group, and differs
    from all others."""
    prompt = bench.prompt(4)
    group = await bench.ask(prompt, (4, 0, 9), **_HOT)
    found = [tuple(each.token_ids) for each in group]
    (other_row,) = await bench.ask(prompt, (4,), row=1, **_HOT)
    (other_seed,) = await bench.ask(prompt, (4,), seed=2, **_HOT)
    if len({*found, tuple(other_row.token_ids), tuple(other_seed.token_ids)}) < 5:
        raise Fails("two samples, rows or seeds give the same tokens")
    if not getattr(bench.engine, "repeats_draws", True):
        raise UserError("samples differ, but repeating a request gives different tokens")

    for each in group:
        (again,) = await bench.ask(prompt, (each.sample,), **_HOT)
        if again.token_ids != each.token_ids:
            raise Fails("repeating a request gives different tokens")

    return "the same for a request again, others for another sample, row or seed"


async def limits(bench: Bench) -> str:
    """A response has at most the requested number of tokens; impossible requests are rejected
    without side effects."""
    prompt = bench.prompt(3)
    wrong: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((), {}),
        ((10**9,), {}),
        (prompt, {"max_tokens": bench.max_positions}),
        (prompt, {"top_p": 0.0}),
    ]
    for ids, params in wrong:
        (refused,) = await asyncio.gather(bench.ask(ids, **params), return_exceptions=True)
        if not isinstance(refused, UserError):
            raise Fails(f"no UserError for {len(ids)} tokens of prompt, {params}: {refused!r}")

    counts = (1, 2, bench.longest - 3)
    found = list[Any]()
    for count in counts:
        found += await bench.ask(prompt, max_tokens=count)

    return (
        f"{len(wrong)} requests refused; cut off after {counts} tokens, "
        f"{bench.compare(prompt, found)}"
    )


async def pauses(bench: Bench) -> str:
    """Nothing is generated during a pause, and everything continues after it."""
    began = time.monotonic()
    await bench.ask(bench.prompt(2), max_tokens=1)
    long_enough = _QUIET_S + 4 * (time.monotonic() - began)
    tasks = await bench.ask_long()
    before = await _paused_count(bench)
    late = asyncio.create_task(bench.ask(bench.prompt(2), max_tokens=1))
    await asyncio.sleep(long_enough)
    await bench.engine.pause()
    if bench.counted != before or late.done():
        raise Fails(f"{bench.counted - before} tokens were generated during a pause")

    await bench.engine.resume()
    results = await asyncio.gather(*tasks, late)
    return max(bench.compare(bench.prompt(2, row % 4), found) for row, found in enumerate(results))


async def _paused_count(bench: Bench) -> int:
    """Pause the engine. Returns its count when the responses that had ended before have arrived."""
    before = -1
    await bench.engine.pause()

    while before != bench.counted:
        before = bench.counted
        await asyncio.sleep(_QUIET_S)
        await bench.engine.pause()

    return before


async def new_weights(bench: Bench) -> str:
    """The engine has the weights that were sent, uses them, and reports their version. Older
    versions are rejected."""
    prompt = bench.prompt(5)
    other = bench.changed()
    hashes = await bench.load(other)
    found = bench.compare(prompt, await bench.ask(prompt, (0, 1)))
    version = bench.next_version()
    older = bench.engine.version
    bench.served[version.step] = other
    await bench.engine.load_weights(version, None)

    (renamed,) = await bench.ask(prompt)
    if {*renamed.versions} != {version.step}:
        raise Fails(
            f"{older.step} was renamed to {version.step}, but tokens are of {renamed.versions}"
        )

    try:
        await bench.engine.load_weights(older, None)
    except ValueError:
        return f"{hashes}; {found}"

    raise Fails(f"the older version {older.step} was taken")


async def in_flight(bench: Bench) -> str:
    """After a weight update within a response, tokens come from their version's weights, with old
    or new keys and values."""
    for patience in (8, 16, 4, 32, 2, 64, 1, 256, 1024):
        tasks = await bench.ask_long(patience)
        await bench.load(bench.changed())

        met = set[str]()
        gaps = list[float]()
        for row, found in enumerate(await asyncio.gather(*tasks)):
            prompt = bench.prompt(2, row)
            for each in found:
                if each.finish_reason == "abort":
                    met.add("abort")
                if not each.token_ids:
                    continue

                kept = bench.gap(prompt, each, bench.logits(prompt, each, keeps_kv=True))
                new = bench.gap(prompt, each, bench.logits(prompt, each, keeps_kv=False))
                gaps.append(min(kept, new))
                if len({*each.versions}) > 1:
                    met.add("keep" if kept < new else "recompute")

        figures = bench.within(gaps)
        if met:
            return f"{' and '.join(sorted(met))}; {figures}"

    raise UserError("new weights wait until responses have ended")


async def release(bench: Bench) -> str:
    """Freed memory is restored with the next weights."""
    await bench.engine.pause(release=True)
    hashes = await bench.load(bench.model)
    await bench.engine.resume()
    return f"{hashes}; {bench.compare(bench.prompt(5), await bench.ask(bench.prompt(5)))}"


async def first_weights(bench: Bench) -> str:
    try:
        return await bench.load(bench.model)
    except UserError:  # a server for evaluation, which must have the model's weights already
        bench.served[bench.engine.version.step] = bench.model
        raise


FIRST: Final = "first weights"
PROPERTIES: dict[str, Callable[[Bench], Awaitable[str]]] = {
    FIRST: first_weights,
    "log-probs": log_probs,
    "greedy tokens": greedy,
    "draws": draws,
    "top_k": partial(draws, top_k=5),
    "top_p": partial(draws, top_p=0.8),
    "min_p": partial(draws, min_p=0.2),
    "repetition_penalty": partial(draws, repetition_penalty=1.5),
    "stop token ids": partial(stops, by_text=False),
    "stop strings": partial(stops, by_text=True),
    "seeds": seeds,
    "limits": limits,
    "pause": pauses,
    "new weights": new_weights,
    "weights in flight": in_flight,
    "released memory": release,
}
MAY_REFUSE: Final = (
    *(FIRST, "new weights", "weights in flight", "released memory"),
    *("top_k", "top_p", "min_p", "repetition_penalty", "seeds"),
)
"""Properties that an engine may reject with UserError; a run that needs one gets that message at
its start."""


async def check_engine(bench: Bench, names: Iterable[str] = PROPERTIES) -> AsyncIterator[Finding]:
    """Yields each finding as soon as it is known. The last property leaves the engine with its
    first weights."""
    for name in names:
        work = asyncio.wait_for(PROPERTIES[name](bench), _DEADLINE_S)
        (found,) = await asyncio.gather(work, return_exceptions=True)
        if isinstance(found, BaseException) and not isinstance(found, Exception):
            raise found  # the process is being ended

        outcome = "held"
        text = str(found)
        if isinstance(found, UserError) and name in MAY_REFUSE:
            outcome = "not supported"
        elif isinstance(found, Exception):
            outcome = "failed"
            if not isinstance(found, Fails):
                text = f"{type(found).__name__}: {text}"

        yield Finding(name, outcome, text)
        if (name, outcome) == (FIRST, "failed"):
            return  # no other check is meaningful then
