"""Where the host waits for the device: in no micro-batch, once in a decode step, else where
waits.md says."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from distflow.algorithms.objectives import PolicyObjective
from distflow.errors import TrustError
from distflow.models.cached_decoder import DecoderView
from distflow.models.loading import load_model
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime.weight_sync.sent_weights import check_sent
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchTrainEngine
from tests.device.rehearsal import on_device
from tests.e2e.runs import Playground
from tests.rollout.drive import make_engine, make_model, prompt_of, request_of, with_engine
from tests.tiny_models import write_tiny_model
from tests.training.batches import ragged_batch

pytestmark = pytest.mark.slow
WAITS = Path(__file__).with_name("waits.md")


def waits_of_response(num_tokens: int) -> Counter:
    """While the engine generates three of that length, after others."""
    from torch_rehearsal import Events

    engine, found = make_engine(make_model().to("rehearsal"), max_num_seqs=9), Counter()

    async def story(engine) -> None:
        request = request_of(prompt_of(5), (0, 1, 2), max_tokens=num_tokens)
        await engine.generate(request)  # allocates
        with Events() as events:
            await engine.generate(request)
        found.update(events.of("wait"))

    with_engine(engine, story)
    return found


def waits_of_step(folder: Path, max_tokens: int, loss) -> Counter:
    """While the train engine takes its second step, in micro-batches of so many tokens."""
    from torch_rehearsal import Events

    model = load_model(write_tiny_model(folder), device="rehearsal")
    engine = TorchTrainEngine(
        model,
        optimizer=make_optimizer("adamw", model.parameters(), lr=1e-3),
        schedule=make_schedule("constant", total_steps=10),
        max_tokens_per_micro_batch=max_tokens,
    )
    batch = ragged_batch()
    batch["old_log_probs"] = -torch.rand(
        batch.flat("advantages").shape, generator=torch.Generator().manual_seed(1)
    )
    engine.train_step(batch, loss)
    with Events() as events:
        engine.train_step(batch, loss)
    return events.of("wait")


@on_device
def test_a_decode_step_waits_once():
    short = waits_of_response(20)
    long = waits_of_response(60)
    assert (long - short).keys() == {
        ("wait", "event", "rollout/embedded/cuda_lane.py CudaRequestLane.read")
    }
    assert (long - short).total() == 40


@on_device
def test_a_number_that_each_decode_step_reads_is_found():
    logits = DecoderView.logits

    def reads(self, hidden):
        found = logits(self, hidden)
        assert found.max().item() < 1e9
        return found

    DecoderView.logits = reads
    short = waits_of_response(20)
    long = waits_of_response(60)
    assert (long - short).total() == 80
    assert "a number read" in {what for _, what, _ in long - short}


@on_device
def test_receipts_and_the_check_of_sent_weights_wait_once_for_a_bucket(tmp_path):
    from torch_rehearsal import Events

    model = load_model(write_tiny_model(tmp_path))
    here = stripe_hashes(model.named_parameters(), torch.bfloat16)
    model.to("rehearsal")
    bucket = [(name, parameter.detach().bfloat16()) for name, parameter in model.named_parameters()]

    with Events() as events:
        assert stripe_hashes(bucket) == here
        check_sent(bucket, model, 1)

    assert len(bucket) > 20 and events.of("wait").total() == 2
    bucket[7][1].view(-1)[0] += 1
    with pytest.raises(TrustError, match=f"not the trainer's: {bucket[7][0]} "):
        check_sent(bucket, model, 1)


OBJECTIVES = {
    "grpo": PolicyObjective(entropy_coef=0.01),
    "sequences": PolicyObjective("gspo", derives_old=True, loss_agg_mode="seq-mean-token-mean"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@on_device
def test_no_micro_batch_waits(tmp_path, name):
    few, many = (waits_of_step(tmp_path, tokens, OBJECTIVES[name]) for tokens in (1000, 20))
    assert few == many == {("wait", "copy to the host", "training/torch_engine.py _read_sums"): 1}


@on_device
def test_a_number_that_a_loss_reads_is_found(tmp_path):
    class Reads(PolicyObjective):
        def __call__(self, outputs, micro, counts):
            assert float(outputs["log_probs"].detach().sum()) < 0
            return super().__call__(outputs, micro, counts)

    few, many = (waits_of_step(tmp_path, tokens, Reads()) for tokens in (1000, 20))
    assert (many - few).total() >= 3 and {what for _, what, _ in many - few} == {"a number read"}


def waits_of_run(ground: Playground, rollout: str, num_steps: int) -> Counter:
    from torch_rehearsal import Events

    keys = (
        f"actor_rollout_ref.rollout.name={rollout}",
        f"trainer.total_training_steps={num_steps}",
    )
    files = (
        f"data.val_files={ground.folder}/rows.jsonl",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
    )
    proofs = ("trust.check_freq=0", "trust.check_rewards=false", "trainer.device=rehearsal")
    with Events() as events:
        ground.run("grpo", *keys, *files, *proofs, name=f"{rollout}-{num_steps}")
    return Counter({f"{where}: {what}": n for (_, what, where), n in events.of("wait").items()})


def documented(heading: str) -> dict[str, bool]:
    """Whether each place of a table waits in every step, and not only once."""
    table = WAITS.read_text().split(heading)[1].split("\n#")[0]
    rows = re.findall(
        r"^\| `(\S+)` · `(\S+)` \| ([^|]+) \| (once|step|token) \|", table, re.MULTILINE
    )
    return {f"{file} {name}: {what.strip()}": when != "once" for file, name, what, when in rows}


@pytest.mark.parametrize("rollout", ["embedded", pytest.param("hf", marks=pytest.mark.by_hand)])
@on_device
def test_every_place_that_waits_is_named(tmp_path, rollout):
    ground = Playground(tmp_path, num_rows=8)
    two, four = (waits_of_run(ground, rollout, steps) for steps in (2, 4))
    measured = {place: four[place] > two[place] for place in four}
    listed = documented("## Where the host waits") | (
        documented("### With the engine `hf`") if rollout == "hf" else {}
    )
    unused = {place for place in listed if "rollout/embedded" in place or "models/cached" in place}
    expected = {
        place: each for place, each in listed.items() if rollout != "hf" or place not in unused
    }
    assert measured == expected, sorted(measured.items() ^ expected.items())
