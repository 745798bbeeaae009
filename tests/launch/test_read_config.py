"""Keys that a pipeline does not take are refused where they were set; the presets set none of
them."""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from distflow.config import load_config
from distflow.errors import UserError
from distflow.graph import PipelineError
from distflow.launch.make_spec import check_run
from distflow.launch.read_config import follow_pipeline, read_config
from distflow.planning.allocation_expression import follow_allocation
from tests.sparse_params import one_fast_in
from tests.user_code import forgotten

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
NEEDED = (f"{MODEL}.path=builtin:tiny", "data.train_files=rows.jsonl")
VALIDATED = ("data.val_files=rows.jsonl",)
PRESETS = Path(__file__).parents[2] / "src" / "distflow" / "config" / "presets"
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def refuse(preset: str, *overrides: str) -> None:
    # it has domains, with their files, and a model
    needed = NEEDED if preset != "quickstart_rlvr" else ()
    read_config(load_config(preset, [*needed, *overrides]))


accept = cache(refuse)
"""The same where nothing is to be refused, which many cases begin with."""


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_no_preset_has_one(preset):
    given = VALIDATED if preset.startswith("verl_") else ()
    if preset == "distill":
        tiny = "path=builtin:tiny-arithmetic"
        given = (f"{MODEL}.{tiny}", f"distill.teacher.{tiny}")
    refuse(preset, *given)


def test_a_preset_with_verls_defaults_may_say_more_than_is_read():
    refuse("verl_grpo", *VALIDATED, f"{ACTOR}.policy_loss=gpg", f"{ROLLOUT}.n=4")
    refuse("verl_ppo", "trainer.val_before_train=false")
    with pytest.raises(UserError, match="critic.cliprange_value"):
        refuse("verl_grpo", *VALIDATED, "critic.cliprange_value=0.2")


@pytest.mark.parametrize("key", ["algorithm.kl_ctrl.kl_coef", f"{ACTOR}.kl_loss_coef"])
def test_the_coefficient_of_a_term_that_is_off_may_be_0(key):
    refuse("dapo", f"{key}=0.0")
    with pytest.raises(UserError, match=key):
        refuse("dapo", f"{key}=0.1")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_no_example_has_one(file, monkeypatch):
    if file.stem == "fetch_reach":
        pytest.importorskip("gymnasium_robotics", reason="wants the packages of gymnasium's robots")
    monkeypatch.syspath_prepend(str(file.parents[1]))
    with forgotten("examples"):
        read_config(load_config(str(file), []))


def cases(table):
    """Of lines: preset, key, and what else is given."""
    lines = [line.split(" ## ") for line in table.strip().splitlines()]
    return [(preset, key, tuple(given)) for preset, key, *given in lines]


INERT = cases("""
grpo ## critic.optim.lr=1e-3
grpo ## dag.model_sizes={actor: 7B} ## trainer.launcher=ray
grpo ## critic.model.path=other
grpo ## algorithm.lam=0.9
grpo ## algorithm.bootstrap_truncated=true
grpo ## algorithm.kl_ctrl.kl_coef=0.1
grpo ## algorithm.kl_penalty=abs
grpo ## algorithm.filter_groups.metric=math
ppo ## algorithm.norm_adv_by_std_in_grpo=false
ppo ## algorithm.adv_epsilon=1e-3
ppo ## actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=9 ## algorithm.use_kl_in_reward=false
ppo ## actor_rollout_ref.actor.kl_loss_coef=0.1
grpo ## actor_rollout_ref.actor.clip_ratio=0.3 ## actor_rollout_ref.actor.policy_loss=gpg
grpo ## actor_rollout_ref.actor.clip_ratio_c=4 ## actor_rollout_ref.actor.policy_loss=gspo
dapo ## actor_rollout_ref.actor.clip_ratio=0.3
grpo ## actor_rollout_ref.actor.optim.eps=1e-6 ## actor_rollout_ref.actor.optim.optimizer=sgd
grpo ## actor_rollout_ref.actor.optim.warmup_ratio=0.2 ## actor_rollout_ref.actor.optim.scheduler=constant
ppo ## critic.optim.eps=1e-6 ## critic.optim.optimizer=sgd
grpo ## actor_rollout_ref.model.revision=abc
grpo ## actor_rollout_ref.rollout.max_num_seqs=8 ## actor_rollout_ref.rollout.name=hf
grpo ## actor_rollout_ref.rollout.val_kwargs.n=4
grpo ## actor_rollout_ref.rollout.val_kwargs.temperature=1.0 ## data.val_files=rows.jsonl
grpo ## data.response_key=text
grpo ## data.seed=3 ## data.shuffle=false
grpo ## trainer.test_freq=3
grpo ## trainer.keep_last=5 ## trainer.save_freq=-1
grpo ## trust.canary_freq=3 ## actor_rollout_ref.model.dtype=float32
grpo ## custom_reward_function.name=judge
sft ## actor_rollout_ref.rollout.n=4
sft ## actor_rollout_ref.actor.ppo_epochs=2
sft ## algorithm.adv_estimator=rloo
sft ## algorithm.filter_groups.max_num_gen_batches=3
sft ## reward.num_workers=4
sft ## trust.canary_freq=3
""")  # noqa: E501


