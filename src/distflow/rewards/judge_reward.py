"""`judge`: a model behind an endpoint with OpenAI's protocol scores the response.

It gives a score or a reward error, never a 0 instead of one: an answer that is not the requested
JSON, a score that is not between 0 and 1, an HTTP status and silence are all reward errors.
"""

import functools
import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from distflow.rewards.judge_prompt import (
    RESPONSE_CHARACTERS,
    SCHEMA,
    beginning,
    fill_template,
    judge_template,
    read_score,
)

try:
    import openai
except ImportError as error:
    raise ImportError(
        "the reward 'judge' needs OpenAI's client: pip install 'distflow[judge]'"
    ) from error

_SHORTEST_SECRET = 8
_REJECTED = (openai.BadRequestError, openai.UnprocessableEntityError)
_MAX_REPLY_BYTES = 2**20


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
) -> dict[str, object]:
    """The score, from 0.0 to 1.0, and the judge's reason for it.

    model, base_url: of the endpoint; without a URL OpenAI's. key_variable: environment variable
    with the API key. template: a text, or the path of a file with it, with placeholders {prompt},
    {response}, {ground_truth} and names of the row's other columns, and {nonce}, for tags that no
    response can close. structured: with the JSON schema, which some servers reject.
    response_characters: a longer response loses its middle. retries: of OpenAI's client, after a
    408, 409, 429 or 5xx, a broken connection or a time-out. Raises ValueError if there is no score.
    """
    if not model:
        raise ValueError(
            "the judge has no model: add options to the part, e.g. {name: judge, options: {model: "
            "...}}"
        )

    values = {
        **(extra_info or {}),
        "prompt": prompt,
        "response": solution_str,
        "ground_truth": ground_truth,
    }
    content = fill_template(judge_template(template), values, response_characters)

    asked: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": temperature,
        "max_tokens": answer_tokens,
    }
    if structured:
        schema = {"name": "score", "strict": True, "schema": SCHEMA}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}

    secret = _secret(key_variable, base_url)
    client = _client(base_url, secret).with_options(max_retries=retries)
    try:
        create: Any = client.chat.completions.create
        answer = _content(await create(**asked))
        result = read_score(_without(secret, answer) if isinstance(answer, str) else answer)
    except openai.OpenAIError as error:
        why = _why_no_reply(error)
        if structured and isinstance(error, _REJECTED):
            why += "; if the server takes no JSON schemas, set the option structured: false"
        if isinstance(error, openai.AuthenticationError):
            holds = "holds its key" if secret else "is not set"
            why += f"; the environment variable {key_variable} {holds}"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        body = _without(secret, str(getattr(error, "doc", error)))
        why = f"the judge's reply is not a chat completion: {beginning(body)}"
    except ValueError as error:
        why = str(error)
    else:
        result["reason"] = _without(secret, str(result["reason"]))
        return result

    raise ValueError(_without(secret, f"{why} (model '{model}' at {base_url or 'OpenAI'})"))


def _why_no_reply(error: openai.OpenAIError) -> str:
    why = f"the judge did not reply: {type(error).__name__}: {error}"
    if isinstance(error, openai.APIStatusError):
        # Older clients do not write the status into their message.
        why += f" (status {error.status_code})"
    if error.__cause__ is not None:
        why += f" ({error.__cause__})"
    return why


def _secret(key_variable: str, base_url: str) -> str:
    """The API key; empty if there is none. Raises ValueError for an invalid one."""
    secret = os.environ.get(key_variable, "").strip()
    if not secret and not base_url:
        raise ValueError(f"the judge has no key: set the environment variable {key_variable}")
    if not (secret.isascii() and secret.isprintable()):
        raise ValueError(
            f"the environment variable {key_variable} does not contain a key: it has characters "
            "not allowed in an HTTP header"
        )

    return secret


def _content(answer: Any) -> object:
    try:
        return answer.choices[0].message.content
    except (AttributeError, IndexError, TypeError):
        raise ValueError(
            f"the judge's reply is not a chat completion: {beginning(str(answer))}"
        ) from None


def _without(secret: str, text: str) -> str:
    """The text without the secret; a short one, like EMPTY, is not secret and may be part of any
    word."""
    if len(secret) >= _SHORTEST_SECRET:
        return text.replace(secret, "***")
    return text


@functools.cache
def _client(base_url: str, secret: str) -> openai.AsyncOpenAI:
    """One client for all calls of this process, which share its connections."""
    bounded = openai.DefaultAsyncHttpxClient(event_hooks={"response": [_bound_reply]})
    return openai.AsyncOpenAI(
        api_key=secret or "none", base_url=base_url or None, http_client=bounded
    )


async def _bound_reply(response: Any) -> None:
    """Have the reply break off where it is too long."""
    stream = response.stream
    kind: Any = type(stream)  # of one of the HTTP clients that versions of openai use

    class BoundedStream(kind):
        def __init__(self) -> None:
            pass

        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes = 0
            async for part in stream:
                num_bytes += len(part)
                if num_bytes > _MAX_REPLY_BYTES:
                    raise ValueError(f"the judge's reply has more than {_MAX_REPLY_BYTES:,} bytes")
                yield part

        async def aclose(self) -> None:
            await stream.aclose()

    response.stream = BoundedStream()
