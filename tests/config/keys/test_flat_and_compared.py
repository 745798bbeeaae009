"""A config for people and files: YAML, differences, explanations, what numbers mean together."""

from dataclasses import FrozenInstanceError, replace

import pytest

from distflow.config import (
    Config,
    ConfigError,
    changed_keys,
    config_from_dict,
    describe,
    explain,
    flatten,
    load_config,
    to_dict,
    to_yaml,
)
from distflow.config.keys.reward import RewardPart
from distflow.config.keys.schema import RESUMABLE, diff, schema_keys
from distflow.config.rules.check_config import check

GOOD = ["data.train_files=train.jsonl", "actor_rollout_ref.model.path=model"]


def good(**groups):
    values = {
        "data": {"train_files": "train.jsonl"},
        "actor_rollout_ref": {"model": {"path": "model"}},
    }
    for name, keys in groups.items():
        values[name] = {**values.get(name, {}), **keys}
    return config_from_dict(values)


def test_a_policys_config_is_read_again_as_it_was_changed():
    """A run's checkpoint stands in the place of the model that it began from."""
    config = load_config(
        "grpo", [*GOOD, "dag.policies={b: {model: {path: other}}}", "dag.policy=b"]
    ).config
    assert config.actor_rollout_ref.model.path == "other"
    values = to_dict(config)
    values["actor_rollout_ref"]["model"]["path"] = "trained"
    assert config_from_dict(values).actor_rollout_ref.model.path == "trained"


@pytest.mark.parametrize("preset", ["grpo", "ppo", "dapo", "sft"])
def test_yaml_round_trips(preset, tmp_path):
    parts = "[math,{name: format, weight: 0.5},{name: length, options: {at_most: 9, unit: words}}]"
    first = load_config(preset, [*GOOD, f"reward.functions.a={parts}", "trainer.seed=3"])
    (tmp_path / "config.yaml").write_text(to_yaml(first.config))
    again = load_config(str(tmp_path / "config.yaml"))
    assert again.config == first.config and to_yaml(again.config) == to_yaml(first.config)
    assert set(again.set_keys) == set(first.set_keys), "a key at its default is not a set key"
    assert config_from_dict(to_dict(first.config)) == first.config


