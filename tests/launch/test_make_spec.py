"""The spec of a run: it can be sent to another process, its data lie in the run's folder, and what
is wrong with a run is found while it is made."""

import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distflow import register_adv_est, register_policy_loss
from distflow.algorithms.mismatch_check import Tolerance
from distflow.config import load_config
from distflow.data.encoded_rows_file import EncodedRows
from distflow.errors import ConfigError, UserError
from distflow.graph import PipelineError
from distflow.launch.importable_code import check_importable
from distflow.launch.one_process_launcher import launch_local
from distflow.launch.plan_data import data_plan
from distflow.rollout.engine import SamplingParams
from distflow.runtime.spec import Offloads, Spec
from tests.e2e.runs import Playground
from tests.models.families import FAMILIES
from tests.user_code import forgotten

RUN_IT = """
import pickle, sys
from pathlib import Path
from distflow.launch.one_process_launcher import launch_local
spec = pickle.loads(Path(sys.argv[1]).read_bytes())
launch_local(spec)
import torch
print("threads:", torch.get_num_threads())
"""
OWN_ESTIMATOR = """
from distflow import register_adv_est

@register_adv_est("own")
def own(scores, response_mask):
    advantages = (scores - 0.5).unsqueeze(-1) * response_mask
    return advantages, advantages
"""
OWN_PIPELINES = """
from dataclasses import replace

from distflow import node
from distflow.graph import Node
from distflow.pipelines.grpo import grpo_pipeline
from distflow.pipelines.sft import sft_pipeline


def with_a_lambda(config):
    graph = grpo_pipeline(config)
    louder = node(writes="token_level_rewards")(lambda token_level_scores: 2 * token_level_scores)
    graph.add_node(Node("louder", louder))
    return graph


def with_an_undeclared_column(config):
    graph = grpo_pipeline(config)
    graph.add_node(Node("odd", node(writes="no_such_bonus")(lambda scores: scores)))
    return graph


def training_on_given_responses():
    return sft_pipeline()


def with_another_config(config):
    return grpo_pipeline(replace(config, algorithm=replace(config.algorithm, use_kl_in_reward=False)))
"""  # noqa: E501
TWO_STEPS = ("trainer.total_training_steps=2", "trainer.save_freq=2")


@pytest.fixture
def playground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playground]:
    (tmp_path / "own_estimator.py").write_text(OWN_ESTIMATOR)
    (tmp_path / "own_pipelines.py").write_text(OWN_PIPELINES)
    monkeypatch.syspath_prepend(str(tmp_path))
    with forgotten("own_estimator", "own_pipelines"):
        yield Playground(tmp_path)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "step-000002" / "actor.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.equal(other[name]) for name, tensor in one.items()
    )


def in_a_fresh_process(spec: Spec, folder: Path) -> str:
    """What was printed by a process that knows nothing but the pickled spec and where modules
    lie."""
    (folder / "spec.pickle").write_bytes(pickle.dumps(spec))
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", RUN_IT, str(folder / "spec.pickle")]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr

    return done.stdout


@pytest.mark.slow
def test_a_fresh_process_runs_it_to_the_same_weights(playground: Playground) -> None:
    own = (*TWO_STEPS, "trainer.imports=[own_estimator]", "algorithm.adv_estimator=own")
    here = playground.run("grpo", *own, name="here")
    plain = playground.run("grpo", *TWO_STEPS, name="plain")
    _, spec = playground.spec("grpo", *own, name="there")
    said = in_a_fresh_process(spec, playground.folder)
    assert same(weights(here.folder), weights(playground.folder / "there"))
    assert not same(weights(here.folder), weights(plain.folder)), (
        "the user's estimator is what was run"
    )
    assert "threads: 1" in said, "trainer.num_threads holds where the spec is run"


