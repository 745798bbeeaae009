"""Adapters that clients train, against float64 references in plain transformers and plain sums."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from distflow.models.loading import load_model
from distflow.models.lora import merge_adapter
from distflow.tinker.adapter import (
    AdapterConfig,
    SharedBase,
    StepOptions,
    TrainedAdapter,
    read_state,
    with_weights,
)
from distflow.tinker.losses import LOSSES
from distflow.tinker.messages import BadRequest, Datum, PassRequest
from distflow.tinker.model_memory import ModelMemory, max_model_bytes
from distflow.training.torch_engine import TorchScorer
from tests.tiny_models import CHARACTERS, write_tiny_model

peft = pytest.importorskip("peft")
CONFIG = AdapterConfig(rank=4, seed=7, attention=True, mlp=True)
SCALE = 32 / CONFIG.rank
ROUNDING = 1e-5
VOCABULARY = 3 + len(CHARACTERS)
LOSS_NAMES = tuple(LOSSES)
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tinker") / "model", "qwen3")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    """The base in float64."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def make_base(folder: Path, kind: type[SharedBase] = SharedBase) -> SharedBase:
    return kind(load_model(folder), None, ModelMemory(math.inf, folder))


class SmallBins(SharedBase):
    """One whose passes hold few tokens, so that a request takes many."""

    def scorer(self, name: str) -> TorchScorer:
        return replace(super().scorer(name), max_tokens_per_micro_batch=16)


def made(base: SharedBase, name: str = "one", config: AdapterConfig = CONFIG) -> TrainedAdapter:
    """With a B of its own: at 0 no gradient would reach A."""
    adapter = TrainedAdapter(base, name, config)
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for path, parameter in base.parameters(name).items():
            if "lora_B" in path:
                parameter.normal_(std=0.02, generator=generator)
    return adapter


def random_datum(seed: int, length: int, head: Sequence[int] = ()) -> Datum:
    """A datum with the inputs of every loss. head: its first tokens, that other data share; their
    targets are its own."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (length,), generator=generator)
    ids[: len(head)] = torch.tensor(list(head), dtype=torch.int64)
    mask = (torch.rand(length, generator=generator) < 0.7).float()
    mask[-1] = 1.0
    inputs = {
        "target_tokens": torch.randint(3, 90, (length,), generator=generator),
        "weights": mask,
        "logprobs": -4.5 + torch.randn(length, generator=generator),
        "advantages": torch.randn(length, generator=generator),
        "sequence_ratio_mask": mask,
    }
    return Datum(ids, inputs)


def random_data() -> tuple[Datum, ...]:
    head = [11, 12, 13, 14]
    return (
        random_datum(0, 9, head),
        random_datum(1, 12, head),
        random_datum(2, 1),
        random_datum(3, 7, head),
        random_datum(4, 30),
        random_datum(5, 2),
    )


def request(
    data: Sequence[Datum], loss: str = "cross_entropy", forward_only: bool = False
) -> PassRequest:
    return PassRequest(loss, {}, tuple(data), forward_only)


def weights_of(base: SharedBase, name: str = "one") -> State:
    return {path: each.detach().clone() for path, each in base.parameters(name).items()}


def gradients_of(base: SharedBase, name: str = "one") -> State:
    found = {}
    for path, parameter in base.parameters(name).items():
        assert parameter.grad is not None
        found[path] = parameter.grad.clone()
    return found


def has_gradients(base: SharedBase, name: str = "one") -> bool:
    return any(each.grad is not None for each in base.parameters(name).values())


def assert_close(own: State, expected: State) -> None:
    """Within rounding of the largest value of each tensor."""
    assert own.keys() == expected.keys()
    for path, value in own.items():
        wanted = expected[path].double()
        limit = ROUNDING * float(wanted.abs().max()) + 1e-12
        torch.testing.assert_close(value.double(), wanted, rtol=0, atol=limit, msg=path)


def assert_equal(own: State, expected: State) -> None:
    assert own.keys() == expected.keys()
    assert all(torch.equal(value, expected[path]) for path, value in own.items())


def merged(plain: Any, leaves: State) -> State:
    """The base's float64 weights with W + alpha / rank · B A."""
    weights = dict(plain.named_parameters())
    for path, down in leaves.items():
        if path.endswith(".lora_A.weight"):
            name = path.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            up = leaves[path.replace("lora_A", "lora_B")]
            weights[name] = weights[name] + SCALE * up @ down
    return weights