EVERY_KEY = """
algorithm:
  recompute_old_log_probs: "true"
  adv_estimator: gae
  adv_estimator_kwargs: {whiten: false}
  gamma: 0.99
  lam: 0.9
  norm_adv_by_std_in_grpo: false
  scale_rewards: none
  adv_epsilon: 1e-4
  reward_norm: &norm
    mean_level: batch
    mean_leave1out: true
    std_level: group
    std_unbiased: false
    eps: 1e-3
    group_size: 2
  adv_norm: *norm
  reward_shift: -0.5
  reward_scale: 2
  reward_clip: 5
  advantage_clip: 10
  mask_truncated: true
  mask_max_turns: true
  mask_long_errors: 100
  mask_type: all
  whiten_rewards: true
  difficulty_mask: [0.1, 0.95]
  difficulty_weight: [0.5, 2]
  length_weight: [1.5, 0.5]
  domains:
    format: {reward_norm: {mean_level: running}, kl_ctrl: {kl_coef: 0.5}, difficulty_mask: [0, 0.5]}
  allow_group_of_one: true
  bootstrap_truncated: true
  use_kl_in_reward: true
  kl_penalty: low_var_kl
  kl_ctrl: {type: adaptive, kl_coef: 0.01, target_kl: 0.1, horizon: 10000, mean: sequence}
  rollout_correction:
    rollout_is: sequence
    rollout_is_threshold: [0.5, 3]
    rollout_is_batch_normalize: true
    rollout_rs: [token_k1, seq_mean_k3]
    rollout_rs_threshold: [[0.5, 2.0], 0.1]
  filter_groups:
    {enable: true, metric: format, max_num_gen_batches: 3, when_exhausted: continue, oversampling: 0.25,
     mean_range: [0.2, 0.8], should_accept: "a.py:accept"}
data:
  train_files: [a.jsonl, builtin:sums]
  val_files: b.jsonl
  prompt_key: question
  allow_overlap: true
  answer_key: gold
  broken_tests: error
  response_key: solution
  messages_key: talk
  chosen_key: better
  rejected_key: worse
  image_key: pictures
  tools_key: functions
  domain_key: kind
  tag_key: tag
  prompt_format: chat
  prompt_template: "Q: {prompt}\\nA:"
  system_prompt: "Be brief: yes"
  enable_thinking: true
  apply_chat_template_kwargs: {date_string: today}
  train_batch_size: 32
  max_prompt_length: 100
  max_response_length: 200
  filter_overlong_prompts: false
  truncation: left
  lazy: true
  bad_rows: skip
  train_max_samples: 1000
  val_max_samples: 100
  shuffle: false
  seed: 2
  num_loader_workers: 0
reward_model: {model: {path: scores}, weight: 0.5, models: {helpful: {path: scores, weight: 2.0}}}
actor_rollout_ref:
  model:
    path: model
    tokenizer_path: tokenizer
    gguf_file: model.gguf
    revision: 0a1b2c3d
    trust_remote_code: true
    dtype: float32
    enable_gradient_checkpointing: true
    lora_rank: 8
    lora_alpha: 32
    target_modules: [q_proj, v_proj]
  actor:
    policy_loss: cispo
    policy_loss_kwargs: {clip_below: false}
    loss_agg_mode: seq-mean-token-sum-norm
    loss_scale_factor: 100
    clip_ratio: 0.1
    clip_ratio_low: 0.15
    clip_ratio_high: 0.3
    clip_ratio_c: null
    off_policy_mask_threshold: 0.5
    entropy_coef: 0
    use_kl_loss: true
    kl_loss_coef: 0.1
    kl_loss_type: mse+
    ppo_epochs: 2
    ppo_mini_batch_size: 16
    ppo_max_token_len_per_gpu: 1000
    max_grad_norm: 0.5
    optim: &optim
      optimizer: adamw_8bit
      lr: 1e-4
      weight_decay: 0
      betas: [0.8, 0.99]
      eps: 1e-6
      scheduler: linear_with_warmup
      warmup_ratio: 0.2
      lr_warmup_steps: 3
      min_lr_ratio: 0.1
  rollout:
    name: hf
    n: 4
    temperature: 0.9
    top_p: 0.95
    top_k: 50
    min_p: 0.01
    repetition_penalty: 1.1
    stop: ["\\n\\n", "é: #"]
    kv_on_update: recompute
    num_threads: 3
    batch_invariant: true
    enforce_eager: true
    free_cache_engine: true
    max_num_seqs: 16
    timeout_s: 60.0
    val_kwargs: {greedy: false, n: 4, temperature: 0.8, top_p: 0.9, top_k: 20}
  ref: {log_prob_max_token_len_per_gpu: 2000}
critic:
  model: {path: critic}
  value_loss: huber
  huber_delta: 5
  cliprange_value: 0.2
  loss_agg_mode: seq-mean-token-sum
  ppo_epochs: 3
  ppo_mini_batch_size: 8
  ppo_max_token_len_per_gpu: 3000
  max_grad_norm: 2
  optim:
    <<: *optim
    lr: 1e-3
reward:
  functions: {a: [math, {name: format, weight: 0.1}], b: custom}
  timeout_s: 3
  max_error_rate: 0.9
  num_workers: 1
  retries: 2
  backoff_s: 0.5
  on_error: {score: -1}
  domains: {a: {timeout_s: 9, num_workers: 4, retries: 0, backoff_s: 3, on_error: drop}}
  overlong: {buffer_tokens: 50, factor: 0.5}
custom_reward_function: {path: my_reward.py, name: score}
embodied_sampling:
  filter_accuracy: true
  accuracy_lower_bound: 0.2
  accuracy_upper_bound: 0.8
  filter_truncated: true
  oversample_factor: 1.5
srpo: {embedder: "mine.py:embed", eps: 0.4, min_samples: 3, max: 0.5, steepness: 8, reward_coef: 2}
trainer:
  project_name: p
  experiment_name: e
  default_local_dir: runs/here
  total_epochs: 2
  total_training_steps: 50
  critic_warmup: 1
  plan_from: runs/measured
  val_before_train: true
  stop_when: actor/kl_loss > 0.5
  test_freq: 2
  test_freq_epochs: 1
  test_freq_secs: 90.5
  save_freq: 3
  save_freq_epochs: 2
  save_freq_secs: 600
  save_hf_model: true
  keep_last: 1
  keep_best: true
  keep_best_metric: reward/mean_score
  resume_mode: never
  save_groups: last_k
  save_groups_last: 2
  logger: [tensorboard, wandb]
  seed: 3
  device: cpu
  num_threads: 1
  imports: [json]
profiler: {enable: true, steps: [1, 3]}
cost: {gpu_hour: 2.5}
trust: {check_freq: 3, on_mismatch: warn, canary_freq: 0, max_skipped_updates: 1, unmoved_after: 5,
        check_rewards: false}
dag: {pipeline: ppo, generates: true, enable_perf: true, policy: b, policies: {b: {actor: {optim: {lr: 0.5}}}}}
"""  # noqa: E501

