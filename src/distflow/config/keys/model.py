"""Keys of `actor_rollout_ref.model`."""

from dataclasses import dataclass

from distflow.builtin_names import DTYPES
from distflow.config.keys.declare import key


@dataclass(frozen=True)
class ModelConfig:
    """The model's source, and which of its weights are trained."""

    path: str | None = key(
        None, "folder or hub id of the model, builtin:NAME, or package:NAME of a Python package"
    )
    tokenizer_path: str | None = key(None, "folder or hub id of the tokenizer; null is the model's")
    gguf_file: str | None = key(None, "GGUF file with the weights, in the model's folder")
    revision: str | None = key(
        None, "revision of a hub id; a commit hash pins it", taken_by="hub_model"
    )
    trust_remote_code: bool = key(
        False, "run Python code that comes with the model; local or pinned models only"
    )
    model_type: str | None = key(None, "family of the model if its folder does not say", later=True)
    init: str = key(
        "pretrained",
        "random: new weights by trainer.seed, from config.json",
        choices=("pretrained", "random"),
    )
    dtype: str = key(
        "auto",
        "dtype of computation; auto is float32 on a CPU, bfloat16 on a GPU",
        choices=("auto", *DTYPES),
    )
    enable_gradient_checkpointing: bool = key(
        False,
        "recompute activations in backward instead of storing them",
        taken_by=("actor", "critic"),
    )
    lora_rank: int = key(
        0, "rank of LoRA adapters; 0 trains all weights", minimum=0, maximum=16_384
    )
    lora_alpha: float = key(
        16,
        "scale of the adapters, divided by the rank",
        above=0,
        taken_if=lambda own: own.lora_rank > 0,
    )
    target_modules: str | tuple[str, ...] = key(
        "all-linear",
        "modules that get an adapter: all-linear or their names",
        taken_if=lambda own: own.lora_rank > 0,
    )
    lora_merge: bool = key(
        True,
        "send adapters merged into the weights; false: vLLM applies them unmerged",
        taken_if=lambda own: own.lora_rank > 0,
    )
