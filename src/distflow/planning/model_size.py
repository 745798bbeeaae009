"""How many parameters a model has: as somebody writes it, or from its `config.json`. Loads nothing."""

import re
from collections.abc import Mapping

from distflow.errors import UserError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)")
_WITH_QKV_BIAS = ("qwen2", "qwen2_moe")
_WITH_QK_NORMS = ("qwen3", "qwen3_moe")


def parse_size(written: str | float) -> int:
    """Parameters of "70B", "500M", "0.5b" or a number. Raises UserError."""
    if isinstance(written, str):
        match = _WRITTEN.fullmatch(written.strip().upper())
        if match is None:
            raise UserError(f"'{written}' is no size of a model; write e.g. 70B, 500M or a number of parameters")
        return round(float(match[1]) * _UNITS[match[2]])
    if not 0 <= written < float("inf"):
        raise UserError(f"{written} is no number of parameters")
    return round(written)


def count_parameters(config: Mapping[str, object]) -> int:
    """Parameters of a decoder by its config, as `transformers` makes a dict of it: exact for the families of Llama,
    Mistral, Mixtral, Qwen2 and Qwen3, their mixtures of experts too, an estimate for others.

    Raises UserError where the shape is not said.
    """
    text = config.get("text_config")
    shape = _Shape({**config, **text} if isinstance(text, Mapping) else config)
    embeddings = shape.vocab * shape.hidden * (1 if shape.is_on("tie_word_embeddings") else 2)
    layers = sum(shape.attention + shape.feed_forward(layer) + 2 * shape.hidden for layer in range(shape.num_layers))
    return embeddings + layers + shape.hidden


class _Shape:
    """The numbers of a config under the names that families give them."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self.hidden = self._number("hidden_size", "n_embd", "d_model")
        self.vocab = self._number("vocab_size")
        self.num_layers = self._number("num_hidden_layers", "n_layer", "num_layers")
        self._kind = str(config.get("model_type", ""))

    @property
    def attention(self) -> int:
        """Query, key, value and output projections of one layer."""
        heads = self._number("num_attention_heads", "n_head", "num_heads")
        head = self._number("head_dim", default=self.hidden // heads)
        queries, keys = heads * head, self._number("num_key_value_heads", default=heads) * head
        weights = 2 * self.hidden * (queries + keys)
        if self.is_on("attention_bias"):
            weights += queries + 2 * keys + self.hidden
        elif self._kind in _WITH_QKV_BIAS:
            weights += queries + 2 * keys
        return weights + (2 * head if self._kind in _WITH_QK_NORMS else 0)

    def feed_forward(self, layer: int) -> int:
        """Gated projections of a layer; of its experts, their router and what they share, where it has experts."""
        inner = self._number("intermediate_size", "n_inner", default=4 * self.hidden)
        experts = self._number("num_experts", "num_local_experts", "n_routed_experts", default=0)
        if not experts or not self._is_sparse(layer):
            return 3 * self.hidden * inner + (2 * inner + self.hidden if self.is_on("mlp_bias") else 0)
        each = 3 * self.hidden * self._number("moe_intermediate_size", default=inner)
        shared = self._number("shared_expert_intermediate_size", default=0)
        gate = self.hidden if shared else 0
        common = each * self._number("n_shared_experts", default=0) + 3 * self.hidden * shared + gate
        return experts * (each + self.hidden) + common

    def _is_sparse(self, layer: int) -> bool:
        dense = self._config.get("mlp_only_layers")
        every = self._number("decoder_sparse_step", default=1)
        is_dense = isinstance(dense, list) and layer in dense
        return layer >= self._number("first_k_dense_replace", default=0) and not is_dense and (layer + 1) % every == 0

    def is_on(self, name: str) -> bool:
        return self._config.get(name) is True

    def _number(self, *names: str, default: int | None = None) -> int:
        found = next((self._config[name] for name in names if isinstance(self._config.get(name), int)), default)
        if not isinstance(found, int):
            said = "say its size, e.g. dag.model_sizes.actor=7B"
            raise UserError(f"the model's config.json does not say its {names[0]}: {said}")
        return found
