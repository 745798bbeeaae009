"""The workflow `harbor`: the model works on a task in a folder with a shell; the task's tests score
what it made."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distflow.data.task_folders import HARBOR, Task, read_task_folder
from distflow.environments.answer_calls import answer_calls
from distflow.environments.chat import Chat
from distflow.environments.harbor_verifier import copy_environment, verify
from distflow.environments.parse_tool_calls import check_format, format_of
from distflow.environments.tools_in_user_code_process import ToolAnswer, bounded, failure
from distflow.environments.workflows import Row
from distflow.errors import UserError
from distflow.sandbox.shell import Shell

SHELL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command with bash in the folder of the task. Files stay for later "
        "commands; variables, "
        "the current folder and processes do not.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}
_MOST_BYTES_OF_COMMAND = 100_000
"""Linux passes on an argument of 128 KiB."""


class HarborWorkflow:
    """A task in a folder in Harbor's format: the model runs commands in the task's folder until it
    gives an answer; then the task's tests run there and write the score."""

    def __init__(
        self,
        *,
        max_turns: int = 32,
        timeout_s: float = 60.0,
        max_characters: int = 4000,
        format: str | None = None,
    ) -> None:
        """timeout_s: of each command. max_characters: of its output. format: as in `ToolWorkflow`.
        Raises UserError."""
        check_format(format)
        self._max_turns = max_turns
        self._timeout_s = timeout_s
        self._max_characters = max_characters
        self._format = format

        shell = Shell("/app")
        try:
            shell.check()
        finally:
            shell.close()

    async def __call__(self, chat: Chat, row: Row) -> Mapping[str, float]:
        """Run an episode. Raises UserError if the row is not from a task folder; RuntimeError or
        OSError, which are errors of the episode, if the task or its tests fail."""
        found = row.extra_info.get(HARBOR)
        if not isinstance(found, Mapping):
            raise UserError(
                f"the row has no column '{HARBOR}': the data of this workflow must be a folder of "
                "tasks"
            )

        task = read_task_folder(Path(str(found["folder"])))
        shell = Shell(task.workdir, task.memory_mb)
        loop = asyncio.get_running_loop()

        copying = loop.run_in_executor(None, copy_environment, task, shell)
        try:
            with chat.clock_stopped():
                await asyncio.shield(copying)
            await self._solve(chat, row, task, shell)
            with chat.clock_stopped("tests of the task"):
                return await verify(task, shell)
        finally:
            await asyncio.wait((copying,))  # a thread that copies on would make the folder anew
            await asyncio.to_thread(shell.close)

    async def _solve(self, chat: Chat, row: Row, task: Task, shell: Shell) -> None:
        left_s = task.agent_s

        async def run(name: str, arguments: dict[str, Any]) -> ToolAnswer:
            nonlocal left_s
            if left_s <= 0:
                return failure(
                    f"the {task.agent_s:g} s that this task has for commands are used up"
                )

            started = time.monotonic()
            limit_s = min(left_s, self._timeout_s)
            answer = await self._run_command(arguments.get("command"), task, shell, limit_s)
            left_s -= time.monotonic() - started

            return answer

        format = self._format or format_of(chat.tokens.tool_template([SHELL]))
        reply = await chat.ask(row.prompt, tools=[SHELL])
        tools = {"shell": SHELL["function"]["parameters"]["properties"]}
        await answer_calls(chat, reply, format, self._max_turns, tools, run)

    async def _run_command(
        self, command: object, task: Task, shell: Shell, limit_s: float
    ) -> ToolAnswer:
        if not isinstance(command, str) or "\0" in command:
            return failure("the argument 'command' of the tool shell must be a text")
        if len(command.encode()) > _MOST_BYTES_OF_COMMAND:
            return failure(
                f"a command has at most {_MOST_BYTES_OF_COMMAND:,} bytes: write long files in parts"
            )

        ran = await shell.run(
            ("/bin/bash", "-c", command), limit_s, 4 * self._max_characters, task.env
        )
        text, is_cut = bounded(ran.output, self._max_characters)
        if ran.exit_code is None:
            late = f"error: the command did not end within {limit_s:.3g} s and was killed"
            return ToolAnswer(f"{text}\n{late}", True)
        if ran.exit_code:
            return ToolAnswer(f"{text}\n[exit status {ran.exit_code}]", is_cut)

        return ToolAnswer(text or "(no output)", is_cut)
