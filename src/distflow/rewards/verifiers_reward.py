"""`verifiers`: the rewards of a task of the package `verifiers` for a single-turn response."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from distflow.data.task_packages import VERIFIERS, missing, read_task

try:
    import verifiers.v1 as vf
except ImportError as error:
    raise ImportError(f"the reward 'verifiers' {missing('verifiers')}") from error


async def compute_score(
    solution_str: str, extra_info: Mapping[str, object] | None = None
) -> dict[str, object]:
    """The weighted sum of the task's rewards, as the package computes it, and each of them
    (`rewards`, `metrics`).

    Raises ValueError for a row of other data and for a reward that returned None, and what the
    rewards raise.
    """
    task_column = (extra_info or {}).get(VERIFIERS)
    if not isinstance(task_column, Mapping):
        raise ValueError(f"the row has no column '{VERIFIERS}': its data must be verifiers:ID")
    if needs := task_column.get("needs"):
        raise ValueError(
            f"the task needs {needs}, not one response: play it with "
            "actor_rollout_ref.rollout.workflow=verifiers"
        )

    task = _task(
        str(task_column["name"]),
        json.dumps(task_column["settings"]),
        json.dumps(task_column["task"]),
    )
    trace = _trace(task, solution_str)
    await task.score(trace)
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
        raise ValueError(f"the task's reward '{missing[0]}' returned None")

    rewards = {name: reward.score for name, reward in trace.rewards.items()}

    return {"score": trace.reward, "rewards": rewards, "metrics": dict(trace.metrics)}


@cache
def _task(name: str, settings: str, data: str) -> Any:
    return read_task(name, json.loads(settings), json.loads(data))


def _trace(task: Any, response: str) -> Any:
    """The package's record of a conversation that ended with the response."""
    prompt = task.data.prompt
    if isinstance(prompt, str):
        messages = [vf.UserMessage(content=prompt)]
    else:
        messages = list(prompt)

    if task.data.system_prompt is not None:
        messages.insert(0, vf.SystemMessage(content=task.data.system_prompt))
    nodes = [
        vf.MessageNode(parent=i - 1 if i else None, message=message)
        for i, message in enumerate(messages)
    ]
    last = vf.MessageNode(
        parent=len(nodes) - 1, message=vf.AssistantMessage(content=response), sampled=True
    )
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = vf.AgentInfo(config=vf.AgentConfig())

    return vf.Trace(
        task=about,
        agent=agent,
        nodes=[*nodes, last],
        is_completed=True,
        ok=True,
        stop_condition="completed",
    )