TWO_DOMAINS = {
    "a": {"train_files": ["a.jsonl"], "reward": "math"},
    "b": {"train_files": ["b.jsonl"], "reward": "math"},
}
# Keys that exclude one of those above.
ELSEWHERE = {
    "actor_rollout_ref.rollout.python": "python3",
    "actor_rollout_ref.rollout.url": "http://localhost:8000",
    "actor_rollout_ref.rollout.data_parallel_size": 2,
    "actor_rollout_ref.rollout.workflow": "games.py:guess",
    "actor_rollout_ref.rollout.workflow_kwargs": {"max_turns": 2},
    "actor_rollout_ref.rollout.agents": {
        "solver": {"max_tokens": 4},
        "judge": {"trainable": False},
    },
    "algorithm.agent_rewards": "own",
    "algorithm.logprob_level": "action",
    "algorithm.reward_level": "chunk",
    "algorithm.sample_level": "decision",
    "reward.limit_penalty.max_turns": 0.1,
    "reward.limit_penalty.length": 0.2,
    "reward.limit_penalty.context": 0.3,
    "actor_rollout_ref.rollout.engine_kwargs": {"vllm": {"max_model_len": 512}},
    "algorithm.workflow_type": "DAPO",
    "actor_rollout_ref.model.init": "random",
    "actor_rollout_ref.model.lora_merge": False,
    "actor_rollout_ref.actor.prox": "interpolate",
    "async.max_concurrent_rollouts": 4,
    "async.max_staleness": 2,
    "data.domains": {
        "a": {
            "train_files": ["a.jsonl"],
            "weight": 2.5,
            "reward": ["math", {"name": "format", "weight": 0.5}],
        }
    },
}
OF_RAY = {
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.allocation",
    "trainer.devices",
    "trainer.worker_cpus",
    "trainer.worker_memory_mb",
    "trainer.worker_env",
    "trainer.worker_roles",
    "trainer.max_held_mb",
    "trainer.peers_timeout_s",
    "trainer.max_restarts",
    *(
        f"trainer.slurm.{name}"
        for name in ("partition", "account", "time", "cpus_per_node", "args")
    ),
    "actor_rollout_ref.actor.weight_update_mode",
    "dag.backend_threshold",
    "dag.apportion_strategy",
    "dag.model_sizes",
    "dag.consider_node_cohesion",
    "dag.consider_node_load",
}


def test_every_key_can_be_set_and_written_and_read_again(tmp_path):
    (tmp_path / "all.yaml").write_text(EVERY_KEY)
    loaded = load_config(str(tmp_path / "all.yaml"))
    values = flatten(loaded.config)
    left_alone = {name for name, info in schema_keys().items() if values[name] == info.default}
    set_elsewhere = {
        *ELSEWHERE,
        *OF_RAY,
        "actor_rollout_ref.actor.model_update_frequency",  # needs async.max_staleness
        "actor_rollout_ref.rollout.tensor_model_parallel_size",  # needs several devices
        *(name for name, info in schema_keys().items() if info.spec.later is True),
        "actor_rollout_ref.actor.strategy",
        *(name for name in schema_keys() if "fsdp_config." in name),
        "trainer.launcher",
    }
    assert set_elsewhere <= left_alone
    (tmp_path / "again.yaml").write_text(to_yaml(loaded.config))
    assert load_config(str(tmp_path / "again.yaml")).config == loaded.config
    assert loaded.set_keys.keys() == set(values) - left_alone


@pytest.mark.parametrize("name", ELSEWHERE)
def test_keys_that_exclude_others_can_be_set_too(name):
    group, *rest, key = name.split(".")
    keys = {key: ELSEWHERE[name]}
    if rest == ["model"]:
        keys["path"] = "model"
    if rest == ["actor"]:
        keys["policy_loss"] = "decoupled"
    if rest == ["rollout"]:
        keys["name"] = "vllm"
    if name.endswith("lora_merge"):
        keys["lora_rank"] = 4
    if key == "agents":
        keys["workflow"] = "games.py:talk"
    for part in rest:
        keys = {part: keys}
    if group == "data":
        keys = {"train_files": [], "domains": TWO_DOMAINS, **keys}
    if name.endswith("lora_merge"):
        keys["rollout"] = {"name": "vllm"}

    others = {}
    if key == "agent_rewards" or "limit_penalty" in name:
        others["actor_rollout_ref"] = {
            "rollout": {"workflow": "games.py:talk", "agents": {"solver": {}}}
        }

    if key.endswith("_level"):
        others["actor_rollout_ref"] = {"rollout": {"workflow": "simulator"}}
    config = good(**{group: keys}, **others)
    assert name in {key for key, _, _ in diff(config, good())}
    assert config_from_dict(to_dict(config)) == config


