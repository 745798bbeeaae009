"""Episodes behind an endpoint, with a scripted policy."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

from distflow.environments.chat import Chat, Limits
from distflow.environments.conversations import Conversations
from distflow.environments.endpoint import Endpoint, Session
from distflow.environments.endpoint_calls import Answer, Call
from distflow.runtime.rollout_loop.loop_thread import LoopThread
from tests.environments.test_chat import FAMILIES, Engine, Family, chat_of, ids


@dataclass
class Episode:
    """One whose chat has an endpoint. replies: of the policy, without the token that ends them."""

    family: Family
    engine: Engine
    chat: Chat
    session: Session

    @property
    def openai(self) -> Any:
        return import_module("openai").OpenAI(
            base_url=f"{self.session.base_url}/v1", api_key=self.session.key, max_retries=0
        )

    @property
    def anthropic(self) -> Any:
        return import_module("anthropic").Anthropic(
            base_url=self.session.base_url, api_key=self.session.key, max_retries=0
        )

    def check_exact(self) -> None:
        """Every prompt is all tokens before it, and what was drawn is in the chat as it was
        drawn."""
        before: tuple[int, ...] = ()
        for (prompt, *_), drawn in zip(self.engine.asked, self.engine.replies, strict=False):
            assert prompt[: len(before)] == before and len(prompt) > len(before)
            before = (*prompt, *drawn)
        assert self.chat.token_ids == before


@pytest.fixture(scope="module")
def endpoint():
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="module")
def loop():
    with LoopThread("episodes") as loop:
        yield loop


@pytest.fixture
def begin(endpoint, loop):
    """Starts an episode with these replies."""
    opened = []

    def start(*replies: str | Sequence[int], family: str = "qwen2.5") -> Episode:
        found = FAMILIES[family]()
        end = ids(found, found.end)
        engine = Engine(
            [ids(found, text) + end if isinstance(text, str) else text for text in replies]
        )
        chat = chat_of(found, engine, Limits(4000, 16_000))
        conversations = Conversations(chat, None, 64)

        def submit(call: Call) -> "Future[Answer]":
            return loop.start(conversations.answer(call))

        context = endpoint.session(submit)
        opened.append(context)
        return Episode(found, engine, chat, context.__enter__())

    yield start
    for context in opened:
        context.__exit__(None, None, None)
