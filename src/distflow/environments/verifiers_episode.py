"""One episode of an environment of the package `verifiers` (0.4), in an agent's process: the
package runs its turns, tools and rewards, and its model is the run's endpoint."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from distflow.data.task_packages import VERIFIERS, missing, read_task
from distflow.errors import UserError

try:
    import httpx
    import verifiers.v1 as vf
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient, omit
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config
except ImportError as error:
    raise ImportError(f"the workflow 'verifiers' {missing('verifiers')}") from error

__all__ = ["ChatHarness", "play"]
_HARNESS = "distflow_chat"
_KEY_VARIABLE = "DISTFLOW_EPISODE_KEY"
_SEAT = {"runtime": {"type": "subprocess"}, "harness": {"id": _HARNESS}}
"""The default of an agent's seat."""
_CERTIFICATES = httpx.create_ssl_context()
"""Read once, before episodes' processes are forked: reading them in a client takes longer than a
short turn."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A conversation with the task's tools in this process; the package's own `null` starts an
    interpreter, provided by `uv`, for each of the user's turns."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Ask until a reply calls no tool."""
        messages = self._begin(data)
        timeout = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}

        http = DefaultAsyncHttpxClient(verify=_CERTIFICATES)
        async with (
            AsyncExitStack() as stack,
            AsyncOpenAI(
                base_url=endpoint, api_key=secret, max_retries=0, http_client=http
            ) as client,
        ):
            tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                completion = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools or omit
                )
                reply = completion.choices[0].message
                messages.append(reply.model_dump(exclude_none=True))
                if not reply.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")

                for call in reply.tool_calls:
                    content = await _result(call.function, names, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def _begin(self, data: Any) -> list[Any]:
        """The messages of the task."""
        system, prompt = self.resolve_prompt(data)
        messages = list[Any]()
        if system:
            messages.append({"role": "system", "content": system})

        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(message_to_wire, prompt or ())

        return messages


async def _result(function: Any, names: Mapping[str, Any], connections: Any) -> object:
    """The result of a tool call; problems of the call are reported to the model."""
    if function.name not in names:
        return f"error: there is no tool '{function.name}'; there are {', '.join(names)}"

    try:
        arguments = json.loads(function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are no JSON: {error}"

    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return await call_mcp(connections, names, function.name, arguments)


async def play(
    row: Mapping[str, Any], base_url: str, api_key: str, model: str, env: Mapping[str, Any]
) -> object:
    """The rewards of an episode of the row's task, by name, and their weighted sum as `score`.

    env: config of the environment, beside its taskset. Raises UserError for a row of other data and
    an environment that cannot be played, RuntimeError with the error that ended the episode.
    """
    task_column = row.get(VERIFIERS)
    if not isinstance(task_column, Mapping):
        raise UserError(
            f"the row has no column '{VERIFIERS}': the data of this workflow must be verifiers:ID"
        )

    name = str(task_column["name"])
    settings = dict(task_column["settings"])
    environment = _environment(name, settings, env)
    task = read_task(name, settings, task_column["task"])
    os.environ[_KEY_VARIABLE] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=_KEY_VARIABLE)
    async with environment.serving():
        episode = await environment.run_episode(task, vf.ModelContext(model=model, client=client))

    if not episode.ok:
        errors = list(episode.errors)
        for trace in episode.traces:
            errors += trace.errors
        if not errors:
            raise RuntimeError("the episode is not ok")
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}")

    (trace,) = episode.traces
    scores = {"score": trace.reward}
    for name, reward in trace.rewards.items():
        if reward is None:
            raise RuntimeError(f"the environment's reward '{name}' returned None")
        scores[name] = reward.score

    return scores


def _environment(name: str, settings: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The environment. Raises UserError if it has several agents, and for unknown options."""
    # the package finds harnesses by module name
    sys.modules.setdefault(_HARNESS, sys.modules[__name__])

    try:
        defaults = env_config_type(name, str(options.get("id", "")))()
        seats = list(agent_config_fields(defaults))
        own = {seat: {**_SEAT, **options.get(seat, {})} for seat in seats}
        environment = load_environment(
            resolve_env_config({**options, **own, "taskset": {**settings, "id": name}})
        )
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:500]
        raise UserError(
            f"the environment '{name}' cannot be loaded with workflow_kwargs.env: {why}"
        ) from error

    if len(seats) > 1:
        raise UserError(
            f"the environment '{name}' has several agents ({', '.join(seats)}), which is not "
            "supported"
        )

    return environment
