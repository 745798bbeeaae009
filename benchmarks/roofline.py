"""What a decoder must move and compute, by formula, and how fast a device moves and computes, by
measurement.

The share of a roofline is the time that the work would take at the measured rate over the time that
it took. Only what the work cannot do without is counted: weights once a step, keys and values of
the tokens that are seen, the causal half of attention, logits where they are wanted, no
recomputation.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Decoder:
    """The numbers of a Llama-like decoder's config that its work hangs on. bias: of q, k and v."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    bias: bool

    @staticmethod
    def of(config: Any) -> "Decoder":
        """Of a Hugging Face config."""
        return Decoder(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            config.vocab_size,
            config.tie_word_embeddings,
            config.model_type == "qwen2",
        )

    @property
    def layer_weights(self) -> int:
        """In the matrices of one layer."""
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        return self.hidden * (2 * queries + 2 * keys + 3 * self.intermediate)

    @property
    def weights(self) -> int:
        """All of them, tied ones once."""
        vectors = 2 * self.hidden + (self.heads + 2 * self.kv_heads) * self.head_dim * self.bias
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * (self.layer_weights + vectors) + self.hidden

    @property
    def kv_elements(self) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def decode_bytes(decoder: Decoder, contexts: Iterable[int], itemsize: int) -> int:
    """Moved by one decode step. contexts: of each row, the tokens that it attends to, its own among
    them.

    Every weight is read once, of an embedding that is not the head as well a row a sequence; keys
    and values of the context are read, those of the row's own token written first.
    """
    seen = list(contexts)
    embedding = 0 if decoder.tied else decoder.vocabulary * decoder.hidden
    weights = decoder.weights - embedding + len(seen) * decoder.hidden
    return itemsize * (weights + decoder.kv_elements * (sum(seen) + len(seen)))


def forward_flops(
    decoder: Decoder, lengths: Iterable[int], num_logits: int, causal: bool = True
) -> int:
    """Of the matrix products over sequences of these lengths; a multiplication and an addition are
    two.

    num_logits: rows for which the head runs. causal: a token attends to itself and what stands
    before it; else to the whole sequence, which is what kernels without a causal path compute.
    """
    seqs = list(lengths)
    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in seqs)
    attention = 2 * 2 * decoder.layers * decoder.heads * decoder.head_dim * pairs
    linears = 2 * decoder.layers * decoder.layer_weights * sum(seqs)
    return linears + attention + 2 * decoder.hidden * decoder.vocabulary * num_logits


def update_flops(
    decoder: Decoder, lengths: Iterable[int], num_logits: int, causal: bool = True
) -> int:
    """Of a forward and a backward pass, by inputs and by weights: three forward passes."""
    return 3 * forward_flops(decoder, lengths, num_logits, causal)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """From an idle device to an idle device."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def copy_rate(device: torch.device, num_bytes: int, repeats: int = 20) -> float:
    """Bytes a second, read and written, of a copy on the device from `num_bytes` to as many; the
    median of 5."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return (
        2
        * num_bytes
        * repeats
        / _median(lambda: [target.copy_(source) for _ in range(repeats)], device)
    )


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int, repeats: int = 20) -> float:
    """FLOPs a second of a square product; the median of 5."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return (
        2
        * size**3
        * repeats
        / _median(lambda: [torch.mm(left, right, out=out) for _ in range(repeats)], device)
    )


def _median(work: Callable[[], object], device: torch.device) -> float:
    work()
    return statistics.median(seconds_of(work, device) for _ in range(5))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
