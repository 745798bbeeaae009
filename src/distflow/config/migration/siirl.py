"""What siiRL has beside verl's keys.

Read in sii-research/siiRL: `examples/grpo_trainer/run_qwen3-8b.sh` at 57ba561, `examples/dapo_trainer/run_qwen3-8b.sh`
at a3ab3fa, `examples/custom_pipeline_example`.
"""

from distflow.config.migration.names import ANY, OFF, Name

_A = "actor_rollout_ref.actor"
_PROGRAM = (
    "a program is a function that dag.custom_pipeline_fn names, or the list dag.nodes: node_id is id there, node_type "
    "type, node_role role, dependencies deps, executable_ref func"
)

NAMES: dict[str, Name] = {
    "algorithm.algorithm_name": Name(
        "algorithm.adv_estimator", values={"dapo": "dag.pipeline=dapo algorithm.filter_groups.enable=true"}
    ),
    "algorithm.weight_factor_in_cpgd": Name(
        note="the estimator cpgd divides by the group's standard deviation", harmless=("STD_weight",)
    ),
    f"{_A}.policy_drift_coeff": Name(f"{_A}.policy_loss_kwargs.policy_drift_coeff", "an option of the loss cpgd"),
    "dag.workflow_path": Name(note=_PROGRAM, harmless=OFF),
    "dag_id": Name(note=_PROGRAM),
    "global_config": Name(note="in a node's options stand the values themselves"),
    "dag.env_enable": Name(note="environments are not there yet", harmless=OFF),
    "dag.environment_path": Name(note="environments are not there yet", harmless=OFF),
    "profiler.*": Name(note="traces of kernels are not there yet, so that it does nothing", harmless=ANY),
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
    (
        "a node of a DAG file: `node_id`, `node_type`, `node_role`, `dependencies`, `executable_ref`",
        "an entry of `dag.nodes`: `id`, `type`, `role`, `deps`, `func`; no `!Ref`, and `config` holds options by name",
    ),
    (
        "`TaskGraph.validate_graph`, `get_topological_sort`, `get_dependencies`, `get_dependents`, `get_entry_nodes`, "
        "`get_exit_nodes`, `copy`",
        "the same; an id twice, an empty graph and an unknown id are errors; `save_dag_pic` is `to_mermaid`",
    ),
    ("`filter_plugin` of a node, DAPO's cache of leftovers", "a node that returns `Drop`: a group takes its place"),
    (
        "`TaskScheduler`: parallel paths are cut at their joins, workers dealt out in turn",
        "[the scheduler](planning.md#the-scheduler): a join keeps each input, shares go in proportion",
    ),
    ("`model_params` of a node, as 70B", "`dag.model_sizes`; by itself counted from the model's `config.json`"),
    ("several graphs given to the scheduler", "one graph; parts that are independent have devices of their own"),
    (
        "`ProcessGroupManager`: a group for each set of ranks that runs a node",
        "`plan.json`: one for each set of ranks along an axis of a model, with the same names",
    ),
    (
        "`DataCoordinator`: `put_batch`, polling `get_batch(batch_size, dp_rank, filter_plugin, balance_partitions)`",
        "[what a plan says](planning.md#what-a-plan-says), `channels`: the planner puts an exchange where columns go "
        "between ranks; nothing is polled, no size must divide another",
    ),
    ("sizes that servers and devices divide", "any size: ranks have what evens out tokens, none is dropped"),
    ("the KL penalty inside of the advantage", "a node of its own before it, which needs the log-probs first"),
)
"""What is no key: there, here."""
