"""Names of other systems: the tables speak of keys that exist, and every well-known name is
answered."""

import re

import pytest
import yaml

from distflow.config import ConfigError, load_config
from distflow.config.compose.setting_origins import Setting
from distflow.config.compose.typed_values import check_bounds, convert
from distflow.config.compose.unknown_keys import is_known, judge_settings, suggest
from distflow.config.keys.schema import group_names, schema_keys
from distflow.config.migration.tables import ANY, NOT_GIVEN, all_tables, find_names

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
OPTIM = f"{ACTOR}.optim"
CORRECTION = "algorithm.rollout_correction"

ENTRIES = [
    (key, name)
    for table in all_tables().values()
    for key, name in (*table.names.items(), *table.tuning.items())
]


def refuse(*overrides):
    """Problems by key of overrides of the preset grpo, without a model or data."""
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", list(overrides), complete=False)
    return {problem.places[0][0]: problem for problem in caught.value.problems}


def written(text):
    return [tuple(override.split("=", 1)) for override in text.split(" ")] if text else []


def test_what_is_to_be_written_are_our_keys_and_values_that_they_take():
    for key, name in ENTRIES:
        for value in (NOT_GIVEN, *name.values):
            for ours, given in written(name.overrides(value)):
                assert is_known(ours), f"{key}: {ours}"
                info = schema_keys().get(ours)
                if info is None or "..." in given:
                    continue

                plain = yaml.safe_load(given)
                made = (
                    info.spec.parse(plain) if info.spec.parse else convert(plain, info.annotation)
                )
                assert not list(check_bounds(made, info)), f"{key}: {ours}={given}"


def test_keys_that_a_note_names_exist():
    for key, name in ENTRIES:
        for word in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", name.note):
            ours = word.partition(".")[0] in group_names() and not word.endswith(".md")
            assert not ours or is_known(word), f"{key}: {word}"


def judge(key, value):
    """What `distflow config` says of one setting: the problems, and the line where it accepts
    it."""
    problems, accepted = judge_settings(
        [Setting(key, "command line", is_group=False, value=value)], {}
    )
    return [problem.advice for problem in problems], accepted.get(key, "")


def test_every_key_is_accepted_with_a_line_where_it_changes_nothing_and_else_answered():
    """Of several systems, all must say so."""
    found = {key.replace("*", "x") for table in all_tables().values() for key in table.names}
    keys = sorted(key for key in found if not is_known(key))
    assert len(keys) > 900

    for key in keys:
        names = find_names(key).values()
        values = {
            repr(value): value for name in names for value in name.harmless if name.harmless != ANY
        }
        for value in (*values.values(), "no value of any system"):
            advice, line = judge(key, value)
            if all(name.accepts(value) for name in names):
                assert not advice and line.startswith(f"{key}="), (key, value)
            else:
                assert len(advice) == 1 and len(advice[0]) > 10 and not line, (key, value)


def test_no_pattern_is_hidden_by_one_before_it():
    for table in all_tables().values():
        for key, name in table.names.items():
            assert table.find(key.replace("*", "x")) == name, key


def test_a_value_that_has_no_name_here_is_answered_with_those_that_have():
    said = find_names("loss_type")["TRL"].answer("dft")
    assert (
        "dft" not in said
        and f"`dr_grpo` is `{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm`" in said
    )
    answer = find_names("save_strategy")["TRL"].answer("hour")
    assert answer.startswith(
        "trainer.save_freq is in steps, trainer.save_freq_epochs in epochs; `no` is"
    )


def test_none_of_them_is_a_key_here():
    names = {key for table in all_tables().values() for key in table.names}
    assert not names & set(schema_keys())


SYSTEM_DEFAULTS = [
    (table, *part) for table in all_tables().values() for part in table.defaults.items()
]


def test_the_defaults_of_other_systems_have_keys_here():
    for table, method, defaults in SYSTEM_DEFAULTS:
        formulas = " ".join(
            formula for part in table.computed.values() for formula in part.values()
        )
        for key in defaults:
            assert is_known(key) or table.find(key, method) or key in formulas, key


def test_formulas_compute_keys_that_exist():
    for table in all_tables().values():
        for formulas in table.computed.values():
            assert all(is_known(ours) for ours in formulas if "." in ours), formulas


