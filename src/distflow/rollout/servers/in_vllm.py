"""Our extension of vLLM's workers (`--worker-extension-cls`): weights and an adapter from files,
with hashes of
what was read, and the same draws as in our own engines, with log-probs before and after truncation.

The server finds it by PYTHONPATH in its own environment, where nothing else of distflow is
importable.
"""

import hashlib
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

INTERFACE = 4
ADAPTER = 1  # the number that vLLM's server gives to the first adapter
STRIPE_LENGTH = 1024
BLOCK = 256  # the CDF is searched in blocks of this many tokens, then in one of them
# samples whose log-probs nobody takes, because their client is gone, are kept until then
MOST_KEPT = 2**14
_WEYL, _MIX_1, _MIX_2 = (
    np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class Extension:
    """Methods of a worker, called over `/collective_rpc`. vLLM mixes it into its own class."""

    model_runner: Any
    distflow_held: "dict[str, str]"

    def distflow_describe(self) -> dict[str, Any]:
        """What this worker runs. The first call installs our sampler."""
        config = self.model_runner.model_config
        if not isinstance(self.model_runner.sampler, DrawingSampler):
            if type(self.model_runner.sampler) is not Sampler:
                raise RuntimeError(
                    f"this vLLM has an unknown sampler, {type(self.model_runner.sampler)}"
                )
            self.model_runner.sampler = DrawingSampler(self.model_runner)
            self.distflow_held = {}

        return {
            "interface": INTERFACE,
            "dtype": str(config.dtype),
            "vocab_size": config.get_vocab_size(),
            "max_model_len": config.max_model_len,
            "can_sleep": config.enable_sleep_mode,
            "held": bool(self.distflow_held),
        }

    def distflow_load(
        self, paths: list[str], adapter: dict[str, Any] | None = None
    ) -> dict[str, str]:
        """Load weights from safetensors files. adapter: PEFT's config of the adapter among them,
        which is applied unmerged; the weights below it are loaded only if they have changed.
        Returns the hash of each tensor as read."""
        self.distflow_describe()  # a server that was started anew has our sampler only then
        before = self.distflow_held
        self.distflow_held = {}
        names = set[str]().union(*map(_names_in, paths))

        if adapter:
            of_adapter = {name for name in names if ".lora_" in name}
        else:
            of_adapter = set[str]()

        hashes = dict[str, str]()
        tensors = dict[str, Tensor]()
        for name, tensor in _read(paths, of_adapter):
            tensors[name] = tensor
            hashes[name] = stripe_hash(tensor)

        base = names - of_adapter
        if adapter and before:
            same = {name: stripe_hash(tensor) for name, tensor in _read(paths, base)}
        else:
            same = {}

        if not same or any(before.get(name) != own for name, own in same.items()):
            same = self._load_base(paths, base)
        if adapter:
            self._serve(adapter, tensors)
        self.distflow_held = hashes | same

        return self.distflow_held

    def distflow_forget_weights(self) -> None:
        """Load all weights next time, even those that do not change."""
        self.distflow_held = {}

    def _load_base(self, paths: list[str], names: set[str]) -> dict[str, str]:
        """Load the model's own weights. Returns their hashes."""
        hashes = dict[str, str]()
        model = self.model_runner.get_model()
        published = self._to_published_names(names)

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in _read(paths, names):
                hashes[name] = stripe_hash(tensor)
                yield from published({name: tensor}).items()

        load_weights = model.load_weights
        loaded = set[str]()

        def load(given: Iterator[tuple[str, Tensor]]) -> set[str]:
            loaded.update(load_weights(given))
            return loaded

        model.load_weights = load
        if current_platform.is_cpu():
            _forget_kernels_of_experts(model)

        try:
            # layers of some families read it
            with set_current_vllm_config(self.model_runner.vllm_config):
                self.model_runner.reload_weights(
                    weights_iterator=weights(), is_checkpoint_format=True
                )
        finally:
            del model.load_weights

        # the head has a packed copy, which keeps old weights if it is tied
        if current_platform.is_cpu():
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

        built = set[str]()  # other parameters have been derived from these
        for path, module in model.named_modules():
            for name in get_layerwise_info(module).restore_metadata[0]:
                built.add(f"{path}.{name}")

        expected = built.intersection(name for name, _ in model.named_parameters())
        missing = {name.replace(".base_layer.", ".") for name in expected} - loaded
        if missing:
            raise RuntimeError(
                f"no weights came for {sorted(missing)[:5]}, {len(missing)} parameters in all"
            )

        return hashes

    def _to_published_names(
        self, names: set[str]
    ) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        """Renames a weight as in checkpoints, which vLLM reads: transformers joins the weights of
        all experts."""
        if not any(".experts." in name for name in names):
            return lambda weights: weights

        with torch.device("meta"):
            of_transformers = AutoModelForCausalLM.from_config(
                self.model_runner.model_config.hf_config
            )

        return partial(revert_weight_conversion, of_transformers)

    def _serve(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Replace the adapter of running and later requests. tensors: by the names that `peft`
        gives them."""
        manager = self.model_runner.lora_manager
        model = self.model_runner.get_model()
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        named = {
            f"base_model.model.{name.replace('.default.', '.')}": tensor
            for name, tensor in tensors.items()
        }
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER,
            named,
            PEFTHelper.from_dict(config),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        layers = manager._adapter_manager
        layers.remove_adapter(ADAPTER)
        layers.add_adapter(adapter)
        layers.activate_adapter(ADAPTER)

    def distflow_take_drawn(self, ended: dict[str, int], abandoned: list[str]) -> list[list[str]]:
        """What was drawn for the samples of these requests, whose numbers are given: what
        `DrawingSampler` kept, as float64 in base64. Forgets them and the abandoned ones."""
        # a server that was started anew has none
        kept = getattr(self.model_runner.sampler, "drawn", {})
        if abandoned:
            for owner in [owner for owner in kept if owner[0] in abandoned]:
                del kept[owner]

        taken = []
        for name, num_samples in ended.items():
            values = [kept.pop((name, sample), b"") for sample in range(num_samples)]
            taken.append([b64encode(value).decode() for value in values])

        return taken

    def distflow_count(self) -> int:
        """The number of tokens drawn so far."""
        return int(getattr(self.model_runner.sampler, "num_drawn", 0))

    def distflow_hashes(self) -> dict[str, str]:
        """The hashes of the weights that were loaded last."""
        return self.distflow_held


def _forget_kernels_of_experts(model: torch.nn.Module) -> None:
    """Have the kernels made again: for a CPU, vLLM packs the weights of experts only when it makes
    their kernel."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _names_in(path: str) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _read(paths: list[str], names: set[str]) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in names.intersection(file.keys()):
                yield name, file.get_tensor(name)


def stripe_hash(tensor: Tensor) -> str:
    """The same hash as in `distflow/rollout/engine_weights.py`, for comparison with receipts."""
    flat = tensor.reshape(-1)
    stripe = flat[torch.arange(0, flat.numel(), -(-flat.numel() // STRIPE_LENGTH) | 1)].contiguous()
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
    digest.update(stripe.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class DrawingSampler(Sampler):
    """Draws with the counters of `distflow/rollout/random_draws.py`: a token does not depend on
    its batch, and is the same as in our other engines.

    Each request has its law in `extra_args`, with the name under which `drawn` keeps three numbers
    per token: the token, its log-prob under softmax(logits / temperature), and its log-prob under
    the distribution drawn from. vLLM would pass log-probs on in objects of single tokens, which
    takes longer than all else.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner = runner
        self.drawn: dict[tuple[str, int], array[float]] = {}
        self.num_drawn = 0
        self._names = list[str]()  # of the last step's rows
        self._laws: _Laws | None = None

    def forward(
        self, logits: Tensor, sampling_metadata: Any, *args: Any, **options: Any
    ) -> SamplerOutput:
        names = self.runner.input_batch.req_ids[: len(logits)]
        states = [self.runner.requests[name] for name in names]

        if names != self._names:  # most steps have the rows of the last one
            self._names = list(names)
            self._laws = _laws_of(states, logits.device)

        laws = self._laws
        if laws is None:  # requests of other clients
            return super().forward(logits, sampling_metadata, *args, **options)

        logits = logits.float()
        policy = drawn_from = logits / laws.temperature

        if not sampling_metadata.no_penalties:
            output = sampling_metadata.output_token_ids
            drawn_from = (
                self.apply_penalties(logits.clone(), sampling_metadata, output) / laws.temperature
            )

        drawn_from = _truncated(drawn_from, laws)
        places = [len(state.output_token_ids) for state in states]
        drawn, sampling = _draw(drawn_from, laws, _uniforms(laws, places))

        if drawn_from is policy:
            before = sampling
        else:
            before = policy.log_softmax(dim=-1).gather(-1, drawn)

        self._keep(laws, places, torch.cat([drawn.double(), before, sampling], dim=-1).tolist())
        return SamplerOutput(drawn.int(), None)

    def _keep(self, laws: "_Laws", places: list[int], values: list[list[float]]) -> None:
        """Keep what was drawn. A token that is drawn again, after a preemption or in the next part
        of a long prompt, takes the place of the first."""
        for owner, place, value in zip(laws.owners, places, values, strict=True):
            kept = self.drawn.get(owner)
            if kept is None:
                kept = self.drawn[owner] = array("d")
            self.num_drawn += place * 3 == len(kept)
            kept[place * 3 :] = array("d", value)

        while len(self.drawn) > MOST_KEPT:
            del self.drawn[next(iter(self.drawn))]


class _Laws:
    """The laws of a batch's requests, by row. owners: under which name, and as which of its
    samples, a row is kept."""

    def __init__(self, laws: list[Any], samples: list[int], device: torch.device) -> None:
        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([[law[name]] for law in laws], device=device, dtype=dtype)

        self.owners = list[tuple[str, int]]()
        keys = []
        for law, sample in zip(laws, samples, strict=True):
            self.owners.append((law["name"], sample))
            keys.append(int(law["keys"][sample]))

        self.keys = np.array(keys, np.uint64)
        self.num_drawn = np.array([law["num_drawn"] for law in laws], np.uint64)
        self.temperature = column("temperature", torch.float32)
        self.top_k = column("top_k", torch.float64)
        self.top_p = column("top_p", torch.float64)
        self.min_p = column("min_p", torch.float64)
        self.cuts = bool(((self.top_k > 0) | (self.top_p < 1)).any())
        self.cuts_below_share = bool((self.min_p > 0).any())
        self.greedy = column("greedy", torch.bool) if any(law["greedy"] for law in laws) else None


def _laws_of(states: list[Any], device: torch.device) -> _Laws | None:
    """None if a request has no law. If a request has several samples, vLLM puts the sample's number
    in front of the request's name."""
    laws: list[Any] = [(state.sampling_params.extra_args or {}).get("distflow") for state in states]
    if None in laws:
        return None

    named = zip(laws, states, strict=True)
    samples = [
        int(state.req_id.partition("_")[0]) if len(law["keys"]) > 1 else 0 for law, state in named
    ]

    return _Laws(laws, samples, device)


def _uniforms(laws: _Laws, places: list[int]) -> list[float]:
    """A number in [0, 1) for each row, from the sample's key and the number of tokens drawn before.
    Products and sums are modulo 2**64."""
    bits = laws.keys + (laws.num_drawn + np.array(places, np.uint64) + np.uint64(1)) * _WEYL
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    bits = bits ^ (bits >> np.uint64(31))
    numbers: list[float] = ((bits >> np.uint64(11)) * 2.0**-53).tolist()
    return numbers


def _truncated(scores: Tensor, laws: _Laws) -> Tensor:
    """Top-k, then top-p of the rest, then min-p, each with its row's values; tokens tied with the
    last one kept are kept too."""
    size = scores.shape[-1]
    top_k = laws.top_k
    top_p = laws.top_p

    if laws.cuts:
        ordered = scores.sort(dim=-1, descending=True).values
        least = ordered.gather(-1, torch.where(top_k > 0, top_k, size).clamp(max=size).long() - 1)
        masses = ordered.masked_fill(ordered < least, float("-inf")).double().softmax(dim=-1)
        inside = (masses.cumsum(dim=-1) - masses < top_p).sum(dim=-1, keepdim=True)
        least = torch.maximum(least, ordered.gather(-1, torch.where(top_p < 1, inside, size) - 1))
        scores = scores.masked_fill(scores < least, float("-inf"))

    if laws.cuts_below_share:
        share = (scores.double() - scores.amax(dim=-1, keepdim=True).double()).exp()
        scores = scores.masked_fill(share < laws.min_p, float("-inf"))

    return scores


def _draw(scores: Tensor, laws: _Laws, uniforms: list[float]) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob, each `(rows, 1)`."""
    top = scores.amax(dim=-1, keepdim=True)
    uniform = torch.tensor(uniforms, dtype=torch.float64, device=scores.device)[:, None]
    drawn, total = _draw_by_mass((scores - top).exp_(), uniform)
    if laws.greedy is not None:
        drawn = torch.where(laws.greedy, scores.argmax(dim=-1, keepdim=True), drawn)
    log_probs = scores.gather(-1, drawn).double() - top - total.log()

    return drawn, log_probs.float()


def _draw_by_mass(masses: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The first token of each row whose cumulative mass exceeds `uniform` of the row's mass, and
    that mass; all are `(rows, 1)` but `masses`, `(rows, vocabulary)`.

    Sums are in float64. Whole rows would take too long in it, so the token's block of the row is
    found by the sums of blocks, and the token by cumulative sums inside its block.
    """
    size = masses.shape[-1]
    if size % BLOCK:
        masses = pad(masses, (0, -size % BLOCK))
    blocks = masses.unflatten(-1, (-1, BLOCK))  # (rows, blocks, tokens of a block)

    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total = ends[:, -1:]
    target = _below(uniform * total, total)
    number = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[-1] - 1)

    begin = pad(ends, (1, 0)).gather(-1, number)
    row = torch.arange(len(blocks), device=masses.device)
    inside = blocks[row, number.squeeze(-1)].double().cumsum(dim=-1)
    rest = _below(target - begin, inside[:, -1:])
    place = torch.searchsorted(inside, rest, right=True)

    return (number * BLOCK + place).clamp(max=size - 1), total


def _below(target: Tensor, total: Tensor) -> Tensor:
    """The target, or the largest number below the total if rounding has made it as large."""
    return torch.minimum(target, total.nextafter(torch.zeros_like(total)))