def reference(plain: Any, leaves: State, data: Sequence[Datum]) -> list[Tensor]:
    """The log-probs of the targets, in float64, one datum after the other."""
    weights = merged(plain, leaves)
    found = []
    for datum in data:
        out = torch.func.functional_call(
            plain, weights, kwargs={"input_ids": datum.token_ids[None]}
        )
        targets = datum.inputs["target_tokens"][:, None]
        found.append(out.logits[0].log_softmax(-1).gather(1, targets)[:, 0])
    return found


@pytest.mark.parametrize("kind", [SharedBase, SmallBins])
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_log_probs_loss_and_gradients_are_those_of_the_merged_model(
    folder: Path, plain: Any, loss: str, kind: type[SharedBase]
) -> None:
    """Also where data with the same first tokens have other targets there."""
    base = make_base(folder, kind)
    adapter = made(base)
    leaves = {path: each.double().requires_grad_() for path, each in weights_of(base).items()}
    data = random_data()
    log_probs, metrics = adapter.run(request(data, loss))

    expected = reference(plain, leaves, data)
    known = LOSSES[loss]
    total = torch.zeros((), dtype=torch.float64)
    for own, datum in zip(expected, data, strict=True):
        inputs = {name: each.double() for name, each in datum.inputs.items()}
        total = total + known.compute(own, inputs, known.settings)
    total.backward()

    for own, wanted in zip(log_probs, expected, strict=True):
        torch.testing.assert_close(own.double(), wanted.detach(), rtol=ROUNDING, atol=ROUNDING)
    assert metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=ROUNDING)
    wanted_gradients = {}
    for path, leaf in leaves.items():
        assert leaf.grad is not None
        wanted_gradients[path] = leaf.grad
    assert_close(gradients_of(base), wanted_gradients)


def test_positions_may_have_several_targets_with_a_weight_each(folder: Path, plain: Any) -> None:
    """As a teacher's most likely tokens; next to data with fewer of them."""
    base = make_base(folder)
    adapter = made(base)
    leaves = {path: each.double().requires_grad_() for path, each in weights_of(base).items()}
    generator = torch.Generator().manual_seed(3)
    data = [random_datum(0, 9)]
    for seed, width in ((1, 3), (2, 2)):
        datum = changed(
            random_datum(seed, 6),
            "target_tokens",
            torch.randint(3, 90, (6, width), generator=generator),
        )
        data.append(changed(datum, "weights", torch.rand(6, width, generator=generator)))
    log_probs, metrics = adapter.run(request(data))

    total = torch.zeros((), dtype=torch.float64)
    for own, datum in zip(log_probs, data, strict=True):
        weights = merged(plain, leaves)
        out = torch.func.functional_call(
            plain, weights, kwargs={"input_ids": datum.token_ids[None]}
        )
        targets = datum.inputs["target_tokens"]
        columns = targets.reshape(len(targets), -1)
        wanted = out.logits[0].log_softmax(-1).gather(1, columns).reshape(targets.shape)
        torch.testing.assert_close(own.double(), wanted.detach(), rtol=ROUNDING, atol=ROUNDING)
        total = total - (wanted * datum.inputs["weights"].double()).sum()

    assert metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=ROUNDING)
    gradients = torch.autograd.grad(total, list(leaves.values()))
    assert_close(gradients_of(base), dict(zip(leaves, gradients, strict=True)))


def test_files_hold_what_peft_merges_to_the_same_model(folder: Path, tmp_path: Path) -> None:
    base = make_base(folder)
    adapter = made(base)
    data = random_data()
    log_probs, _ = adapter.run(request(data, forward_only=True))
    adapter.save(tmp_path, with_optimizer=False)

    model = merge_adapter(load_model(folder), str(tmp_path))
    for own, datum in zip(log_probs, data, strict=True):
        logits = model(input_ids=datum.token_ids[None]).logits[0]
        wanted = logits.log_softmax(-1).gather(1, datum.inputs["target_tokens"][:, None])[:, 0]
        torch.testing.assert_close(own, wanted.detach(), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (2, 3, 1), (5, 1), (1, 5)])
