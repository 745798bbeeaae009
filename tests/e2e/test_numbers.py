"""Where numbers can go silently wrong between rooms: the border of prompt and response,
temperatures, masked parts."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow.data.batch import Batch
from distflow.models.loading import load_tokenizer
from tests.e2e.runs import Playground, Run
from tests.sparse_params import one_fast_in

ONE_STEP = ["trainer.total_training_steps=1", "trainer.save_groups=all"]
KEPT = ["trainer.save_freq=1", "trainer.keep_last=9"]
ROLLOUT = "actor_rollout_ref.rollout"
# No verdict for the answers to prompts with an x, and for some of the others.
PICKY = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "x" or sum(map(ord, solution_str)) % 3 == 0:
        raise RuntimeError("no verdict")
    return sum(map(ord, solution_str)) % 7 / 6
"""


@pytest.fixture
def playground(tmp_path):
    return Playground(tmp_path)


def recorded(run: Run, step: int = 1) -> Batch:
    return Batch.load(run.folder / "tokens" / f"{step:06d}.safetensors")


@pytest.mark.parametrize("family", one_fast_in(3, ["qwen3", "qwen2", "llama"]))
def test_log_probs_stand_at_their_tokens_from_the_border_on(tmp_path, family):
    playground = Playground(tmp_path, family)
    batch = recorded(playground.run("grpo", f"{ROLLOUT}.temperature=0.8", *ONE_STEP))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(tmp_path / "model"))

    prompts, responses = (batch.lengths(axis).tolist() for axis in ("prompt", "response"))
    for i, (num_prompt, num_response) in enumerate(zip(prompts, responses, strict=True)):
        prompt = batch["prompt_ids"][i, :num_prompt]
        response = batch["response_ids"][i, :num_response]
        assert tokenizer.decode(prompt) == batch["prompts"][i]
        assert tokenizer.decode(response, skip_special_tokens=True) == batch["responses"][i]

        context = prompt
        for t, token in enumerate(response):  # the plainest way: one token at a time
            with torch.no_grad():
                wanted = (model(input_ids=context[None]).logits[0, -1] / 0.8).log_softmax(-1)[token]

            for column in ("rollout_log_probs", "old_log_probs", "ref_log_prob"):
                assert float(batch[column][i, t]) == pytest.approx(float(wanted), abs=1e-5), (
                    column,
                    i,
                    t,
                )

            context = torch.cat([context, token[None]])

        at_end = int(response[-1]) == tokenizer.eos_token_id
        assert batch["finish_reason"][i] == ("stop" if at_end else "length")
        assert bool(batch["truncated"][i]) == (not at_end)


@pytest.mark.slow
def test_each_domain_has_the_policy_of_its_own_temperature(playground):
    rows = "".join(f'{{"prompt": "ab{i}=", "answer": "7"}}\n' for i in range(4))
    heats = {"hot": 1.7, "cold": 0.6, "plain": 0.9}
    for name in heats:
        (playground.folder / f"{name}.jsonl").write_text(rows)
    files = {name: f"train_files: {playground.folder}/{name}.jsonl" for name in heats}
    run = playground.run(
        "grpo",
        "data.train_files=[]",
        f"data.domains={{hot: {{{files['hot']}, temperature: 1.7}}, cold: {{{files['cold']}, "
        f"temperature: 0.6}}, "
        f"plain: {{{files['plain']}}}}}",
        f"{ROLLOUT}.temperature=0.9",
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=60",
        "trainer.total_training_steps=2",
        "trainer.save_groups=all",
        "trust.check_freq=1",
    )
    batch = recorded(run)
    model = AutoModelForCausalLM.from_pretrained(
        playground.folder / "model", dtype=torch.float32
    ).eval()
    assert set(batch["domain"]) == set(heats)

    for i, domain in enumerate(batch["domain"]):
        num_prompt, num_response = (int(batch.lengths(axis)[i]) for axis in ("prompt", "response"))
        prompt = batch["prompt_ids"][i, :num_prompt]
        response = batch["response_ids"][i, :num_response]

        with torch.no_grad():
            logits = (
                model(input_ids=torch.cat([prompt, response])[None])
                .logits[0, num_prompt - 1 : -1]
                .double()
            )

        wanted = (logits / heats[domain]).log_softmax(-1).gather(-1, response[:, None])[:, 0]
        for column in ("rollout_log_probs", "old_log_probs", "ref_log_prob"):
            assert batch[column][i, :num_response].tolist() == pytest.approx(
                wanted.tolist(), abs=1e-5
            ), column

    assert all(step["mismatch/max_abs"] < 1e-4 for step in run.metrics())
    assert run.notes("warning") == [] or all(
        "sampled policy" in note for note in run.notes("warning")
    )