def test_every_field_travels_as_plain_data(playground: Playground) -> None:
    _, spec = playground.spec("ppo", f"data.val_files={playground.folder}/rows.jsonl")
    again = pickle.loads(pickle.dumps(spec))

    for item in fields(Spec):
        if item.name not in ("pipeline", "factories", "rows", "validation"):
            assert getattr(again, item.name) == getattr(spec, item.name), item.name

    assert [again.rows[i] for i in range(12)] == [spec.rows[i] for i in range(12)]
    assert again.validation[0].rows[3] == spec.validation[0].rows[3]
    assert again.factories.keys() == spec.factories.keys()
    assert [node.node_id for node in again.pipeline().nodes] == [
        node.node_id for node in spec.pipeline().nodes
    ]
    assert len(pickle.dumps(spec)) < 100_000, "no weights, no rows"


def test_data_are_encoded_into_the_folder_of_the_run_once(playground: Playground) -> None:
    data = f"data.val_files={playground.folder}/rows.jsonl"
    _, spec = playground.spec("grpo", data, "data.val_max_samples=3")

    rows = (spec.rows, spec.validation[0].rows)
    for found, name, num_rows in zip(rows, ("train", "val"), (12, 3), strict=True):
        assert isinstance(found, EncodedRows) and len(found) == num_rows
        assert (
            found.path.parent == playground.folder / "run" / "data"
            and found.path.name.startswith(f"{name}-")
        )

    assert isinstance(spec.rows, EncodedRows)
    before = spec.rows.path.stat()
    _, again = playground.spec("grpo", data, "data.val_max_samples=3")
    assert isinstance(again.rows, EncodedRows) and again.rows.path == spec.rows.path
    after = again.rows.path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_keys_are_checked_before_any_file_is_opened(playground: Playground) -> None:
    with pytest.raises(UserError, match=r"'grpo_training_pipeline':\n.*critic\.optim\.lr"):
        playground.spec("grpo", "data.train_files=/nowhere/rows.jsonl", "critic.optim.lr=1e-3")
    assert not (playground.folder / "run").exists(), "nothing is left behind either"


def test_a_reward_of_the_users_finds_the_messages_of_a_chat(playground: Playground) -> None:
    chat = ("data.prompt_format=chat", "data.system_prompt=be", "data.max_prompt_length=100")
    _, spec = playground.spec("grpo", *chat)
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "ab0="}]
    assert spec.rows[0].extra_info == {"prompt_chat": messages}
    _, text = playground.spec("grpo", name="text")
    assert text.rows[0].extra_info == {}
    keys = ("reward.functions={default: [math]}", "custom_reward_function.path=null")
    _, built_in = playground.spec("grpo", *chat, *keys, name="built_in")
    assert built_in.rows[0].extra_info == {}


def homeless(code: str, module: str) -> types.FunctionType:
    """A function of a module that no other process can import."""
    scope: dict[str, types.FunctionType] = {"__name__": module}  # type: ignore[dict-item]
    exec(code, scope)
    return scope["homeless"]


@pytest.mark.parametrize("module", ["__main__", "made_by_hand"])
@pytest.mark.parametrize("key", ["algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss"])
def test_a_registered_function_that_no_worker_can_import(
    playground: Playground, monkeypatch: pytest.MonkeyPatch, module: str, key: str
) -> None:
    if module == "made_by_hand":
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))

    if key == "algorithm.adv_estimator":
        fn = homeless(
            "def homeless(scores, response_mask): return scores.unsqueeze(-1) * response_mask",
            module,
        )
        register_adv_est("homeless")(fn)
    else:
        fn = homeless(
            "def homeless(log_probs, advantages, loss_mask): return -log_probs * advantages, {}",
            module,
        )
        register_policy_loss("homeless")(fn)

    with pytest.raises(UserError, match=f"{key}: .* homeless .*'{module}'.*trainer.imports"):
        playground.spec("grpo", f"{key}=homeless", "trainer.imports=[json]")


def chosen(builder: str) -> tuple[str, ...]:
    return (f"dag.pipeline={builder}",)


def test_a_pipeline_of_the_users_may_hold_what_does_not_pickle(playground: Playground) -> None:
    """Each worker builds it anew."""
    _, spec = playground.spec("grpo", *chosen("own_pipelines:with_a_lambda"), *TWO_STEPS)
    launch_local(pickle.loads(pickle.dumps(spec)))
    assert (playground.folder / "run" / "checkpoints" / "step-000002").exists()


