"""The built-in names that a config may choose from, one table a kind: what each is, where it lives, what others must
know of it before it is loaded. To add one is a file and an entry here. Loads nothing.

target: "module:attribute", loaded when the name is asked for; empty where the part is not there yet.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A built-in of a kind of which nothing else must be known."""

    description: str
    target: str = ""


@dataclass(frozen=True)
class Estimator(Entry):
    """An advantage estimator: what it cannot do without.

    reads_parts: it reads the parts of the reward, not their sum. whitens: its advantages, by definition.
    """

    needs_group: bool = False
    needs_critic: bool = False
    reads_parts: bool = False
    whitens: bool = False


@dataclass(frozen=True)
class PolicyLoss(Entry):
    """A policy loss: which of the actor's clips it takes, and whether they bound a divergence in place of the ratio."""

    clips: bool = False
    dual_clips: bool = False
    divergence: bool = False


@dataclass(frozen=True)
class Reward(Entry):
    """A reward function.

    needs_answer: it compares with the row's answer, so every row must have one.
    scores_own_answer: the row's own answer, put into a box, must score 1. solutions: columns in which data sets have
    responses that it must call right. row_check: a function that is called with a row's answer and its columns, and
    raises ValueError where the reward could score no response to it. executes_response: it runs code of the response in
    the sandbox. prepare: "module:function" that loads what is too large to load twice, with the options of
    the part; one process holds it and scores for all domains that name the same. reads_messages: it is shown the
    prompt's chat messages.
    """

    needs_answer: bool = False
    scores_own_answer: bool = False
    solutions: tuple[str, ...] = ()
    row_check: str = ""
    executes_response: bool = False
    prepare: str = ""
    reads_messages: bool = False


@dataclass(frozen=True)
class BuiltinPipeline(Entry):
    """A pipeline: whether it trains a critic, and whether it generates what it learns from.

    by_estimator: it trains one where an estimator reads values, that of the run or of a domain. reads_pairs: it trains
    a reward model, on pairs of responses.
    """

    has_critic: bool = False
    generates: bool = True
    by_estimator: bool = False
    reads_pairs: bool = False


@dataclass(frozen=True)
class TrainEngineEntry(Entry):
    """A train engine. sizes: the letters of trainer.allocation that may be above 1 with it."""

    sizes: str = "d"


@dataclass(frozen=True)
class RolloutEngineEntry(Entry):
    """A rollout engine. in_flight: it takes new weights below responses that are being generated. sizes: as of a train
    engine. in_server: it computes in a server, to which weights are sent. draws_by_stream: by the random numbers of the
    sample's own stream, which an audit repeats."""

    in_flight: bool = False
    sizes: str = "d"
    in_server: bool = False
    draws_by_stream: bool = True


@dataclass(frozen=True)
class Tracker(Entry):
    """A tracker. package: what must be installed; the extra of the tracker's name brings it. One without a target is
    what every run writes, named or not."""

    package: str = ""