# name=value of TRL: what is to be written for it
TRL = {
    "num_generations_eval=4": f"write {ROLLOUT}.val_kwargs.n=4; in addition to one greedy response",
    "max_prompt_length=256": "write data.max_prompt_length=256 data.filter_overlong_prompts=false "
    "data.truncation=left"
    "; TRL cuts longer prompts from the left",
    "max_length=1024": "data.max_prompt_length and data.max_response_length",
    "max_seq_length=1024": "data.max_prompt_length and data.max_response_length",
    "per_device_train_batch_size=8": "both are that product / num_generations",
    "gradient_accumulation_steps=4": "TRL counts completions",
    "generation_batch_size=64": "generation_batch_size / num_generations",
    "steps_per_generation=4": f"data.train_batch_size / {ACTOR}.ppo_mini_batch_size",
    "top_k=0": f"write {ROLLOUT}.top_k=-1",
    "beta=0.04": f"write {ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0.04",
    "beta=0.0": f"write {ACTOR}.use_kl_loss=false",
    "loss_type=grpo": f"write {ACTOR}.loss_agg_mode=seq-mean-token-mean",
    "loss_type=dapo": f"write {ACTOR}.loss_agg_mode=token-mean",
    "loss_type=bnpo": f"write {ACTOR}.loss_agg_mode=token-mean",
    "loss_type=dr_grpo": f"write {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    "loss_type=cispo": f"write {ACTOR}.policy_loss=cispo {ACTOR}.loss_agg_mode=token-mean",
    "importance_sampling_level=sequence": f"write {ACTOR}.policy_loss=gspo",
    "scale_rewards=True": "write algorithm.scale_rewards=group",
    "scale_rewards=False": "write algorithm.scale_rewards=none",
    "mask_truncated_completions=True": "write algorithm.mask_truncated=true",
    "reward_weights=[1.0,0.5]": "reward.functions",
    "reward_funcs=accuracy": "reward.functions",
    "multi_objective_aggregation=normalize_then_sum": "write algorithm.adv_estimator=gdpo",
    "use_vllm=True": f"write {ROLLOUT}.name=vllm",
    "vllm_structured_outputs_regex='[0-9]+'": "responses cannot be constrained",
    "group_by_length=True": "data.shuffle orders the rows",
    "vllm_importance_sampling_mode=token_truncate": (
        f"rollout_is=token {CORRECTION}.rollout_is_threshold=3.0"
    ),
    "sync_ref_model=True": "is always the initial model",
    "top_entropy_quantile=0.2": "all tokens contribute",
    "learning_rate=1e-5": f"write {OPTIM}.lr=1e-05",
    "lr_scheduler_type=linear": f"write {OPTIM}.scheduler=linear_with_warmup",
    "adam_beta1=0.9": f"write {OPTIM}.betas=[0.9,0.999]",
    "adam_beta2=0.95": f"write {OPTIM}.betas=[0.9,0.95]",
    "adam_epsilon=1e-7": f"write {OPTIM}.eps=1e-07",
    "optim=adamw_torch": f"write {OPTIM}.optimizer=adamw",
    "optim=paged_adamw_8bit": f"write {OPTIM}.optimizer=adamw_8bit",
    "bf16=True": f"write {MODEL}.dtype=bfloat16",
    "fp16=True": "float16 is not supported",
    "gradient_checkpointing=True": f"write {MODEL}.enable_gradient_checkpointing=true",
    "lora_dropout=0.05": "adapters have no dropout",
    "max_steps=100": "write trainer.total_training_steps=100; TRL counts optimizer steps",
    "max_steps=-1": "write trainer.total_training_steps=null",
    "save_strategy=no": "write trainer.save_freq=-1",
    "save_strategy=epoch": "write trainer.save_freq=-1 trainer.save_freq_epochs=1",
    "eval_strategy=epoch": "write trainer.test_freq=-1 trainer.test_freq_epochs=1",
    "eval_strategy=no": "write trainer.test_freq=-1",
    "eval_on_start=True": "write trainer.val_before_train=true",
    "load_best_model_at_end=True": "write trainer.keep_best=true",
    "report_to=none": "write trainer.logger=[console]",
    "report_to=wandb": "write trainer.logger=[console,wandb]",
    "seed=42": "write trainer.seed=42 data.seed=42",
    "push_to_hub=True": "distflow export",
    "resume_from_checkpoint=True": "write trainer.resume_mode=auto",
    "kl_coef=0.05": "write algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.05",
    "num_ppo_epochs=4": f"write {ACTOR}.ppo_epochs=4 critic.ppo_epochs=4",
    "vf_coef=0.1": "",
    "missing_eos_penalty=1.0": "reward.overlong.buffer_tokens",
    "reward_model_path=m": "write reward.functions={default:[{name:model,options:{path:m}}]}",
    "deepspeed=ds.json": "trainer.n_gpus_per_node",
    "logging_steps=10": "",
    "use_liger_kernel=True": "",
    "log_completions=True": "",
    "packing=False": "",
    "assistant_only_loss=True": "",
}

