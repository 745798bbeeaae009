"""The independent parts of a pipeline, the devices of each, and the number of parameters of their models."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from distflow.errors import UserError
from distflow.graph import BoundPipeline
from distflow.graph.wiring import Edges, ancestors, dependents, topological_order

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)")
_WITH_QKV_BIAS = ("qwen2", "qwen2_moe")
_WITH_QK_NORMS = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Part:
    """Nodes that run on the same devices, in order, and their engines. size: parameters of the models it trains."""

    nodes: tuple[str, ...]
    engines: tuple[str, ...]
    size: int


def split(deps: Edges, holds: Mapping[str, Collection[str]]) -> list[tuple[str, ...]]:
    """The irreducible parts of a graph: each exit with all that it depends on; exits that share an engine are one part.

    A node without an engine that leads to several parts is in each. holds: the engines of each node; a run has each
    engine once. Nodes of a part are in topological order, parts by their first exit in the order of `deps`.
    """
    before, after = ancestors(deps), dependents(deps)
    closures = [{exit_, *before[exit_]} for exit_ in deps if not after[exit_]]
    parts: list[set[str]] = []
    for nodes in closures:
        contents = _contents(nodes, holds)
        common = [part for part in parts if contents & _contents(part, holds)]
        for part in common[1:]:
            parts.remove(part)
        if common:
            common[0].update(nodes, *common[1:])
        else:
            parts.append(nodes)
    order = topological_order(deps)
    return [tuple(node for node in order if node in part) for part in parts]


def pipeline_parts(pipeline: BoundPipeline, sizes: Mapping[str, str | float]) -> list[Part]:
    """The parts of a pipeline in the order in which they get devices: the largest model first, then the longest chain.

    If the rollout loop has an engine, the pipeline is one part, since every prompt group passes through that loop. A
    part without an engine joins the first part with one. sizes: parameters of the model of each role.
    """
    rollout_nodes = tuple(node.node_id for node in pipeline.rollout_nodes)
    holds = {node.node_id: node.engines for node in pipeline.nodes}
    if not pipeline.training_nodes or any(holds[node_id] for node_id in rollout_nodes):
        return [_part(pipeline, [node.node_id for node in pipeline.nodes], sizes)]
    deps = {n.node_id: tuple(dep for dep in n.deps if dep not in rollout_nodes) for n in pipeline.training_nodes}
    found = split(deps, holds)
    trained = [nodes for nodes in found if _contents(nodes, holds)] or found[:1]
    idle = {node for nodes in found if nodes not in trained for node in nodes}
    parts = sort_parts([_part(pipeline, (*rollout_nodes, *nodes), sizes) for nodes in trained])
    first = {*parts[0].nodes, *idle}
    return [_part(pipeline, [n.node_id for n in pipeline.nodes if n.node_id in first], sizes), *parts[1:]]


def sort_parts(parts: Sequence[Part]) -> list[Part]:
    """Parts in the order in which they get devices: by size, then by number of nodes; the sort is stable."""
    return sorted(parts, key=lambda part: (-part.size, -len(part.nodes)))


def apportion(sizes: Sequence[float], num_devices: int, strategy: str) -> list[int]:
    """Devices of each part, in total all and at least 1 each. Earlier parts get the remainder of a division.

    strategy: `even`, or `param_aware`: in proportion to `sizes`, the rest by largest remainder; a part whose
    proportion is below 1 gets 1, and the others share the rest. Raises UserError for too few devices.
    """
    if num_devices < len(sizes):
        raise UserError(
            f"the pipeline has {len(sizes)} independent parts, and there are {num_devices} devices: give it at least "
            f"{len(sizes)} (trainer.nnodes × trainer.n_gpus_per_node)"
        )
    weights = [Fraction(size) if strategy == "param_aware" else Fraction(1) for size in sizes]
    if not any(weights):
        weights = [Fraction(1)] * len(sizes)
    quotas = _quotas(weights, num_devices)
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda part: (shares[part] - quotas[part], part))
    for part in by_remainder[: num_devices - sum(shares)]:
        shares[part] += 1
    return shares


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
    """Parameters of a decoder by its config, a dict as in config.json: exact for the families of Llama, Mistral,
    Mixtral, Qwen2 and Qwen3 with their mixtures of experts, an estimate for others.

    Raises UserError if the config lacks a number of the shape.
    """
    text = config.get("text_config")
    shape = _Shape({**config, **text} if isinstance(text, Mapping) else config)
    embeddings = shape.vocab * shape.hidden * (1 if shape.is_on("tie_word_embeddings") else 2)
    layers = sum(shape.attention + shape.feed_forward(layer) + 2 * shape.hidden for layer in range(shape.num_layers))
    return embeddings + layers + shape.hidden


def _quotas(weights: list[Fraction], num_devices: int) -> list[Fraction]:
    small: set[int] = set()
    while True:
        left, total = num_devices - len(small), sum(w for part, w in enumerate(weights) if part not in small)
        quotas = [Fraction(1) if part in small else w * left / total for part, w in enumerate(weights)]
        below = {part for part, quota in enumerate(quotas) if quota < 1}
        if not below:
            return quotas
        small |= below


def _part(pipeline: BoundPipeline, node_ids: Sequence[str], sizes: Mapping[str, str | float]) -> Part:
    engines = dict.fromkeys(engine for node_id in node_ids for engine in pipeline.node(node_id).engines)
    models = [engine for engine in engines if engine != "rollout"]  # it uses the actor's weights
    return Part(tuple(node_ids), tuple(engines), sum(parse_size(sizes.get(model, 0)) for model in models))


def _contents(nodes: Collection[str], holds: Mapping[str, Collection[str]]) -> set[str]:
    return {each for node in nodes for each in holds.get(node, ())}


class _Shape:
    """The numbers of a config by the names of the different families."""

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
        """Gated projections of a layer, or its experts, their router and shared experts."""
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
            raise UserError(f"the model's config.json has no {names[0]}: set its size, e.g. dag.model_sizes.actor=7B")
        return found