def test_gradients_add_up_however_the_data_are_cut(folder: Path, sizes: tuple[int, ...]) -> None:
    data = random_data()
    whole = make_base(folder)
    made(whole).run(request(data, "ppo"))

    cut = make_base(folder)
    adapter = made(cut)
    start = 0
    for size in sizes:
        adapter.run(request(data[start : start + size], "ppo"))
        start += size
    assert_close(gradients_of(cut), gradients_of(whole))


def test_a_forward_pass_adds_no_gradient(folder: Path) -> None:
    base = make_base(folder)
    adapter = made(base)
    alone, metrics = adapter.run(request(random_data(), forward_only=True))
    assert not has_gradients(base)

    log_probs, trained = adapter.run(request(random_data()))
    before = gradients_of(base)
    again, _ = adapter.run(request(random_data(), forward_only=True))
    assert_equal(gradients_of(base), before)
    assert trained["loss:sum"] == pytest.approx(metrics["loss:sum"], rel=ROUNDING)
    for one, two, three in zip(alone, log_probs, again, strict=True):
        torch.testing.assert_close(two, one, rtol=ROUNDING, atol=ROUNDING)
        assert torch.equal(three, one)


def without(datum: Datum, name: str) -> Datum:
    return Datum(datum.token_ids, {k: v for k, v in datum.inputs.items() if k != name})


def changed(datum: Datum, name: str, value: Tensor) -> Datum:
    return Datum(datum.token_ids, {**datum.inputs, name: value})


def with_token(datum: Datum, token: int) -> Datum:
    ids = datum.token_ids.clone()
    ids[-1] = token
    return Datum(ids, datum.inputs)


BAD: dict[str, tuple[str, Callable[[Datum], Datum], str]] = {
    "no advantages": ("ppo", lambda each: without(each, "advantages"), "datum 2.*advantages"),
    "no mask": ("gspo", lambda each: without(each, "sequence_ratio_mask"), "datum 2.*ratio_mask"),
    "nothing marked": (
        "gspo",
        lambda each: changed(each, "sequence_ratio_mask", torch.zeros(len(each.token_ids))),
        "marks no token",
    ),
    "a token beyond": ("ppo", lambda each: with_token(each, 100_000), "datum 2.*model_input"),
    "a token below 0": ("ppo", lambda each: with_token(each, -1), "datum 2.*model_input"),
    "a target beyond": (
        "ppo",
        lambda each: changed(each, "target_tokens", torch.full((len(each.token_ids),), VOCABULARY)),
        f"datum 2.*target_tokens.*{VOCABULARY}",
    ),
}


@pytest.mark.parametrize("kind", list(BAD))
def test_a_bad_datum_among_good_ones_adds_no_gradient(folder: Path, kind: str) -> None:
    """Each datum is a pass of its own here: those before it had theirs."""
    loss, spoil, message = BAD[kind]
    base = make_base(folder, SmallBins)
    adapter = made(base)
    good = [random_datum(seed, 16) for seed in range(5)]
    bad = [*good[:2], spoil(good[2]), *good[3:]]

    with pytest.raises(ValueError, match=message):
        adapter.run(request(bad, loss))
    assert not has_gradients(base)

    adapter.run(request(good, loss))
    before = gradients_of(base)
    with pytest.raises(ValueError, match=message):
        adapter.run(request(bad, loss))
    assert_equal(gradients_of(base), before)


def test_unknown_losses_and_settings_are_refused(folder: Path) -> None:
    base = make_base(folder)
    adapter = made(base)
    with pytest.raises(BadRequest, match="'grpo'.*importance_sampling"):
        adapter.run(request(random_data(), "grpo"))
    with pytest.raises(BadRequest, match="clip_low is no setting of ppo"):
        adapter.run(PassRequest("ppo", {"clip_low": 0.5}, random_data(), False))
    assert not has_gradients(base)


