"""The weights that are sent to engines are the trainer's, element by element, and those of all
ranks that train it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distflow.errors import TrustError
from distflow.models.loading import load_model
from distflow.models.lora import add_lora, named_weights
from distflow.runtime.weight_sync.sent_weights import check_replicas, check_sent
from distflow.training.engine import OneRank
from tests.tiny_models import write_tiny_model

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def trained(folder: Path, adapter: bool, by: float = 0.1) -> nn.Module:
    """by: how far an adapter's B is from its start."""
    model = load_model(folder)
    if not adapter:
        return model

    wrapped = add_lora(model, rank=4)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=by, generator=torch.Generator().manual_seed(len(name)))

    return wrapped


def sent(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in named_weights(model)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("by", [1e-5, 0.1])
def test_the_trainer_s_own_pass(folder, adapter, dtype, by):
    model = trained(folder, adapter, by)
    check_sent(list(sent(model, dtype).items()), model, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda own: own.T.contiguous(),
        lambda own: own.roll(1, 0),
        lambda own: own * 0.99,
        torch.zeros_like,
    ],
    ids=["transposed", "rolled", "scaled", "zero"],
)
def test_others_are_named(folder, adapter, dtype, spoil):
    model = trained(folder, adapter)
    weights = sent(model, dtype)
    weights[Q] = spoil(weights[Q])
    with pytest.raises(TrustError, match=rf"version 3 .*: {Q} \(1 tensors\)"):
        check_sent(list(weights.items()), model, 3)


@pytest.mark.parametrize(("dtype", "by"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_a_model_without_its_small_adapter(folder, dtype, by):
    model = trained(folder, adapter=True, by=by)
    bare = sent(load_model(folder), dtype)
    with pytest.raises(TrustError, match=r"version 3 .* adapter"):
        check_sent(list(bare.items()), model, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_is_sent_unmerged(folder, dtype):
    model = trained(folder, adapter=True)
    weights = {name: tensor.to(dtype) for name, tensor in named_weights(model, merge=False)}
    check_sent(list(weights.items()), model, 3, merged=False)

    half = "model.layers.1.self_attn.q_proj.lora_B.default.weight"
    for name, other in ((Q, sent(model, dtype)[Q]), (half, weights[half].roll(1, 0))):
        with pytest.raises(TrustError, match=rf"version 3 .*: {name} \(1 tensors\)"):
            check_sent([*(weights | {name: other}).items()], model, 3, merged=False)


class TwoRanks(OneRank):
    """The other one has these hashes."""

    size = 2

    def __init__(self, other: dict[str, str]) -> None:
        self.other = other

    def gather(self, value):  # type: ignore[no-untyped-def]
        """A digest first, then what differs."""
        if isinstance(value, dict):
            return [value, self.other]
        recording = Recording()
        check_replicas(self.other, 0, recording)
        return [value, recording.digest]


class Recording(OneRank):
    size = 2

    def gather(self, value):  # type: ignore[no-untyped-def]
        self.digest = value
        return [value, value]


def test_the_same_weights_pass_and_others_are_named():
    own = {"a": "1", "b": "2", "c": "3"}
    check_replicas(own, 4, TwoRanks(dict(own)))
    with pytest.raises(TrustError, match="step 4: b, 1 tensors"):
        check_replicas(own, 4, TwoRanks({**own, "b": "9"}))
