"""Engines from a config: which class, with which of its keys, on whose weights, for how many
optimizer steps."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from distflow.config import Config, load_config
from distflow.errors import UserError
from distflow.launch import train_engines
from distflow.launch.configured_models import critic_source
from distflow.launch.engines import make_factories
from distflow.launch.rollout_engines import engine_dtype, engine_options
from distflow.models.cpu_kernels import build as native
from distflow.planning.plan import RankPlan
from distflow.rollout.embedded.engine import EmbeddedEngine
from distflow.rollout.hf_engine import HFEngine
from distflow.runtime.resources import Resources, build_resources
from distflow.training.torch_engine import TorchScorer, TorchTrainEngine
from tests.tiny_models import write_tiny_model

NEEDED = (
    "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
    "actor_rollout_ref.model.init=random",
    "data.train_files=rows.jsonl",
)
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"


def config(preset: str, *overrides: str) -> Config:
    return load_config(preset, [*NEEDED, *overrides]).config


def build(config: Config, *engines: str, steps: int = 1) -> Resources:
    """What a worker with these engines builds; the factories have travelled to it."""
    factories = pickle.loads(pickle.dumps(make_factories(config, engines, (), steps)))
    return build_resources(factories, RankPlan(0, "cpu", (), (), engines, ()))


def falls_to_zero_at(engine: object) -> int:
    """The optimizer step at which a linear schedule has come to its end."""
    assert isinstance(engine, TorchTrainEngine)
    return next(step for step in range(1000) if engine.schedule(step) == 0.0)


def test_an_engine_without_a_model_is_refused_before_one_is_built():
    with pytest.raises(UserError, match=r"reward_model\.model\.path: .* engine"):
        make_factories(config("grpo"), ("actor", "reward_model"), (), 1)

    models = "reward_model.models={helpful: {path: scores}}"
    with pytest.raises(UserError, match=r"reward_model\.models\.helpfull: .*'helpful'"):
        make_factories(config("grpo", models), ("actor", "helpfull"), (), 1)


def test_warm_up_of_the_critic_is_taken_off_the_actors_schedule_and_not_off_the_critics():
    linear = ("scheduler=linear_with_warmup", "warmup_ratio=0.0", "min_lr_ratio=0.0")
    settings = config(
        "ppo",
        "trainer.critic_warmup=2",
        "trainer.total_training_steps=5",
        "data.train_batch_size=5",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_epochs=2",
        "critic.ppo_mini_batch_size=4",
        "critic.ppo_epochs=3",
        *(f"{ACTOR}.optim.{change}" for change in linear),
        *(f"critic.optim.{change}" for change in linear),
    )
    built = build(settings, "actor", "critic", steps=5)
    assert falls_to_zero_at(built.actor) == (5 - 2) * 2 * 3, "3 steps, 2 passes, 2 + 2 + 1 prompts"
    assert falls_to_zero_at(built.critic) == 5 * 3 * 2, "5 steps, 3 passes, 4 + 1 prompts"


@pytest.mark.parametrize(
    ("name", "made", "taken"),
    [
        (
            "embedded",
            EmbeddedEngine,
            {"max_num_seqs": 7, "batch_invariant": False, "enforce_eager": False},
        ),
        ("hf", HFEngine, {}),
    ],
)
def test_a_rollout_engine_gets_the_keys_that_its_constructor_names(name, made, taken):
    settings = config(
        "grpo", f"{ROLLOUT}.name={name}", f"{ROLLOUT}.max_num_seqs=7", f"{MODEL}.dtype=float32"
    )
    assert engine_options(settings) == taken
    assert type(build(settings, "rollout").rollout) is made


def test_only_what_the_plan_names_is_built():
    built = build(config("grpo"), "actor")
    assert isinstance(built.actor, TorchTrainEngine)
    assert built.rollout is built.ref is built.critic is built.reward_fn is None


@pytest.mark.parametrize("engine", ["actor", "critic", "ref"])
def test_weights_are_spread_over_ranks_only_where_there_are_several(engine):
    settings = config("ppo")
    actor = replace(settings.actor_rollout_ref.actor, strategy="fsdp")
    sharded = replace(settings, actor_rollout_ref=replace(settings.actor_rollout_ref, actor=actor))
    with pytest.raises(UserError, match="trainer.n_gpus_per_node=2"):
        build(sharded, engine)
    assert build(sharded, "rollout").rollout is not None, "what only generates has whole weights"


@pytest.mark.parametrize(
    ("dtype", "engines", "shares"),
    [
        ("float32", ("actor", "rollout"), True),
        ("bfloat16", ("actor", "rollout"), False),
        ("float32", ("rollout",), False),
    ],
)
def test_the_engine_computes_on_the_trainers_weights_only_where_both_are_there_in_float32(
    dtype, engines, shares, monkeypatch
):
    given: list[nn.Module] = []
    monkeypatch.setattr(
        EmbeddedEngine,
        "__init__",
        lambda self, model, *rest, shares_weights, **options: given.append(model),
    )
    built = build(
        config("grpo", f"{MODEL}.dtype={dtype}", f"{ROLLOUT}.enforce_eager=true"), *engines
    )
    storage = {parameter.data_ptr() for parameter in given[0].parameters()}
    assert next(given[0].parameters()).dtype.__str__() == f"torch.{dtype}"

    if built.actor is not None:
        assert isinstance(built.actor, TorchTrainEngine)
        assert shares == (
            storage == {parameter.data_ptr() for parameter in built.actor.model.parameters()}
        )


def test_the_reference_is_a_model_of_its_own_or_the_adapters_base(tmp_path):
    write_tiny_model(tmp_path)
    own = (f"{MODEL}.path={tmp_path}", f"{MODEL}.init=pretrained")
    plain = build(config("grpo", *own), "actor", "ref")

    adapted = build(config("grpo", *own, f"{MODEL}.lora_rank=2"), "actor", "ref")
    for built, same in ((plain, False), (adapted, True)):
        assert isinstance(built.ref, TorchScorer) and isinstance(built.actor, TorchTrainEngine)
        assert (built.ref.model is built.actor.model) == same


def test_actor_critic_and_reference_get_their_own_settings():
    settings = config(
        "ppo",
        f"{ACTOR}.optim.lr=0.5",
        f"{ACTOR}.max_grad_norm=2.0",
        f"{ACTOR}.ppo_max_token_len_per_gpu=100",
        "critic.optim.lr=0.25",
        "critic.max_grad_norm=3.0",
        "critic.ppo_max_token_len_per_gpu=200",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=300",
        f"{ROLLOUT}.temperature=0.5",
    )
    built = build(settings, "actor", "critic", "ref")
    assert isinstance(built.actor, TorchTrainEngine) and isinstance(built.critic, TorchTrainEngine)
    assert isinstance(built.ref, TorchScorer) and not any(
        p.requires_grad for p in built.ref.model.parameters()
    )
    found = [
        (engine.optimizer.param_groups[0]["lr"], engine.max_grad_norm, engine.max_tokens)
        for engine in (built.actor, built.critic)
    ]
    assert found == [(0.5, 2.0, 100), (0.25, 3.0, 200)] and built.ref.max_tokens == 300
    assert {built.actor.temperature, built.critic.temperature, built.ref.temperature} == {0.5}
    assert not built.ref.without_adapter
    plain = config("ppo", f"{ACTOR}.ppo_max_token_len_per_gpu=100")
    assert train_engines.reference_options(plain)["max_tokens_per_micro_batch"] == 100
    critic = build(plain, "critic").critic
    assert isinstance(critic, TorchTrainEngine) and critic.max_tokens == 100


def test_answers_of_the_data_are_learned_at_temperature_one():
    actor = build(config("sft", f"{ROLLOUT}.temperature=0.5"), "actor").actor
    assert isinstance(actor, TorchTrainEngine) and actor.temperature == 1.0


@pytest.mark.parametrize(
    "given", [{}, {"lr_warmup_steps": 4}, {"warmup_ratio": 0.4, "min_lr_ratio": 0.5}]
)
def test_a_schedule_gets_the_keys_of_the_optimizer(given, monkeypatch):
    keys = (f"{ACTOR}.optim.{name}={value}" for name, value in given.items())
    settings = config("grpo", f"{ACTOR}.optim.scheduler=linear_with_warmup", *keys)
    made = dict[str, object]()
    monkeypatch.setattr(train_engines, "make_schedule", lambda name, **own: made.update(own))
    build(settings, "actor", steps=10)
    optim = settings.actor_rollout_ref.actor.optim
    assert (made["warmup_steps"], made["warmup_ratio"], made["min_lr_ratio"]) == (
        optim.lr_warmup_steps,
        optim.warmup_ratio,
        optim.min_lr_ratio,
    )


def test_another_critic_is_loaded_as_it_was_trained_and_an_equal_one_as_the_policy():
    told = (f"{MODEL}.revision=abc", f"{MODEL}.path=some/model", f"{MODEL}.init=random")
    sources = [
        critic_source(config("ppo", *told, *more))
        for more in ([], ["critic.model.path=other/critic"])
    ]
    found = [(source["path"], source["init"], source["revision"]) for source in sources]
    assert found == [("some/model", "random", "abc"), ("other/critic", "pretrained", None)]


@pytest.mark.parametrize(
    ("others", "there", "casts", "rounds"),
    [
        ((), True, True, True),
        ((), False, False, True),
        ((f"{ROLLOUT}.enforce_eager=true",), True, False, True),
        (("actor_rollout_ref.actor.strategy=fsdp", "trainer.launcher=ray"), True, False, False),
    ],
)
def test_native_code_casts_the_weights_that_the_trainer_casts(
    others, there, casts, rounds, monkeypatch
):
    if there and not native.is_there():
        pytest.skip("wants a C compiler (Debian: apt-get install gcc)")
    given: list[tuple[nn.Module, torch.dtype | None]] = []
    monkeypatch.setattr(native, "is_there", lambda: there)
    monkeypatch.setattr(
        EmbeddedEngine,
        "__init__",
        lambda self, model, *rest, compute_dtype=None, **options: given.append(
            (model, compute_dtype)
        ),
    )
    settings = config("grpo", f"{MODEL}.dtype=bfloat16", *others)
    build(settings, "rollout")
    (model, compute_dtype) = given[0]
    assert compute_dtype == (torch.bfloat16 if rounds else None)
    dtype = torch.float32 if casts else torch.bfloat16
    assert (
        {parameter.dtype for parameter in model.parameters()} == {dtype} == {engine_dtype(settings)}
    )


def test_an_engine_in_bfloat16_keeps_the_frequencies_of_positions(monkeypatch):
    """Rounded, they would turn a token 500 places away by up to a radian."""
    given: list[nn.Module] = []
    monkeypatch.setattr(
        EmbeddedEngine, "__init__", lambda self, model, *rest, **options: given.append(model)
    )
    build(config("grpo", f"{MODEL}.dtype=bfloat16", f"{ROLLOUT}.enforce_eager=true"), "rollout")
    build(config("grpo", f"{MODEL}.dtype=float32"), "rollout")
    rounded, exact = (dict(model.named_buffers()) for model in given)
    assert exact and all(torch.equal(rounded[name], buffer) for name, buffer in exact.items())


def test_an_engine_beside_an_adapter_computes_on_the_merged_weights_copy(tmp_path, monkeypatch):
    given: list[nn.Module] = []
    monkeypatch.setattr(
        EmbeddedEngine,
        "__init__",
        lambda self, model, *rest, shares_weights, **options: given.append(model),
    )
    write_tiny_model(tmp_path)
    own = (
        f"{MODEL}.path={tmp_path}",
        f"{MODEL}.init=pretrained",
        f"{MODEL}.lora_rank=2",
        f"{MODEL}.dtype=bfloat16",
    )
    built = build(config("grpo", *own, f"{ROLLOUT}.enforce_eager=true"), "actor", "ref", "rollout")
    assert isinstance(built.actor, TorchTrainEngine) and isinstance(built.ref, TorchScorer)
    trained, served = (dict(model.named_parameters()) for model in (built.actor.model, given[0]))
    assert len(served) < len(trained) and not any(
        parameter.requires_grad for parameter in served.values()
    )
    assert {str(parameter.dtype) for parameter in served.values()} == {"torch.bfloat16"}
    assert {str(parameter.dtype) for parameter in trained.values()} == {"torch.float32"}
    assert built.ref.without_adapter


def test_a_judge_whose_reply_leaves_no_room_for_a_question_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path / "judge")
    models = (
        f"reward_model.models={{critique: {{path: {folder}, judge: true, answer_tokens: 512}}}}"
    )

    with pytest.raises(UserError, match=r"critique\.path: .* 512 tokens .* 512 tokens"):
        build(config("grpo", models), "critique")