def test_a_pipeline_of_nodes_is_written_and_read_again():
    nodes = [{"id": "a", "func": "m:f", "deps": [], "options": {"scale": 0.5}}]
    config = good(dag={"pipeline": nodes})
    assert config.dag.pipeline == tuple(nodes) and to_dict(config)["dag"]["pipeline"] == nodes
    assert config_from_dict(to_dict(config)) == config


def test_defaults_are_those_that_were_settled():
    settled = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.workflow_type": "DEFAULT",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 0.95,
        "algorithm.use_kl_in_reward": False,
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.kl_ctrl.type": "fixed",
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "algorithm.filter_groups.metric": "acc",
        "algorithm.filter_groups.max_num_gen_batches": 10,
        "algorithm.filter_groups.when_exhausted": "error",
        "data.prompt_key": "prompt",
        "data.answer_key": "answer",
        "data.domain_key": "data_source",
        "data.train_batch_size": 512,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 4096,
        "data.num_loader_workers": 4,
        "data.shuffle": True,
        "data.seed": 1,
        "data.enable_thinking": False,
        "actor_rollout_ref.model.dtype": "auto",
        "actor_rollout_ref.model.trust_remote_code": False,
        "actor_rollout_ref.actor.strategy": "torch",
        "actor_rollout_ref.actor.clip_ratio": 0.2,
        "actor_rollout_ref.actor.clip_ratio_low": None,
        "actor_rollout_ref.actor.clip_ratio_high": None,
        "actor_rollout_ref.actor.clip_ratio_c": 3.0,
        "actor_rollout_ref.actor.entropy_coef": 0.01,
        "actor_rollout_ref.actor.ppo_epochs": 1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
        "actor_rollout_ref.actor.max_grad_norm": 1.0,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.policy_loss": "vanilla",
        "actor_rollout_ref.actor.model_update_frequency": 1,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.optim.weight_decay": 0.01,
        "actor_rollout_ref.actor.optim.scheduler": "cosine_with_warmup",
        "actor_rollout_ref.actor.optim.warmup_ratio": 0.1,
        "actor_rollout_ref.rollout.name": "embedded",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.temperature": 1.0,
        "actor_rollout_ref.rollout.top_p": 1.0,
        "actor_rollout_ref.rollout.top_k": -1,
        "actor_rollout_ref.rollout.max_num_seqs": 256,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 0.6,
        "critic.optim.lr": 1e-5,
        "critic.cliprange_value": 0.5,
        "reward.functions": {"default": (RewardPart("math"),)},
        "reward.timeout_s": 10.0,
        "reward.num_workers": 2,
        "reward.overlong.buffer_tokens": 0,
        "reward.overlong.factor": 1.0,
        "trust.canary_freq": 1,
        "trainer.launcher": "local",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_epochs": 30,
        "trainer.total_training_steps": None,
        "trainer.save_freq": 10,
        "trainer.test_freq": 5,
        "trainer.val_before_train": False,
        "trainer.critic_warmup": 0,
        "trainer.project_name": "my_project",
        "trainer.experiment_name": "grpo_training",
        "trainer.seed": 1,
        "trainer.save_groups": "none",
        "trainer.logger": ("console",),
        "trainer.resume_mode": "auto",
        "dag.pipeline": None,
        "dag.enable_perf": False,
        "dag.backend_threshold": 32,
        "dag.apportion_strategy": "param_aware",
        "dag.consider_node_cohesion": True,
        "dag.consider_node_load": True,
        "async.max_staleness": 0,
        "async.max_concurrent_rollouts": None,
    }
    flat = flatten(Config())
    assert {name: flat[name] for name in settled} == settled


def test_the_config_is_frozen_and_async_is_async_():
    config = good()
    assert config.async_.max_staleness == 0
    assert "async" in to_dict(config) and "async_" not in to_dict(config)
    with pytest.raises(FrozenInstanceError):
        config.trainer.seed = 2


def test_a_config_changed_in_python_can_be_checked():
    config = good()
    check(config)
    broken = replace(config, algorithm=replace(config.algorithm, gamma=2.0))
    with pytest.raises(ConfigError, match="algorithm.gamma"):
        check(broken)