# of the others
OTHERS = {
    "rollout.max_head_offpolicyness=2": "write async.max_staleness=2; in steps",
    "rollout.max_concurrent_rollouts=64": "write async.max_concurrent_rollouts=64; in prompts",
    "rollout.consumer_batch_size=32": "write data.train_batch_size=32; in prompts",
    "rollout.queue_size=16": "",
    "rollout.check_trajectory_format=True": "",
    "rollout.enable_rollout_tracing=True": "",
    "rollout.schedule_policy=round_robin": "",
    "rollout.pause_grace_period=0.5": "",
    "async_training=True": "",
    "new_tokens_per_chunk=1024": "",
    f"{ROLLOUT}.checkpoint_engine.backend=nccl": (
        f"write {ACTOR}.weight_update_mode=collective; for workers that only"
    ),
    f"{ROLLOUT}.checkpoint_engine.backend=naive": "",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=4096": "",
    "actor.weight_update_mode=xccl": (
        f"write {ACTOR}.weight_update_mode=collective; for workers that only generate"
    ),
    "actor.weight_update_mode=disk": (
        f"write {ACTOR}.weight_update_mode=disk; for workers that only generate"
    ),
    "actor.behav_imp_weight_mode=token_truncate": (
        f"write {ACTOR}.policy_loss_kwargs.behav_imp_weight_mode=clamp"
    ),
    "actor.behave_imp_weight_mode=sequence_mask": "rejection_sampling={level:sequence,action:mask,upper:5.0}",  # noqa: E501
    "actor.rejection_sampling.upper=2.0": (
        f"write {ACTOR}.policy_loss_kwargs.rejection_sampling.upper=2.0"
    ),
    "ppo.use_decoupled_loss=True": f"write {ACTOR}.policy_loss=decoupled",
    "evaluator.eval_before_train=True": "write trainer.val_before_train=true",
    "async_train=True": "write async.max_staleness=2",
    "async_queue_size=3": "async_queue_size + 1",
    "async_training.partial_rollout=True": f"write {ROLLOUT}.kv_on_update=recompute",
    "partial_rollout=True": f"write {ROLLOUT}.kv_on_update=keep",
    "async_training.staleness_threshold=0.5": "async.max_staleness is in whole steps: round up",
    "async_training.trigger_parameter_sync_step=4": (
        "set data.train_batch_size to ppo_mini_batch_size"
    ),
    "actor.kl_ctl=0.1": "write algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.1",
    "actor.ppo_n_minibatches=4": (
        f"{ACTOR}.ppo_mini_batch_size is data.train_batch_size / ppo_n_minibatches"
    ),
    "actor.use_decoupled_loss=True": f"write {ACTOR}.policy_loss=decoupled",
    "actor.optimizer.lr_scheduler_type=constant": f"write {OPTIM}.scheduler=constant_with_warmup",
    "allocation_mode=sglang:d4p1t1+d4p1t1": "trainer.launcher=ray",
    "rollout_batch_size=128": "write data.train_batch_size=128; in prompts",
    "train_batch_size=128": (
        "train_batch_size / n_samples_per_prompt; verl's train_batch_size is data.train_batch_size"
    ),
    "advantage_estimator=group_norm": "write algorithm.adv_estimator=grpo",
    "actor_learning_rate=5e-7": f"write {OPTIM}.lr=5e-07",
    "eps_clip_low_high=[0.2,0.27]": "clip_ratio_low",
    "zero_stage=3": "",
    "adam_offload=True": f"write {ACTOR}.fsdp_config.optimizer_offload=true",
    "is_offload_states=true": f"param_offload=true {ACTOR}.fsdp_config.optimizer_offload=true",
    "actor_train.training_args.learning_rate=1e-6": f"write {OPTIM}.lr=1e-06",
    "is_use_additional_prompts=true": (
        "write algorithm.filter_groups.oversampling=0.5; with 0.5, half as many"
    ),
    "max_additional_running_prompts=32": "is their number as a fraction of rollout_batch_size",
    "actor_infer.strategy_args.strategy_name=hf_infer": f"write {ROLLOUT}.name=hf",
    "actor_train.strategy_args.strategy_name=megatron_train": "",
    "actor_infer.strategy_args.strategy_config.tensor_parallel_size=2": (
        f"write {ROLLOUT}.tensor_model_parallel_size=2"
    ),
    "actor_infer.strategy_args.strategy_config.quantization=fp8": (
        f"set {ROLLOUT}.engine_kwargs.vllm or"
    ),
    "actor_infer.strategy_args.strategy_config.block_size=16": "",
    "actor_train.device_mapping=[0,1]": "",
    "sglang.max_running_requests=null": "",
    "sglang.kv_cache_dtype=fp8_e5m2": f"set {ROLLOUT}.engine_kwargs.vllm or .sglang",
    "vllm.speculative_model=m": f"set {ROLLOUT}.engine_kwargs.vllm or .sglang",
    "sglang.mem_fraction_static=0.8": (
        f"write {ROLLOUT}.engine_kwargs.sglang.mem_fraction_static=0.8"
    ),
    "init_kl_coef=0": "write algorithm.use_kl_in_reward=false",
    "whiten_advantages=True": "in ROLL: write algorithm.adv_norm.mean_level=batch",
    f"{ACTOR}.optim.warmup_style=cosine": f"write {OPTIM}.scheduler=cosine_with_warmup",
    "critic.model.fsdp_config.param_offload=True": "write critic.fsdp_config.param_offload=true",
    "critic.fsdp.offload_policy=True": "write critic.fsdp_config.offload_policy=true",
    "reward_model.model.fsdp_config.param_offload=True": (
        "write reward_model.fsdp_config.param_offload=true"
    ),
    f"{REF}.fsdp_config.fsdp_size=4": f"sharded like the actor: {ACTOR}.fsdp_config.fsdp_size",
    f"{ACTOR}.fsdp_config.forward_prefetch=True": "",
    f"{ACTOR}.ulysses_sequence_parallel_size=2": "sequence parallelism is not supported",
    f"{ROLLOUT}.multi_turn.enable=True": "workflow=tools",
    "data.reward_fn_key=data_source": "",
    "reward_model.reward_manager=mine": "reward.functions",
    "trainer.val_only=True": "distflow eval",
    "use_remove_padding=True": "",
    "dag.workflow_path=dag.yaml": "or a list of nodes, in which node_id is id",
    "dag_id=mine": "or a list of nodes, in which node_id is id",
    "global_config=1": "put the values themselves into a node's options",
    "dag.env_enable=False": "",
    "dag.env_enable=True": "the workflow environment",
    "profiler.level=level1": "",
    "reward_model.micro_batch_size_per_gpu=4": "",
}