@pytest.mark.parametrize(
    ("preset", "inert", "given"),
    one_fast_in(3, INERT, unpack=True),
    ids=[f"{preset}-{key}" for preset, key, _ in INERT],
)
def test_it_is_named_with_its_origin(preset, inert, given):
    accept(preset, *given)
    with pytest.raises(UserError) as refused:
        refuse(preset, *given, inert)
    lines = str(refused.value).splitlines()
    assert len(lines) == 3 and lines[1].startswith(f"  {inert.partition('=')[0]} (command line)")


@pytest.mark.parametrize("inert", [f"{ROLLOUT}.kv_on_update=recompute", f"{ROLLOUT}.num_threads=1"])
def test_what_matters_to_training_and_generation_at_once_is_refused_where_they_take_turns(inert):
    with pytest.raises(
        UserError, match=rf"{inert.partition('=')[0]} \(command line\): .*async\.max_staleness=0"
    ):
        refuse("grpo", inert)

    refuse("grpo", inert, "async.max_staleness=1")
    with pytest.raises(UserError, match=inert.partition("=")[0]):
        refuse("sft", inert)


@pytest.mark.parametrize(
    ("mode", "more"),
    [("disk", ()), ("collective", ()), ("disk", ("trainer.allocation='embedded:d2|torch:d2'",))],
)
def test_how_weights_travel_is_refused_where_every_worker_that_generates_trains(mode, more):
    elsewhere = (
        f"{ACTOR}.weight_update_mode={mode}",
        "trainer.launcher=ray",
        f"{MODEL}.path=builtin:tiny-arithmetic",
    )

    with pytest.raises(
        UserError,
        match=r"weight_update_mode \(command line\): .* also trains",
    ):
        follow("grpo", *elsewhere, *more)

    follow("grpo", *elsewhere, "trainer.allocation='embedded[rollout]:d1+torch[actor]:d1'")


def follow(preset: str, *overrides: str) -> None:
    read_config(follow_allocation(load_config(preset, [*NEEDED, *overrides])))


NODES = (
    "{id: rollout, func: distflow.pipelines.nodes:generate}",
    "{id: reward, func: distflow.pipelines.nodes:compute_reward}",
    "{id: advantages, func: distflow.pipelines.nodes:compute_advantage, plane: training}",
    "{id: update, func: distflow.pipelines.nodes:train_actor}",
)
REFERENCE = (
    "{id: reference, func: distflow.pipelines.nodes:compute_ref_log_prob, only_forward_compute: "
    "true}"
)


def test_the_kl_loss_of_a_preset_is_off_in_a_pipeline_that_computes_no_reference():
    compares = f"dag.pipeline=[{','.join((*NODES, REFERENCE))}]"
    lacks = f"dag.pipeline=[{','.join(NODES)}]"
    assert follow_pipeline(
        load_config("grpo", [*NEEDED, compares])
    ).config.actor_rollout_ref.actor.use_kl_loss
    assert not follow_pipeline(
        load_config("grpo", [*NEEDED, lacks])
    ).config.actor_rollout_ref.actor.use_kl_loss
    with pytest.raises(PipelineError, match="compute_ref_log_prob writes it"):
        follow_pipeline(load_config("grpo", [*NEEDED, lacks, f"{ACTOR}.use_kl_loss=true"]))


