"""Keys of `actor_rollout_ref.rollout`, and of `async`."""

from collections.abc import Callable

import torch

from distflow.launch.rollout_engines import policy_engine_options
from distflow.rollout.hf_engine import HFEngine
from distflow.runtime.spec import Spec
from tests.e2e.keys.case import Case, close, the_spec
from tests.e2e.keys.lab import ROLLOUT, Run

ONE = "trainer.total_training_steps=1"
NO_STOPS = f"{ROLLOUT}.stop=[]"
GREEDY = f"{ROLLOUT}.top_k=1"
VALIDATED = ("data.val_files={lab}/val.jsonl", "trainer.val_before_train=true", ONE)
SAMPLED = (*VALIDATED, f"{ROLLOUT}.val_kwargs.n=4")
GROUP = 4


def answered_by_hf(before: Run, after: Run) -> None:
    """Another engine, the same policy: its log-probs are the trainer's."""
    assert not isinstance(before.engine("rollout"), HFEngine) and isinstance(
        after.engine("rollout"), HFEngine
    )
    assert after.column("mismatch/max_abs")[0] < 1e-4


def groups_of(size: int) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        for run, wanted in ((before, GROUP), (after, size)):
            assert run.batch()["group_index"].bincount().tolist() == [wanted] * 4

    return check


def colder(before: Run, after: Run) -> None:
    """In engine, trainer and reference alike."""
    assert after.column("actor/entropy")[0] < 0.5 * before.column("actor/entropy")[0]
    assert after.column("mismatch/max_abs")[0] < 1e-4
    assert (
        after.batch()["rollout_log_probs"].mean() > before.batch()["rollout_log_probs"].mean() + 0.5
    )
    close(after.batch()["ref_log_prob"], after.batch()["old_log_probs"], 1e-4)


def only_the_likeliest(before: Run, after: Run) -> None:
    """All samples of a group are the same, drawn with certainty; their log-probs are still the
    whole policy's."""
    batch = after.batch()
    assert (
        len(
            {
                (group, text)
                for group, text in zip(
                    batch["group_index"].tolist(), batch["responses"], strict=True
                )
            }
        )
        == 4
    )
    close(batch["sampling_log_probs"], torch.zeros_like(batch["sampling_log_probs"]))
    assert float(batch["rollout_log_probs"][batch["response_mask"] > 0].mean()) < -0.1
    assert len(set(before.batch()["responses"])) > 8


def truncated_mass(before: Run, after: Run) -> None:
    """What is drawn from holds half the mass, and a token more at most."""
    batch = after.batch()
    mask = after.batch()["response_mask"] > 0
    kept = (batch["rollout_log_probs"] - batch["sampling_log_probs"])[mask].exp()
    assert float(kept.min()) > 0.5 - 1e-4 and float(kept.max()) < 0.95
    close(before.batch()["rollout_log_probs"], before.batch()["sampling_log_probs"])


def no_token_twice(before: Run, after: Run) -> None:
    def repeats(run: Run) -> int:
        batch = run.batch()
        rows = zip(batch["response_ids"].tolist(), batch.lengths("response").tolist(), strict=True)
        return sum(length - len(set(ids[:length])) for ids, length in rows)

    assert repeats(before) > 0 == repeats(after)


def stops_end(before: Run, after: Run) -> None:
    """A stop is the last character or none."""

    def earlier_ones(run: Run) -> int:
        return sum(
            character in row["response"][:-1]
            for row in run.samples()
            for character in "ABCDEFGHIJKL"
        )

    assert earlier_ones(before) > 0 == earlier_ones(after)
    ended = [
        row
        for row in after.samples()
        if row["response"][-1:] and row["response"][-1] in "ABCDEFGHIJKL"
    ]
    assert ended and all(row["finish_reason"] == "stop" for row in ended)


def deadline_of(timeout_s: float) -> Callable[[Spec, Spec], None]:
    def check(before: Spec, after: Spec) -> None:
        found = [spec.config.actor_rollout_ref.rollout.timeout_s for spec in (before, after)]
        assert found == [1800.0, timeout_s]

    return check


def kv_is(before: Spec, after: Spec) -> None:
    kinds = [policy_engine_options(spec.config)["kv_on_update"] for spec in (before, after)]
    assert kinds == ["keep", "recompute"]


def rollout_threads_are(before: Spec, after: Spec) -> None:
    threads = [policy_engine_options(spec.config)["num_threads"] for spec in (before, after)]
    assert (
        threads[1]
        == after.facts["rollout_threads"]
        == 3
        != threads[0]
        == before.facts["rollout_threads"]
    )


def bits_are_of_the_request(before: Spec, after: Spec) -> None:
    options = [policy_engine_options(spec.config)["batch_invariant"] for spec in (before, after)]
    assert options == [False, True]


def steps_are_eager(before: Spec, after: Spec) -> None:
    options = [policy_engine_options(spec.config)["enforce_eager"] for spec in (before, after)]
    assert options == [False, True]


def rows_at_once(before: Run, after: Run) -> None:
    assert (before.decode_rows(), after.decode_rows()) == (16, 8)


def steps_behind(before: Run, after: Run) -> None:
    assert [max(run.column("async/version_diff/max")) for run in (before, after)] == [0, 1]


def groups_at_once(before: Run, after: Run) -> None:
    def most(run: Run) -> int:
        return max(
            sum(start < moment <= end for start, end in run.spans()) for _, moment in run.spans()
        )

    assert most(before) == 4 and most(after) == 1