def test_a_node_that_no_worker_can_import(
    playground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = types.ModuleType("made_by_hand")
    by_hand.look = homeless(("def homeless(scores): return scores"), "made_by_hand")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_by_hand", by_hand)
    nodes = "dag.pipeline=[{id: look, func: made_by_hand.look}]"
    config = load_config("grpo", playground.overrides("run", nodes, "dag.generates=true")).config

    with pytest.raises(
        UserError, match=r"dag\.pipeline: .* homeless .*'made_by_hand'.*my_code:homeless"
    ):
        check_importable(config)


def test_a_marker_among_the_nodes_has_no_function_to_import(playground: Playground) -> None:
    nodes = "dag.pipeline=[{id: wait, type: BARRIER_SYNC}]"
    check_importable(
        load_config("grpo", playground.overrides("run", nodes, "dag.generates=true")).config
    )


def test_ranks_that_do_not_divide_a_models_layers_are_told_before_anything_is_started(
    playground: Playground,
) -> None:
    allocation = "trainer.allocation=embedded[rollout]:d3|fsdp[actor]:d1t3"
    with pytest.raises(UserError, match=r"model\.path: t3 .*num_attention_heads=4: .*:d3 "):
        playground.spec("grpo", "trainer.launcher=ray", "trainer.n_gpus_per_node=3", allocation)


def test_rows_of_a_family_with_windows_are_not_divided(tmp_path: Path) -> None:
    ground = Playground(tmp_path, "gemma2", **FAMILIES["gemma2"].changes)
    keys = ("actor_rollout_ref.rollout.name=hf", "trainer.device=cpu")
    allocation = "trainer.allocation='hf:d4|fsdp:d2c2'"
    with pytest.raises(UserError, match=r"model\.path: .*'gemma2'.*\(c\): .*fsdp\[actor\]:d4 "):
        ground.spec("grpo", *keys, allocation)


def test_imports_that_no_worker_can_import(
    playground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "made_by_hand", types.ModuleType("made_by_hand"))
    with pytest.raises(UserError, match=r"trainer\.imports.*made_by_hand"):
        playground.spec("grpo", "trainer.imports=[made_by_hand]")


def test_a_column_that_nobody_declared(playground: Playground) -> None:
    with pytest.raises(PipelineError, match="'odd' .*'no_such_bonus', .*declared"):
        playground.spec("grpo", *chosen("own_pipelines:with_an_undeclared_column"))


def test_a_pipeline_of_the_users_is_given_the_config_as_the_dataclass_that_it_is(
    playground: Playground,
) -> None:
    _, spec = playground.spec("grpo", *chosen("own_pipelines:with_another_config"))
    assert "kl_penalty" not in [node.node_id for node in spec.pipeline().nodes]


GONE = (
    "reward.functions",
    "reward.num_workers",
    "custom_reward_function.path",
    "actor_rollout_ref.rollout.n",
)


def test_a_pipeline_of_the_users_that_samples_nothing_trains_on_the_responses_of_the_rows(
    playground: Playground,
) -> None:
    playground.write_rows([{"prompt": f"{i}=", "solution": f"{i}"} for i in range(12)])
    pipeline = (f"~{key}" for key in GONE)
    given = (
        *pipeline,
        *chosen("own_pipelines:training_on_given_responses"),
        "data.response_key=solution",
    )
    config, spec = playground.spec("sft", *given)
    assert (
        config.dag.generates is None
        and spec.config.dag.generates is False
        and "generates: false" in spec.text
    )
    assert spec.data.group_size == 1
    assert spec.rows[0].response_ids is not None
    assert (
        spec_of(playground, "grpo", "own_pipelines:with_another_config").config.dag.generates
        is None
    )


def test_what_is_said_of_a_pipeline_goes_before_what_its_nodes_say(playground: Playground) -> None:
    given = (
        "dag.generates=true",
        "actor_rollout_ref.rollout.n=3",
        "~reward.functions",
        "~custom_reward_function.path",
    )
    spec = spec_of(
        playground,
        "sft",
        "own_pipelines:training_on_given_responses",
        *given,
        "~reward.num_workers",
    )
    assert spec.data.group_size == 3


def spec_of(playground: Playground, preset: str, function: str, *given: str) -> Spec:
    return playground.spec(preset, *chosen(function), *given)[1]


MODEL = "actor_rollout_ref.model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 2])
def test_what_hangs_on_the_dtype_of_the_model(
    playground: Playground, dtype: str, rank: int
) -> None:
    """An engine with a copy of the weights needs each version's tensors; a copy is compared less
    strictly."""
    exact = dtype == "float32"
    often = () if exact else ("actor_rollout_ref.rollout.enforce_eager=true",)
    _, spec = playground.spec("grpo", f"{MODEL}.dtype={dtype}", f"{MODEL}.lora_rank={rank}", *often)
    assert (spec.weight_dtype, spec.shares_weights) == (
        torch.float32 if exact else torch.bfloat16,
        exact,
    )
    assert spec.sends_weights == (not exact or rank == 0)
    assert (spec.tolerance, spec.ratio_limit) == (Tolerance.of(exact), 1e-4 if exact else 0.05)


SHARDED = (
    "actor_rollout_ref.actor.strategy=fsdp",
    "trainer.launcher=ray",
    "trainer.n_gpus_per_node=2",
)
ACTOR_FSDP = "actor_rollout_ref.actor.fsdp_config"
CRITIC_FSDP = "critic.fsdp_config"


@pytest.mark.parametrize("strategy", ["fsdp", "torch"])
@pytest.mark.parametrize(
    ("keys", "offloads"),
    [
        ((), {}),
        ((f"{ACTOR_FSDP}.param_offload=true",), {"actor": Offloads(weights=True, moments=False)}),
        (
            (f"{ACTOR_FSDP}.optimizer_offload=true",),
            {"actor": Offloads(weights=False, moments=True)},
        ),
        ((f"{CRITIC_FSDP}.param_offload=true",), {"critic": Offloads(weights=True, moments=False)}),
        (
            (f"{CRITIC_FSDP}.optimizer_offload=true",),
            {"critic": Offloads(weights=False, moments=True)},
        ),
        ((f"{ACTOR_FSDP}.offload_policy=true", f"{CRITIC_FSDP}.offload_policy=true"), {}),
    ],
)
def test_what_waits_in_the_hosts_memory_is_what_the_config_says_and_nothing_on_a_cpu(
    playground: Playground,
    monkeypatch: pytest.MonkeyPatch,
    keys: tuple[str, ...],
    offloads: dict[str, Offloads],
    strategy: str,
) -> None:
    ways = (
        *SHARDED,
        f"actor_rollout_ref.actor.strategy={strategy}",
        "actor_rollout_ref.model.dtype=bfloat16",
    )

    if strategy == "torch" and "offload_policy" in str(keys):
        with pytest.raises(ConfigError, match="(?s)offload_policy.* whole weights"):
            playground.spec("ppo", *ways, *keys)
        return

    if keys:
        with pytest.raises(
            UserError,
            match=f"{keys[0].partition('=')[0]}.* on a CPU",
        ):
            playground.spec("ppo", *ways, *keys)

    # where the plan is made; nothing runs
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    _, spec = playground.spec("ppo", *ways, *keys, "trainer.device=auto")
    assert spec.offloads == offloads
    assert spec.plan.backends == (("nccl", "gloo") if keys else ("nccl",))


@pytest.mark.parametrize(
    ("strategy", "moves"),
    [("torch", {"critique", "helpful"}), ("fsdp", {"critique"})],
)
def test_a_model_that_scores_waits_in_the_hosts_memory_unless_its_shards_do(
    playground: Playground, monkeypatch: pytest.MonkeyPatch, strategy: str, moves: set[str]
) -> None:
    entry = f"path: {playground.folder}/model, param_offload: true"
    models = f"reward_model.models={{critique: {{{entry}, judge: true}}, helpful: {{{entry}}}}}"
    keys = (*SHARDED, f"actor_rollout_ref.actor.strategy={strategy}", models)

    with pytest.raises(
        UserError,
        match=r"models\.critique\.param_offload, .*helpful.*: on a CPU",
    ):
        playground.spec("grpo", *keys)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    _, spec = playground.spec("grpo", *keys, "trainer.device=auto")
    assert spec.offloads == dict.fromkeys(moves, Offloads(weights=True, moments=False))


def test_a_judge_on_devices_that_cannot_run_it_is_refused(playground: Playground) -> None:
    models = f"reward_model.models={{critique: {{path: {playground.folder}/model, judge: true}}}}"
    allocated = "trainer.allocation='embedded:d1|torch:d1+torch[critique]:d1'"
    with pytest.raises(UserError, match="critique.* rollout, embedded"):
        playground.spec("grpo", "trainer.launcher=ray", allocated, models)


def test_weights_that_another_engine_computes_with_stay(
    playground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    moves = f"{ACTOR_FSDP}.param_offload=true"

    with pytest.raises(UserError, match=r"param_offload=true: the rollout engine "):
        playground.spec("grpo", moves)

    lora = ("actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.model.dtype=bfloat16")
    kl = "actor_rollout_ref.actor.use_kl_loss="

    with pytest.raises(UserError, match=r"param_offload=true: the reference "):
        playground.spec("grpo", moves, *lora, f"{kl}true")

    _, spec = playground.spec("grpo", moves, *lora, f"{kl}false")
    assert spec.offloads == {"actor": Offloads(weights=True, moments=False)}


def test_workers_with_an_engine_have_needs_of_their_own(playground: Playground) -> None:
    allocation = "embedded[rollout]:d2+torch[actor]:d1|torch[ref]:d1+torch[critic]:d1"
    own = "{worker_memory_mb: 900, worker_env: {A: 1}}"
    roles = f"{{rollout: {{worker_cpus: 2}}, training: {{worker_cpus: 3}}, critic: {own}}}"
    critic = f"critic.model.path={playground.write_critic()}"
    keys = (
        "trainer.launcher=ray",
        f"trainer.allocation='{allocation}'",
        f"trainer.worker_roles={roles}",
        critic,
    )
    _, spec = playground.spec("ppo", *keys, "trainer.worker_env={B: 2}")
    needs = [(rank.engines, spec.needs.of(rank)) for rank in spec.plan.ranks]
    assert [(own.cpus, own.memory_mb) for engines, own in needs if engines == ("rollout",)] == [
        (2, None)
    ] * 2
    assert [(own.cpus, own.env) for engines, own in needs if "actor" in engines] == [
        (3, {"B": "2"})
    ]
    of_critic = [own for engines, own in needs if "critic" in engines]
    assert [(own.cpus, own.memory_mb, own.env) for own in of_critic] == [
        (1, 900, {"A": "1", "B": "2"})
    ]


APART = ("trainer.launcher=ray", "trainer.allocation=embedded[rollout]:d1+torch[actor]:d1")
FREE = "actor_rollout_ref.rollout.free_cache_engine=true"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            (FREE, "async.max_staleness=1"),
            "free_cache_engine .command line.: .* async",
        ),
        (
            (FREE, *APART),
            "free_cache_engine .command line.: .* only generate",
        ),
        (
            (
                "trainer.worker_roles={rollout: {worker_cpus: 2}}",
                "trainer.launcher=ray",
                "trainer.n_gpus_per_node=2",
            ),
            r"trainer\.worker_roles: rollout .* actor, ref, training",
        ),
        (
            (*APART, "trainer.worker_roles={critic: {worker_cpus: 2}}"),
            "critic has no workers .* actor, ref, rollout",
        ),
        (
            (*APART, "trainer.worker_roles={actor: {worker_cpus: 2}, ref: {worker_cpus: 3}}"),
            "actor and ref share ",
        ),
        (
            (*APART, "trainer.worker_roles={rollout: {cpus: 2}}"),
            "has 'cpus' for the role 'rollout'.*worker_cpus",
        ),
        (
            (*APART, "trainer.worker_roles={rollout: {worker_env: {HF_TOKEN: x}}}"),
            "HF_TOKEN looks like a secret",
        ),
    ],
)
def test_what_workers_of_a_role_cannot_have_is_refused(
    playground: Playground, keys: tuple[str, ...], message: str
) -> None:
    with pytest.raises((UserError, ConfigError), match=f"(?s){message}"):
        playground.spec("grpo", *keys)