_ADVANTAGES, _LOSSES = "distflow.algorithms.advantages", "distflow.algorithms.losses"
_GRPO, _REINFORCE = f"{_ADVANTAGES}.grpo_family", f"{_ADVANTAGES}.reinforce"
_CLIPPED, _UNCLIPPED, _COVARIANCE = (f"{_LOSSES}.{name}" for name in ("clipped_ratio", "unclipped", "covariance"))

ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(
        "generalised advantage estimation over a critic's values",
        "distflow.algorithms.advantages.gae:compute_gae_advantage",
        needs_critic=True,
    ),
    "grpo": Estimator(
        "score less the group's mean, over its standard deviation", f"{_GRPO}:compute_grpo_advantage", needs_group=True
    ),
    "rloo": Estimator(
        "score less the mean of the group's other samples", f"{_REINFORCE}:compute_rloo_advantage", needs_group=True
    ),
    "reinforce": Estimator("discounted reward-to-go without a baseline", f"{_REINFORCE}:compute_reinforce_advantage"),
    "reinforce_plus_plus": Estimator(
        "discounted reward-to-go, whitened over the global batch",
        f"{_REINFORCE}:compute_reinforce_plus_plus_advantage",
        whitens=True,
    ),
    "reinforce_plus_plus_baseline": Estimator(
        "score less the group's mean, whitened over the global batch",
        f"{_REINFORCE}:compute_reinforce_plus_plus_baseline_advantage",
        needs_group=True,
        whitens=True,
    ),
    "remax": Estimator(
        "score less that of a greedy sample of the same prompt", f"{_REINFORCE}:compute_remax_advantage"
    ),
    "opo": Estimator(
        "score less the length-weighted mean of the group", f"{_REINFORCE}:compute_opo_advantage", needs_group=True
    ),
    "cpgd": Estimator("as grpo, under its name there", f"{_GRPO}:compute_cpgd_advantage", needs_group=True),
    "gspo": Estimator("as grpo, under its name there", f"{_GRPO}:compute_gspo_advantage", needs_group=True),
    "gpg": Estimator(
        "score less the group's mean, scaled up for the groups that teach nothing",
        f"{_GRPO}:compute_gpg_advantage",
        needs_group=True,
    ),
    "grpo_passk": Estimator(
        "only the group's best sample, by its lead over the second best",
        f"{_GRPO}:compute_grpo_passk_advantage",
        needs_group=True,
    ),
    "gdpo": Estimator(
        "each reward function's score as in grpo, then their weighted sum, whitened over the global batch",
        f"{_GRPO}:compute_gdpo_advantage",
        needs_group=True,
        reads_parts=True,
        whitens=True,
    ),
}

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(
        "PPO's clipped ratio with dual clip and clip-higher",
        f"{_CLIPPED}:compute_vanilla_loss",
        clips=True,
        dual_clips=True,
    ),
    "decoupled": PolicyLoss(
        "PPO around a proximal policy, with capped behaviour weights",
        "distflow.algorithms.losses.decoupled:compute_decoupled_loss",
        clips=True,
        dual_clips=True,
    ),
    "gspo": PolicyLoss("one clipped ratio a sequence", f"{_CLIPPED}:compute_gspo_loss", clips=True),
    "cpgd": PolicyLoss(
        "policy gradient with a clipped log-prob in place of a ratio", f"{_UNCLIPPED}:compute_cpgd_loss", clips=True
    ),
    "gpg": PolicyLoss("plain policy gradient", f"{_UNCLIPPED}:compute_gpg_loss"),
    "cispo": PolicyLoss(
        "clipped importance weights; no token loses its gradient", f"{_CLIPPED}:compute_cispo_loss", clips=True
    ),
    "topr": PolicyLoss("tapered off-policy REINFORCE", f"{_UNCLIPPED}:compute_topr_loss"),
    "sapo": PolicyLoss("a soft gate in place of the clip", f"{_UNCLIPPED}:compute_sapo_loss"),
    "gmpo": PolicyLoss("geometric mean of clipped token ratios", f"{_CLIPPED}:compute_gmpo_loss", clips=True),
    "dppo_tv": PolicyLoss(
        "bounds how far a token's probability moves",
        f"{_CLIPPED}:compute_dppo_tv_loss",
        clips=True,
        dual_clips=True,
        divergence=True,
    ),
    "dppo_kl": PolicyLoss(
        "bounds the binary KL by which a token moves",
        f"{_CLIPPED}:compute_dppo_kl_loss",
        clips=True,
        dual_clips=True,
        divergence=True,
    ),
    "dro": PolicyLoss("policy gradient with a quadratic pull to the old policy", f"{_UNCLIPPED}:compute_dro_loss"),
    "clip_cov": PolicyLoss(
        "PPO without the gradient of a few tokens that lower the entropy most",
        f"{_COVARIANCE}:compute_clip_cov_loss",
        clips=True,
    ),
    "kl_cov": PolicyLoss(
        "a pull to the old policy on the tokens that lower the entropy most", f"{_COVARIANCE}:compute_kl_cov_loss"
    ),
}

REGISTERED: set[str] = set()
"""Estimators and losses of the user's that this process has registered."""

