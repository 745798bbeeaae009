"""`distflow.rollouts`: generated and scored prompt groups for a user's own training loop, with
bounded staleness."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from distflow.api.arguments_to_config import Overrides, PythonInputs, Reward, Rows
from distflow.api.load_run import Run
from distflow.api.train import (
    PresetOrConfig,
    claimed_for_a_run,
    make_spec_of,
    preset_and_lines,
    read,
    say,
)
from distflow.config import Config, Loaded, load_config, pipeline_name
from distflow.config.compose.load_config import is_verls
from distflow.config.derived_settings import check_keys, data_files, is_one_process, is_rl
from distflow.errors import UserError, called_from_python

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distflow.cluster.own_loop_driver import OwnLoop
    from distflow.data.batch import Batch
    from distflow.data.sample import Segment
    from distflow.launch.one_process_launcher import Running
    from distflow.rollout.engine import GenerateRequest
    from distflow.runtime.sample_queue.protocol import TrainingStep
    from distflow.training.engine import LossFn, Scorer, TrainEngine

ShouldAccept = Callable[["Batch"], object]


def rollouts(
    preset_or_config: PresetOrConfig,
    overrides: Overrides = (),
    *,
    data: Rows | None = None,
    val_data: Rows | None = None,
    reward: Reward | None = None,
    workflow: Callable[..., object] | None = None,
    should_accept: ShouldAccept | None = None,
    resume: str | None = None,
    allow_change: Sequence[str] = (),
) -> "Rollouts":
    """Generate and score prompts while your own loop trains: enter it with `with`.

    The run is that of `distflow.train` with the same arguments, but you drive the steps. Nodes
    after the rollout loop run only in `Rollouts.train`. With `trainer.launcher=ray` your loop is in
    this process, and the engines are in the workers. data: rows for `prepare_batch`; without data,
    prompts come only from `submit`, and `trainer.total_training_steps` sets the number of steps.
    workflow: for episodes of several turns, as in `distflow.train`. should_accept: decides from the
    batch of a finished group whether to train on it; a rejected group is dropped as rejected, or
    for the reason returned as a str, and another starts. It runs on its own thread. resume,
    allow_change: as in `distflow.train`. Raises UserError or PipelineError for a user's mistake.
    """
    inputs = PythonInputs(data, val_data, reward, workflow=workflow)
    has_data = True
    if data is None:
        named = load_config(*preset_and_lines(preset_or_config, overrides), complete=False).config
        has_data = any(data_files(named, "train_files").values())
        if not has_data:
            inputs = replace(inputs, data=_unused_rows(named))

    loaded = read(preset_or_config, overrides, inputs, resume)
    _check_own_loop(loaded)
    _check_should_accept(should_accept)
    check_keys(allow_change)

    return Rollouts(loaded, inputs, should_accept, tuple(allow_change), has_data=has_data)


def _unused_rows(config: Config) -> list[dict[str, object]]:
    """Rows for the config check, which needs some, of a loop without data."""
    row: dict[str, object] = {
        config.data.prompt_key: "0",
        config.data.answer_key: "0",
        config.data.domain_key: next(iter(config.reward.functions), "default"),
    }
    return [row] * config.data.train_batch_size


def _check_own_loop(loaded: Loaded) -> None:
    """Raises UserError for what only `distflow.train` can do."""
    config = loaded.config
    trainer = config.trainer

    if not is_rl(config):
        raise UserError(
            f"the pipeline {pipeline_name(config)} does not generate: run it with distflow.train"
        )
    if trainer.launcher == "slurm" or trainer.max_restarts:
        raise UserError(
            "your own loop is started by your script: remove trainer.max_restarts and "
            "trainer.launcher=slurm"
        )
    if config.profiler.enable:
        raise UserError(
            "profiler.enable records steps of distflow train: use torch.profiler in your own loop"
        )
    if trainer.launcher == "local" and not is_one_process(config):
        raise UserError("your own loop needs Ray for several processes: set trainer.launcher=ray")

    key = "actor_rollout_ref.rollout.free_cache_engine"
    origin = loaded.origin(key)
    if config.actor_rollout_ref.rollout.free_cache_engine and not is_verls(origin):
        raise UserError(f"{key}=true ({origin}): only distflow.train can free it")


@dataclass(frozen=True)
class RolloutStats:
    """Prompt groups since the start of the run.

    enqueued: waiting until staleness allows them to start. submitted: started. running: started,
    not finished. accepted: finished, and passed on or kept for a later batch. rejected: dropped,
    for any reason.
    """

    enqueued: int
    submitted: int
    running: int
    accepted: int
    rejected: int


class Rollouts:
    """The context manager that `distflow.rollouts` returns. Only the thread that enters it may call
    it.

    A step is all groups taken by `prepare_batch` or `wait` since the last `publish`. None of its
    tokens comes from weights more than `async.max_staleness` steps older. Groups are ordered by the
    latest step that may train on them, then by their start. Leaving the context ends everything,
    whatever the loop raised.
    """

    def __init__(
        self,
        loaded: Loaded,
        inputs: PythonInputs,
        should_accept: ShouldAccept | None,
        allow_change: tuple[str, ...],
        *,
        has_data: bool,
    ) -> None:
        self.config: Config = loaded.config
        self._loaded = loaded
        self._inputs = inputs
        self._should_accept = should_accept
        self._has_data = has_data
        self._allow_change = allow_change
        self._stack = ExitStack()
        self._running: Running | OwnLoop | None = None
        self._parts: list[TrainingStep[Batch]] = []  # parts of the step that `publish` ends
        self._updates: list[dict[str, float]] = []
        self._num_submitted = self._num_requests = self._num_asked = 0
        self._has_ended = False

    @called_from_python()
    def __enter__(self) -> "Rollouts":
        """Build engines and reward processes, and send the first weights. Raises what
        `distflow.train` raises."""
        from distflow.cluster.ray_launcher import open_ray
        from distflow.launch.one_process_launcher import open_local

        if self._running is not None:
            raise UserError("these rollouts have already been entered")

        with ExitStack() as stack:
            stack.enter_context(claimed_for_a_run(self.config.trainer.run_dir))
            self._spec_entered = spec = self._spec()
            self._pipeline = spec.pipeline()

            if self.config.trainer.launcher == "ray":
                self._running = stack.enter_context(open_ray(spec, self._allow_change, say))
            else:
                self._running = stack.enter_context(open_local(spec, self._allow_change, say))

            self._stack = stack.pop_all()

        return self

    def __exit__(self, *exception: Any) -> None:
        self._running = None
        self._has_ended = True
        self._stack.__exit__(*exception)

    def prepare_batch(
        self,
        timeout: float | None = None,
        *,
        should_accept: ShouldAccept | None = None,
        workflow: object = None,
    ) -> "Batch | None":
        """The next `data.train_batch_size` groups: submitted prompts first, then rows of the data.
        None if the run has had all its steps, or the data have ended; the last batch may be
        smaller.

        timeout: in seconds. should_accept: replaces that of `rollouts` for groups of the data that
        finish before the next call. workflow: likewise, for groups that start before then. Raises
        TimeoutError (nothing is lost), NothingToWaitFor if `publish` or `resume` must come first,
        and whatever ended the rollouts.
        """
        of_group = self._of_group(should_accept, workflow)
        if not self._has_data:
            raise UserError(
                "prepare_batch takes rows of data, but there is no data: pass data=..., or submit "
                "and wait"
            )

        self._entered.intake.open_data(of_group)
        return self._take(self.config.data.train_batch_size, timeout)

    def submit(
        self,
        row: Mapping[str, object],
        *,
        should_accept: ShouldAccept | None = None,
        workflow: object = None,
    ) -> None:
        """Submit a prompt with the columns of a data row. It starts as soon as staleness allows.

        should_accept, workflow: replace those of `rollouts` for this group. Raises UserError for an
        unusable row, or if data.domains allocate the groups of every step.
        """
        self._submit([row], should_accept, workflow)

    def rollout_batch(
        self,
        rows: Sequence[Mapping[str, object]],
        timeout: float | None = None,
        *,
        should_accept: ShouldAccept | None = None,
        workflow: object = None,
    ) -> "Batch":
        """Submit rows, or none of them if one is unusable, and wait for their groups.
        should_accept, workflow: as in `submit`. Raises what `submit` and `wait` raise."""
        self._submit(rows, should_accept, workflow)
        return self.wait(len(rows), timeout)

    def _submit(
        self,
        rows: Sequence[Mapping[str, object]],
        should_accept: ShouldAccept | None,
        workflow: object,
    ) -> None:
        from distflow.launch.data_sources import encode_row

        of_group = self._of_group(should_accept, workflow)
        self._refuse_domains("submit")
        numbers = range(self._num_submitted + 1, self._num_submitted + 1 + len(rows))
        encoded = [
            encode_row(row, number, self.config, self._pipeline, self.tokenizer)
            for row, number in zip(rows, numbers, strict=True)
        ]
        self._num_submitted += len(rows)
        for each in encoded:
            self._entered.intake.offer(each, of_group)

    def wait(self, count: int, timeout: float | None = None) -> "Batch":
        """The next `count` finished groups, in the order in which they were submitted.

        timeout: in seconds. Raises TimeoutError (nothing is lost), NothingToWaitFor if too few
        groups were submitted or `publish` or `resume` must come first, and whatever ended the
        rollouts.
        """
        self._refuse_domains("wait")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UserError(f"wait({count!r}): pass a number of prompt groups, at least 1")

        batch = self._take(count, timeout)
        if batch is None:
            steps = self._spec_entered.data.total_steps
            raise UserError(
                f"wait({count}): all {steps} steps of the run are done "
                "(trainer.total_training_steps)"
            )

        return batch

    def train(self, batch: "Batch") -> dict[str, float]:
        """Run the pipeline's training nodes on a batch; the columns that they write are added to
        it.

        Returns their metrics, which `publish` records.
        """
        from distflow.pipelines.nodes.objectives_from_config import may_derive_old

        self._refuse_while_shared()
        if self._updates and may_derive_old(self.config):
            raise UserError(
                "train: the only update of this step is done, and afterwards the ratio is no "
                "longer 1. To train on a step in parts, set algorithm.recompute_old_log_probs=true"
            )

        trained, metrics = self._entered.worker.learn(
            sorted(set(batch["group_index"].tolist())), batch
        )
        batch.copy_columns(trained, **{name: name for name in trained.names})
        self._updates.append(metrics)

        return metrics

    def apply(self, batch: "Batch", function: Callable[["Batch"], object]) -> None:
        """Call a function that writes columns of the batch, where the batch is: over Ray the
        function is pickled, and each rank calls it on its own groups."""
        written = self._entered.worker.apply(batch, function)
        batch.copy_columns(written, **{name: name for name in written.names})

    def generate(
        self, prompt_ids: "Sequence[int]", n: int = 1, **sampling: Any
    ) -> "tuple[Segment, ...]":
        """n responses to a tokenized prompt from the weights published last, generated beside the
        run's groups.

        sampling: overrides the config, by the names of `SamplingParams`. Calls in the same order
        after the same `publish` draw the same samples. Raises UserError if the engine cannot do it,
        or shares weights trained since."""
        return self._entered.worker.generate(self._request(prompt_ids, n, sampling))

    async def agenerate(
        self, prompt_ids: "Sequence[int]", n: int = 1, **sampling: Any
    ) -> "tuple[Segment, ...]":
        """`generate` for your own event loop, where many calls may wait at once."""
        request = self._request(prompt_ids, n, sampling)
        self._num_asked += 1
        try:
            return await self._entered.worker.agenerate(request)
        finally:
            self._num_asked -= 1

    def publish(self, metrics: Mapping[str, float] | None = None) -> dict[str, float]:
        """End the step: send its weights to the engine as the next version, while groups continue.
        Then validate, record and save according to `trainer.test_freq` and `trainer.save_freq`.

        metrics: your own, recorded too. Returns all metrics of the step. Raises UserError if no
        batch was taken, or another must be taken first so that no group gets too stale; TrustError
        if a check fails.
        """
        from distflow.data.batch import Batch
        from distflow.runtime.sample_queue.protocol import metrics_of_parts

        worker = self._entered.worker
        self._refuse_early_publish()

        if not self._updates:
            say(
                "warning: publish ends a step in which nothing was trained: call train or "
                "actor.train_step before it"
            )

        common = set.intersection(*(set(part.batch.names) for part in self._parts))
        batches = []
        for part in self._parts:
            batches.append(part.batch.only(name for name in part.batch.names if name in common))
        measured = metrics_of_parts(self._parts)
        measured |= {**_over_updates(self._updates), **(metrics or {}), **worker.reward_metrics()}
        recorded = worker.finish(Batch.concat(batches), measured)
        self._parts = []
        self._updates = []
        self._num_requests = 0

        return recorded

    def pause(self) -> None:
        """Start no further group until `resume`; running groups continue."""
        self._entered.intake.pause(True)

    def resume(self) -> None:
        """Let groups start again."""
        self._entered.intake.pause(False)

    @property
    def version(self) -> int:
        """The version of the weights that were sent last: the number of finished steps."""
        return self._entered.worker.step

    @property
    def stats(self) -> RolloutStats:
        """The number of waiting, running and finished groups."""
        standing = self._entered.intake.standing()
        counts = standing.group_counts
        accepted = counts.complete + counts.consumed
        rejected = sum(counts.dropped.values())
        return RolloutStats(standing.num_offered, counts.issued, counts.running, accepted, rejected)

    @property
    def actor(self) -> "TrainEngine":
        """The policy's train engine; over Ray only `forward` and `train_step`, whose batches stay
        with the workers."""
        return cast("TrainEngine", _CheckedEngine(self, "actor", self._engine("actor")))

    @property
    def critic(self) -> "TrainEngine":
        """The critic's train engine. Raises UserError if the pipeline has none."""
        return cast("TrainEngine", _CheckedEngine(self, "critic", self._engine("critic")))

    @property
    def ref(self) -> "Scorer":
        """The frozen reference policy. Raises UserError if the pipeline has none."""
        return cast("Scorer", self._engine("ref"))

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self._entered.worker.resources.tokenizer

    @property
    def run(self) -> Run:
        """The record of the run, while it runs and afterwards."""
        return Run(self.config.trainer.run_dir)

    @property
    def _entered(self) -> "Running | OwnLoop":
        if self._running is None:
            if self._has_ended:
                raise UserError(
                    "the rollouts have ended with their `with` block: call this inside it"
                )
            raise UserError("enter the rollouts first: with distflow.rollouts(...) as rollouts:")

        return self._running

    def _of_group(self, should_accept: ShouldAccept | None, workflow: object) -> Any:
        """The options of a call for its groups. Raises UserError."""
        from distflow.pipelines.nodes.workflow_rollout import workflow_of_call
        from distflow.runtime.sample_queue.submissions import OfGroup

        _check_should_accept(should_accept)
        made = None
        if workflow is not None and self._entered:
            made = workflow_of_call(workflow, self.config, "reward_fn" in self._pipeline.services)
        return OfGroup(should_accept or self._should_accept, made)

    def _spec(self) -> Any:
        """The spec of the run, without checks of whole steps, since how the user's loop trains is
        unknown."""
        from distflow.launch.run_settings import make_plan
        from distflow.launch.select_pipeline import for_own_loop
        from distflow.runtime.sample_queue.submissions import Submissions

        spec = make_spec_of(self._inputs, self._loaded, has_data=self._has_data)
        if not self._has_data:
            if spec.config.trainer.total_training_steps is None:
                raise UserError(
                    "without data the number of steps is unknown: set trainer.total_training_steps"
                )

            spec = replace(
                spec, description={**spec.description, "data": "prompts submitted by the loop"}
            )

        spec = replace(spec, checks_steps=False)
        self.config = spec.config
        return replace(
            spec, plan=make_plan(spec.config, for_own_loop(spec, Submissions()).pipeline())
        )

    def _refuse_early_publish(self) -> None:
        """Raises UserError if a batch must be taken first."""
        if not self._parts:
            raise UserError(
                "publish ends a step, but no batch was taken since the last: prepare_batch or wait "
                "first"
            )

        owed = self._entered.intake.standing().num_owed
        if owed:
            plan = self._spec_entered.data
            raise UserError(
                f"publish: {owed} more prompt groups must be taken first, or they would be trained "
                f"on with a staleness above {plan.max_staleness} (async.max_staleness). A version "
                f"consumes data.train_batch_size={plan.consumer_batch} groups: set it to the "
                f"number that you train on, or wait({owed})"
            )

    def _refuse_domains(self, method: str) -> None:
        if self.config.data.domains:
            raise UserError(
                f"{method}: the groups of a step are divided over data.domains: use prepare_batch"
            )

    def _take(self, wanted: int, timeout: float | None) -> "Batch | None":
        running = self._entered
        try:
            part = running.worker.take(
                wanted, None if timeout is None else time.monotonic() + timeout
            )
        # a thread may still be waiting for this call, and would take groups meant for later
        except KeyboardInterrupt:
            running.intake.fail(
                UserError("a wait for groups was interrupted: call distflow.rollouts again")
            )
            raise

        if part is None:
            return None
        self._parts.append(part)
        return part.batch

    def _engine(self, name: str) -> Any:
        engine = getattr(self._entered.worker.resources, name)
        if engine is None:
            raise UserError(
                f"the pipeline '{self._pipeline.graph_id}' has no {name}: none of its nodes uses "
                "one"
            )

        return engine

    def _request(
        self, prompt_ids: "Sequence[int]", n: int, sampling: Mapping[str, Any]
    ) -> "GenerateRequest":
        from distflow.rollout.engine import GenerateRequest, Stream

        worker = self._entered.worker
        spec = self._spec_entered

        if isinstance(prompt_ids, str) or not all(isinstance(token, int) for token in prompt_ids):
            raise UserError(
                f"generate: {prompt_ids!r:.80} is not a prompt of token ids: pass "
                "rollouts.tokenizer.encode(text)"
            )

        together = any({"actor", "rollout"} <= {*rank.engines} for rank in spec.plan.ranks)
        if self._updates and spec.shares_weights and together:
            raise UserError(
                "generate: the engine computes with weights that were trained since the last "
                "publish, and have no version yet: publish first, or set async.max_staleness=1, "
                "where it has weights of its own"
            )

        self._num_requests += 1
        stream = Stream(spec.config.trainer.seed, "own", worker.step, self._num_requests)
        return GenerateRequest(
            tuple(prompt_ids), tuple(range(n)), replace(spec.sampling, **sampling), stream
        )

    def _refuse_while_shared(self) -> None:
        """At staleness 0 the engine computes with the same weights that an update changes."""
        standing = self._entered.intake.standing()
        num_running = standing.group_counts.running - standing.num_waiting + self._num_asked
        if num_running and self._spec_entered.shares_weights:
            raise UserError(
                f"{num_running} prompt groups or requests are still being generated with the "
                "weights that this would change: wait for them first, or set "
                "async.max_staleness=1, with which the engine has its own weights"
            )


