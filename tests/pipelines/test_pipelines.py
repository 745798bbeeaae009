"""The built-in pipelines: their ids, their order, what a config leaves out, and how a config
chooses one."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.config.keys.dag import WITHOUT_FUNC
from distflow.errors import UserError
from distflow.graph import PipelineError
from distflow.graph.node_roles import CONFIGURING_TYPES, MARKER_TYPES
from distflow.launch.select_pipeline import bind, select_pipeline
from distflow.pipelines.dapo import dapo_pipeline
from distflow.pipelines.grpo import grpo_pipeline
from distflow.pipelines.ppo import ppo_pipeline
from distflow.pipelines.rm import rm_pipeline
from distflow.pipelines.sft import sft_pipeline

NEEDED = ["actor_rollout_ref.model.path=builtin:tiny", "data.train_files=rows.jsonl"]


def config(preset: str, *overrides: str):
    return load_config(preset, [*NEEDED, *overrides]).config


def ids(preset: str, *overrides: str) -> list[str]:
    return [node.node_id for node in bind(config(preset, *overrides)).nodes]


@pytest.mark.parametrize(
    ("build", "graph_id"),
    [
        (grpo_pipeline, "grpo_training_pipeline"),
        (ppo_pipeline, "ppo_training_pipeline"),
        (dapo_pipeline, "dapo_training_pipeline"),
        (sft_pipeline, "sft_training_pipeline"),
        (rm_pipeline, "rm_training_pipeline"),
    ],
)
def test_each_is_a_valid_graph_under_its_id(build, graph_id: str) -> None:
    graph = build()
    assert graph.graph_id == graph_id
    assert graph.validate_graph() == (True, None)


def test_grpo_scores_before_it_compares() -> None:
    assert ids("grpo") == [
        "rollout_actor",
        "function_reward",
        "actor_old_log_prob",
        "reference_log_prob",
        "calculate_advantages",
        "actor_train",
    ]


def test_a_reward_model_scores_after_groups_were_filtered_and_before_they_are_compared(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text("def accept(acc): return True\n")
    model = "reward_model.model.path=scores"

    accept = f"algorithm.filter_groups.should_accept={tmp_path}/mine.py:accept"
    for filters in (
        (),
        ("algorithm.filter_groups.enable=true",),
        ("algorithm.filter_groups.enable=true", accept),
    ):
        found = ids("grpo", model, *filters)
        place = found.index("reward_model_score")
        rollout = {"rollout_actor", "function_reward", "dynamic_sampling", "group_filter"}
        assert set(found[:place]) >= rollout & set(found) and len(rollout & set(found)) == 2 + len(
            filters
        )
        assert (
            "calculate_advantages" in found[place:]
            and "reward_model" in bind(config("grpo", model)).engines
        )


def test_without_a_kl_term_there_is_no_reference() -> None:
    bound_pipeline = bind(config("grpo", "actor_rollout_ref.actor.use_kl_loss=false"))
    assert "reference_log_prob" not in [node.node_id for node in bound_pipeline.nodes]
    assert "ref" not in bound_pipeline.engines


def test_kl_in_the_reward_comes_before_the_advantages() -> None:
    order = ids("grpo", "algorithm.use_kl_in_reward=true")
    assert (
        order.index("reference_log_prob")
        < order.index("kl_penalty")
        < order.index("calculate_advantages")
    )


def test_normalisations_stand_around_what_they_normalise() -> None:
    order = ids(
        "ppo",
        "algorithm.reward_norm.mean_level=batch",
        "algorithm.adv_norm.std_level=batch",
        "algorithm.use_kl_in_reward=true",
    )
    wanted = ["reward_norm", "kl_penalty", "calculate_advantages", "advantage_norm", "actor_train"]
    assert [node_id for node_id in order if node_id in wanted] == wanted


def test_gae_whitens_unless_its_advantages_are_normalised_by_another_rule() -> None:
    def options(preset: str, *overrides: str) -> Mapping[str, object]:
        bound_pipeline = bind(config(preset, *overrides))
        return next(
            node.options for node in bound_pipeline.nodes if node.node_id == "calculate_advantages"
        )

    assert options("ppo")["whiten"] is True
    assert options("ppo", "algorithm.adv_norm.mean_level=batch")["whiten"] is False
    kept = ("algorithm.adv_norm.mean_level=group", "+algorithm.adv_estimator_kwargs.whiten=true")
    assert options("ppo", *kept)["whiten"] is True


@pytest.mark.parametrize(
    ("estimator", "option", "choices"),
    [
        ("gpg", "alpha_counts=reward", "'groups' \\| 'rewards'"),
        ("gdpo", "whiten_over=sample", "'tokens' \\| 'samples'"),
        ("gpg", "f_norm=two", "float"),
        ("gpg", "f_norm='2'", "float; .* without quotes"),
    ],
)
def test_an_option_of_an_estimator_has_its_type(estimator: str, option: str, choices: str) -> None:
    asked = (f"algorithm.adv_estimator={estimator}", f"+algorithm.adv_estimator_kwargs.{option}")
    with pytest.raises(
        (PipelineError, UserError), match=f"'{option.split('=')[0]}' of .* not of type {choices}"
    ):
        bind(config("grpo", *asked, "reward.functions={default: [math, format]}"))


def test_the_parts_of_gdpo_have_the_weights_of_the_reward_functions() -> None:
    bound_pipeline = bind(
        config(
            "grpo",
            "algorithm.adv_estimator=gdpo",
            "reward.functions={default: [math, {name: format, weight: 0.2}], code: [exact_match]}",
        )
    )
    options = next(
        node.options for node in bound_pipeline.nodes if node.node_id == "calculate_advantages"
    )
    assert options["reward_weights"] == {
        "default": {"math": 1.0, "format": 0.2},
        "code": {"exact_match": 1.0},
    }
    functions = "reward.functions.default=[math, format]"
    model = "reward_model.model.path=scores"
    judged = config(
        "grpo", "algorithm.adv_estimator=gdpo", functions, model, "reward_model.weight=3"
    )
    options = next(
        node.options for node in bind(judged).nodes if node.node_id == "calculate_advantages"
    )
    assert options["reward_weights"] == {
        "default": {"math": 1.0, "format": 1.0, "reward_model": 3.0}
    }


def test_sft_uses_no_rollout_engine() -> None:
    assert bind(config("sft")).engines == {"actor"}


def test_the_estimator_brings_its_own_fields() -> None:
    bound_pipeline = bind(config("grpo", "algorithm.adv_estimator=rloo"))
    node = bound_pipeline.node("calculate_advantages")
    assert "group_index" in node.contract.reads
    assert node.contract.scope == "group"


def test_a_pipeline_in_yaml() -> None:
    nodes = (
        "[{id: answer, type: MODEL_INFERENCE, role: ROLLOUT, func: "
        "'distflow.pipelines.nodes:generate'},"
        "{id: judge, role: REWARD, func: 'distflow.pipelines.nodes:compute_reward', deps: "
        "[answer]},"
        "{id: compare, role: ADVANTAGE, func: 'distflow.pipelines.nodes:compute_advantage', deps: "
        "[judge]},"
        "{id: learn, type: MODEL_TRAIN, role: ACTOR, func: 'distflow.pipelines.nodes:train_actor', "
        "deps: [compare]}]"
    )
    chosen = config("grpo", "actor_rollout_ref.actor.use_kl_loss=false", f"dag.pipeline={nodes}")
    assert [node.node_id for node in bind(chosen).nodes] == ["answer", "judge", "compare", "learn"]


def test_a_marker_in_yaml_needs_no_function() -> None:
    nodes = (
        "[{id: load, func: 'distflow.pipelines.nodes:load_responses'}, {id: fence, type: "
        "barrier_sync, deps: [load]}]"
    )
    chosen = config("sft", f"dag.pipeline={nodes}")
    assert bind(chosen).node("fence").plane == "training"
    assert set(WITHOUT_FUNC) == {kind.name for kind in (*MARKER_TYPES, *CONFIGURING_TYPES)}


def test_a_custom_function_must_return_a_graph() -> None:
    with pytest.raises(UserError, match=r"dag\.pipeline=os:getcwd .* str"):
        select_pipeline(config("grpo", "dag.pipeline='os:getcwd'"))


def test_several_graphs_are_one_pipeline_of_several_parts(tmp_path: Path) -> None:
    file = tmp_path / "pipe.py"
    file.write_text(
        "from distflow.pipelines.sft import sft_pipeline\ndef prog(): return [sft_pipeline()]\n"
    )
    with pytest.raises(UserError, match=r"dag\.pipeline=.*prog .* list"):
        select_pipeline(config("sft", f"dag.pipeline={file}:prog"))


def test_a_custom_function_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pipe.py"
    file.write_text("from distflow.pipelines.dapo import dapo_pipeline as prog\n")
    chosen = config("grpo", f"dag.pipeline={file}:prog")
    assert select_pipeline(chosen).graph_id == "dapo_training_pipeline"


def test_a_custom_function_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="dag.pipeline: .*no_such_module"):
        select_pipeline(config("grpo", "dag.pipeline='no_such_module:make'"))


def test_an_unknown_estimator_option_is_named() -> None:
    with pytest.raises(
        PipelineError, match=r"'grpo' \(algorithm\.adv_estimator_kwargs\) .*'epsilom'"
    ):
        bind(config("grpo", "+algorithm.adv_estimator_kwargs.epsilom=1"))
