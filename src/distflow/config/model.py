"""Keys of `actor_rollout_ref.model`: the model that is trained."""

from dataclasses import dataclass

from distflow.config.keys import key
from distflow.config.names import DTYPES


@dataclass(frozen=True)
class ModelConfig:
    """Where the model comes from, and what of it is trained."""

    path: str | None = key(None, "folder or hub id of the model, builtin:NAME, or package:NAME of a Python package")
    tokenizer_path: str | None = key(None, "folder or hub id of the tokenizer; null is the model's")
    gguf_file: str | None = key(None, "name of a GGUF file in that folder to load the weights from")
    revision: str | None = key(None, "revision of a hub id; a commit hash pins it")
    trust_remote_code: bool = key(False, "run Python code that comes with the model; local or pinned models only")
    model_type: str | None = key(None, "family of the model where its folder does not say", later=True)
    init: str = key(
        "pretrained", "random: fresh weights by trainer.seed from config.json", choices=("pretrained", "random")
    )
    dtype: str = key("bfloat16", "dtype to compute in", choices=DTYPES)
    enable_gradient_checkpointing: bool = key(False, "compute activations twice instead of keeping them")
    lora_rank: int = key(0, "rank of LoRA adapters; 0 trains all weights", minimum=0)
    lora_alpha: float = key(16, "scale of the adapters, divided by the rank", above=0)
    target_modules: str | tuple[str, ...] = key("all-linear", "modules that get an adapter: all-linear or their names")
