"""Keys of `actor_rollout_ref.rollout`."""

import re
from dataclasses import dataclass

from distflow.builtin_names import KV_ON_UPDATE, ROLLOUT_ENGINES, not_there_yet
from distflow.config.compose.typed_values import Mismatch, parse_differing
from distflow.config.keys.declare import BY_NAME, collect, group, key, plain_settings

_NO_ZERO = "greedy responses belong to validation: actor_rollout_ref.rollout.val_kwargs.greedy=true"


@dataclass(frozen=True)
class ValKwargsConfig:
    """Generation in validation."""

    greedy: bool = key(True, "generate one greedy response per prompt")
    n: int = key(0, "additional sampled responses per prompt, for pass@k and mean@k", minimum=0)
    temperature: float = key(
        0.6,
        "temperature of the sampled responses",
        above=0,
        advice=_NO_ZERO,
        taken_if=lambda own: own.n > 0,
    )
    top_p: float = key(
        1.0,
        "sample from the smallest set of tokens with this mass; 1 is off",
        above=0,
        maximum=1,
        taken_if=lambda own: own.n > 0,
    )
    top_k: int = key(
        -1,
        "sample from the k most likely tokens; -1 is off",
        minimum=-1,
        taken_if=lambda own: own.n > 0,
    )


@dataclass(frozen=True)
class AgentConfig:
    """An agent of an episode."""

    policy: str = key("actor", "whose replies it gives: actor, or one of dag.policies")
    trainable: bool = key(True, "train on what it says")
    system_prompt: str = key("", "message that its conversation begins with; empty: none")
    max_tokens: int | None = key(
        None, "maximum length of its replies in tokens; null: what is left", minimum=1
    )
    stop: tuple[str, ...] = key(
        (), "strings that end its replies, in addition to rollout.stop: one or a list"
    )
    temperature: float | None = key(
        None, "of its replies in training; null: rollout.temperature", above=0
    )
    top_p: float | None = key(
        None, "of its replies in training; null: rollout.top_p", above=0, maximum=1
    )
    top_k: int | None = key(None, "of its replies in training; null: rollout.top_k", minimum=-1)

    @property
    def sampling(self) -> dict[str, float]:
        """The settings that replace those of the rollout."""
        own = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in own.items() if value is not None}


def parse_agents(value: object) -> dict[str, AgentConfig]:
    """Agents by name from plain data. Raises Mismatch."""
    form = "write e.g. {solver: {max_tokens: 64}, checker: {trainable: false}}"
    found = parse_differing(value, collect(AgentConfig()), form, of="agent")
    for name in found:
        if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
            raise Mismatch(f"has an agent '{name}'", "name it by letters, digits and underscores")
    return {name: AgentConfig(**settings) for name, settings in found.items()}


@dataclass(frozen=True)
class RolloutConfig:
    """Generation in training."""

    name: str = key(
        "embedded",
        "rollout engine",
        choices=tuple(ROLLOUT_ENGINES),
        later=not_there_yet(ROLLOUT_ENGINES),
        taken_by=("rollout", "judge"),
    )
    tensor_model_parallel_size: int = key(
        1, "devices that share one engine (name=vllm)", minimum=1, taken_by="several_processes"
    )
    n: int = key(8, "responses per prompt (group size)", minimum=1, taken_by="rl")
    temperature: float = key(
        1.0, "the policy is softmax(logits / temperature)", above=0, advice=_NO_ZERO, taken_by="rl"
    )
    top_p: float = key(
        1.0,
        "sample from the smallest set of tokens with this mass; 1 is off",
        above=0,
        maximum=1,
        taken_by="rl",
    )
    top_k: int = key(
        -1, "sample from the k most likely tokens; -1 is off", minimum=-1, taken_by="rl"
    )
    min_p: float = key(
        0.0,
        "minimum probability, relative to the most likely token; 0 is off",
        minimum=0,
        below=1,
        taken_by="rl",
    )
    repetition_penalty: float = key(
        1.0, "penalty on tokens that already occurred; 1 is off", above=0, taken_by="rl"
    )
    stop: tuple[str, ...] = key((), "strings that end a response: one or a list", taken_by="rl")
    max_num_seqs: int = key(
        256, "maximum number of responses generated concurrently", minimum=1, taken_by=BY_NAME
    )
    kv_on_update: str = key(
        "keep",
        (
            "running responses at a weight sync (max_staleness > 0): keep their KV cache, "
            "recompute it, or restart them"
        ),
        choices=KV_ON_UPDATE,
        taken_by=BY_NAME,
    )
    num_threads: int | None = key(
        None,
        (
            "CPU threads of generation if max_staleness > 0; null: half, or the rest after "
            "trainer.num_threads"
        ),
        minimum=1,
        taken_by="concurrent_rollout",
    )
    batch_invariant: bool = key(
        False, "decode one response at a time: bit-equal in any company, but slow", taken_by=BY_NAME
    )
    enforce_eager: bool = key(
        False,
        "run each operation of a decode step separately: no CUDA graphs or native CPU step",
        taken_by=BY_NAME,
    )
    free_cache_engine: bool = key(
        False,
        (
            "free KV cache and engine-owned weights while training, on workers that do both "
            "(max_staleness=0)"
        ),
        taken_by="rollout_in_turns",
    )
    timeout_s: float | None = key(
        1800.0,
        (
            "stop the run if the engine returns nothing and samples no token for this many "
            "seconds; null: never"
        ),
        above=0,
        taken_by="rollout",
    )
    python: str | None = key(
        None,
        "Python of the environment that has the engine's server; null is this one",
        taken_by=BY_NAME,
    )
    url: tuple[str, ...] = key(
        (),
        "addresses of running servers, one or a list; empty: the run starts them",
        taken_by=BY_NAME,
    )
    data_parallel_size: int = key(
        1, "servers that each rollout worker starts, as one engine", minimum=1, taken_by=BY_NAME
    )
    engine_kwargs: dict[str, object] = key(
        {}, "options of the engine's server, by engine: vllm: {OPTION: VALUE}", taken_by=BY_NAME
    )
    workflow: str | None = key(
        None,
        "episodes of several turns: single_turn, multi_turn, tools, environment, or your async "
        "function or class as module:attribute or file.py:attribute (docs/workflows.md); null: one "
        "prompt, one response",
        taken_by="run_workflow",
    )
    workflow_kwargs: dict[str, object] = key({}, "options of the workflow", taken_by="run_workflow")
    agents: dict[str, AgentConfig] = key(
        {},
        (
            f"name → {', '.join(collect(AgentConfig()))}: agents of an episode, for a workflow "
            "with the parameter agents"
        ),
        parse=parse_agents,
        plain=plain_settings,
        taken_by="run_workflow",
    )
    val_kwargs: ValKwargsConfig = group(ValKwargsConfig, taken_by="rl_validation")
