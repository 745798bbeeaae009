"""Faults on the way of weights to the rollout engine, and in what it says of them, planted into
real runs: at staleness 0 with a copy of its own, and where tokens of older versions are trained on.
Each is caught within a few steps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distflow.errors import TrustError
from distflow.models import lora
from distflow.rollout import engine_weights
from distflow.rollout.embedded.engine import EmbeddedEngine
from distflow.rollout.embedded.host_lane import RequestLane
from distflow.rollout.embedded.prompt_cache import PromptCache
from distflow.rollout.embedded.scheduler import DrawnToken, Sequence
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime.weight_sync.same_process_weights import LocalWeights
from distflow.runtime.weight_sync.sender import WeightSender
from distflow.scheduling.group_states import CountsError
from distflow.training.torch_engine import TorchTrainEngine
from tests.e2e.runs import Playground

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
FAST = (f"{ACTOR}.optim.lr=3e-2", f"{ACTOR}.optim.scheduler=constant")
STEPS = 6
pytestmark = pytest.mark.slow
MODES = {
    "waves": ("actor_rollout_ref.model.dtype=bfloat16",),
    "stream": ("async.max_staleness=2",),
    "stream in bfloat16": ("async.max_staleness=2", "actor_rollout_ref.model.dtype=bfloat16"),
}
LONG = (
    "data.max_response_length=100",
    f"{ROLLOUT}.max_num_seqs=4",
    f"{ROLLOUT}.enforce_eager=true",
)
"""Answers that updates come in the middle of: by native code they would be done before."""
ADAPTER = ("actor_rollout_ref.model.lora_rank=4",)
Patch = pytest.MonkeyPatch
Fired = list[object]
"""What a fault leaves each time that it happens."""


@pytest.fixture
def playground(tmp_path):
    return Playground(tmp_path, num_rows=64)


def run(playground: Playground, mode: str, *more: str, name: str = "run") -> Any:
    steps = f"trainer.total_training_steps={STEPS}"
    return playground.run(
        "grpo", *MODES[mode], *FAST, steps, "trust.check_freq=1", *more, name=name
    )


def no_adapter(patch: Patch, fired: Fired) -> None:
    original = lora._delta
    patch.setattr(
        lora, "_delta", lambda module: fired.append(0) or torch.zeros_like(original(module))
    )


def stale_scale(patch: Patch, fired: Fired) -> None:
    original = lora._delta
    patch.setattr(lora, "_delta", lambda module: fired.append(0) or 0.5 * original(module))


def merged_once(patch: Patch, fired: Fired) -> None:
    """The first merged weights are sent again and again."""
    original, first = lora._delta, dict[int, torch.Tensor]()

    def kept(module: nn.Module) -> torch.Tensor:
        fired.append(0)
        return first.setdefault(id(module), original(module))

    patch.setattr(lora, "_delta", kept)


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        (no_adapter, "waves"),
        (stale_scale, "stream"),
        (merged_once, "stream in bfloat16"),
    ],
)
def test_an_adapter_that_is_not_sent_as_it_is(playground, monkeypatch, fault, mode):
    fired: Fired = []
    fault(monkeypatch, fired)

    with pytest.raises(TrustError, match=r"version 1 .*trainer's: .*self_attn\.q_proj\.weight"):
        run(playground, mode, *ADAPTER)

    assert fired


def sent_otherwise(
    patch: Patch, fired: Fired, part: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """`change` what the trainer gives for the tensors whose name holds `part`."""
    original = TorchTrainEngine.weights

    def changed(self: TorchTrainEngine) -> Any:
        for name, tensor in original(self):
            if part in name:
                fired.append(name)
                tensor = change(tensor)
            yield name, tensor

    patch.setattr(TorchTrainEngine, "weights", changed)


def first_again(patch: Patch, fired: Fired) -> None:
    kept: list[torch.Tensor] = []

    def first(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.clone())
        return kept[0]

    sent_otherwise(patch, fired, "layers.1.mlp.up", first)


def of_the_step_before(patch: Patch, fired: Fired) -> None:
    kept: list[torch.Tensor] = []

    def before(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.clone())
        return kept[max(len(kept) - 2, 0)]

    sent_otherwise(patch, fired, "norm", before)


def transposed(patch: Patch, fired: Fired) -> None:
    sent_otherwise(patch, fired, "layers.1.self_attn.o_proj", lambda tensor: tensor.T.contiguous())


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        (first_again, "waves"),
        (of_the_step_before, "stream"),
        (transposed, "stream"),
    ],
)
def test_a_tensor_that_is_sent_otherwise(playground, monkeypatch, fault, mode):
    fired: Fired = []
    fault(monkeypatch, fired)
    with pytest.raises(TrustError, match="version [01] .*trainer's: "):
        run(playground, mode)
    assert fired


def test_a_tensor_that_is_exchanged_on_its_way(playground, monkeypatch):
    original, first, fired = LocalWeights.put, dict[str, torch.Tensor](), Fired()

    def put(self: LocalWeights, bucket: Any) -> None:
        for name, tensor in bucket:
            first.setdefault(name, tensor.clone())
        fired.append(0)
        original(self, [(n, first[n] if "lm_head" in n else t) for n, t in bucket])

    monkeypatch.setattr(LocalWeights, "put", put)
    with pytest.raises(TrustError, match=r"version 1 .* different tensors: lm_head\.weight"):
        run(playground, "stream")

    assert len(fired) > 1


def taken_otherwise(
    patch: Patch, take: Callable[[nn.Module, dict[str, torch.Tensor]], None]
) -> None:
    """The engine takes weights by `take`, and says that it took them as they were sent."""

    def copy_weights(module: nn.Module, weights: Any) -> dict[str, str]:
        sent = dict(weights)
        take(module, sent)
        dtype = next(module.parameters()).dtype
        return stripe_hashes(sent.items(), dtype)

    patch.setattr(engine_weights, "copy_weights", copy_weights)


def half(module: nn.Module, sent: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in list(module.named_parameters())[::2]:
            parameter.copy_(sent[name])


def nothing(module: nn.Module, sent: dict[str, torch.Tensor]) -> None:
    pass


def rounded(module: nn.Module, sent: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(sent[name].to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("take", "mode"),
    [
        (half, "stream"),
        (nothing, "waves"),
        (rounded, "stream"),
    ],
)
def test_an_engine_that_claims_to_have_taken_weights(playground, monkeypatch, take, mode):
    """Its version runs ahead of its weights."""
    taken_otherwise(monkeypatch, take)
    with pytest.raises(TrustError, match="version .* different tensors: "):
        run(playground, mode)


def test_weights_in_a_module_that_is_not_computed_with(playground, monkeypatch):
    """The initial weights are served for ever, and every hash is right."""
    original = EmbeddedEngine.__init__

    def init(self: EmbeddedEngine, model: nn.Module, *args: Any, **options: Any) -> None:
        original(self, copy.deepcopy(model), *args, **options)
        self.model = model
        self._weights = engine_weights.EngineWeights(model, self.shares_weights)

    monkeypatch.setattr(EmbeddedEngine, "__init__", init)
    with pytest.raises(TrustError, match="canary: "):
        run(playground, "waves")


def test_initial_weights_after_a_resume(playground, monkeypatch):
    original = WeightSender.sync_changed

    def breaking(self: WeightSender, version: Any, updated: bool) -> Any:
        if version.step == 4:
            raise RuntimeError("broken off")
        return original(self, version, updated)

    monkeypatch.setattr(WeightSender, "sync_changed", breaking)
    with pytest.raises(RuntimeError, match="broken off"):
        run(playground, "stream", "trainer.save_freq=1")
    monkeypatch.undo()
    taken_otherwise(monkeypatch, nothing)
    with pytest.raises(TrustError, match="version 3 .* different tensors: "):
        run(playground, "stream", "trainer.save_freq=1")
    monkeypatch.undo()
    assert run(playground, "stream", "trainer.save_freq=1").outcome.steps == STEPS


@pytest.mark.parametrize("by", [-1, 1])
def test_versions_that_are_counted_ahead_or_late(playground, monkeypatch, by):
    original, fired = Sequence.append, Fired()

    def append(self: Sequence, drawn: DrawnToken, version: int) -> None:
        fired.append(0)
        original(self, drawn, max(version + by, 0))

    monkeypatch.setattr(Sequence, "append", append)
    with pytest.raises(
        (TrustError, CountsError), match="which step . may not train on|would leave"
    ):
        run(playground, "stream")

    assert fired


def test_versions_of_an_answer_s_begin(playground, monkeypatch):
    """Tokens behind an update carry the version before it, which their step may train on."""
    original, fired = Sequence.append, Fired()

    def append(self: Sequence, drawn: DrawnToken, version: int) -> None:
        first = (*self.versions, version)[0]
        if version != first:
            fired.append(version)
        original(self, drawn, first)

    monkeypatch.setattr(Sequence, "append", append)
    with pytest.raises(TrustError, match=r"\(versions\): .* tokens'"):
        run(playground, "stream", *LONG)
    assert fired


def test_keys_and_values_that_are_not_made_again(playground, monkeypatch):
    fired = Fired()
    monkeypatch.setattr(RequestLane, "forget_kv", lambda self: fired.extend(self.scheduler.begun()))
    with pytest.raises(TrustError, match=r"\(versions\): .* other weights"):
        run(playground, "stream", *LONG, f"{ROLLOUT}.kv_on_update=recompute")
    assert fired


def test_prompt_kv_kept_across_a_publish(playground, monkeypatch):
    original, fired = PromptCache.rows, Fired()

    def rows(self: PromptCache, version: object, *rest: Any) -> Any:
        fired.append(version)
        return original(self, "any", *rest)

    monkeypatch.setattr(PromptCache, "clear", lambda self: None)
    monkeypatch.setattr(PromptCache, "rows", rows)
    with pytest.raises(TrustError, match="canary: "):
        run(playground, "stream")
    assert len(set(fired)) > 1


def test_an_old_copy_that_is_swapped_in_after_a_pause(playground, monkeypatch):
    original, fired = EmbeddedEngine.resume, Fired()

    async def resume(self: EmbeddedEngine) -> None:
        if not hasattr(self, "_first"):
            self._first = copy.deepcopy(self.model.state_dict())  # type: ignore[attr-defined]
        elif self.version.step > 2:
            fired.append(0)
            self.model.load_state_dict(self._first)  # type: ignore[attr-defined]
        await original(self)

    monkeypatch.setattr(EmbeddedEngine, "resume", resume)
    with pytest.raises(TrustError, match=r"\(weights\): .* version "):
        run(playground, "waves")
    assert fired


def test_a_new_version_number_in_the_place_of_changed_weights(playground, monkeypatch):
    fired = Fired()

    def sync_changed(self: WeightSender, version: Any, updated: bool) -> Any:
        fired.append(updated)
        self.port.renumber(version, {})
        return False, {}

    monkeypatch.setattr(WeightSender, "sync_changed", sync_changed)
    for mode in ("waves", "stream"):
        with pytest.raises(TrustError, match=r"\(weights\): .* version 1, "):
            run(playground, mode, name=mode)

    assert all(fired)