def test_missing_weights_of_cross_entropy_are_ones(folder: Path) -> None:
    adapter = made(make_base(folder))
    datum = random_datum(0, 8)
    log_probs, metrics = adapter.run(request([without(datum, "weights")]))
    assert metrics["loss:sum"] == pytest.approx(-float(log_probs[0].sum()), rel=ROUNDING)


OPTIONS = (
    StepOptions(learning_rate=1e-2, weight_decay=0.1),
    StepOptions(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-3, grad_clip_norm=0.5),
    StepOptions(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1e9),
)


def test_steps_are_those_of_adamw(folder: Path) -> None:
    """By hand in float64, with another rate, betas, decay and limit at each step."""
    base = make_base(folder)
    adapter = made(base)
    own = {path: each.double() for path, each in weights_of(base).items()}
    first = {path: torch.zeros_like(each) for path, each in own.items()}
    second = {path: torch.zeros_like(each) for path, each in own.items()}

    for number, options in enumerate(OPTIONS, 1):
        adapter.run(request(random_data(), "importance_sampling"))
        gradients = {path: each.double() for path, each in gradients_of(base).items()}
        norm = float(torch.stack([each.square().sum() for each in gradients.values()]).sum().sqrt())
        assert norm > 0.5
        limit = options.grad_clip_norm
        factor = min(1.0, limit / norm) if limit else 1.0
        metrics = adapter.step(options)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)

        beta1, beta2 = options.beta1, options.beta2
        for path, weight in own.items():
            gradient = factor * gradients[path]
            first[path] = beta1 * first[path] + (1 - beta1) * gradient
            second[path] = beta2 * second[path] + (1 - beta2) * gradient.square()
            mean = first[path] / (1 - beta1**number)
            root = (second[path] / (1 - beta2**number)).sqrt()
            kept = weight * (1 - options.learning_rate * options.weight_decay)
            own[path] = kept - options.learning_rate * mean / (root + options.eps)
        assert_close(weights_of(base), own)

    assert adapter.num_steps == 3
    assert not has_gradients(base)


def test_a_step_without_gradients_is_refused(folder: Path) -> None:
    base = make_base(folder)
    adapter = made(base)
    before = weights_of(base)
    with pytest.raises(BadRequest, match="forward_backward first"):
        adapter.step(StepOptions())
    adapter.run(request(random_data(), forward_only=True))
    with pytest.raises(BadRequest, match="forward_backward first"):
        adapter.step(StepOptions())

    assert_equal(weights_of(base), before)
    assert adapter.num_steps == 0


def test_a_step_on_gradients_that_are_not_finite_changes_nothing(folder: Path) -> None:
    base = make_base(folder)
    adapter = made(base)
    before = weights_of(base)
    datum = random_datum(0, 8)
    adapter.run(
        request([changed(datum, "logprobs", torch.full((8,), -1e4))], "importance_sampling")
    )
    with pytest.raises(BadRequest, match="nothing changed"):
        adapter.step(StepOptions())
    assert_equal(weights_of(base), before)
    assert adapter.num_steps == 0

    adapter.run(request([datum]))
    adapter.step(StepOptions())
    assert adapter.num_steps == 1
    assert all(bool(each.isfinite().all()) for each in weights_of(base).values())


def train(adapter: TrainedAdapter, seed: int, num_steps: int = 2) -> list[Tensor]:
    """The log-probs of the last pass."""
    log_probs: list[Tensor] = []
    for step in range(num_steps):
        data = [random_datum(100 * seed + 10 * step + each, 6 + each) for each in range(3)]
        log_probs, _ = adapter.run(request(data))
        adapter.step(StepOptions(learning_rate=1e-2))
    return log_probs


def test_adapters_over_one_base_train_as_each_would_alone(folder: Path) -> None:
    other = AdapterConfig(rank=2, seed=8, attention=True, mlp=False)
    alone = make_base(folder)
    first = train(made(alone), 1, 3)
    alone_too = make_base(folder)
    second = train(made(alone_too, "two", other), 2, 3)

    both = make_base(folder)
    one = made(both)
    two: TrainedAdapter | None = None
    for step in range(3):
        # a gradient waits while the other starts, and has its pass and its step
        data = [[random_datum(100 * n + 10 * step + i, 6 + i) for i in range(3)] for n in (1, 2)]
        own, _ = one.run(request(data[0]))
        if two is None:
            two = made(both, "two", other)
        others, _ = two.run(request(data[1]))
        two.step(StepOptions(learning_rate=1e-2))
        one.step(StepOptions(learning_rate=1e-2))

    assert_equal(weights_of(both), weights_of(alone))
    assert_equal(weights_of(both, "two"), weights_of(alone_too, "two"))
    assert all(map(torch.equal, own, first)) and all(map(torch.equal, others, second))