def test_a_config_of_an_earlier_run_is_only_read():
    values = {"trainer": {"resume_mode": "runs/gone/step_10", "seed": 4}}
    assert config_from_dict(values, judge=False).trainer.seed == 4
    with pytest.raises(ConfigError, match="trainer.sed"):
        config_from_dict({"trainer": {"sed": 4}}, judge=False)
    with pytest.raises(ConfigError, match="trainer.seed"):
        config_from_dict({"trainer": {"seed": "x"}}, judge=False)


def test_differences_and_what_may_change_on_resume():
    before = good()
    after = good(trainer={"seed": 2, "total_epochs": 5}, data={"train_files": "moved/train.jsonl"})
    assert {key for key, _, _ in diff(before, after)} == {
        "trainer.seed",
        "trainer.total_epochs",
        "data.train_files",
    }
    assert ("trainer.seed", 1, 2) in diff(before, after)
    assert changed_keys(before, after) == [("trainer.seed", 1, 2)]
    assert diff(before, before) == []
    spread = replace(
        before.trainer, launcher="ray", nnodes=2, n_gpus_per_node=4, allocation="fsdp:d8"
    )
    assert changed_keys(before, replace(before, trainer=spread)) == []
    assert set(schema_keys()) >= RESUMABLE


def test_the_files_of_a_domain_may_move_as_others_may():
    def domains(**changes):
        own = {
            "a": {"train_files": ["a.jsonl"], "reward": "math", **changes},
            "b": TWO_DOMAINS["b"],
        }
        return good(data={"train_files": [], "domains": own})

    before = domains()
    moved = domains(train_files=["/moved/a.jsonl"], val_files=["v.jsonl"])
    assert [key for key, _, _ in diff(before, moved)] == ["data.domains"] and changed_keys(
        before, moved
    ) == []

    for change in ({"weight": 2}, {"max_response_length": 9}, {"prompt_template": "Q {prompt}"}):
        assert [
            key for key, _, _ in changed_keys(before, domains(train_files=["x.jsonl"], **change))
        ] == ["data.domains"]

    assert changed_keys(before, good(data={"train_files": [], "domains": {"a": TWO_DOMAINS["a"]}}))


def test_explain_says_what_a_key_means_and_who_set_it():
    loaded = load_config("dapo", [*GOOD, "algorithm.gamma=0.5"])
    text = explain("algorithm.gamma", loaded)

    for part in (
        "discount",
        "≥ 0 and ≤ 1",
        "default  1.0",
        "value    0.5",
        "origin   command line",
    ):
        assert part in text

    assert "methods/dapo.py:" in explain("actor_rollout_ref.actor.clip_ratio_high", loaded)
    assert "default  {default: ['math']}" in explain("reward.functions", loaded)
    assert "algorithm.kl_ctrl.horizon=null" in explain("algorithm.kl_ctrl", loaded)
    with pytest.raises(ConfigError, match=r"(?s)algorithm\.gama .*algorithm\.gamma\?"):
        explain("algorithm.gama", loaded)


# (prompts, n, mini-batch, passes) → the first line, counted by hand
STEPS = {
    (64, 8, 16, 1): "64 prompts × 8 = 512 samples → 4 optimizer steps of 128, the first on-policy",
    (256, 4, 256, 1): "256 prompts × 4 = 1024 samples → 1 optimizer step of 1024, on-policy",
    (
        100,
        2,
        30,
        1,
    ): (
        "100 prompts × 2 = 200 samples → 4 optimizer steps of 60 (the last of a pass 20), the "
        "first on-policy"
    ),
    (
        10,
        8,
        4,
        3,
    ): (
        "10 prompts × 8 = 80 samples → 9 optimizer steps of 32 (the last of a pass 16) in 3 "
        "passes, the first on-policy"
    ),
    (
        1,
        2,
        1,
        2,
    ): "1 prompt × 2 = 2 samples → 2 optimizer steps of 2 in 2 passes, the first on-policy",
}


@pytest.mark.parametrize("numbers", STEPS)
def test_what_the_numbers_of_a_step_mean(numbers):
    prompts, group, mini, passes = numbers
    config = good(
        data={"train_batch_size": prompts},
        actor_rollout_ref={
            "model": {"path": "model"},
            "rollout": {"n": group},
            "actor": {"ppo_mini_batch_size": mini, "ppo_epochs": passes},
        },
    )
    assert describe(config)[0] == STEPS[numbers]