class _CheckedEngine:
    """A `TrainEngine` whose optimizer steps are checked and recorded; the rest is delegated to the
    engine."""

    def __init__(self, rollouts: Rollouts, role: str, engine: "TrainEngine") -> None:
        self._rollouts = rollouts
        self._role = role
        self._engine = engine

    def train_step(self, batch: "Batch", loss_fn: "LossFn") -> dict[str, float]:
        """See `TrainEngine`. Raises TrustError if updates remain non-finite."""
        self._rollouts._refuse_while_shared()
        if missing := [name for name in getattr(loss_fn, "reads", ()) if name not in batch]:
            raise UserError(
                f"{self._role}.train_step: the loss reads the column '{missing[0]}', which the "
                f"batch does not have: write batch['{missing[0]}'] = ... before, or call "
                "rollouts.train(batch), which computes all columns"
            )

        metrics = self._rollouts._entered.worker.train_step(self._role, batch, loss_fn)
        self._rollouts._updates.append(
            {f"{self._role}/{name}": value for name, value in metrics.items()}
        )

        return metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _check_should_accept(should_accept: object) -> None:
    if should_accept is not None and not callable(should_accept):
        raise UserError(
            f"should_accept is {should_accept!r:.80}: pass a function of a group's batch"
        )
    if inspect.iscoroutinefunction(should_accept):
        raise UserError(
            "should_accept is an async function, which would never be awaited: use a synchronous "
            "one"
        )


def _over_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """One set of metrics from those of the updates of a step, as `distflow.train` records them."""
    from distflow.pipelines.nodes.updates import COUNTED

    found = dict[str, float]()
    for name in dict.fromkeys(chain.from_iterable(updates)):
        role, _, metric = name.partition("/")
        having = [update for update in updates if name in update]
        if metric.rpartition("/")[2] in COUNTED:
            found[name] = sum(update[name] for update in having)
            continue

        stepped = [update for update in having if not update.get(f"{role}/empty")]
        values = [update[name] for update in stepped or having]
        found[name] = sum(values) / len(values)

    return found
