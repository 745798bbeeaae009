"""`judge`: a model behind an endpoint with OpenAI's protocol scores the response.

It gives a score or a reward error, never a 0 instead of one: a body that is not the requested JSON,
a score that is not between 0 and 1, an HTTP status, silence and a spent budget are all reward
errors. Answers are cached and costs are counted in one SQLite file that all worker processes and
later runs share.
"""

import asyncio
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import cast

from distflow.rewards.judge_cache import BudgetSpent, JudgeCache
from distflow.rewards.judge_prompt import (
    RESPONSE_CHARACTERS,
    SCHEMA,
    beginning,
    fill_template,
    judge_template,
    read_score,
)
from distflow.rewards.reward_results import Case, left_s

try:
    import openai
except ImportError as error:
    raise ImportError(
        "the reward 'judge' needs OpenAI's client: pip install 'distflow[judge]'"
    ) from error

CASES: tuple[Case, ...] = ()
"""No known cases: a judge's scores are its own, and cost money."""

_HTTP_LIBRARIES = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
"""The one that the client imported: httpx before its third version, httpx2 since."""
_HTTP_ERRORS = (
    OSError,
    *(error for library in _HTTP_LIBRARIES for error in (library.HTTPError, library.StreamError)),
)
_FORMAT = "response_format"
MAX_BODY_BYTES = 2**20
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 30.0
_SHORTEST_SECRET = 8
_MOST_TOKENS = 2**31
_BYTES_A_TOKEN = 4


