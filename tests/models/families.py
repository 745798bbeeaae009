"""Families that people train: what a tiny config of each wants besides `tiny_config`'s numbers.

Not phimoe: its routing jumps where two experts come close, so rounding alone moves a token's
log-prob by 0.2.
"""

from dataclasses import dataclass, field
from typing import Any

_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}


@dataclass(frozen=True)
class Family:
    """forward: what `choose_attention` finds. changes: entries of the config."""

    family: str
    forward: str
    changes: dict[str, Any] = field(default_factory=dict)


_WINDOW = {"sliding_window": 4}
_GEMMA = {"query_pre_attn_scalar": 8, **_WINDOW}
OURS = "distflow_packed"
FAMILIES = {
    each.family: each
    for each in (
        Family("cohere2", "sdpa", _WINDOW),
        Family("deepseek_v2", OURS, _LATENT),
        Family("deepseek_v3", OURS, _LATENT),
        Family("ernie4_5", OURS),
        Family("exaone4", "sdpa", _WINDOW),
        Family("falcon_mamba", "eager, padded"),
        Family("gemma", OURS),
        Family("gemma2", "eager", _GEMMA),
        Family("gemma3_text", "sdpa", _GEMMA),
        Family("gemma4_text", "sdpa", _WINDOW),
        Family("glm4", OURS),
        Family("glm4_moe", OURS, _LATENT),
        Family("gpt2", OURS, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
        Family("gpt_neox", OURS),
        Family("gpt_oss", "eager, padded", {**_EXPERTS, **_WINDOW}),
        Family("granite", OURS),
        Family("granitemoe", OURS, _EXPERTS),
        Family(
            "granitemoehybrid",
            "sdpa, padded",
            {**_EXPERTS, **_MAMBA, "layer_types": ["mamba", "attention"]},
        ),
        Family("lfm2", "sdpa, padded", {"layer_types": ["conv", "full_attention"]}),
        Family("llama4_text", "sdpa", {**_EXPERTS, "intermediate_size_mlp": 64}),
        Family(
            "mamba2",
            "eager, padded",
            {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
        ),
        Family("mixtral", OURS, _EXPERTS),
        Family("nemotron_h", "sdpa, padded"),
        Family("olmo", OURS),
        Family("olmo2", OURS),
        Family("olmo3", "sdpa", _WINDOW),
        Family("olmoe", OURS, _EXPERTS),
        Family("phi", OURS),
        Family("phi3", OURS),
        Family("qwen2_moe", "sdpa", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
        Family("qwen3_moe", OURS, _EXPERTS),
        Family(
            "qwen3_next",
            "sdpa, padded",
            {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16},
        ),
        Family("qwen3_5_text", "sdpa, padded", _LINEAR),
        Family("smollm3", OURS),
        Family("stablelm", "sdpa"),
    )
}