def test_auto_is_cuda_where_all_workers_can_have_a_gpu(
    playground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this machine, on which a Ray would be started: test_nodes.py asks a cluster."""
    keys = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2", "trainer.device=auto")
    for number, has in ((0, "no GPU"), (1, r"1 GPU\(s\) on 1 machine\(s\)")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=number: number)
        with pytest.raises(
            UserError, match=rf" 2 GPU\(s\) .* Ray has {has}: .*trainer\.device=cpu"
        ):
            playground.spec("grpo", *keys)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    _, spec = playground.spec("grpo", *keys)
    assert {rank.device for rank in spec.plan.ranks} == {"cuda"} and spec.facts["device"] == "cuda"
    assert playground.spec("grpo", *keys, "trainer.device=cpu")[1].plan.ranks[0].device == "cpu"

    with pytest.raises(UserError, match=r" 3 GPU\(s\) on 1 machine\(s\); Ray has 2 GPU\(s\) on 1"):
        playground.spec(
            "grpo", "trainer.launcher=ray", "trainer.n_gpus_per_node=3", "trainer.device=cuda"
        )


def test_answers_are_drawn_as_the_config_says_in_training_and_in_validation(
    playground: Playground,
) -> None:
    rollout = "actor_rollout_ref.rollout"
    training = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
    }
    validation = {"temperature": 0.25, "top_p": 0.625, "top_k": 3, "n": 2}
    _, spec = playground.spec(
        "grpo",
        f"data.val_files={playground.folder}/rows.jsonl",
        f"{rollout}.stop=[x]",
        *(f"{rollout}.{key}={value}" for key, value in training.items()),
        *(f"{rollout}.val_kwargs.{key}={value}" for key, value in validation.items()),
    )
    assert spec.sampling == SamplingParams(10, **training, stop=("x",))
    (validation,) = spec.validation
    assert validation.greedy == SamplingParams(10, greedy=True, stop=("x",))
    assert validation.sampled == SamplingParams(
        10, temperature=0.25, top_p=0.625, top_k=3, stop=("x",)
    )
    assert validation.num_samples == 2


def test_the_terms_of_the_actors_loss_are_watched_where_it_has_one(playground: Playground) -> None:
    actor = "actor_rollout_ref.actor"
    _, spec = playground.spec("grpo", f"{actor}.entropy_coef=0.01")
    assert spec.loss_terms == tuple(f"actor/loss_term/{name}" for name in ("pg", "entropy", "kl"))
    off = (
        "~reward.functions",
        "~reward.num_workers",
        "~custom_reward_function.path",
        "~actor_rollout_ref.rollout.n",
    )
    _, spec = playground.spec("sft", "data.response_key=answer", *off)
    assert spec.loss_terms == ()


def test_a_resumed_run_must_have_the_data_and_the_tokenizer_of_before(
    playground: Playground,
) -> None:
    _, spec = playground.spec("grpo")
    _, same_data = playground.spec("grpo", "trainer.seed=7", name="again")
    playground.write_rows([{"prompt": f"{i}-", "answer": "7"} for i in range(12)])
    _, other_data = playground.spec("grpo", name="other")
    prints = {name for name in spec.facts if name.endswith("_fingerprint")}
    assert prints == {"data_fingerprint", "tokenizer_fingerprint"}
    assert all(spec.facts[name] == same_data.facts[name] for name in prints)
    assert spec.facts["data_fingerprint"] != other_data.facts["data_fingerprint"]


def test_a_number_of_steps_may_go_beyond_the_epochs_and_answers_of_the_data_are_groups_of_one() -> (
    None
):
    needed = (
        f"{MODEL}.path=builtin:tiny",
        "data.train_files=rows.jsonl",
        "data.train_batch_size=4",
    )
    short = (
        *needed,
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=3",
    )

    for preset, size in (("grpo", 3), ("sft", 1)):
        by_epochs = data_plan(
            load_config(preset, [*short, "trainer.total_epochs=2"]).config, {"": 12}
        )
        assert (by_epochs.total_groups, by_epochs.total_steps, by_epochs.group_size) == (
            24,
            6,
            size,
        )
        by_steps = data_plan(
            load_config(preset, [*short, "trainer.total_training_steps=9"]).config, {"": 12}
        )
        assert (by_steps.total_groups, by_steps.total_steps) == (None, 9)