class Unavailable(Exception):
    """Another attempt may succeed. wait_s: the wait that the endpoint requested, or None."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


# (URL, model) that rejected the schema and answered without it
_WITHOUT_SCHEMA: set[tuple[str, str]] = set()
_cache_of = functools.cache(JudgeCache)


async def compute_score(
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
    prompt: str = "",
    model: str = "",
    base_url: str = "",
    key_variable: str = "OPENAI_API_KEY",
    template: str = "",
    temperature: float = 0.0,
    answer_tokens: int = 1024,
    structured: bool = True,
    response_characters: int = RESPONSE_CHARACTERS,
    retries: int = 4,
    store: str = "",
    max_calls: int = 0,
    max_tokens: int = 0,
) -> dict[str, object]:
    """The score, from 0.0 to 1.0, and the judge's reason for it.

    model, base_url: of the endpoint; without a URL OpenAI's. key_variable: environment variable
    with the API key. template: a text, or the path of a file with it, with placeholders {prompt},
    {response}, {ground_truth} and names of the row's other columns, and {nonce}, for tags that no
    response can close. structured: with the JSON schema, unless the server rejects it.
    response_characters: a longer response loses its middle. retries: after a 408, 409, 429 or 5xx,
    a broken connection or a time-out, with growing waits. store: a file that caches replies, and
    counts costs. max_calls, max_tokens: of all users of the store; 0 means no limit. Raises
    ValueError if there is no score.
    """
    if not model:
        raise ValueError(
            "the judge has no model: add options to the part, e.g. {name: judge, options: {model: "
            "...}}"
        )
    if (max_calls or max_tokens) and not store:
        raise ValueError("a budget of the judge is counted in a file: set its option 'store' too")
    values = {
        **(extra_info or {}),
        "prompt": prompt,
        "response": solution_str,
        "ground_truth": ground_truth,
    }
    content = fill_template(judge_template(template), values, response_characters)
    asked = _request(model, content, temperature, answer_tokens, structured)
    cache = _cache_of(store)
    key = _hash(json.dumps([base_url, asked], sort_keys=True))
    if (known := _known(cache, key)) is not None:
        return known
    secret = _secret(key_variable, base_url)
    try:
        body = await _ask(asked, _client(base_url, secret), retries, cache, (max_calls, max_tokens))
        answer, tokens = _read(_without(secret, body.decode(errors="replace")))
        cache.spend_tokens(tokens or (len(body) + len(json.dumps(asked))) // _BYTES_A_TOKEN)
        reward_result = read_score(_without(secret, answer) if isinstance(answer, str) else answer)
    except BudgetSpent:  # not the endpoint's fault
        raise
    except openai.OpenAIError as error:
        why = f"the judge rejected the request: {type(error).__name__}: {error}"
        if isinstance(error, openai.AuthenticationError):
            why += (
                f"; the environment variable {key_variable} "
                f"{'holds its key' if secret else 'is not set'}"
            )
    except ValueError as error:
        why = str(error)
    else:
        reward_result["reason"] = _without(secret, str(reward_result["reason"]))
        if store:  # an invalid answer is not cached
            cache.put(key, json.dumps(reward_result))
        return reward_result
    raise ValueError(_without(secret, f"{why} (model '{model}' at {base_url or 'OpenAI'})"))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _known(cache: JudgeCache, key: str) -> dict[str, object] | None:
    """The cached answer; None if there is none, or it is damaged and must be requested again."""
    cached = cache.find(key)
    with suppress(ValueError):
        if cached is not None:
            return read_score(cached)
    return None


def _request(
    model: str, content: str, temperature: float, max_tokens: int, structured: bool
) -> dict[str, object]:
    request: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    if structured:
        schema = {"name": "score", "strict": True, "schema": SCHEMA}
        request[_FORMAT] = {"type": "json_schema", "json_schema": schema}
    return request


def _secret(key_variable: str, base_url: str) -> str:
    """The API key; empty if there is none. Raises ValueError for an invalid one."""
    secret = os.environ.get(key_variable, "").strip()
    if not secret and not base_url:
        raise ValueError(f"the judge has no key: set the environment variable {key_variable}")
    if not (secret.isascii() and secret.isprintable()):
        raise ValueError(
            f"the environment variable {key_variable} does not contain a key: it has characters "
            "not allowed in an "
            f"HTTP header"
        )
    return secret


async def _ask(
    asked: dict[str, object],
    client: openai.AsyncOpenAI,
    retries: int,
    cache: JudgeCache,
    budget: tuple[int, int],
) -> bytes:
    """As `_answer`; without the schema if the endpoint rejects it."""
    endpoint = (str(client.base_url), str(asked["model"]))
    if endpoint not in _WITHOUT_SCHEMA:
        try:
            return await _answer(asked, client, retries, cache, budget)
        except (openai.BadRequestError, openai.UnprocessableEntityError):
            if _FORMAT not in asked:
                raise
    plain = {name: value for name, value in asked.items() if name != _FORMAT}
    body = await _answer(plain, client, retries, cache, budget)
    _WITHOUT_SCHEMA.add(endpoint)
    return body


async def _answer(
    asked: Mapping[str, object],
    client: openai.AsyncOpenAI,
    retries: int,
    cache: JudgeCache,
    budget: tuple[int, int],
) -> bytes:
    """The body of the judge's answer. Each attempt counts as a call.

    Raises openai.OpenAIError if it rejects the request, ValueError if it does not answer in time.
    """
    wait_s = _FIRST_WAIT_S
    for attempt in range(1, retries + 2):
        cache.spend_call(*budget)
        try:
            return await _body(client, asked)
        except Unavailable as error:
            asked_s = f", and asks to wait {error.wait_s:g} s" if error.wait_s else ""
            said = (
                f"the judge did not reply in {attempt} attempt{'s' * (attempt > 1)}: "
                f"{error}{asked_s}"
            )
            pause_s = min(error.wait_s if error.wait_s is not None else wait_s, _LONGEST_WAIT_S)
            if attempt > retries:
                raise ValueError(said) from None
            if pause_s >= left_s():
                raise ValueError(
                    f"{said}; reward.timeout_s leaves no time for another attempt"
                ) from None
            await asyncio.sleep(pause_s)
            wait_s *= 2
    raise AssertionError("the last attempt returns or raises")


async def _body(client: openai.AsyncOpenAI, asked: Mapping[str, object]) -> bytes:
    """The body, at most `MAX_BODY_BYTES`. Raises Unavailable, openai.OpenAIError, ValueError."""
    body = bytearray()
    try:
        async with client.chat.completions.with_streaming_response.create(
            **cast(dict, asked)
        ) as response:
            try:
                async for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise ValueError(
                            f"the judge's reply is longer than {MAX_BODY_BYTES:,} bytes"
                        )
            except _HTTP_ERRORS as error:
                raise Unavailable(f"its reply is incomplete ({error})") from None
    except openai.APIConnectionError as error:  # includes time-outs
        raise Unavailable(
            f"{error} ({error.__cause__})" if error.__cause__ else str(error)
        ) from None
    except openai.APIStatusError as error:
        if error.status_code in (408, 409, 429) or error.status_code >= 500:
            raise Unavailable(
                f"status {error.status_code}", _seconds(error.response.headers.get("retry-after"))
            ) from None
        raise
    return bytes(body)


def _read(body: str) -> tuple[object, int]:
    """The judge's text, and the total tokens: 0 if the endpoint does not report them."""
    try:
        found = json.loads(body)
        content = found["choices"][0]["message"]["content"]
        usage = found.get("usage") or {}
        tokens = usage.get("total_tokens", 0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"the judge's reply is not a chat completion: {beginning(body)}") from None
    return content, tokens if isinstance(tokens, int) and 0 < tokens < _MOST_TOKENS else 0


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header, a number or a date; NaN counts as 0."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _without(secret: str, text: str) -> str:
    """The text without the secret; a short one, like EMPTY, is not secret and may be part of any
    word."""
    return text.replace(secret, "***") if len(secret) >= _SHORTEST_SECRET else text


@functools.cache
def _client(base_url: str, secret: str) -> openai.AsyncOpenAI:
    """One client for all calls of this process, which share its connections. Its retries are off:
    each is a call."""
    return openai.AsyncOpenAI(api_key=secret or "none", base_url=base_url or None, max_retries=0)