@pytest.mark.parametrize("settings", [TRL, OTHERS], ids=["TRL", "others"])
def test_well_known_names_are_answered_with_ours_and_their_value(settings):
    """Empty: it asks for nothing that is not so anyway, and is accepted with a line."""
    said = {override: suggest_for(override) for override in settings}
    for override, part in settings.items():
        if part:
            assert part in said[override], override

    accepted = [override for override, part in settings.items() if not part]
    notes = load_config("grpo", accepted, complete=False).notes
    assert len([line for line in notes if "verl has other defaults" not in line]) == len(accepted)


def suggest_for(override):
    key, value = override.split("=", 1)
    return suggest(
        key, schema_keys(), yaml.load(value, yaml.SafeLoader) if "e-" not in value else float(value)
    )


def test_the_command_line_gives_the_same_answers():
    some = [
        "top_k=0",
        "+beta=0.04",
        "++scale_rewards=False",
        "report_to=none",
    ]
    problems = refuse(*some)
    assert [problem.what for problem in problems.values()] == [
        "there is no such key; TRL has it"
    ] * 4

    for override in some:
        key = override.lstrip("+").partition("=")[0]
        assert TRL[override.lstrip("+")] in problems[key].advice


def test_a_file_gives_the_same_answers(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "defaults: [grpo, _self_]\nnum_generations: 4\ngconfig:\n  n_samples: 4\n  greedy: false\n"
        "actor_rollout_ref:\n  actor:\n    fsdp_config: {param_offload: false, model_dtype: fp32}\n"
        "    ppo_micro_batch_size_per_gpu: 4\n"
        "critic:\n  model:\n    fsdp_config: {param_offload: true, optimizer_offload: false}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "run.yaml"), complete=False)
    said = {problem.places[0][0]: problem.advice for problem in caught.value.problems}
    assert said == {
        "num_generations": f"write {ROLLOUT}.n=4",
        "gconfig.n_samples": f"write {ROLLOUT}.n=4",
        "critic.model.fsdp_config.param_offload": "write critic.fsdp_config.param_offload=true",
    }


def test_a_group_of_one_system_and_a_name_of_another_are_told_apart(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "defaults: [grpo, _self_]\ntrain_dataset:\n  path: gsm8k\n"
        "  batch_size: ${gconfig.n_samples}\n"
        "gconfig: {n_samples: 4}\ntokenizer_path: ${train_dataset.path}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "run.yaml"), complete=False)
    said = {problem.places[0][0]: problem.advice for problem in caught.value.problems}
    assert said == {
        "train_dataset.path": "write data.train_files=gsm8k",
        "train_dataset.batch_size": "write data.train_batch_size=4; in prompts",
        "gconfig.n_samples": f"write {ROLLOUT}.n=4",
        "tokenizer_path": f"write {MODEL}.tokenizer_path=gsm8k",
    }


@pytest.mark.parametrize("value", ["true", "1", "false"])
def test_an_offload_is_accepted_only_where_nothing_is_to_be_offloaded(value):
    override = f"critic.model.fsdp_config.optimizer_offload={value}"
    if value == "false":
        (line,) = list(load_config("verl_grpo", [override], complete=False).notes)
        assert line == f"{override} (verl): it asks for nothing"
    else:
        assert list(refuse(override)) == ["critic.model.fsdp_config.optimizer_offload"]


def test_what_is_accepted_leaves_no_trace_in_the_config():
    plain = load_config("verl_grpo", complete=False)
    spoken = load_config(
        "verl_grpo", ["trainer.balance_batch=True", f"{ACTOR}.entropy_coeff=0"], complete=False
    )
    assert (spoken.config, spoken.origins) == (plain.config, plain.origins)
    assert spoken.notes[1] == (
        f"{ACTOR}.entropy_coeff=0 (verl): here it is {ACTOR}.entropy_coef=0, which is already set"
    )
    assert f"{ACTOR}.entropy_coeff" in refuse(f"{ACTOR}.entropy_coeff=0.01")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"{ACTOR}.kl_loss_type=k3", "did you mean low_var_kl?"),
        ("algorithm.kl_penalty=k2", "did you mean mse?"),
        (f"{OPTIM}.scheduler=cosine", "did you mean cosine_with_warmup?"),
        (f"{OPTIM}.optimizer=AdamW", "did you mean adamw?"),
        ("trainer.resume_mode=disable", "never (verl's disable)"),
    ],
)
def test_values_of_verl_are_answered(override, said):
    (problem,) = refuse(override).values()
    assert said in problem.advice


