"""The tools of a run: what the config names becomes schemas for the model, and a process in which
episodes call them."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from distflow.environments import mcp_tools, tools_in_user_code_process
from distflow.environments.builtin_tools import BUILTIN_TOOLS
from distflow.environments.mcp_tools import mcp_schemas
from distflow.environments.user_code_process import ProcessServer
from distflow.errors import UserError, hint
from distflow.import_target import LoadError, load
from distflow.sandbox.interface import DEFAULT_LIMITS
from distflow.sandbox.local_sandbox import Sandbox

Entry = str | Mapping[str, Any]
"""A tool: a built-in name or a target ("file.py:function"), or {name, options} with keyword
arguments that the model does not see."""
PYTHON = "python"
_SESSION_CPU_S = 600.0


class Tools:
    """The tools of a run, in the run's process.

    `schemas` are in the form of chat templates."""

    def __init__(
        self,
        entries: Sequence[Entry],
        timeout_s: float,
        max_characters: int,
        mcp: Sequence[str] = (),
    ) -> None:
        """mcp: commands and URLs of servers. Raises UserError for a tool that cannot be used."""
        targets = [_read(entry) for entry in entries]
        self.schemas = [_schema(target, options) for target, options in targets]

        for server in mcp:
            for schema in mcp_schemas(server):
                self.schemas.append(schema)
                options = {"server": server, "tool": schema["function"]["name"]}
                targets.append((f"{mcp_tools.__name__}:McpTool", options))

        self.parameters = dict[str, Mapping[str, Any]]()
        named = dict[str, tuple[str, dict[str, Any]]]()
        for schema, target in zip(self.schemas, targets, strict=True):
            name = schema["function"]["name"]
            if name in named:
                raise UserError(f"two tools have the same name: {name}")
            self.parameters[name] = schema["function"]["parameters"]["properties"]
            named[name] = target

        self.server = ProcessServer(
            f"{tools_in_user_code_process.__name__}:Toolbox", {"targets": named}
        )
        self.timeout_s = timeout_s
        self.max_characters = max_characters
        self.sandbox = None

        if PYTHON in self.parameters:
            limits = DEFAULT_LIMITS._replace(
                wall_s=timeout_s, cpu_s=_SESSION_CPU_S, output_bytes=4 * max_characters
            )
            self.sandbox = Sandbox(limits)

    def close(self) -> None:
        self.server.close()
        if self.sandbox is not None:
            self.sandbox.close()


def _read(entry: Entry) -> tuple[str, dict[str, Any]]:
    """Target and options of an entry. Raises UserError."""
    whole = {"name": entry} if isinstance(entry, str) else entry
    if (
        not isinstance(whole, Mapping)
        or not isinstance(whole.get("name"), str)
        or set(whole) - {"name", "options"}
    ):
        raise UserError(
            f"the tool {entry!r} is neither a name nor {{name, options}}: write e.g. {{name: "
            "search, options: {file: texts.txt}}"
        )

    name = str(whole["name"])
    options = dict(cast(Mapping[str, Any], whole.get("options", {})))
    if name in BUILTIN_TOOLS:
        return BUILTIN_TOOLS[name], options
    if ":" not in name:  # code that the config names (`code_of_workflow`)
        raise UserError(
            f"there is no built-in tool '{name}'{hint(name, BUILTIN_TOOLS)}; one of your own is "
            '"file.py:function"'
        )

    return name, options


def _schema(target: str, options: Mapping[str, object]) -> dict[str, Any]:
    """A tool's schema for the model, without the parameters that are options. Raises UserError."""
    try:
        found: Any = load(target)
    except LoadError as error:
        raise UserError(f"the tool {error}") from error

    is_class = isinstance(found, type)
    try:
        inspect.signature(found).bind_partial(**options)
        schema: dict[str, Any] = get_json_schema(found.__call__ if is_class else found)
    except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError) as error:
        raise UserError(
            f"the tool '{target}' cannot be described to the model or does not take its options: "
            f"{error}. Give every parameter a type, and a line in the docstring under 'Args:', as "
            "'name: what it is'"
        ) from None

    parameters = schema["function"]["parameters"]
    if is_class:
        schema["function"]["name"] = found.__name__.lower()
        return schema

    schema["function"]["name"] = found.__name__
    for hidden in options:
        parameters["properties"].pop(hidden, None)
        parameters["required"] = [name for name in parameters.get("required", []) if name != hidden]

    return schema
