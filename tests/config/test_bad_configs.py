"""A hundred bad configs: each is refused with the key to change, what is wrong with it, and what to
do."""

from dataclasses import replace

import pytest

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import ConfigError, load_config
from distflow.config.rules.check_config import check
from tests.sparse_params import one_fast_in

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
FSDP = (f"{ACTOR}.strategy=fsdp", "trainer.launcher=ray")
GOOD = ("data.train_files=train.jsonl", f"{MODEL}.path=model")
VAL = "data.val_files=val.jsonl"
DOMAIN_A = "data.domains={a: {train_files: a.jsonl, reward: math}}"
CORRECTION = "algorithm.rollout_correction"

NUMBERS = (
    *(f"{ROLLOUT}.workflow=simulator", f"{ROLLOUT}.name=hf"),
    f"{ROLLOUT}.workflow_kwargs={{actions: {{head: gaussian, low: -1, high: 1}}}}",
)
# name: (preset, overrides, the key that is named first, parts of the message)
BAD: dict[str, tuple[str, list[str], str, tuple[str, ...]]] = {
    # continuous actions
    **{
        f"numbers of actions and {override.split('=')[0]}": (
            "grpo",
            [*NUMBERS, override],
            override.split("=")[0].removeprefix("+"),
            ("actions.head=gaussian draws numbers",),
        )
        for override in (
            *(
                f"{ROLLOUT}.name=embedded",
                f"{ROLLOUT}.workflow=tools",
                f"{ROLLOUT}.temperature=0.7",
            ),
            *(
                f"{ROLLOUT}.top_p=0.9",
                f"{ROLLOUT}.top_k=5",
                f"{ROLLOUT}.min_p=0.1",
                f"{ROLLOUT}.stop=[x]",
            ),
            *(
                f"{ROLLOUT}.repetition_penalty=1.1",
                f"{MODEL}.lora_rank=4",
                f"{ROLLOUT}.agents={{a: {{}}}}",
            ),
        )
    },
    "numbers of actions of one of several workflows": (
        "grpo",
        [
            *(f"{ROLLOUT}.workflow=by_domain", f"{ROLLOUT}.name=hf"),
            (
                f"{ROLLOUT}.workflow_kwargs={{a: {{workflow: simulator, actions: {{head: gaussian, "
                f"low: -1, high: 1}}}}}}"
            ),
        ],
        f"{ROLLOUT}.workflow",
        ("actions.head=gaussian draws numbers", "set it to simulator"),
    ),
    **{
        f"a flow with noise {noise} and {preset}": (
            preset,
            [
                *(
                    *NUMBERS[:2],
                    (
                        f"{ROLLOUT}.workflow_kwargs={{actions: {{head: flow_sde, low: -1, high: 1, "
                        f"noise: {noise}}}}}"
                    ),
                ),
            ],
            f"{ROLLOUT}.workflow_kwargs",
            (
                "a flow without noise is deterministic",
                "no density",
                "set actions.noise to a number above 0",
            ),
        )
        for noise, preset in ((0, "grpo"), (-0.5, "ppo"), ("x", "dapo"), (0.0, "embodied_srpo"))
    },
    "numbers of actions and sampled validation": (
        "grpo",
        [*NUMBERS, f"{ROLLOUT}.val_kwargs.n=2"],
        f"{ROLLOUT}.val_kwargs.temperature",
        ("actions.head=gaussian draws numbers", "val_kwargs.temperature=1.0"),
    ),
    "a warm-up longer than the run": (
        "grpo",
        [f"{ACTOR}.optim.lr_warmup_steps=20", "trainer.total_training_steps=10"],
        f"{ACTOR}.optim.lr_warmup_steps",
        ("20 of 20 optimizer steps",),
    ),
    # what is missing
    "no data": (
        "grpo",
        ["~data.train_files"],
        "data.train_files",
        ("no data to train on", "FILE.jsonl"),
    ),
    "no data, null": (
        "grpo",
        ["data.train_files=null"],
        "data.train_files",
        ("no data to train on",),
    ),
    "a band that is none": (
        "grpo",
        ["algorithm.difficulty_mask=[0.5,0.5]"],
        "algorithm.difficulty_mask",
        ("no range within 0..1",),
    ),
    "a band above 1": (
        "grpo",
        ["algorithm.difficulty_mask=[0,8]"],
        "algorithm.difficulty_mask",
        ("no range within 0..1",),
    ),
    "no model": (
        "sft",
        [f"~{MODEL}.path"],
        f"{MODEL}.path",
        ("no model", "builtin:tiny-arithmetic", "init=random"),
    ),
    "an empty model path": ("sft", [f"{MODEL}.path=''"], f"{MODEL}.path", ("no model",)),
    # unknown keys
    "a key misspelt": (
        "grpo",
        ["data.train_batch_sise=8"],
        "data.train_batch_sise",
        ("data.train_batch_size",),
    ),
    "with +": (
        "grpo",
        ["+data.train_batch_sise=8"],
        "data.train_batch_sise",
        ("data.train_batch_size",),
    ),
    "with ++": (
        "grpo",
        ["++data.train_batch_sise=8"],
        "data.train_batch_sise",
        ("data.train_batch_size",),
    ),
    "a short form": (
        "grpo",
        ["actor.clip_ratio=0.1"],
        "actor.clip_ratio",
        (f"did you mean {ACTOR}.clip_ratio?",),
    ),
    "a wrong group": (
        "grpo",
        ["trainer.train_batch_size=8"],
        "trainer.train_batch_size",
        ("data.train_batch_size",),
    ),
    "a wrong case": ("grpo", ["data.Seed=8"], "data.Seed", ("did you mean data.seed?",)),
    "a group misspelt": ("grpo", ["algoritm.gamma=0.9"], "algoritm.gamma", ("algorithm.gamma",)),
    "inside a mapping": ("grpo", ["data={seeds: 3}"], "data.seeds", ("did you mean data.seed?",)),
    "hydra's own": ("grpo", ["hydra.run.dir=x"], "hydra.run.dir", ("trainer.default_local_dir",)),
    "verl's loss mode": (
        "grpo",
        [f"{ACTOR}.policy_loss.loss_mode=gspo"],
        f"{ACTOR}.policy_loss.loss_mode",
        (f"write {ACTOR}.policy_loss=gspo",),
    ),
    "AReaL's staleness": (
        "grpo",
        ["async.max_head_offpolicyness=2"],
        "async.max_head_offpolicyness",
        ("staleness",),
    ),
    "decisions of no simulator": (
        "grpo",
        ["algorithm.sample_level=decision"],
        "algorithm.sample_level",
        ("only the workflow simulator has actions, chunks and decisions",),
    ),
    "weights of episodes for decisions": (
        "grpo",
        [
            "algorithm.sample_level=decision",
            f"{CORRECTION}.rollout_is=sequence",
            f"{ROLLOUT}.workflow=simulator",
        ],
        f"{CORRECTION}.rollout_is",
        (
            "sequence is of whole episodes, and samples are decisions",
            "algorithm.sample_level=episode",
        ),
    ),
    "statistics of episodes for decisions": (
        "grpo",
        [
            *("algorithm.sample_level=decision", f"{ROLLOUT}.workflow=simulator"),
            *(
                f"{CORRECTION}.rollout_rs=seq_mean_k1",
                f"{CORRECTION}.rollout_rs_threshold=[[0.5,2]]",
            ),
        ],
        f"{CORRECTION}.rollout_rs",
        ("seq_mean_k1 is of whole episodes",),
    ),
    # the grammar of overrides
    "no key and no value": ("grpo", ["ppo"], "'ppo'", ("write key=value",)),
    "a group that is dropped": (
        "grpo",
        ["custom_reward_function=null"],
        "custom_reward_function",
        ("custom_reward_function.path=null",),
    ),
    "an option": ("grpo", ["--seed=1"], "'--seed=1'", ("key=value",)),
    "an agent twice": (
        "grpo",
        [f"{ROLLOUT}.agents={{a: {{}}, b: {{}}, a: {{trainable: false}}}}"],
        f"'{ROLLOUT}.agents={{a: {{}}, b: {{}}, a: {{trainable: false}}}}'",
        ("names a twice",),
    ),
    "a group choice": ("grpo", ["algorithm/kl=x"], "'algorithm/kl=x'", ("names a file",)),
    "nothing to remove": ("grpo", ["~trainer.seed"], "~trainer.seed", ("nothing to remove",)),
    "a group as a value": (
        "grpo",
        ["critic=null"],
        "critic",
        ("group of keys", "critic.model.path"),
    ),
    "an unknown reference": (
        "grpo",
        ["data.seed=${trainer.sed}"],
        "data.seed",
        ("trainer.sed", "not found"),
    ),
    # types
    "a str for an int": (
        "grpo",
        ["data.train_batch_size=many"],
        "data.train_batch_size",
        ("'many'",),
    ),
    "a quoted number": ("grpo", ["data.seed='7'"], "data.seed", ("without quotes",)),
    "a fraction for a count": (
        "grpo",
        ["data.train_batch_size=1.5"],
        "data.train_batch_size",
        ("of type int",),
    ),
    "a boolean for a count": ("grpo", ["data.seed=true"], "data.seed", ("not of type int",)),
    "a number for a boolean": (
        "grpo",
        ["data.shuffle=1"],
        "data.shuffle",
        ("write true or false",),
    ),
    "yes for a boolean": ("grpo", ["data.shuffle=yes"], "data.shuffle", ("write true or false",)),
    "a boolean for a number": (
        "grpo",
        ["algorithm.gamma=true"],
        "algorithm.gamma",
        ("of type float",),
    ),
    "a list for a str": ("grpo", [f"{MODEL}.path=[a]"], f"{MODEL}.path", ("not of type str",)),
    "null for a number": ("grpo", ["data.seed=null"], "data.seed", ("is null",)),
    "not a number": ("grpo", ["algorithm.gamma=nan"], "algorithm.gamma", ("finite",)),
    "infinity": ("grpo", [f"{ACTOR}.max_grad_norm=inf"], f"{ACTOR}.max_grad_norm", ("finite",)),
    "a mapping for a list": (
        "grpo",
        ["data.train_files={a: b}"],
        "data.train_files",
        ("list[str]",),
    ),
    "numbers in a list of str": ("grpo", [f"{ROLLOUT}.stop=[1]"], f"{ROLLOUT}.stop", ("quotes",)),
    "a list for a mapping": (
        "grpo",
        [f"{ACTOR}.policy_loss_kwargs=[1]"],
        f"{ACTOR}.policy_loss_kwargs",
        ("mapping",),
    ),
    "three betas": (
        "grpo",
        [f"{ACTOR}.optim.betas=[0.9,0.9,0.9]"],
        f"{ACTOR}.optim.betas",
        ("3 entries, not 2",),
    ),
    "a boolean for a name or list": (
        "grpo",
        [f"{MODEL}.target_modules=true"],
        f"{MODEL}.target_modules",
        ("true",),
    ),
    # bounds
    "an empty batch": ("grpo", ["data.train_batch_size=0"], "data.train_batch_size", ("≥ 1",)),
    "gamma above 1": ("grpo", ["algorithm.gamma=1.1"], "algorithm.gamma", ("≤ 1",)),
    "temperature 0": (
        "grpo",
        [f"{ROLLOUT}.temperature=0"],
        f"{ROLLOUT}.temperature",
        ("> 0", "val_kwargs.greedy"),
    ),
    "an agent's top_k": (
        "grpo",
        [f"{ROLLOUT}.agents={{a: {{top_k: 0}}}}", f"{ROLLOUT}.workflow=a.py:b"],
        f"{ROLLOUT}.agents.a.top_k",
        ("-1 (off)",),
    ),
    "validation at temperature 0": (
        "grpo",
        [f"{ROLLOUT}.val_kwargs.temperature=0"],
        f"{ROLLOUT}.val_kwargs.temperature",
        ("val_kwargs.greedy=true",),
    ),
    "top_p 0": ("grpo", [f"{ROLLOUT}.top_p=0"], f"{ROLLOUT}.top_p", ("> 0 and ≤ 1",)),
    "top_k 0": ("grpo", [f"{ROLLOUT}.top_k=0"], f"{ROLLOUT}.top_k", ("-1 (off)",)),
    "min_p 1": ("grpo", [f"{ROLLOUT}.min_p=1"], f"{ROLLOUT}.min_p", ("< 1",)),
    "clip_ratio above 1": (
        "grpo",
        [f"{ACTOR}.clip_ratio=1.5"],
        f"{ACTOR}.clip_ratio",
        ("never reaches",),
    ),
    "clip_ratio_low above 1": (
        "grpo",
        [f"{ACTOR}.clip_ratio_low=1.2"],
        f"{ACTOR}.clip_ratio_low",
        ("≤ 1",),
    ),
    "a beta of 1": ("grpo", [f"{ACTOR}.optim.betas=[0.9,1.0]"], f"{ACTOR}.optim.betas", ("< 1",)),
    "no steps": (
        "grpo",
        ["trainer.total_training_steps=0"],
        "trainer.total_training_steps",
        ("total_epochs decide",),
    ),
    "a secret in the open": (
        "grpo",
        ["trainer.launcher=ray", "trainer.worker_env={HF_TOKEN: hf_x}"],
        "trainer.worker_env",
        ("HF_TOKEN looks like a secret", "in the environment"),
    ),
    "no judge": ("grpo", ["reward.num_workers=0"], "reward.num_workers", ("≥ 1",)),
    # choices
    "an estimator misspelt": (
        "grpo",
        ["algorithm.adv_estimator=gropo"],
        "algorithm.adv_estimator",
        ("grpo?",),
    ),
    "a loss misspelt": (
        "grpo",
        [f"{ACTOR}.policy_loss=vanila"],
        f"{ACTOR}.policy_loss",
        ("vanilla?", "imports"),
    ),
    "an aggregation misspelt": (
        "grpo",
        [f"{ACTOR}.loss_agg_mode=token_mean"],
        f"{ACTOR}.loss_agg_mode",
        ("token-mean",),
    ),
    "a KL type misspelt": (
        "grpo",
        [f"{ACTOR}.kl_loss_type=low_var"],
        f"{ACTOR}.kl_loss_type",
        ("low_var_kl?",),
    ),
    "a schedule misspelt": (
        "grpo",
        [f"{ACTOR}.optim.scheduler=cosine"],
        f"{ACTOR}.optim.scheduler",
        ("with_warmup",),
    ),
    "an optimizer misspelt": (
        "grpo",
        [f"{ACTOR}.optim.optimizer=adam"],
        f"{ACTOR}.optim.optimizer",
        ("adamw?",),
    ),
    "a dtype misspelt": ("grpo", [f"{MODEL}.dtype=bf16"], f"{MODEL}.dtype", ("bfloat16",)),
    "a tracker misspelt": (
        "grpo",
        ["trainer.logger=[console,wandbb]"],
        "trainer.logger",
        ("wandb?",),
    ),
    "a pipeline misspelt": ("grpo", ["dag.pipeline=dappo"], "dag.pipeline", ("dapo?",)),
    "a reward misspelt": (
        "grpo",
        ["reward.functions={default: [maths]}"],
        "reward.functions.default",
        ("math?",),
    ),
    "a resume mode misspelt": (
        "grpo",
        ["trainer.resume_mode=nevr"],
        "trainer.resume_mode",
        ("no such file or folder", "did you mean 'never'"),
    ),
    # parts that are not implemented yet
    "two machines": (
        "grpo",
        ["trainer.nnodes=2"],
        "trainer.nnodes",
        ("set trainer.launcher=ray, or remove it",),
    ),
    "weights by a backend's name": (
        "grpo",
        ["trainer.launcher=ray", f"{ACTOR}.weight_update_mode=xccl"],
        f"{ACTOR}.weight_update_mode",
        ("store, disk, collective",),
    ),
    "restarts from another run": (
        "grpo",
        ["trainer.launcher=ray", "trainer.max_restarts=2", "trainer.resume_mode=/"],
        "trainer.resume_mode",
        ("must resume from its own checkpoints", "without trainer.max_restarts"),
    ),
    "a fraction of a step": (
        "grpo",
        ["async.max_staleness=1.5"],
        "async.max_staleness",
        ("of type int",),
    ),
    "no staleness at all": (
        "grpo",
        ["async.max_staleness=null"],
        "async.max_staleness",
        ("is null",),
    ),
    "more groups ahead of training": (
        "grpo",
        ["algorithm.filter_groups.oversampling=0.5", "async.max_staleness=1"],
        "algorithm.filter_groups.oversampling",
        ("async.max_staleness=0",),
    ),
    "weights sent too rarely": (
        "grpo",
        ["async.max_staleness=2", f"{ACTOR}.model_update_frequency=4"],
        f"{ACTOR}.model_update_frequency",
        ("up to 3 steps old, but 2 is allowed", f"{ACTOR}.model_update_frequency=3 or less"),
    ),
    "keys and values dropped": (
        "grpo",
        ["async.max_staleness=2", f"{ROLLOUT}.kv_on_update=drop"],
        f"{ROLLOUT}.kv_on_update",
        ("keep, recompute, abort",),
    ),
    "sglang": (
        "grpo",
        [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.top_p=0.9"],
        f"{ROLLOUT}.top_p",
        ("remove", "top_k is"),
    ),
    "options of a server that is there": (
        "grpo",
        [
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.url=http://localhost:8000",
            f"{ROLLOUT}.python=/usr/bin/python3",
        ],
        f"{ROLLOUT}.python",
        ("started with options of its own",),
    ),
    "options of no engine": (
        "grpo",
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.max_model_len=512"],
        f"{ROLLOUT}.engine_kwargs",
        ("engine_kwargs.vllm.max_model_len=",),
    ),
    "tensor parallel": (
        "grpo",
        [f"{ROLLOUT}.tensor_model_parallel_size=2"],
        f"{ROLLOUT}.tensor_model_parallel_size",
        ("the engine 'embedded' has one device", f"set {ROLLOUT}.name=vllm, or keep the default 1"),
    ),
    "tensor parallel of SGLang": (
        "grpo",
        [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.tensor_model_parallel_size=4"],
        f"{ROLLOUT}.tensor_model_parallel_size",
        (f"{ROLLOUT}.engine_kwargs.sglang.tp_size=4",),
    ),
    "tensor parallel on one device": (
        "grpo",
        [
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.tensor_model_parallel_size=4",
            "trainer.n_gpus_per_node=6",
        ],
        f"{ROLLOUT}.tensor_model_parallel_size",
        ("4 devices of one machine, and 6 is not a multiple of 4", "trainer.n_gpus_per_node=8"),
    ),
    "fsdp": (
        "grpo",
        [f"{ACTOR}.strategy=fsdp"],
        f"{ACTOR}.strategy",
        ("trainer.n_gpus_per_node=2", "torch"),
    ),
    "shards of whole weights": (
        "grpo",
        [f"{ACTOR}.fsdp_config.fsdp_size=2"],
        f"{ACTOR}.fsdp_config.fsdp_size",
        ("remove it", "strategy=fsdp"),
    ),
    "what stays is moved": (
        "grpo",
        [
            *FSDP,
            f"{ACTOR}.fsdp_config.offload_policy=true",
            f"{ACTOR}.fsdp_config.param_offload=true",
        ],
        f"{ACTOR}.fsdp_config.param_offload",
        ("offload_policy", "remove one of them"),
    ),
    "megatron": (
        "grpo",
        [f"{ACTOR}.strategy=megatron"],
        f"{ACTOR}.strategy",
        ("not implemented yet",),
    ),
    "a reward model": (
        "grpo",
        ["reward_model.enable=true"],
        "reward_model.enable",
        ("reward_model.model.path enables a reward model",),
    ),
    "embodied": (
        "grpo",
        ["algorithm.workflow_type=EMBODIED"],
        "algorithm.workflow_type",
        ("selects the pipeline embodied_srpo",),
    ),
    "the whole KL": (
        "grpo",
        ["algorithm.kl_penalty=full"],
        "algorithm.kl_penalty",
        ("not a valid choice", "whole distributions", "low_var_kl"),
    ),
    # the pipeline
    "siiRL's key of a function beside ours": (
        "grpo",
        ["dag.custom_pipeline_fn=a:b", "dag.pipeline=c:d"],
        "dag.custom_pipeline_fn",
        ("no such key; siiRL has it", "write dag.pipeline=a:b"),
    ),
    "a list of nodes under a key of its own": (
        "grpo",
        ["dag.nodes=[{id: a, func: 'm:f'}]"],
        "dag.nodes",
        ("no such key", "dag.pipeline is module:function"),
    ),
    "a preset as a pipeline": (
        "grpo",
        ["dag.pipeline=multi_agent"],
        "dag.pipeline",
        ("write distflow train multi_agent, or defaults: [multi_agent]",),
    ),
    "a function without a module": (
        "grpo",
        ["dag.pipeline=build"],
        "dag.pipeline",
        ("module:fun",),
    ),
    "a node without func": (
        "grpo",
        ["dag.pipeline=[{id: a}]"],
        "dag.pipeline",
        ("an entry 1 with no id or func",),
    ),
    "a node with an unknown key": (
        "grpo",
        ["dag.pipeline=[{id: a, func: f, dep: b}]"],
        "dag.pipeline",
        ("'dep'", "deps"),
    ),
    "a node twice": (
        "grpo",
        ["dag.pipeline=[{id: a, func: f},{id: a, func: f}]"],
        "dag.pipeline",
        ("two nodes",),
    ),
    "nodes as a mapping": (
        "grpo",
        ["dag.pipeline={a: b}"],
        "dag.pipeline",
        ("neither a name nor a list",),
    ),
    "DAPO workflow, grpo pipeline": (
        "grpo",
        ["algorithm.workflow_type=DAPO"],
        "algorithm.workflow_type",
        ("dag.pipeline",),
    ),
    "DAPO workflow, sft pipeline": (
        "sft",
        ["algorithm.workflow_type=DAPO"],
        "algorithm.workflow_type",
        ("sft",),
    ),
    "gae without a critic": (
        "grpo",
        ["algorithm.adv_estimator=gae"],
        "algorithm.adv_estimator",
        ("dag.pipeline=ppo",),
    ),
    "gae in dapo": (
        "dapo",
        ["algorithm.adv_estimator=gae"],
        "algorithm.adv_estimator",
        ("critic", "dapo"),
    ),
    "a critic that nobody reads": (
        "ppo",
        ["algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=4"],
        "algorithm.adv_estimator",
        ("gae",),
    ),
    "a mean of advantages of other policies": (
        "grpo",
        ["algorithm.adv_norm.mean_level=running"],
        "algorithm.adv_norm.mean_level",
        ("running", "reward_norm"),
    ),
    "a key of no algorithm in a domain": (
        "rlvr",
        ["algorithm.domains={code: {adv_estimater: grpo}}"],
        "algorithm.domains",
        ("'code'", "adv_estimator?"),
    ),
    "a wrong value in a domain": (
        "rlvr",
        ["algorithm.domains={code: {reward_clip: -1}}"],
        "algorithm.domains",
        ("reward_clip", "'code'", "> 0"),
    ),
    "a domain that is no mapping": (
        "rlvr",
        ["algorithm.domains={code: grpo}"],
        "algorithm.domains",
        ("{code:",),
    ),
    "a domain that normalises twice": (
        "rlvr",
        ["algorithm.domains={code: {adv_estimator: grpo}}"],
        "algorithm.reward_norm.mean_level",
        ("grpo", "reinforce"),
    ),
    "a domain's controller without a target": (
        "rlvr",
        [
            (
                "algorithm.domains={code: {use_kl_in_reward: true, kl_ctrl: {type: adaptive, "
                "horizon: 9}}}"
            )
        ],
        "algorithm.kl_ctrl.target_kl",
        ("algorithm.domains.code.kl_ctrl.type",),
    ),
    "a domain with a critic in a pipeline without": (
        "grpo",
        ["algorithm.domains={code: {adv_estimator: gae}}"],
        "algorithm.domains.code.adv_estimator",
        ("critic", "dag.pipeline=rlvr"),
    ),
    "an estimator of a domain misspelt": (
        "rlvr",
        ["algorithm.domains={code: {adv_estimator: gro}}"],
        "algorithm.domains.code.adv_estimator",
        ("'gro'", "grpo?"),
    ),
    "a loss of a domain misspelt": (
        "rlvr",
        ["algorithm.domains={code: {policy_loss: sap}}"],
        "algorithm.domains.code.policy_loss",
        ("'sap'", "sapo?"),
    ),
    "a penalty of limits without a workflow": (
        "grpo",
        ["reward.limit_penalty.max_turns=0.5"],
        "reward.limit_penalty.max_turns",
        ("no workflow", "reward.overlong"),
    ),
    "no band of shares": (
        "rlvr",
        ["algorithm.difficulty_mask=[0.9, 0.1]"],
        "algorithm.difficulty_mask",
        ("0..1",),
    ),
    "no such fate of a sample": (
        "grpo",
        ["reward.on_error=skip"],
        "reward.on_error",
        ("mask, drop",),
    ),
    "no such patience": (
        "grpo",
        ["reward.domains={code: {timeout: 3}}"],
        "reward.domains",
        ("timeout_s", "'code'"),
    ),
    "groups that do not fit": (
        "grpo",
        [
            "algorithm.adv_norm.mean_level=group",
            "algorithm.adv_norm.group_size=3",
            f"{ROLLOUT}.n=8",
        ],
        "algorithm.adv_norm.group_size",
        ("groups of 3", f"{ROLLOUT}.n"),
    ),
    "rewards normalised twice": (
        "grpo",
        ["algorithm.reward_norm.mean_level=group"],
        "algorithm.reward_norm.mean_level",
        ("grpo", "reinforce"),
    ),
    "normalised rewards less a raw one": (
        "grpo",
        ["algorithm.adv_estimator=remax", "algorithm.reward_norm.mean_level=batch"],
        "algorithm.reward_norm.mean_level",
        ("remax",),
    ),
    "one reward for all turns": (
        "grpo",
        ["algorithm.adv_estimator=grpo_turns", "algorithm.reward_scale=2"],
        "algorithm.reward_scale",
        ("rewards of their own", "workflow"),
    ),
    "normalised, for all turns": (
        "ppo",
        [
            "algorithm.adv_estimator_kwargs={over_turns: true}",
            "algorithm.reward_norm.std_level=batch",
        ],
        "algorithm.reward_norm.std_level",
        ("rewards of their own", "workflow"),
    ),
    "groups dropped that teach by their turns": (
        "dapo",
        ["algorithm.adv_estimator=grpo_turns"],
        "algorithm.filter_groups.enable",
        ("rewards of its turns", "algorithm.filter_groups.enable=false"),
    ),
    "verl's parts": (
        "grpo",
        ["algorithm.gdpo_reward_keys=[a]"],
        "algorithm.gdpo_reward_keys",
        ("reward.functions",),
    ),
    "a group of one": (
        "grpo",
        [f"{ROLLOUT}.n=1"],
        f"{ROLLOUT}.n",
        ("only one", "allow_group_of_one"),
    ),
    "a group of one, rloo": (
        "grpo",
        [f"{ROLLOUT}.n=1", "algorithm.adv_estimator=rloo"],
        f"{ROLLOUT}.n",
        ("rloo",),
    ),
    "warm-up without an end": (
        "ppo",
        ["trainer.critic_warmup=10", "trainer.total_training_steps=10"],
        "trainer.critic_warmup",
        ("never be trained",),
    ),
    # batches and data
    "a mini-batch too large": (
        "grpo",
        ["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=128"],
        f"{ACTOR}.ppo_mini_batch_size",
        ("=64 or less",),
    ),
    "a mini-batch too large, sft": (
        "sft",
        ["data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=64"],
        f"{ACTOR}.ppo_mini_batch_size",
        ("=32 or less",),
    ),
    "a critic's mini-batch too large": (
        "ppo",
        ["critic.ppo_mini_batch_size=1024"],
        "critic.ppo_mini_batch_size",
        ("data.train_batch_size", "1024"),
    ),
    "no training rows": ("grpo", ["data.train_max_samples=0"], "data.train_max_samples", ("-1",)),
    "fewer rows than a batch": (
        "grpo",
        ["data.train_max_samples=100", "data.train_batch_size=512"],
        "data.train_batch_size",
        ("100 rows",),
    ),
    "a reward model beside ReMax": (
        "grpo",
        ["algorithm.adv_estimator=remax", "reward_model.model.path=scores"],
        "reward_model.model.path",
        ("baseline is scored by reward functions", "{name: model"),
    ),
    **{
        f"a scoring model: {said}": (
            "grpo",
            [f"reward_model.models={{{models}}}", *keys],
            "reward_model.models",
            (said,),
        )
        for said, models, keys in (
            ("names no other engine", "actor: {path: x}", ()),
            ("has no 'path' of the model 'a'", "a: {weight: 2}", ()),
            ("did you mean path?", "a: {pth: x}", ()),
            (
                "'domains' of the model 'a', which is {math: 1}, not",
                "a: {path: x, domains: {math: 1}}",
                (),
            ),
            ("has 'template' of 'a', which is a reward model", "a: {path: x, template: t}", ()),
            (
                "'math' is a reward function too",
                "math: {path: builtin:tiny}",
                ("reward.functions.default=[math]",),
            ),
            (
                "cannot replace a group",
                "a: {path: builtin:tiny, judge: true}",
                ("reward.on_error=drop",),
            ),
        )
    },
    "a judge in shards": (
        "grpo",
        ["reward_model.models={a: {path: builtin:tiny, judge: true, sharded: true}}"],
        "reward_model.models",
        ("'sharded' of 'a'", "set reward.functions"),
    ),
    "a judge without a model": (
        "grpo",
        ["reward.functions.default=[math, {name: judge, options: {base_url: 'http://h/v1'}}]"],
        "reward.functions.default",
        ("the judge has no model", "options: {model: NAME, base_url: URL}"),
    ),
    "a scoring model of no domain": (
        "grpo",
        [
            "~data.train_files",
            "data.domains={maths: {train_files: builtin:arithmetic-rl, reward: math}}",
            "reward_model.models={a: {path: builtin:tiny, domains: [math]}}",
        ],
        "reward_model.models.a.domains",
        ("there is no domain 'math'", "did you mean maths?"),
    ),
    "a template without a prompt": (
        "grpo",
        ["data.prompt_template='Q:'"],
        "data.prompt_template",
        ("{prompt}",),
    ),
    "a template with a stray brace": (
        "grpo",
        ["data.prompt_template='{prompt} {'"],
        "data.prompt_template",
        ("{{",),
    ),
    "a template with another field": (
        "grpo",
        ["data.prompt_template='{prompt}{x}'"],
        "data.prompt_template",
        ("no other",),
    ),
    "a system prompt without a chat": (
        "grpo",
        ["data.system_prompt=Hi"],
        "data.system_prompt",
        ("prompt_format=chat",),
    ),
    "tools of all rows": (
        "grpo",
        ["data.apply_chat_template_kwargs.tools=[a]"],
        "data.apply_chat_template_kwargs",
        ("'tools' already", "data.tools_key"),
    ),
    # models and engines
    "remote code of a moving model": (
        "grpo",
        [f"{MODEL}.trust_remote_code=true"],
        f"{MODEL}.trust_remote_code",
        ("pinned",),
    ),
    "remote code of a branch": (
        "grpo",
        [f"{MODEL}.trust_remote_code=true", f"{MODEL}.revision=main"],
        f"{MODEL}.trust_remote_code",
        ("commit hash",),
    ),
    "fresh and trained weights": (
        "grpo",
        [f"{MODEL}.init=random", f"{MODEL}.gguf_file=a.gguf"],
        f"{MODEL}.init",
        ("pretrained",),
    ),
    "an unmerged adapter elsewhere": (
        "grpo",
        [f"{MODEL}.lora_rank=8", f"{MODEL}.lora_merge=false"],
        f"{MODEL}.lora_merge",
        ("vllm", "lora_merge=true"),
    ),
    "an adapter on random weights": (
        "sft",
        [f"{MODEL}.lora_rank=8", f"{MODEL}.init=random"],
        f"{MODEL}.lora_rank",
        ("stay random",),
    ),
    "publishing too seldom": (
        "grpo",
        [f"{ACTOR}.model_update_frequency=2"],
        f"{ACTOR}.model_update_frequency",
        ("=1 or less",),
    ),
    # the algorithm
    "adaptive without a target": (
        "ppo",
        ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100"],
        "algorithm.kl_ctrl.target_kl",
        ("=0.1",),
    ),
    "adaptive without a horizon": (
        "ppo",
        ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.1"],
        "algorithm.kl_ctrl.horizon",
        ("=10000",),
    ),
    "a threshold that is none": (
        "grpo",
        [f"{CORRECTION}={{rollout_is: token, rollout_is_threshold: [1, 2, 3]}}"],
        f"{CORRECTION}.rollout_is_threshold",
        ("neither a number nor a band", "[0.5, 2.0]"),
    ),
    "a level of weights under another name": (
        "grpo",
        [f"{CORRECTION}.level=token"],
        f"{CORRECTION}.level",
        ("no such key",),
    ),
    "an empty band": (
        "grpo",
        [f"{CORRECTION}={{rollout_is: token, rollout_is_threshold: [3, 2]}}"],
        f"{CORRECTION}.rollout_is_threshold",
        ("no weight",),
    ),
    **{
        f"a correction done twice, by {name}": (
            "grpo",
            [
                f"{CORRECTION}.rollout_is=token",
                f"{ACTOR}.policy_loss=decoupled",
                f"+{ACTOR}.policy_loss_kwargs.{name}={value}",
            ],
            f"{CORRECTION}.rollout_is",
            ("both apply the weights", name),
        )
        for name, value in (
            ("behav_imp_weight_cap", "2.0"),
            ("behav_imp_weight_mode", "clamp"),
            ("rejection_sampling", "{upper: 2.0}"),
        )
    },
    "a mean of weights that are made in the loss": (
        "grpo",
        [
            f"{CORRECTION}={{rollout_is: token, rollout_is_batch_normalize: true}}",
            f"{ACTOR}.policy_loss=decoupled",
            f"{ACTOR}.prox=interpolate",
        ],
        f"{CORRECTION}.rollout_is_batch_normalize",
        ("prox=recompute",),
    ),
    "a rejection without a bound": (
        "grpo",
        [f"{CORRECTION}.rollout_rs=token_k1"],
        f"{CORRECTION}.rollout_rs_threshold",
        ("needs a bound", "[[0.5, 2.0]]"),
    ),
    "a bound of no rejection": (
        "grpo",
        [f"{CORRECTION}.rollout_rs_threshold=2.0"],
        f"{CORRECTION}.rollout_rs_threshold",
        ("is off",),
    ),
    "a statistic that there is not": (
        "grpo",
        [f"{CORRECTION}={{rollout_rs: 'token_k1,seq_mean_k4', rollout_rs_threshold: 2}}"],
        f"{CORRECTION}.rollout_rs",
        ("did you mean seq_mean_k",),
    ),
    "bounds of other statistics": (
        "grpo",
        [f"{CORRECTION}={{rollout_rs: [token_k1], rollout_rs_threshold: [2, 3]}}"],
        f"{CORRECTION}.rollout_rs_threshold",
        ("2 bounds for 1",),
    ),
    "a band the wrong way round": (
        "grpo",
        [f"{CORRECTION}={{rollout_rs: seq_sum_k1, rollout_rs_threshold: 2.0_0.5}}"],
        f"{CORRECTION}.rollout_rs_threshold",
        ("exclude everything",),
    ),
    "a bound of 0": (
        "grpo",
        [f"{CORRECTION}={{rollout_rs: token_k2, rollout_rs_threshold: 0}}"],
        f"{CORRECTION}.rollout_rs_threshold",
        ("exclude everything",),
    ),
    "a bound that is no number": (
        "grpo",
        [f"{CORRECTION}={{rollout_rs: token_k1, rollout_rs_threshold: tight}}"],
        f"{CORRECTION}.rollout_rs_threshold",
        ("'tight'", "[0.5, 2.0]"),
    ),
    "a bound of three numbers": (
        "grpo",
        [f"{CORRECTION}={{rollout_rs: token_k1, rollout_rs_threshold: [[1, 2, 3]]}}"],
        f"{CORRECTION}.rollout_rs_threshold",
        ("[1, 2, 3]",),
    ),
    "a bound that is true": (
        "grpo",
        [f"{CORRECTION}={{rollout_rs: token_k1, rollout_rs_threshold: [true]}}"],
        f"{CORRECTION}.rollout_rs_threshold",
        ("entry true",),
    ),
    "an infinite bound": (
        "grpo",
        [f"{CORRECTION}={{rollout_rs: token_k1, rollout_rs_threshold: [.inf]}}"],
        f"{CORRECTION}.rollout_rs_threshold",
        ("no bound",),
    ),
    "a rejection by an interpolated policy": (
        "grpo",
        [
            f"{CORRECTION}={{rollout_rs: token_k1, rollout_rs_threshold: 2}}",
            f"{ACTOR}.policy_loss=decoupled",
            f"{ACTOR}.prox=interpolate",
        ],
        f"{CORRECTION}.rollout_rs",
        ("rejection_sampling", "prox=recompute"),
    ),
    "a filter by no reward": (
        "dapo",
        ["algorithm.filter_groups.metric=accuracy"],
        "algorithm.filter_groups.metric",
        ("acc", "score", "math"),
    ),
    # rewards
    "no reward": ("grpo", ["reward.functions={}"], "reward.functions", ("no reward",)),
    "no reward of a domain": (
        "grpo",
        ["reward.functions={a: []}"],
        "reward.functions",
        ("the domain 'a'",),
    ),
    "a part of another form": (
        "grpo",
        ["reward.functions={a: [{nam: x}]}"],
        "reward.functions",
        ("{name, weight, options}",),
    ),
    "a weight that is a text": (
        "grpo",
        ["reward.functions={a: [{name: math, weight: x}]}"],
        "reward.functions",
        ("'math'",),
    ),
    "a part twice": (
        "grpo",
        ["reward.functions={a: [math, math]}"],
        "reward.functions",
        ("twice",),
    ),
    "rewards as a list": (
        "grpo",
        ["reward.functions=[math]"],
        "reward.functions",
        ("{default: [math]",),
    ),
    # domains
    **{
        name: ("grpo", ["data.train_files=[]", *overrides], key, parts)
        for name, overrides, key, parts in (
            (
                "a domain without data",
                ["data.domains={a: {reward: math}}"],
                "data.domains.a.train_files",
                ("weight=0",),
            ),
            (
                "a domain without a verifier",
                [DOMAIN_A, "data.domains.b.train_files=b.jsonl"],
                "data.domains.b.reward",
                ("reward=math",),
            ),
            (
                "domains of weight 0",
                [f"{DOMAIN_A[:-2]}, weight: 0}}}}"],
                "data.domains.a.weight",
                ("all weights are 0", "relative"),
            ),
            (
                "a domain's estimator elsewhere",
                [f"{DOMAIN_A[:-2]}, adv_estimator: gae}}}}"],
                "data.domains",
                ("set algorithm.domains.a.adv_estimator",),
            ),
            (
                "a domain's patience elsewhere",
                [f"{DOMAIN_A[:-2]}, retries: 3}}}}"],
                "data.domains",
                ("set reward.domains.a.retries",),
            ),
            (
                "a negative weight",
                [f"{DOMAIN_A[:-2]}, weight: -1}}}}"],
                "data.domains",
                ("'weight' of the domain 'a'", "≥ 0"),
            ),
            (
                "a weight that is none",
                [f"{DOMAIN_A[:-2]}, weight: x}}}}"],
                "data.domains",
                ("not of type float",),
            ),
            (
                "a setting misspelt",
                [f"{DOMAIN_A[:-2]}, wieght: 2}}}}"],
                "data.domains",
                ("did you mean weight?",),
            ),
            (
                "a setting that is two",
                [DOMAIN_A.replace("reward: math", "reward: [math, math]")],
                "data.domains",
                ("'math' twice",),
            ),
            (
                "files twice",
                [DOMAIN_A, "data.train_files=t.jsonl"],
                "data.train_files",
                ("data.domains", "both name data"),
            ),
            (
                "validation files twice",
                [DOMAIN_A, "data.val_files=t.jsonl"],
                "data.val_files",
                ("data.domains",),
            ),
            (
                "two rewards of a domain",
                [DOMAIN_A, "reward.functions.a=[format]"],
                "data.domains.a.reward",
                ("reward.functions.a",),
            ),
            (
                "a reward of a domain misspelt",
                ["data.domains={a: {train_files: a.jsonl, reward: mth}}"],
                "data.domains.a.reward",
                ("math?",),
            ),
            (
                "a domain called all",
                ["data.domains.all={train_files: a.jsonl}"],
                "data.domains",
                ("another name",),
            ),
            (
                "a domain with a plus",
                ["data.domains={a+b: {train_files: a.jsonl}}"],
                "data.domains",
                ("letters",),
            ),
            (
                "a domain without settings",
                ["data.domains={a: a.jsonl}"],
                "data.domains",
                ("not a mapping",),
            ),
            ("domains as a list", ["data.domains=[a.jsonl]"], "data.domains", ("not a mapping",)),
            (
                "no rows of a domain",
                [DOMAIN_A, "data.domains.a.train_max_samples=0"],
                "data.domains.a.train_max_samples",
                ("no row",),
            ),
            (
                "a response that is too long",
                [DOMAIN_A, "data.domains.a.max_response_length=9999"],
                "data.domains.a.max_response_length",
                ("4096",),
            ),
            (
                "a domain's template",
                [DOMAIN_A, "data.domains.a.prompt_template=x"],
                "data.domains.a.prompt_template",
                ("{prompt}",),
            ),
            (
                "a system message without a chat",
                [DOMAIN_A, "data.domains.a.system_prompt=x"],
                "data.domains.a.system_prompt",
                ("chat",),
            ),
            (
                "one answer to a prompt of a domain",
                [f"{DOMAIN_A[:-2]}, n: 1}}}}"],
                "data.domains.a.n",
                ("compares the samples of a prompt", "algorithm.adv_estimator"),
            ),
            (
                "a domain's temperature",
                [f"{DOMAIN_A[:-2]}, temperature: 0}}}}"],
                "data.domains",
                ("> 0", "'a'"),
            ),
            (
                "a domain's top_k",
                [DOMAIN_A, "data.domains.a.top_k=0"],
                "data.domains.a.top_k",
                ("-1 (off)",),
            ),
            (
                "shares of ROLL",
                [DOMAIN_A, "actor_train.data_args.domain_interleave_probs.math=0.4"],
                "actor_train.data_args.domain_interleave_probs.math",
                ("data.domains.NAME", "weight"),
            ),
        )
    },
    "custom without a function": (
        "grpo",
        ["reward.functions={default: [custom]}"],
        "custom_reward_function.path",
        ("no function",),
    ),
    "a function that nobody uses": (
        "grpo",
        ["custom_reward_function.path=r.py", "reward.functions={default: [math]}"],
        "custom_reward_function.path",
        ("[custom]",),
    ),
    "a penalty on everything": (
        "dapo",
        ["data.max_response_length=1024", "reward.overlong.buffer_tokens=1024"],
        "reward.overlong.buffer_tokens",
        ("whole response", "256"),
    ),
    "a penalty on everything of a domain": (
        "dapo",
        [
            "data.train_files=null",
            "data.max_response_length=1024",
            "reward.overlong.buffer_tokens=128",
            "data.domains={a: {train_files: a.jsonl, reward: math, max_response_length: 128}}",
        ],
        "data.domains.a.max_response_length",
        ("whole response of this domain", "128"),
    ),
    "weights that are all 0": (
        "grpo",
        ["reward.functions={default: [{name: math, weight: 0}]}"],
        "reward.functions.default",
        ("always 0",),
    ),
    "a domain whose name is a number": (
        "grpo",
        ["reward.functions={1: [math]}"],
        "reward.functions",
        ("the domain 1", "in quotes"),
    ),
    "rewards compared in groups of one": (
        "grpo",
        [
            "algorithm.adv_estimator=reinforce",
            "algorithm.reward_norm.mean_level=group",
            f"{ROLLOUT}.n=1",
        ],
        f"{ROLLOUT}.n",
        ("only one sample",),
    ),
    "a KL that the estimator does not read": (
        "grpo",
        ["algorithm.adv_estimator=gdpo", "algorithm.use_kl_in_reward=true"],
        "algorithm.use_kl_in_reward",
        ("not their sum", "use_kl_loss"),
    ),
    "a fixed score without parts": (
        "grpo",
        ["algorithm.adv_estimator=gdpo", "reward.on_error={score: 0}"],
        "reward.on_error",
        ("no parts", "mask or drop"),
    ),
    "a scale that the estimator does not read": (
        "grpo",
        ["algorithm.adv_estimator=gdpo", "algorithm.reward_scale=2"],
        "algorithm.reward_scale",
        ("not their sum",),
    ),
    "a stop of no characters": (
        "grpo",
        [f"{ROLLOUT}.stop=['']"],
        f"{ROLLOUT}.stop",
        ("every response at once",),
    ),
    "a file without a name": (
        "grpo",
        ["data.train_files=['a.jsonl', '']"],
        "data.train_files",
        ("empty name",),
    ),
    # the run
    "validation of nothing": (
        "grpo",
        ["trainer.val_before_train=true"],
        "trainer.val_before_train",
        ("data.val_files",),
    ),
    "validation without answers": (
        "grpo",
        [VAL, f"{ROLLOUT}.val_kwargs.greedy=false"],
        f"{ROLLOUT}.val_kwargs.n",
        ("not generate any response",),
    ),
    "the best without validation": (
        "grpo",
        ["trainer.keep_best=true"],
        "trainer.keep_best",
        ("data.val_files",),
    ),
    "the best, never validated": (
        "grpo",
        [VAL, "trainer.keep_best=true", "trainer.test_freq=0"],
        "trainer.test_freq",
        ("disables it",),
    ),
    "the best, never saved": (
        "grpo",
        [VAL, "trainer.keep_best=true", "trainer.save_freq=-1"],
        "trainer.save_freq",
        ("disables it",),
    ),
    "a name that leaves the folder": (
        "grpo",
        ["trainer.experiment_name='../x'"],
        "trainer.experiment_name",
        ("slashes",),
    ),
    "a name that is the folder": (
        "grpo",
        ["trainer.project_name='..'"],
        "trainer.project_name",
        ("not a valid folder name",),
    ),
}


@pytest.mark.parametrize("name", one_fast_in(3, BAD))
def test_a_bad_config_is_refused_with_its_key_and_what_to_do(name):
    preset, overrides, key, parts = BAD[name]
    with pytest.raises(ConfigError) as caught:
        load_config(preset, [*GOOD, *overrides])
    problems = caught.value.problems
    assert len(problems) == 1, f"one mistake gave {len(problems)} problems:\n{caught.value}"
    subject, where = problems[0].places[0]
    assert subject.split(" = ")[0] == key.split(" = ")[0]
    assert where == "default" or where == "command line" or where.startswith("presets/")
    assert problems[0].advice, "says what to do"
    for part in parts:
        assert part in str(problems[0])


def test_there_are_a_hundred_of_them():
    assert len(BAD) >= 100


def test_all_problems_come_at_once():
    overrides = [
        "data.seed=x",
        "foo=1",
        "data.seed=[1",
        f"{ROLLOUT}.top_p=2",
        f"{ROLLOUT}.n=1",
        "data.seeed=1",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", overrides)
    named = [problem.places[0][0].split(" = ")[0] for problem in caught.value.problems]
    expected = [
        "data.seed",
        "foo",
        "'data.seed=[1'",
        f"{ROLLOUT}.top_p",
        f"{ROLLOUT}.n",
        "data.seeed",
    ]
    assert sorted(named) == sorted([*expected, "data.train_files", f"{MODEL}.path"])
    assert str(caught.value).startswith("8 problems in the config\n")


def test_no_rule_judges_a_value_that_could_not_be_read():
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", [*GOOD, f"{ROLLOUT}.n=one", "data.train_batch_size=-5"])
    assert [problem.places[0][0] for problem in caught.value.problems] == [
        f"{ROLLOUT}.n",
        "data.train_batch_size",
    ]


def test_the_registration_of_an_engine_says_what_its_server_can(monkeypatch):
    plain = ROLLOUT_ENGINES["vllm"]
    server = [*GOOD, f"{ROLLOUT}.name=vllm"]
    load_config("grpo", [*server, f"{ROLLOUT}.top_p=0.9"])
    monkeypatch.setitem(
        ROLLOUT_ENGINES,
        "vllm",
        replace(plain, sizes="d", reports_truncated=False, size_option="gpus"),
    )

    with pytest.raises(ConfigError) as caught:
        load_config(
            "grpo", [*server, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.tensor_model_parallel_size=2"]
        )

    devices, sampled = (str(problem) for problem in caught.value.problems)
    assert f"{ROLLOUT}.engine_kwargs.vllm.gpus=2" in devices
    assert f"{ROLLOUT}.top_p" in sampled and "'vllm' does not report log-probs" in sampled


def test_what_needs_whole_weights_is_refused_where_they_are_spread():
    config = load_config("ppo", [*GOOD, f"{ACTOR}.optim.optimizer=adamw_8bit"]).config
    actor = replace(config.actor_rollout_ref.actor, strategy="fsdp")
    trainer = replace(config.trainer, launcher="ray")
    spread = replace(
        config, trainer=trainer, actor_rollout_ref=replace(config.actor_rollout_ref, actor=actor)
    )
    with pytest.raises(ConfigError) as caught:
        check(spread)
    keys = [problem.places[1][0].split(" = ")[0] for problem in caught.value.problems]
    assert keys == [f"{ACTOR}.optim.optimizer"]