# What must not be suggested for what
DANGEROUS = [
    ("max_completion_length", "max_prompt_length"),
    ("max_new_length", "max_prompt_length"),
    ("data.max_completion_length", "max_prompt_length"),
    ("data.max_answer_length", "max_prompt_length"),
    ("data.train_files_size", "train_files"),
    ("data.test_files", "train_files"),
    ("trainer.eval_freq", "save_freq"),
    ("trainer.total_steps", "total_epochs"),
    (f"{ROLLOUT}.top_n", "top_p"),
    (f"{ACTOR}.clip_high", "clip_ratio_high"),
    (f"{ACTOR}.min_grad_norm", "max_grad_norm"),
    ("data.prompt_id", "prompt_key"),
    ("logging.path", "model.path"),
    ("log.level", "reward_norm.mean_level"),
    ("wandb.name", "rollout.name"),
    ("server.mode", "actor.weight_update_mode"),
]


@pytest.mark.parametrize(("key", "wrong"), DANGEROUS)
def test_another_word_is_no_suggestion(key, wrong):
    assert wrong not in suggest(key, schema_keys())


MISSPELT = {
    "data.train_batch_sise": "data.train_batch_size",
    "data.trian_files": "data.train_files",
    "data.trainbatchsize": "data.train_batch_size",
    "trainer.sede": "trainer.seed",
    "Trainer.Seed": "trainer.seed",
    "algoritm.gama": "algorithm.gamma",
    "actor.cliprange_ratio": "",
    f"{ACTOR}.clip_ration": f"{ACTOR}.clip_ratio",
    "temprature": f"{ROLLOUT}.temperature",
    "tempreature": f"{ROLLOUT}.temperature",
    "trainer.lr": f"{OPTIM}.lr",
    "rollout.n": f"{ROLLOUT}.n",
    "zzz": "",
    "data.zzz": "",
}


@pytest.mark.parametrize("key", MISSPELT)
def test_a_typing_error_is_understood(key):
    said = suggest(key, schema_keys())
    wanted = f"did you mean {MISSPELT[key]}" if MISSPELT[key] else "see docs/config.md"
    assert said.startswith(wanted)