@pytest.mark.parametrize(
    "options",
    one_fast_in(
        7,
        [
            [f"{ROLLOUT}.top_k=5", f"{ROLLOUT}.min_p=0.05", f"{ROLLOUT}.repetition_penalty=1.3"],
            [f"{ROLLOUT}.temperature=0.5"],
            [f"{ROLLOUT}.temperature=1.7", f"{ROLLOUT}.top_p=0.7"],
            ["actor_rollout_ref.model.lora_rank=4"],
            ["actor_rollout_ref.model.enable_gradient_checkpointing=true"],
            ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40", f"{ROLLOUT}.max_num_seqs=3"],
            [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.temperature=1.4", f"{ROLLOUT}.top_p=0.9"],
        ],
    ),
)
def test_engine_trainer_and_reference_mean_one_policy(playground, options):
    run = playground.run(
        "grpo", "trainer.total_training_steps=3", "trainer.save_groups=all", *options
    )
    for number, step in enumerate(run.metrics()):
        assert step["mismatch/mean_abs"] < 1e-5 and step["mismatch/max_abs"] < 1e-4
        assert step["actor/log_ratio_abs"] < 1e-5
        if number == 0:  # nothing has been learned yet: the reference is the policy
            gap = recorded(run).flat("ref_log_prob") - recorded(run).flat("old_log_probs")
            assert float(gap.abs().max()) < 1e-4

    assert run.notes("warning") == [] or all(
        "sampled policy" in note for note in run.notes("warning")
    )


@pytest.mark.slow
def test_a_batch_without_a_verdict_takes_no_step_and_the_run_goes_on(playground):
    playground.write_reward(PICKY)
    playground.write_rows(
        [{"prompt": f"{i}", "answer": "x" if 4 <= i < 8 else "7"} for i in range(12)]
    )
    options = [
        "data.shuffle=false",
        f"{ROLLOUT}.n=1",
        "actor_rollout_ref.actor.entropy_coef=0.1",
        *KEPT,
    ]
    options.append("reward.max_error_rate=1")
    run = playground.run(
        "ppo", "trainer.total_training_steps=3", "trainer.save_groups=all", *options
    )
    first, second, third = run.metrics()
    assert second["reward/errors"] == 4 and "reward/mean_score" not in second
    assert second["actor/loss"] == second["actor/grad_norm"] == second["critic/loss"] == 0
    assert [
        second[f"{role}/{why}"] for role in ("actor", "critic") for why in ("empty", "skipped")
    ] == [1] * 4
    assert first["actor/grad_norm"] > 0 and third["actor/grad_norm"] > 0
    for step in run.metrics():
        assert [name for name, value in step.items() if not math.isfinite(value)] == []


def test_samples_without_a_verdict_are_in_no_statistic(playground):
    playground.write_reward(PICKY)
    run = playground.run("grpo", *ONE_STEP, "reward.max_error_rate=1")
    batch = recorded(run)
    metrics = run.metrics()[0]
    valid = batch["valid"].tolist()
    scores = batch["token_level_scores"].sum(-1).double()
    groups = batch["group_index"].tolist()
    assert 0 < sum(valid) < len(valid)

    for i, group in enumerate(groups):
        own = [float(scores[j]) for j in range(len(batch)) if groups[j] == group and valid[j]]
        mean = sum(own) / len(own)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in own) / (len(own) - 1))
        wanted = (float(scores[i]) - mean) / (deviation + 1e-6) if valid[i] and deviation else 0.0
        length = int(batch.lengths("response")[i])
        assert batch["advantages"][i, :length].tolist() == pytest.approx(
            [wanted] * length, abs=1e-5
        )
        assert batch["loss_mask"][i, :length].tolist() == [float(valid[i])] * length
        assert batch["response_mask"][i, :length].tolist() == [1.0] * length

    judged = [float(score) for score, ok in zip(scores, valid, strict=True) if ok]
    assert metrics["reward/mean_score"] == pytest.approx(sum(judged) / len(judged))
    assert metrics["reward/errors"] >= len(valid) - len(judged), (
        "those of groups that were dropped count too"
    )


def test_the_next_epoch_draws_other_answers_to_the_same_prompts(tmp_path):
    """With weights that stand still only the random stream can differ between the epochs."""
    playground = Playground(tmp_path, num_rows=4)
    frozen = (
        "actor_rollout_ref.actor.optim.lr=0",
        "trainer.total_epochs=2",
        "trainer.save_groups=all",
    )
    run = playground.run("grpo", *frozen)
    first, second = (
        {
            (prompt, uid.split("-")[1]): text
            for prompt, uid, text in zip(
                *(b[name] for name in ("prompts", "uid", "responses")), strict=True
            )
        }
        for b in (recorded(run, 1), recorded(run, 2))
    )
    assert len(first) == 16 and first.keys() == second.keys()
    assert all(first[key] != second[key] for key in first)
