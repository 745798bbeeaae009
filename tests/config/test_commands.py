"""Well-known commands of verl and siiRL as they are: what is accepted, what is answered, that the
answers train."""

from pathlib import Path

import pytest

from distflow.config import ConfigError, load_config
from distflow.config.migration.tables import all_tables
from distflow.errors import UserError
from distflow.launch.read_config import read_config

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
VERL = all_tables()["verl"].example
TENSOR = f"{ROLLOUT}.tensor_model_parallel_size"
ONE_GPU = {f"{REF}.fsdp_config.param_offload": "or remove it"}
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"

# command: (preset, what is refused and a part of its answer, what is written in its place)
ANSWERS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "verl_grpo_qwen2_7b": ("verl_grpo", ONE_GPU, []),
    "verl_grpo_qwen3_4b": ("verl_grpo", ONE_GPU, []),
    "verl_grpo_lora": ("verl_grpo", ONE_GPU, []),
    "verl_grpo_seq_balance": (
        "verl_grpo",
        {**ONE_GPU, TENSOR: f"{ROLLOUT}.engine_kwargs.sglang.tp_size=2"},
        [],
    ),
    "verl_ppo_deepseek7b": ("verl_ppo", {}, []),
    "verl_ppo_qwen3_8b": ("verl_ppo", ONE_GPU, []),
    "verl_dapo_7b_math": (
        "verl_grpo",
        {
            **ONE_GPU,
            TENSOR: f"set {ROLLOUT}.name=vllm",  # which was its default then
            "actor_rollout_ref.model.override_config.max_position_embeddings": "config.json",
            f"{ACTOR}.ulysses_sequence_parallel_size": "write sequence parallelism as c",
            f"{REF}.ulysses_sequence_parallel_size": "write sequence parallelism as c",
            f"{ACTOR}.fsdp_config.fsdp_size": f"set {ACTOR}.strategy=fsdp",
            f"{ROLLOUT}.val_kwargs.do_sample": f"write {ROLLOUT}.val_kwargs.greedy=false",
            f"{OVERLONG}.len": "write reward.overlong.buffer_tokens=4096",
            "trainer.nnodes": "set trainer.launcher=ray",
        },
        [f"{ROLLOUT}.val_kwargs.greedy=false", "reward.overlong.buffer_tokens=4096"],
    ),
    "siirl_grpo_qwen3_8b": (
        "verl_grpo",
        {
            **ONE_GPU,
            f"{ACTOR}.policy_drift_coeff": (
                f"write {ACTOR}.policy_loss_kwargs.policy_drift_coeff=0.001"
            ),
            f"{ACTOR}.grad_clip": f"write {ACTOR}.max_grad_norm=0.5",
            "trainer.max_actor_ckpt_to_keep": "write trainer.keep_last=5",
        },
        [f"{ACTOR}.max_grad_norm=0.5", "trainer.keep_last=5"],
    ),
}

# Second answers, of a config that is sound by itself: what its pipeline does not read.
INERT = {
    "verl_ppo_qwen3_8b": f"{REF}.log_prob_max_token_len_per_gpu",
    "verl_dapo_7b_math": f"{REF}.log_prob_max_token_len_per_gpu",
}


def command(name: str) -> list[str]:
    if name == "verl_grpo_qwen2_7b":
        return list(VERL["command"])
    lines = (Path(__file__).parent / "commands" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def key_of(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_command_is_answered_key_by_key(name):
    preset, answers, _ = ANSWERS[name]
    if not answers:
        load_config(preset, command(name))
        return

    with pytest.raises(ConfigError) as caught:
        load_config(preset, command(name))
    said = {
        problem.places[0][0].partition(" = ")[0]: problem.advice
        for problem in caught.value.problems
    }
    assert said.keys() == answers.keys()
    for key, part in answers.items():
        assert part in said[key]


@pytest.mark.parametrize("name", ANSWERS)
def test_with_the_answers_it_trains_what_it_says(name):
    preset, answers, written = ANSWERS[name]
    taken = {*answers, f"{ROLLOUT}.name", TENSOR}  # vLLM is in no environment of these tests

    kept = [override for override in command(name) if key_of(override) not in taken]
    if offloads := [override for override in kept if override.endswith("_offload=True")]:
        with pytest.raises(UserError, match="_offload: on a CPU"):
            read_config(load_config(preset, [*kept, *written]))
        kept = [override for override in kept if override not in offloads]

    if name in INERT:
        with pytest.raises(
            UserError,
            match=f"pipeline .*\n  {INERT[name]} \\(command line\\)\nRemove",
        ):
            read_config(load_config(preset, [*kept, *written]))
        kept = [override for override in kept if key_of(override) != INERT[name]]

    loaded = load_config(preset, [*kept, *written])
    read_config(loaded)
    told = {line.partition("=")[0].partition(" ")[0] for line in loaded.notes}
    assert "actor_rollout_ref.model.use_remove_padding" in told
    assert not told & set(loaded.origins), "a key that is ours is not accepted as another's"
    assert {key_of(override) for override in kept} <= told | set(loaded.origins)
    assert not any("verl has other defaults" in line for line in loaded.notes)


def test_the_scripts_translation_in_the_docs_is_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(
        "def compute_score(solution_str, ground_truth):\n    return 1.0\n"
    )
    loaded = load_config("grpo", all_tables()["TRL"].example["here"])
    read_config(loaded)
    actor = loaded.config.actor_rollout_ref.actor
    assert (actor.optim.betas, actor.loss_agg_mode, actor.clip_ratio_high) == (
        (0.9, 0.99),
        "seq-mean-token-sum-norm",
        0.28,
    )