def kinds(run: Run) -> dict[str, int]:
    rows = run.samples(0, "val")
    return {kind: sum(row["kind"] == kind for row in rows) for kind in ("greedy", "sampled")}


def answers_are(
    before_kinds: tuple[int, int], after_kinds: tuple[int, int]
) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        assert (
            tuple(kinds(before).values()) == before_kinds
            and tuple(kinds(after).values()) == after_kinds
        )
        for run, (_, sampled) in ((before, before_kinds), (after, after_kinds)):
            assert ("val_correct/all/pass@4" in run.validations[0]) == (sampled > 0)

    return check


def sampled_are_greedy(before: Run, after: Run) -> None:
    def agreeing(run: Run) -> float:
        rows = run.samples(0, "val")
        greedy = {row["prompt"]: row["response"] for row in rows if row["kind"] == "greedy"}
        sampled = [row for row in rows if row["kind"] == "sampled"]
        return sum(row["response"] == greedy[row["prompt"]] for row in sampled) / len(sampled)

    assert agreeing(before) < 0.5 and agreeing(after) == 1.0


def val_case(name: str, value: str) -> Case:
    key = f"{ROLLOUT}.val_kwargs.{name}"
    return Case(
        key,
        f"{key}={value}",
        "sampled answers are the greedy ones",
        sampled_are_greedy,
        given=SAMPLED,
    )


CASES = (
    Case(f"{ROLLOUT}.name", f"{ROLLOUT}.name=hf", "the engine", answered_by_hf, given=(ONE,)),
    Case(f"{ROLLOUT}.n", f"{ROLLOUT}.n=2", "samples of a group", groups_of(2), given=(ONE,)),
    Case(
        f"{ROLLOUT}.temperature",
        f"{ROLLOUT}.temperature=0.3",
        "actor/entropy; log-probs of engine, trainer and reference",
        colder,
        base="ppo",
        given=(ONE,),
    ),
    Case(f"{ROLLOUT}.top_k", GREEDY, "tokens: the likeliest", only_the_likeliest, given=(ONE,)),
    Case(
        f"{ROLLOUT}.top_p",
        f"{ROLLOUT}.top_p=0.5",
        "sampling_log_probs over rollout's",
        truncated_mass,
        given=(ONE,),
    ),
    Case(
        f"{ROLLOUT}.min_p",
        f"{ROLLOUT}.min_p=0.999",
        "tokens: the likeliest",
        only_the_likeliest,
        given=(ONE,),
    ),
    Case(
        f"{ROLLOUT}.repetition_penalty",
        f"{ROLLOUT}.repetition_penalty=1e6",
        "no token comes twice",
        no_token_twice,
        given=(ONE, NO_STOPS, GREEDY),
    ),
    Case(
        f"{ROLLOUT}.stop",
        f"{ROLLOUT}.stop=['A','B','C','D','E','F','G','H','I','J','K','L']",
        "where responses end",
        stops_end,
        given=(ONE, NO_STOPS),
    ),
    Case(
        f"{ROLLOUT}.timeout_s",
        f"{ROLLOUT}.timeout_s=7",
        "how long an engine may be silent (tests/e2e/test_hanging_engine.py has one that hangs)",
        deadline_of(7.0),
        look=the_spec,
    ),
    Case(
        f"{ROLLOUT}.kv_on_update",
        f"{ROLLOUT}.kv_on_update=recompute",
        (
            "what the engine does with begun answers (tests/rollout/test_in_flight.py looks at "
            "their tokens)"
        ),
        kv_is,
        given=("async.max_staleness=1",),
        look=the_spec,
    ),
    Case(
        f"{ROLLOUT}.num_threads",
        f"{ROLLOUT}.num_threads=3",
        "threads that generate (tests/runtime/rollout_loop/test_taking_turns.py counts them)",
        rollout_threads_are,
        given=("async.max_staleness=1",),
        look=the_spec,
    ),
    Case(
        f"{ROLLOUT}.batch_invariant",
        f"{ROLLOUT}.batch_invariant=true",
        "what the bits of an answer depend on (tests/rollout/test_tiles.py compares them)",
        bits_are_of_the_request,
        look=the_spec,
    ),
    Case(
        f"{ROLLOUT}.enforce_eager",
        f"{ROLLOUT}.enforce_eager=true",
        "whether decode steps are CUDA graphs (tests/gpu/test_decode.py counts them)",
        steps_are_eager,
        look=the_spec,
    ),
    Case(
        f"{ROLLOUT}.max_num_seqs",
        f"{ROLLOUT}.max_num_seqs=8",
        "rows of a decode step",
        rows_at_once,
        given=(ONE, NO_STOPS),
    ),
    Case(
        f"{ROLLOUT}.val_kwargs.greedy",
        f"{ROLLOUT}.val_kwargs.greedy=false",
        "greedy answers",
        answers_are((6, 24), (0, 24)),
        given=SAMPLED,
    ),
    Case(
        f"{ROLLOUT}.val_kwargs.n",
        f"{ROLLOUT}.val_kwargs.n=4",
        "sampled answers, val_correct/all/pass@4",
        answers_are((6, 0), (6, 24)),
        given=VALIDATED,
    ),
    val_case("temperature", "0.001"),
    val_case("top_p", "0.001"),
    val_case("top_k", "1"),
    Case(
        "async.max_staleness",
        "async.max_staleness=1",
        "the age of a step's oldest token",
        steps_behind,
    ),
    Case(
        "async.max_concurrent_rollouts",
        "async.max_concurrent_rollouts=1",
        "prompt groups in flight",
        groups_at_once,
        given=(ONE, NO_STOPS),
    ),
)
