"""What siiRL has beside verl's keys.

Read in sii-research/siiRL: `examples/grpo_trainer/run_qwen3-8b.sh` at 57ba561, `examples/dapo_trainer/run_qwen3-8b.sh`
at a3ab3fa, `examples/custom_pipeline_example`.
"""

from distflow.config.foreign.name import Name

_A = "actor_rollout_ref.actor"

NAMES: dict[str, Name] = {
    "algorithm.algorithm_name": Name(
        "algorithm.adv_estimator", values={"dapo": "dag.pipeline=dapo algorithm.filter_groups.enable=true"}
    ),
    "algorithm.weight_factor_in_cpgd": Name(
        note="the estimator cpgd divides by the group's standard deviation", harmless=("STD_weight",)
    ),
    f"{_A}.policy_drift_coeff": Name(f"{_A}.policy_loss_kwargs.policy_drift_coeff", "an option of the loss cpgd"),
    "dag.workflow_path": Name("dag.custom_pipeline_fn", "a function that returns the program, or dag.nodes"),
}

PAGES: tuple[tuple[str, str], ...] = (
    ("`Pipeline`, `add_node`, `TaskGraph`, `NodeType`, `NodeRole`, `NodeOutput`", "the same, from `distflow`"),
    ("`siirl.dag_worker.dagworker:DAGWorker.generate`", "`distflow.pipelines.nodes:generate`"),
    (
        "`...DAGWorker.compute_advantage`, `...DAGWorker.train_actor`",
        "`distflow.pipelines.nodes:compute_advantage`, `distflow.pipelines.nodes:train_actor`",
    ),
    ("`compute_custom_reward(batch, config, **kwargs) -> NodeOutput`", "the same signature, as a node"),
    (
        "`register_adv_est`, `register_policy_loss`, `AdvantageEstimator`",
        "the same, from `distflow`; the seven-parameter signature of losses is accepted",
    ),
    ("`dag.custom_pipeline_fn`, `algorithm.workflow_type`", "the same"),
    ("a node is a method of `DAGWorker`", "a plain function; its parameters are its wiring"),
    ("the KL penalty inside of the advantage", "a node of its own before it, which needs the log-probs first"),
)
"""What is no key: there, here."""
