"""Agents of several frameworks, unchanged: each runs its own loop with a tool, and becomes one
conversation."""

import json
import sys
from typing import Any

import pytest

from tests.environments.test_endpoint import ASKED, CALLS

pytestmark = [pytest.mark.slow, pytest.mark.by_hand]
WHY = "the frameworks of agents are tested where they are installed: make test-agents installs"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one number
        b: another number
    """
    return a + b


def owners(episode: Any) -> list[str]:
    return [segment.owner for segment in episode.chat.segments]


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
def test_openai_agents(begin, api):
    agents = pytest.importorskip("agents", reason=f"{WHY} openai-agents")
    openai = pytest.importorskip("openai")
    episode = begin(f"Let me see. {CALLS}", "It is 2.")
    client = openai.AsyncOpenAI(
        base_url=f"{episode.session.base_url}/v1", api_key=episode.session.key
    )
    kind = (
        agents.OpenAIChatCompletionsModel
        if api == "chat_completions"
        else agents.OpenAIResponsesModel
    )
    agents.set_tracing_disabled(True)
    agent = agents.Agent(
        "adder",
        instructions="Use the tool.",
        tools=[agents.function_tool(add)],
        model=kind(model="gpt-4o", openai_client=client),
    )
    assert agents.Runner.run_sync(agent, "What is 1 + 1?").final_output == "It is 2."
    episode.check_exact()
    assert owners(episode) == ["prompt", "policy", "tool", "policy"]
    assert episode.chat.messages[3]["content"] == "2"


def test_pydantic_ai(begin):
    pydantic_ai = pytest.importorskip("pydantic_ai", reason=f"{WHY} 'pydantic-ai-slim[openai]'")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    episode = begin(f"Let me see. {CALLS}", "It is 2.")
    provider = OpenAIProvider(
        base_url=f"{episode.session.base_url}/v1", api_key=episode.session.key
    )
    agent = pydantic_ai.Agent(
        OpenAIChatModel("gpt-4o", provider=provider), system_prompt="Use the tool.", tools=[add]
    )
    assert agent.run_sync("What is 1 + 1?").output == "It is 2."
    episode.check_exact()
    assert owners(episode) == ["prompt", "policy", "tool", "policy"]


def test_smolagents(begin):
    smolagents = pytest.importorskip("smolagents", reason=f"{WHY} smolagents")
    final = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "2"}}\n</tool_call>'
    episode = begin(f"Let me see. {CALLS}", final)
    model = smolagents.OpenAIServerModel(
        "gpt-4o", api_base=f"{episode.session.base_url}/v1", api_key=episode.session.key
    )
    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(add)], model=model, verbosity_level=0
    )
    assert agent.run("What is 1 + 1?") == "2"
    drawn = [
        token
        for chat in episode.chat.conversations
        for s in chat.segments
        if s.owner == "policy"
        for token in s.token_ids
    ]
    assert sorted(drawn) == sorted(token for reply in episode.engine.replies for token in reply)
    assert "smolagents" in sys.modules


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
def test_langchain(begin, api):
    langchain = pytest.importorskip("langchain_openai", reason=f"{WHY} langchain-openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    episode = begin(f"Let me see. {CALLS}", "It is 2.")
    model = langchain.ChatOpenAI(
        model="gpt-4o",
        base_url=f"{episode.session.base_url}/v1",
        api_key=episode.session.key,
        use_responses_api=api == "responses",
    ).bind_tools([tool(add)])
    messages: list[Any] = [HumanMessage("What is 1 + 1?")]
    messages.append(model.invoke(messages))
    (call,) = messages[-1].tool_calls
    messages.append(ToolMessage(str(add(**call["args"])), tool_call_id=call["id"]))
    assert model.invoke(messages).text == "It is 2."
    episode.check_exact()
    assert owners(episode) == ["prompt", "policy", "tool", "policy"]


def test_instructor_asks_again_until_the_answer_fits(begin):
    instructor = pytest.importorskip("instructor", reason=f"{WHY} instructor")
    from pydantic import BaseModel

    class Sum(BaseModel):
        """The result."""

        value: int

    def call(value: object) -> str:
        return (
            f'<tool_call>\n{{"name": "Sum", "arguments": {json.dumps({"value": value})}}}\n'
            "</tool_call>"
        )

    episode = begin(call("two"), call(2))
    client = instructor.from_openai(episode.openai)
    made = client.chat.completions.create(
        model="gpt-4o", messages=[ASKED], response_model=Sum, max_retries=2
    )
    assert made.value == 2
    episode.check_exact()
    assert owners(episode) == ["prompt", "policy", "tool", "policy"]
