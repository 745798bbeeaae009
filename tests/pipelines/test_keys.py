"""Keys that a program does not take are refused where they were set; the presets set none of them."""

from pathlib import Path

import pytest
from distflow.pipelines.assembly import bind, refuse_inert_keys

from distflow.config import load_config
from distflow.config.errors import UserError

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
NEEDED = (f"{MODEL}.path=builtin:tiny", "data.train_files=rows.jsonl")
PRESETS = Path(__file__).parents[2] / "src" / "distflow" / "config" / "presets"
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def refuse(preset: str, *overrides: str) -> None:
    loaded = load_config(preset, [*NEEDED, *overrides])
    refuse_inert_keys(bind(loaded.config), loaded)


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_no_preset_has_one(preset: str) -> None:
    refuse(preset)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_no_example_has_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parents[1]))
    loaded = load_config(str(file), [])
    for module in loaded.config.trainer.imports:
        __import__(module)
    refuse_inert_keys(bind(loaded.config), loaded)


INERT = [
    ("grpo", "critic.cliprange_value=0.2", ()),
    ("grpo", "critic.optim.lr=1e-3", ()),
    ("grpo", "critic.model.path=other", ()),
    ("grpo", "algorithm.lam=0.9", ()),
    ("grpo", "algorithm.gamma=0.9", ()),
    ("grpo", "algorithm.bootstrap_truncated=true", ()),
    ("grpo", "algorithm.kl_ctrl.kl_coef=0.1", ()),
    ("grpo", "algorithm.kl_penalty=abs", ()),
    ("grpo", "algorithm.filter_groups.metric=math", ()),
    ("grpo", "algorithm.allow_group_of_one=true", ()),
    ("ppo", "algorithm.norm_adv_by_std_in_grpo=false", ()),
    ("ppo", "algorithm.adv_epsilon=1e-3", ()),
    ("ppo", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=9", ("algorithm.use_kl_in_reward=false",)),
    ("ppo", f"{ACTOR}.kl_loss_coef=0.1", ()),
    ("ppo", f"{ACTOR}.kl_loss_type=mse", ()),
    ("grpo", f"{ACTOR}.clip_ratio=0.3", (f"{ACTOR}.policy_loss=gpg",)),
    ("grpo", f"{ACTOR}.clip_ratio_c=4", (f"{ACTOR}.policy_loss=gspo",)),
    ("dapo", f"{ACTOR}.clip_ratio=0.3", ()),
    ("grpo", f"{ACTOR}.optim.eps=1e-6", (f"{ACTOR}.optim.optimizer=sgd",)),
    ("grpo", f"{ACTOR}.optim.warmup_ratio=0.2", (f"{ACTOR}.optim.scheduler=constant",)),
    ("ppo", "critic.optim.eps=1e-6", ("critic.optim.optimizer=sgd",)),
    ("grpo", f"{MODEL}.revision=abc", ()),
    ("grpo", f"{ROLLOUT}.max_num_seqs=8", (f"{ROLLOUT}.name=hf",)),
    ("grpo", f"{ROLLOUT}.val_kwargs.n=4", ()),
    ("grpo", f"{ROLLOUT}.val_kwargs.temperature=1.0", ("data.val_files=rows.jsonl",)),
    ("grpo", "data.response_key=text", ()),
    ("grpo", "data.seed=3", ("data.shuffle=false",)),
    ("grpo", "trainer.test_freq=3", ()),
    ("grpo", "trainer.keep_last=5", ("trainer.save_freq=-1",)),
    ("grpo", "trust.canary_freq=3", (f"{MODEL}.dtype=float32",)),
    ("grpo", "custom_reward_function.name=judge", ()),
    ("sft", f"{ROLLOUT}.n=4", ()),
    ("sft", f"{ROLLOUT}.temperature=0.7", ()),
    ("sft", f"{ACTOR}.ppo_epochs=2", ()),
    ("sft", f"{ACTOR}.entropy_coef=0.1", ()),
    ("sft", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", ()),
    ("sft", "algorithm.adv_estimator=rloo", ()),
    ("sft", "algorithm.rollout_correction.level=token", ()),
    ("sft", "algorithm.filter_groups.max_num_gen_batches=3", ()),
    ("sft", "reward.num_workers=4", ()),
    ("sft", "trust.canary_freq=3", ()),
    ("sft", "trust.certify_rewards=false", ()),
]


@pytest.mark.parametrize(("preset", "inert", "given"), INERT, ids=[f"{preset}-{key}" for preset, key, _ in INERT])
def test_it_is_named_with_its_origin(preset: str, inert: str, given: tuple[str, ...]) -> None:
    refuse(preset, *given)
    with pytest.raises(UserError) as refused:
        refuse(preset, *given, inert)
    lines = str(refused.value).splitlines()
    assert lines[1:-1] == [f"  {inert.partition('=')[0]} (command line)"]


def test_the_file_and_line_are_the_origin(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [grpo, _self_]\ncritic:\n  ppo_epochs: 3\n")
    with pytest.raises(UserError, match=r"critic\.ppo_epochs \(.*mine\.yaml:3\)"):
        refuse(str(file))


TAKEN = [
    ("grpo", f"{MODEL}.revision=abc", (f"{MODEL}.path=a-hub/model",)),
    ("grpo", "trust.canary_freq=0", (f"{MODEL}.dtype=float32",)),
    ("grpo", "algorithm.filter_groups.max_num_gen_batches=3", ()),
    ("grpo", "algorithm.allow_group_of_one=true", (f"{ROLLOUT}.n=1",)),
    ("dapo", f"{ACTOR}.clip_ratio_low=0.1", ()),
    ("grpo", "trainer.test_freq=-1", ()),
    ("sft", "data.response_key=text", ()),
    ("quickstart_sft", "trainer.total_training_steps=5", ()),
    ("quickstart_sft", f"{ACTOR}.optim.lr_warmup_steps=5", ()),
]


@pytest.mark.parametrize(("preset", "taken", "given"), TAKEN, ids=[f"{preset}-{key}" for preset, key, _ in TAKEN])
def test_a_key_in_use_is_accepted(preset: str, taken: str, given: tuple[str, ...]) -> None:
    refuse(preset, *given, taken)