def test_an_adapter_that_ends_leaves_the_others_as_they_are(folder: Path) -> None:
    alone = make_base(folder)
    train(made(alone), 1, 3)

    base = make_base(folder)
    one = made(base)
    two = made(base, "two")
    train(one, 1)
    train(two, 2)
    two.close()
    data = [random_datum(120 + each, 6 + each) for each in range(3)]
    one.run(request(data))
    one.step(StepOptions(learning_rate=1e-2))
    assert_equal(weights_of(base), weights_of(alone))

    one.close()
    train(made(base), 1, 3)
    assert_equal(weights_of(base), weights_of(alone))


def test_a_loaded_adapter_with_its_optimizer_goes_on_to_the_bit(
    folder: Path, tmp_path: Path
) -> None:
    base = make_base(folder)
    adapter = made(base)
    train(adapter, 1)
    adapter.save(tmp_path, with_optimizer=True)
    saved = weights_of(base)
    train(adapter, 2)

    again = make_base(folder)
    loaded = TrainedAdapter(again, "one", replace(CONFIG, seed=99))
    train(loaded, 3)
    loaded.run(request(random_data()))
    loaded.load(tmp_path, with_optimizer=True)
    assert_equal(weights_of(again), saved)
    assert loaded.num_steps == 2 and not has_gradients(again)
    train(loaded, 2)
    assert_equal(weights_of(again), weights_of(base))
    assert loaded.num_steps == 4


def test_a_loaded_adapter_without_its_optimizer_starts_with_fresh_moments(
    folder: Path, tmp_path: Path
) -> None:
    """As one with these weights that has taken no step."""
    base = make_base(folder)
    adapter = made(base)
    train(adapter, 1)
    adapter.save(tmp_path, with_optimizer=True)
    saved = weights_of(base)
    train(adapter, 2)

    again = make_base(folder)
    loaded = made(again)
    train(loaded, 3)
    loaded.load(tmp_path, with_optimizer=False)
    train(loaded, 2)

    fresh = make_base(folder)
    new = made(fresh)
    with torch.no_grad():
        for path, parameter in fresh.parameters("one").items():
            parameter.copy_(saved[path])
    train(new, 2)
    assert_equal(weights_of(again), weights_of(fresh))
    assert any(not torch.equal(each, weights_of(base)[p]) for p, each in weights_of(again).items())


@pytest.mark.parametrize(
    "other", [replace(CONFIG, rank=2), replace(CONFIG, mlp=False), replace(CONFIG, attention=False)]
)
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_checkpoint_of_another_form_is_refused_with_nothing_changed(
    folder: Path, tmp_path: Path, other: AdapterConfig, with_optimizer: bool
) -> None:
    saved = made(make_base(folder), config=other)
    train(saved, 1)
    saved.save(tmp_path, with_optimizer=True)

    base = make_base(folder)
    adapter = made(base)
    same = make_base(folder)
    untouched = made(same)
    for each in (adapter, untouched):
        train(each, 2)
        each.run(request(random_data()))
    with pytest.raises(BadRequest, match="another rank or scale"):
        adapter.load(tmp_path, with_optimizer)

    assert_equal(weights_of(base), weights_of(same))
    assert_equal(gradients_of(base), gradients_of(same))
    for each in (adapter, untouched):
        each.step(StepOptions())
        assert each.num_steps == 3
    assert_equal(weights_of(base), weights_of(same))


