"""Keys of `actor_rollout_ref.rollout`: how responses are generated."""

from dataclasses import dataclass

from distflow.config.keys import group, key
from distflow.config.names import KV_ON_UPDATE, ROLLOUT_ENGINES, not_there_yet

_NO_ZERO = "greedy answers belong to validation: actor_rollout_ref.rollout.val_kwargs.greedy=true"


@dataclass(frozen=True)
class ValKwargsConfig:
    """Generation in validation."""

    greedy: bool = key(True, "one greedy answer a prompt")
    n: int = key(0, "sampled answers a prompt besides it, for pass@k and mean@k", minimum=0)
    temperature: float = key(0.6, "temperature of those", above=0, advice=_NO_ZERO)
    top_p: float = key(1.0, "smallest set of tokens with this mass; 1 is off", above=0, maximum=1)
    top_k: int = key(-1, "the most likely tokens; -1 is off", minimum=-1)


@dataclass(frozen=True)
class RolloutConfig:
    """Generation in training."""

    name: str = key("embedded", "rollout engine", choices=tuple(ROLLOUT_ENGINES), later=not_there_yet(ROLLOUT_ENGINES))
    tensor_model_parallel_size: int = key(1, "devices that share one engine", minimum=1, later=True)
    n: int = key(8, "responses a prompt: the size of a group", minimum=1)
    temperature: float = key(1.0, "the policy is softmax(logits / temperature)", above=0, advice=_NO_ZERO)
    top_p: float = key(1.0, "smallest set of tokens with this mass; 1 is off", above=0, maximum=1)
    top_k: int = key(-1, "the most likely tokens; -1 is off", minimum=-1)
    min_p: float = key(0.0, "least probability as a share of the largest; 0 is off", minimum=0, below=1)
    repetition_penalty: float = key(1.0, "penalty on tokens that occurred; 1 is off", above=0)
    stop: tuple[str, ...] = key((), "texts that end a response: one or a list")
    max_num_seqs: int = key(256, "responses generated at the same time", minimum=1)
    kv_on_update: str = key(
        "keep",
        "answers that run when new weights come (async.max_staleness > 0) go on over their old keys and values, over "
        "recomputed ones, or are ended and asked for again",
        choices=KV_ON_UPDATE,
    )
    num_threads: int | None = key(
        None,
        "threads that generate while the trainer trains (async.max_staleness > 0); null is half of the cores, or what "
        "trainer.num_threads leaves",
        minimum=1,
    )
    batch_invariant: bool = key(
        False,
        "the bits of an answer depend on its own request alone, not on what is generated beside it nor on when: about "
        "half as fast",
    )
    enforce_eager: bool = key(
        False,
        "each operation of a decode step is launched on its own: no CUDA graphs, and on a CPU none of the native code "
        "by which a decode step is one, where there is a C compiler",
    )
    timeout_s: float | None = key(
        1800.0, "the run ends where the engine answers nothing and draws no token for so long; null is never", above=0
    )
    val_kwargs: ValKwargsConfig = group(ValKwargsConfig)