# What a rejection mask may measure, as in verl: of each token, or of a sequence's tokens their sum, mean or maximum.
ROLLOUT_RS = (
    *(f"{level}_{estimator}" for level in ("token", "seq_sum", "seq_mean") for estimator in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

VALUE_LOSSES = ("mse", "huber")

_PLAIN_KL_TYPES = ("kl", "abs", "mse", "low_var_kl")
KL_TYPES = (*_PLAIN_KL_TYPES, *(f"{name}+" for name in _PLAIN_KL_TYPES))
NO_FULL_KL = (
    "'full' would need the whole distributions of policy and reference, and only the log-probs of sampled tokens are "
    "kept; low_var_kl is an unbiased estimate of the same KL"
)

CUSTOM_REWARD = "custom"
_SOLUTIONS = ("canonical_solution", "code", "solution", "solutions")
REWARDS: dict[str, Reward] = {
    "math": Reward(
        "the last boxed answer (or number) equals the ground truth, by math-verify",
        "distflow.rewards.math.reward:compute_result",
        needs_answer=True,
        scores_own_answer=True,
    ),
    "exact_match": Reward(
        "the answer's text equals the ground truth",
        "distflow.rewards.text_rewards:exact_match",
        needs_answer=True,
        scores_own_answer=True,
    ),
    "code": Reward(
        "the code of the response passes all of the row's tests, in a sandbox",
        "distflow.rewards.code.reward:compute_score",
        solutions=_SOLUTIONS,
        row_check="distflow.rewards.code.reward:check_row",
        executes_response=True,
        reads_messages=True,
    ),
    "code_share": Reward(
        "the share of the row's tests that the code of the response passes",
        "distflow.rewards.code.reward:compute_share",
        solutions=_SOLUTIONS,
        row_check="distflow.rewards.code.reward:check_row",
        executes_response=True,
        reads_messages=True,
    ),
    "format": Reward("the response has the wanted form", "distflow.rewards.text_rewards:has_format"),
    "ifeval": Reward(
        "the response follows all of IFEval's instructions in the row",
        "distflow.rewards.ifeval_reward:compute_score",
        row_check="distflow.rewards.ifeval_reward:check_row",
    ),
    "ifeval_loose": Reward(
        "the same, or does so without its first or last line or asterisks",
        "distflow.rewards.ifeval_reward:compute_loose_score",
        row_check="distflow.rewards.ifeval_reward:check_row",
    ),
    "ifeval_share": Reward(
        "the share of IFEval's instructions in the row that are followed",
        "distflow.rewards.ifeval_reward:compute_share",
        row_check="distflow.rewards.ifeval_reward:check_row",
    ),
    "length": Reward("the response is neither shorter nor longer than wanted", "distflow.rewards.text_rewards:length"),
    "repetition": Reward(
        "the share of its n-grams that repeat others; for a negative weight",
        "distflow.rewards.text_rewards:repetition",
    ),
    "judge": Reward(
        "a model behind an OpenAI-compatible endpoint says how good the response is",
        "distflow.rewards.judge_reward:compute_score",
    ),
    "model": Reward(
        "a reward model in Hugging Face format says how good the response is",
        "distflow.rewards.model_reward:compute_score",
        prepare="distflow.rewards.model_reward:prepare",
        reads_messages=True,
    ),
    "reasoning_gym": Reward(
        "what a data set of the package reasoning-gym says of the answer to its own row",
        "distflow.rewards.reasoning_gym_reward:compute_score",
    ),
    "verifiers": Reward(
        "the rewards of a task of the package verifiers, of an answer as its only turn",
        "distflow.rewards.verifiers_reward:compute_score",
    ),
    CUSTOM_REWARD: Reward("the function of custom_reward_function"),
}

PROMPT_MESSAGES = "prompt_messages"
"""Where a reward that reads messages finds those of the prompt, among the row's other columns."""
PROMPT_CHAT = "prompt_chat"
"""Where a user's reward finds them, if the prompt is a chat."""

WHOLE_SCORE = ("score", "seq_reward")
"""What a filter of groups calls the whole score, penalties too; the second as in verl."""
FILTER_METRICS = ("acc", *WHOLE_SCORE)

PIPELINES: dict[str, BuiltinPipeline] = {
    "grpo": BuiltinPipeline("group-relative policy optimisation: no critic", "distflow.pipelines.grpo:grpo_pipeline"),
    "ppo": BuiltinPipeline("actor and critic with GAE", "distflow.pipelines.ppo:ppo_pipeline", has_critic=True),
    "dapo": BuiltinPipeline("GRPO with dynamic sampling", "distflow.pipelines.dapo:dapo_pipeline"),
    "rlvr": BuiltinPipeline(
        "domains side by side, each with its verifiers and its way from rewards to advantages",
        "distflow.pipelines.rlvr:rlvr_pipeline",
        by_estimator=True,
    ),
    "sft": BuiltinPipeline(
        "supervised fine-tuning on given responses", "distflow.pipelines.sft:sft_pipeline", generates=False
    ),
    "rm": BuiltinPipeline(
        "a reward model, trained on pairs of a chosen and a rejected response",
        "distflow.pipelines.rm:rm_pipeline",
        generates=False,
        reads_pairs=True,
    ),
}

MODELS: dict[str, Entry] = {
    "tiny-arithmetic": Entry("a llama of 0.8 M parameters with a character tokenizer for sums"),
}
"""What `builtin:NAME` means as a model's path. None has weights."""

CURRICULA: dict[str, Entry] = {
    "learnability": Entry(
        "by the mean of p · (1 - p) over a domain's prompts, p being the share of right answers to one",
        "distflow.scheduling.curriculum:learnability",
    ),
}

TRAIN_ENGINES: dict[str, TrainEngineEntry] = {
    "torch": TrainEngineEntry("one device, packed micro-batches", "distflow.training.torch_engine:TorchTrainEngine"),
    "fsdp": TrainEngineEntry(
        "weights sharded over the ranks (FSDP2), layers divided over some of them by the model's own plan",
        "distflow.training.torch_engine:TorchTrainEngine",
        sizes="dt",
    ),
    "megatron": TrainEngineEntry("tensor and pipeline parallel (not there yet)", sizes="dtpce"),
}

ROLLOUT_ENGINES: dict[str, RolloutEngineEntry] = {
    "embedded": RolloutEngineEntry(
        "continuous batching in this process", "distflow.rollout.embedded.engine:EmbeddedEngine", in_flight=True
    ),
    "hf": RolloutEngineEntry("transformers' generate, for any causal language model", "distflow.rollout.hf:HFEngine"),
    "vllm": RolloutEngineEntry(
        "vLLM's server, in an environment of its own",
        "distflow.rollout.servers.vllm_engine:VllmEngine",
        in_flight=True,
        sizes="dtp",
        in_server=True,
    ),
    "sglang": RolloutEngineEntry(
        "SGLang's server, in an environment of its own",
        "distflow.rollout.servers.sglang_engine:SGLangEngine",
        in_flight=True,
        in_server=True,
        draws_by_stream=False,
    ),
}

KV_ON_UPDATE = ("keep", "recompute", "abort")

WEIGHT_UPDATE_MODES = ("store", "disk", "collective")

TRACKERS: dict[str, Tracker] = {
    "console": Tracker("lines or a live view in the terminal", "distflow.observe.writing.live_view:TerminalView"),
    "tensorboard": Tracker("its event files", "distflow.observe.writing.trackers:TensorBoardTracker", "tensorboard"),
    "wandb": Tracker("Weights & Biases", "distflow.observe.writing.trackers:WandbTracker", "wandb"),
    "trackio": Tracker("Trackio, local first", "distflow.observe.writing.trackers:TrackioTracker", "trackio"),
    "mlflow": Tracker("MLflow, here or at a server", "distflow.observe.writing.trackers:MlflowTracker", "mlflow"),
    "swanlab": Tracker("SwanLab", "distflow.observe.writing.trackers:SwanlabTracker", "swanlab"),
    "jsonl": Tracker("metrics.jsonl in the run's folder, which every run writes"),
    "file": Tracker("the same, under its name in verl"),
}

LAUNCHERS: dict[str, Entry] = {
    "local": Entry("one process, or one a device here, no Ray", "distflow.launch.local_launcher:launch_local"),
    "ray": Entry("one worker a device, over Ray", "distflow.cluster.ray_entry:launch_ray"),
    "slurm": Entry("a job of Slurm, over Ray in it", "distflow.cluster.slurm:launch_slurm"),
}
SEVERAL_PROCESSES = "distflow.cluster.local_processes:launch_processes"
"""What starts the processes of the launcher `local`, where they are several."""
GPUS_OF_CLUSTER = "distflow.cluster.ray_entry:gpus_of_machines"
"""What counts the GPUs that workers of the launcher `ray` may have."""
SEVERAL_RUNS = "distflow.cluster.ray_entry:launch_several"
"""What starts several runs side by side, with that launcher."""

HUB_DATA = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]*){0,2}")
"""The id of a data set on the hub, with its configuration and split."""

TEMPLATE_PARAMETERS = (
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""What the call of a chat template sets itself: no further argument of it may be called so."""

OPTIMIZERS = ("adamw", "adamw_8bit", "sgd")
SCHEDULERS = ("constant", "constant_with_warmup", "linear_with_warmup", "cosine_with_warmup")
DTYPES = ("bfloat16", "float32")


def is_own(reward: str) -> bool:
    """Whether a reward function is the user's."""
    return reward not in REWARDS or reward == CUSTOM_REWARD


def not_there_yet(table: Mapping[str, Entry]) -> tuple[str, ...]:
    """The names of a table that lead nowhere so far."""
    return tuple(name for name, entry in table.items() if not entry.target)