def test_a_checkpoint_for_sampling_has_no_optimizer(folder: Path, tmp_path: Path) -> None:
    base = make_base(folder)
    adapter = made(base)
    train(adapter, 1)
    adapter.save(tmp_path, with_optimizer=False)
    saved = weights_of(base)
    train(adapter, 2)
    after = weights_of(base)
    with pytest.raises(BadRequest, match="for sampling"):
        adapter.load(tmp_path, with_optimizer=True)
    assert_equal(weights_of(base), after)
    adapter.load(tmp_path, with_optimizer=False)
    assert_equal(weights_of(base), saved)
    assert json.loads((tmp_path / "distflow.json").read_text())["config"]["rank"] == CONFIG.rank


def test_an_adapter_starts_at_the_base_by_its_seed(folder: Path) -> None:
    base = make_base(folder)
    for name, seed in (("one", 1), ("two", 2), ("three", 1)):
        TrainedAdapter(base, name, replace(CONFIG, seed=seed))
    one, two = weights_of(base), weights_of(base, "two")
    assert_equal(one, weights_of(base, "three"))
    for path, weight in one.items():
        if "lora_B" in path:
            assert not weight.any()
        else:
            assert not torch.equal(weight, two[path])


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("attention, mlp", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("second", [False, True])
def test_the_client_chooses_layers(folder: Path, attention: bool, mlp: bool, second: bool) -> None:
    """Also beside an adapter on other layers; never the output head."""
    base = make_base(folder)
    if second:
        made(base, "other", replace(CONFIG, attention=mlp, mlp=attention))
    TrainedAdapter(base, "one", AdapterConfig(3, 0, attention, mlp))
    own = base.parameters("one")
    layers = {path.split(".lora_")[0].rpartition(".")[2] for path in own}
    assert layers == (ATTENTION if attention else set()) | (MLP if mlp else set())
    assert len(own) == 2 * 2 * len(layers)
    assert all(3 in each.shape for each in own.values())


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, rank=0),
        replace(CONFIG, rank=-1),
        replace(CONFIG, attention=False, mlp=False),
    ],
)
def test_an_adapter_of_nothing_is_refused(folder: Path, config: AdapterConfig) -> None:
    """And the base serves the others as before."""
    base = make_base(folder)
    adapter = made(base)
    with pytest.raises(BadRequest, match=r"rank (0|-1|4) for (14|0) layers"):
        TrainedAdapter(base, "two", config)
    assert base.parameters("two") == {}
    train(adapter, 1)

    alone = make_base(folder)
    train(made(alone), 1)
    assert_equal(weights_of(base), weights_of(alone))


def small_base(folder: Path, kept: Path, models: float) -> SharedBase:
    """One with memory for so many adapters of `CONFIG`."""
    each = SharedBase(load_model(folder), None, ModelMemory(math.inf, kept)).num_bytes(CONFIG)
    return SharedBase(load_model(folder), None, ModelMemory(models * each, kept))


@pytest.mark.parametrize("models", [1, 2.5])
def test_adapters_that_leave_memory_come_back_equal(
    folder: Path, tmp_path: Path, models: float
) -> None:
    """With gradients that no step has used yet, and with moments."""
    names = ("one", "two", "three")
    small = small_base(folder, tmp_path, models)
    large = make_base(folder)
    of_small = [made(small, name, replace(CONFIG, seed=5)) for name in names]
    of_large = [made(large, name, replace(CONFIG, seed=5)) for name in names]
    seen = []
    for adapters in (of_small, of_large):
        told = []
        for number in (0, 1, 2, 0, 0, 2, 1, 0):
            adapter = adapters[number]
            told.append(adapter.run(request(random_data()[: number + 3]))[1])
            if len(told) % 2:
                told.append(adapter.step(StepOptions(learning_rate=0.01)))
        seen.append(told)
    assert seen[0] == seen[1]

    num_there = len([name for name in names if small.parameters(name)])
    assert num_there == int(models)
    assert len([*(tmp_path / ".idle").iterdir()]) == len(names) - num_there
    for name, adapter, twin in zip(names, of_small, of_large, strict=True):
        adapter.save(tmp_path, with_optimizer=True)
        assert adapter.num_steps == twin.num_steps
        assert_equal(weights_of(small, name), weights_of(large, name))

    for adapter in of_small:
        adapter.close()
    assert not [*(tmp_path / ".idle").iterdir()]
    assert not any(small.parameters(name) for name in names)