def test_the_file_and_line_are_the_origin(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [grpo, _self_]\ncritic:\n  ppo_epochs: 3\n")
    with pytest.raises(UserError, match=r"critic\.ppo_epochs \(.*mine\.yaml:3\)"):
        refuse(str(file))


TAKEN = cases("""
grpo ## actor_rollout_ref.model.revision=abc ## actor_rollout_ref.model.path=a-hub/model
grpo ## trust.canary_freq=0 ## actor_rollout_ref.model.dtype=float32
grpo ## algorithm.filter_groups.max_num_gen_batches=3
grpo ## algorithm.allow_group_of_one=true ## actor_rollout_ref.rollout.n=1
dapo ## actor_rollout_ref.actor.clip_ratio_low=0.1
grpo ## trainer.test_freq=-1
sft ## data.response_key=text
sft ## data.messages_key=talk
sft ## data.tools_key=functions
sft ## data.apply_chat_template_kwargs.date_string=today
quickstart_sft ## trainer.total_training_steps=5
quickstart_sft ## actor_rollout_ref.actor.optim.lr_warmup_steps=5
""")


@pytest.mark.parametrize(
    ("preset", "taken", "given"), TAKEN, ids=[f"{preset}-{key}" for preset, key, _ in TAKEN]
)
def test_a_key_in_use_is_accepted(preset, taken, given):
    refuse(preset, *given, taken)


OWN_NODE = """
from dataclasses import dataclass

from distflow import node
from distflow.config import register_config_group
from distflow.graph import Node
from distflow.pipelines.grpo import grpo_pipeline


@dataclass(frozen=True)
class Mine:
    strength: float = 1.0
    deeper: int = 0


register_config_group("mine", Mine)
register_config_group("cri", Mine)  # its name begins that of another group, of which it excuses nothing


@node(writes="token_level_rewards")
def damp(token_level_scores, ctx):
    return token_level_scores * ctx.config.mine.strength


@node(writes="token_level_rewards")
def halve(token_level_scores):
    return token_level_scores / 2


def with_ctx(config):
    return with_node(config, damp)


def without_ctx(config):
    return with_node(config, halve)


def with_node(config, fn):
    graph = grpo_pipeline(config)
    graph.add_node(Node("own", fn))
    return graph
"""  # noqa: E501


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_inert_pipeline.py").write_text(OWN_NODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with forgotten("own_inert_pipeline"):
        yield


def refuse_own(builder: str, *overrides: str) -> None:
    chosen = (f"dag.pipeline=own_inert_pipeline:{builder}",)
    refuse("grpo", "trainer.imports=[own_inert_pipeline]", *chosen, *overrides)


@pytest.mark.parametrize(
    "key", ["algorithm.lam", "critic.cliprange_value", f"{ACTOR}.clip_ratio_low"]
)
def test_a_node_of_the_users_that_takes_ctx_does_not_excuse_other_keys(own, key):
    given = (f"{ACTOR}.policy_loss=gpg", "mine.strength=0.5")
    refuse_own("with_ctx", *given)
    with pytest.raises(UserError, match=rf"in pipeline '\w+':\n  {key} \(command line\)\n\w"):
        refuse_own("with_ctx", *given, f"{key}=0.3")


def test_a_registered_group_is_read_by_a_node_that_takes_ctx(own):
    refuse_own("with_ctx", "mine.strength=0.5", "mine.deeper=2")


def test_a_registered_group_that_no_node_can_read_is_refused(own):
    with pytest.raises(UserError, match=r"mine\.strength \(command line\)"):
        refuse_own("without_ctx", "mine.strength=0.5")


def test_a_registered_group_of_which_nothing_is_set_has_its_defaults(own):
    refuse_own("with_ctx")


def test_a_users_module_is_imported_with_the_runs_number_of_threads(tmp_path, monkeypatch):
    (tmp_path / "counting_threads.py").write_text(
        "import torch\nthreads = torch.get_num_threads()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = torch.get_num_threads()
    wanted = before + 1

    given = (
        f"{MODEL}.path=builtin:tiny-arithmetic",
        f"{MODEL}.init=random",
        "data.train_files=builtin:arithmetic-rl",
    )
    try:
        with forgotten("counting_threads"):
            check_run(
                load_config(
                    "grpo",
                    [*given, "trainer.imports=[counting_threads]", f"trainer.num_threads={wanted}"],
                )
            )
            assert sys.modules["counting_threads"].threads == wanted
    finally:
        torch.set_num_threads(before)


def test_parts_that_are_chosen_by_name_are_checked_once_however_often_the_config_is_read(
    monkeypatch,
):
    read, checked = list[object](), list[object]()
    monkeypatch.setattr("distflow.launch.read_config.check_extensions", checked.append)
    monkeypatch.setattr(
        "distflow.launch.read_config.read_config",
        lambda loaded: read.append(loaded) or read_config(loaded),
    )
    given = (
        f"{MODEL}.path=builtin:tiny-arithmetic",
        f"{MODEL}.init=random",
        "data.train_files=builtin:arithmetic-rl",
    )
    check_run(load_config("grpo", given))
    assert len(checked) == 1 and len(read) == 1, "again, as sizes were fitted"


def test_the_allocation_decides_the_engine_before_its_options_are_refused():
    given = (
        f"{MODEL}.path=builtin:tiny-arithmetic",
        f"{MODEL}.init=random",
        "data.train_files=builtin:arithmetic-rl",
    )
    split = (
        "trainer.launcher=ray",
        "trainer.allocation=vllm[rollout]:d2t2+fsdp[actor]:d2",
        f"{ROLLOUT}.python=python3",
    )
    fitted = check_run(load_config("grpo", [*given, *split])).config
    assert fitted.actor_rollout_ref.rollout.name == "vllm" and fitted.trainer.n_gpus_per_node == 6
    with pytest.raises(UserError, match=r"rollout\.name=embedded .*trainer\.allocation"):
        check_run(load_config("grpo", [*given, *split, f"{ROLLOUT}.name=embedded"]))
    embedded = split[1].replace("vllm", "embedded").replace("t2", "")
    with pytest.raises(UserError, match=r"rollout\.python"):
        check_run(load_config("grpo", [*given, split[0], embedded, split[2]]))


@pytest.mark.parametrize(
    "key", ["apportion_strategy=even", "consider_node_cohesion=false", "consider_node_load=false"]
)
def test_how_devices_are_divided_matters_where_there_is_more_than_one_part(key, tmp_path):
    over_ray = (
        "trainer.launcher=ray",
        "trainer.n_gpus_per_node=4",
        f"{MODEL}.path=builtin:tiny-arithmetic",
    )

    with pytest.raises(
        UserError,
        match=rf"dag\.{key.partition('=')[0]} \(command line\): .* one part",
    ):
        refuse("grpo", *over_ray, f"dag.{key}")
