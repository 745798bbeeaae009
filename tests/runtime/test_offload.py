"""Engines of which something is offloaded are on the device when they are used, and only then."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from distflow.builtin_names import ROLLOUT_ENGINES, TRAIN_ENGINES
from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.rollout.embedded.engine import EmbeddedEngine
from distflow.rollout.engine import GenerateRequest
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.offload import Offload
from distflow.runtime.spec import Offloads
from distflow.training.engine import LossFn
from distflow.training.torch_engine import FrozenWeights, TorchTrainEngine
from tests.e2e.runs import Playground

KEYS = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=2",
    "trainer.test_freq=1",
    "trust.check_freq=1",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "async.max_staleness=0",
)
EVENTS: list[str] = []
AWAY: set[str] = set()


class WatchedEngine(TorchTrainEngine):
    """Says when it is moved; its model cannot run while it is away."""

    def __init__(self, model: nn.Module, **options: object) -> None:
        super().__init__(model, **options)  # type: ignore[arg-type]  # as given
        self.role = "critic" if hasattr(model, "score") else "actor"
        model.register_forward_pre_hook(lambda *_: self.used("pass"))

    def used(self, how: str) -> None:
        assert self.role not in AWAY, f"{how} of the {self.role}, which is away"

    def forward(self, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        self.used("forward")
        return super().forward(batch, outputs)

    def train_step(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        self.used("step")
        EVENTS.append(f"step {self.role}")
        return super().train_step(batch, loss_fn)

    def offload(self, weights: bool = True, moments: bool = True) -> None:
        super().offload(weights, moments)
        EVENTS.append(f"offload {self.role}{' weights' * weights}{' moments' * moments}")
        if weights:
            AWAY.add(self.role)

    def onload(self) -> None:
        super().onload()
        EVENTS.append(f"onload {self.role}")
        AWAY.remove(self.role)


class WatchedRollout(EmbeddedEngine):
    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        if not EVENTS or EVENTS[-1] != "generate":
            EVENTS.append("generate")
        return await super().generate(request)


def use(patch: pytest.MonkeyPatch, trainer: type, rollout: type) -> None:
    """Have runs of this process build these engines."""
    for table, name, engine in (
        (TRAIN_ENGINES, "torch", trainer),
        (ROLLOUT_ENGINES, "embedded", rollout),
    ):
        entry = replace(table[name], target=f"{__name__}:{engine.__name__}")  # type: ignore[type-var]
        patch.setitem(table, name, entry)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_moves_engines_as_it_needs_them_and_ends_where_one_that_moves_none_does(
    tmp_path, monkeypatch
):
    playground = Playground(tmp_path)
    keys = (
        *KEYS,
        f"critic.model.path={playground.write_critic()}",
        f"data.val_files={tmp_path}/rows.jsonl",
    )
    plain = playground.run("ppo", *keys, name="plain")
    EVENTS.clear()
    offloads = {
        "actor": Offloads(weights=True, moments=True),
        "critic": Offloads(weights=True, moments=False),
    }
    use(monkeypatch, WatchedEngine, WatchedRollout)
    run = playground.run(
        "ppo",
        *keys,
        name="moved",
        spoil=lambda spec: replace(spec, offloads=offloads),
    )

    for role in ("actor", "critic"):
        ours, theirs = (
            CheckpointStore(each.folder / "checkpoints").load(2).load(role) for each in (run, plain)
        )
        assert ours.keys() == theirs.keys() and all(
            torch.equal(ours[name], theirs[name]) for name in theirs
        )

    canary = ["generate", "offload actor weights moments", "offload critic weights"]
    scored = [
        "generate",
        "onload actor",
        "offload actor weights moments",
        "onload critic",
        "offload critic weights",
    ]
    audited = [
        "onload actor",
        "onload critic",
        "step actor",
        "offload actor weights moments",
        "step critic",
    ]
    published = ["offload critic weights", "onload actor", "offload actor weights moments"]
    step = [*scored, *audited, *published]
    assert [*canary, *step, "generate", *step[1:], "generate"] == EVENTS


class Recorded:
    """The moves that an engine is asked for."""

    def __init__(self) -> None:
        self.moves: list[object] = []

    def offload(self, weights: bool = True, moments: bool = True) -> None:
        self.moves.append((weights, moments))

    def onload(self) -> None:
        self.moves.append("onload")


def test_moments_alone_need_no_onload_and_an_engine_of_which_nothing_is_offloaded_is_never_asked():
    actor = Recorded()
    critic = Recorded()
    residence = Offload({"actor": actor, "critic": critic}, {"actor": Offloads(False, True)})  # type: ignore[dict-item]
    for roles in ((), (), ("critic",), ("actor", "critic"), ("actor",), ()):
        residence.only(roles)
    assert (actor.moves, critic.moves) == ([(False, True), (False, True)], [])


def test_the_weights_of_a_model_that_scores_leave_their_device_and_come_back_to_it():
    moves: list[str] = []

    class Known(nn.Linear):
        def to(self, device: object) -> nn.Module:  # type: ignore[override]
            moves.append(str(device))
            return self

    judge = FrozenWeights()
    judge.model = Known(1, 1, device="meta")
    residence = Offload({"critique": judge}, {"critique": Offloads(weights=True, moments=False)})
    for roles in ((), ("actor",), ("critique",), ("critique",), ()):
        residence.only(roles)
    assert moves == ["cpu", "meta", "cpu"]


FREE = "actor_rollout_ref.rollout.free_cache_engine=true"
HELD: list[int] = []
"""Bytes of the engine's weights at each optimizer step."""
MODELS: list[nn.Module] = []


class KnownRollout(EmbeddedEngine):
    def __post_init__(self) -> None:
        super().__post_init__()
        MODELS.append(self.model)


class LookingEngine(TorchTrainEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        HELD.append(sum(weight.untyped_storage().nbytes() for weight in MODELS[-1].parameters()))
        return super().train_step(batch, loss_fn)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_an_engine_that_frees_its_memory_while_training_generates_the_same_bits(
    tmp_path, engine, monkeypatch
):
    """Also where an update is skipped: weights that are free come again, changed or not."""
    playground = Playground(tmp_path)
    keys = (
        *KEYS,
        "actor_rollout_ref.model.dtype=bfloat16",
        f"data.val_files={tmp_path}/rows.jsonl",
    )
    keys = (
        *keys,
        f"actor_rollout_ref.rollout.name={engine}",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
    )
    keys = (*keys, "actor_rollout_ref.rollout.n=2")
    if engine == "embedded":
        use(monkeypatch, LookingEngine, KnownRollout)
    HELD.clear()
    plain = playground.run("grpo", *keys, name="plain")
    number = len(HELD)
    freed = playground.run("grpo", *keys, FREE, name="freed")
    ours = freed.weights(3)
    theirs = plain.weights(3)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )
    assert freed.notes("warning") == plain.notes("warning")
    if engine == "embedded":
        assert number == 3 and len(HELD) == 6 and max(HELD[number:]) < min(HELD[:number]) / 50


@pytest.mark.slow
def test_released_weights_come_again_though_no_update_changed_them(tmp_path):
    keys = ("actor_rollout_ref.model.dtype=bfloat16", "trainer.total_training_steps=3", FREE)
    warm_up = ("trainer.critic_warmup=2", "actor_rollout_ref.rollout.n=1")
    run = Playground(tmp_path).run("ppo", *keys, *warm_up, "trust.check_freq=1")
    assert run.outcome.steps == 3