def test_a_model_larger_than_the_memory_is_refused_and_the_others_stay(
    folder: Path, tmp_path: Path
) -> None:
    base = small_base(folder, tmp_path, 1)
    adapter = made(base)
    with pytest.raises(BadRequest, match="GB for models"):
        TrainedAdapter(base, "two", replace(CONFIG, rank=5))
    with pytest.raises(BadRequest, match="rank 0"):
        TrainedAdapter(base, "three", replace(CONFIG, rank=0))
    train(adapter, 1)
    made(base, "two").close()
    train(adapter, 1)


def test_a_model_that_cannot_be_written_stays_in_memory(folder: Path, tmp_path: Path) -> None:
    base = small_base(folder, tmp_path, 1)
    adapter = made(base)
    train(adapter, 1)
    (tmp_path / ".idle" / "one" / "distflow.json").mkdir(parents=True)
    with pytest.raises(OSError):
        TrainedAdapter(base, "two", CONFIG)
    train(adapter, 1)
    assert base.parameters("two") == {}
    made(base, "two").close()
    train(adapter, 1)


def test_processes_share_the_memory_of_a_machine() -> None:
    device = torch.device("cpu")
    assert 0 < max_model_bytes(device, 4) < max_model_bytes(device, 1) / 2


def peft_folder(model: Path, folder: Path, **changes: Any) -> Any:
    """An adapter that PEFT wrote itself, and its model in float64."""
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    options: dict[str, Any] = {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]}
    found = peft.get_peft_model(causal, peft.LoraConfig(**options, **changes))
    generator = torch.Generator().manual_seed(4)
    for path, parameter in found.named_parameters():
        if "lora_" in path:
            parameter.data.normal_(std=0.05, generator=generator)
    found.save_pretrained(str(folder))
    return found


def test_an_adapter_of_peft_starts_a_model_and_trains_on(folder: Path, tmp_path: Path) -> None:
    """With its own scale and layers, of which a save tells too."""
    theirs = peft_folder(folder, tmp_path / "theirs")
    config = AdapterConfig(**read_state(tmp_path / "theirs")["config"])
    adapter = TrainedAdapter(make_base(folder), "one", config)
    with pytest.raises(BadRequest, match="for sampling"):
        adapter.load(tmp_path / "theirs", with_optimizer=True)
    adapter.load(tmp_path / "theirs", with_optimizer=False)

    data = random_data()
    log_probs, _ = adapter.run(request(data))
    for own, datum in zip(log_probs, data, strict=True):
        logits = theirs(datum.token_ids[None]).logits[0]
        targets = datum.inputs["target_tokens"][:, None]
        expected = logits.log_softmax(-1).gather(1, targets)[:, 0].detach()
        torch.testing.assert_close(own.double(), expected, rtol=0, atol=1e-5)

    adapter.step(StepOptions(learning_rate=0.01))
    adapter.save(tmp_path, with_optimizer=False)
    expected = adapter.run(request(data))[1]
    again = TrainedAdapter(
        make_base(folder), "one", AdapterConfig(**read_state(tmp_path)["config"])
    )
    again.load(tmp_path, with_optimizer=False)
    assert again.run(request(data))[1] == expected
    loaded = peft.PeftModel.from_pretrained(load_model(folder), tmp_path)
    assert loaded.peft_config["default"].lora_alpha == 12


@pytest.mark.parametrize("changes", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}])
def test_another_kind_of_adapter_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    peft_folder(folder, tmp_path, **changes)
    with pytest.raises(BadRequest, match=next(iter(changes))):
        read_state(tmp_path)


def test_a_checkpoint_of_another_base_is_refused(folder: Path, tmp_path: Path) -> None:
    """Of the same shapes."""
    made(make_base(folder)).save(tmp_path, with_optimizer=True)
    model = load_model(folder)
    base = SharedBase(model.bfloat16().float(), None, ModelMemory(math.inf, folder))
    made(base).load(tmp_path, with_optimizer=True)

    with torch.no_grad():
        model.get_output_embeddings().weight += 0.01
    base = SharedBase(model, None, ModelMemory(math.inf, folder))
    with pytest.raises(BadRequest, match="another base"):
        made(base).load(tmp_path, with_optimizer=True)


WHOLE = replace(CONFIG, rank=None)


@pytest.fixture(scope="module", params=[False, True])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an output head of its own, and without."""
    made = tmp_path_factory.mktemp("whole") / "model"
    return write_tiny_model(made, "qwen3", tie_word_embeddings=request.param)


def test_all_weights_train_as_in_plain_torch(any_model: Path) -> None:
    """Beside an adapter over the same base, which does not change."""
    causal = AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float64)
    options = StepOptions(learning_rate=1e-3, weight_decay=0.1)
    adamw = torch.optim.AdamW(
        causal.parameters(),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
    )
    base = make_base(any_model)
    adapter = made(base, "small")
    whole = TrainedAdapter(base, "one", WHOLE)
    data = random_data()
    before = adapter.run(request(data, forward_only=True))[1]

    for _ in range(3):
        losses = []
        for datum in data:
            log_probs = causal(datum.token_ids[None]).logits[0].log_softmax(-1)
            of_targets = log_probs.gather(1, datum.inputs["target_tokens"][:, None])[:, 0]
            losses.append(-(of_targets * datum.inputs["weights"]).sum())
        loss = torch.stack(losses).sum()
        loss.backward()
        adamw.step()
        adamw.zero_grad()

        _, metrics = whole.run(request(data))
        assert metrics["loss:sum"] == pytest.approx(float(loss), rel=ROUNDING)
        whole.step(options)

    expected = {name: each.detach() for name, each in causal.named_parameters()}
    own = weights_of(base)
    assert own.keys() == expected.keys()
    for name, weight in own.items():
        torch.testing.assert_close(weight.double(), expected[name], rtol=0, atol=2e-5, msg=name)
    assert adapter.run(request(data, forward_only=True))[1] == before


def test_all_weights_are_saved_as_a_model_and_go_on_to_the_bit(
    any_model: Path, tmp_path: Path
) -> None:
    base = make_base(any_model)
    whole = TrainedAdapter(base, "one", WHOLE)
    train(whole, 1)
    whole.save(tmp_path, with_optimizer=True)
    loss = whole.run(request(random_data(), forward_only=True))[1]["loss:sum"]
    again = TrainedAdapter(make_base(tmp_path), "one", WHOLE)
    assert again.run(request(random_data(), forward_only=True))[1]["loss:sum"] == loss
    merged = TrainedAdapter(
        SharedBase(
            with_weights(load_model(any_model), tmp_path), None, ModelMemory(math.inf, tmp_path)
        ),
        "one",
        CONFIG,
    )
    assert merged.run(request(random_data(), forward_only=True))[1]["loss:sum"] == loss

    other = make_base(any_model)
    loaded = TrainedAdapter(other, "one", AdapterConfig(**read_state(tmp_path)["config"]))
    loaded.load(tmp_path, with_optimizer=True)
    train(whole, 2)
    train(loaded, 2)
    assert_equal(weights_of(other), weights_of(base))
    with pytest.raises(BadRequest, match="another rank or scale"):
        made(other, "two").load(tmp_path, with_optimizer=True)
    loaded.close()
    assert base.parameters("one") and not other.parameters("one")


def test_all_weights_leave_memory_for_an_adapter_and_come_back_equal(
    folder: Path, tmp_path: Path
) -> None:
    size = make_base(folder).num_bytes(WHOLE)
    base = SharedBase(load_model(folder), None, ModelMemory(size, tmp_path))
    whole = TrainedAdapter(base, "one", WHOLE)
    twin = TrainedAdapter(make_base(folder), "one", WHOLE)
    for each in (whole, twin):
        train(each, 1)
        each.run(request(random_data()))
    adapter = made(base, "two")
    assert base.parameters("one") == {}

    for each in (whole, twin):
        each.step(StepOptions(learning_rate=0.01))
    last = [each.run(request(random_data()))[1] for each in (whole, twin)]
    assert last[0] == last[1]
    adapter.close()
    less = SharedBase(load_model(folder), None, ModelMemory(size - 1, tmp_path))
    with pytest.raises(BadRequest, match="GB for models: choose an adapter"):
        TrainedAdapter(less, "one", WHOLE)
