"""A prompt group in the rollout loop: its samples, and the columns of its nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distflow.algorithms.advantages.group_estimator_base import sample_scores
from distflow.data.batch import Batch, Written
from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Sample, Segment
from distflow.graph.fields import canonical
from distflow.observe.metrics import Measured
from distflow.rollout.engine import SamplingParams, Stream
from distflow.runtime.run_errors import Failure
from distflow.runtime.sample_queue.protocol import FinishedGroup
from distflow.runtime.sample_rows import scores_of
from distflow.scheduling.group_states import PromptGroup


def rows_by_group(batch: Batch) -> dict[int, list[int]]:
    """The rows of each group of a batch, by group number."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(batch["group_index"].tolist()):
        rows.setdefault(number, []).append(row)
    return rows


@dataclass
class Group:
    """A prompt, its responses, and the results of nodes. `stream` is the random stream of the
    samples."""

    prompt_group: PromptGroup
    row: PromptRow
    params: SamplingParams
    """How samples are drawn."""
    seed: int
    """Of the run."""
    wanted: tuple[int, ...] = ()
    """Indices of the samples; empty for all."""
    samples: list[Sample] = field(default_factory=list)
    """Empty until a node has generated."""
    written: dict[str, Written] = field(default_factory=dict)
    """The columns of later nodes, by name."""
    measured: list[Measured] = field(default_factory=list)
    """Metrics of each node."""
    _columns: Batch | None = field(default=None, repr=False)
    _batch: Batch | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        of = self.prompt_group
        self.stream = Stream(self.seed, of.stream, of.epoch, of.row)
        self.wanted = self.wanted or tuple(range(of.group_size))

    def __len__(self) -> int:
        return len(self.wanted)

    def greedy(self) -> "Group":
        """The same prompt with one response, of the most likely tokens."""
        return Group(
            self.prompt_group, self.row, replace(self.params, greedy=True), self.seed, wanted=(0,)
        )

    def sample(self, index: int, segment: Segment | None, text: str, finish_reason: str) -> Sample:
        """The prompt with one response (None: none yet). text: its tokens decoded, without special
        tokens."""
        segments = [segment] if segment else []
        return sample_of_row(self.prompt_group, self.row, index, segments, text, finish_reason)

    def __contains__(self, name: object) -> bool:
        return name in self.batch()

    def __getitem__(self, name: str) -> object:
        """A column as nodes receive it: `(n,)`, padded `(n, longest)`, or a list."""
        return self.batch()[name]

    def write(self, columns: Mapping[str, Written]) -> None:
        """Store the columns of a node. Raises ValueError if a column does not fit the group."""
        if not columns:
            return

        before = self.written
        self.written = {**before, **{canonical(n): value for n, value in columns.items()}}
        self._batch = None

        try:
            self.batch()
        except (ValueError, TypeError):
            self.written = before
            self._batch = None
            raise

    def set_samples(self, samples: list[Sample]) -> None:
        """Set the group's samples. Raises ValueError if earlier columns do not fit them."""
        self.samples = samples
        self._columns = None
        self._batch = None
        self.batch()

    def batch(self) -> Batch:
        """The group as columns, with the score of each sample on the last token of the policy.

        Cached until the group changes; callers may add columns.
        """
        if self._columns is None:
            samples = self.samples or [self.sample(i, None, "", "stop") for i in self.wanted]
            self._columns = Batch.from_samples(samples, self.params.num_top)

        if self._batch is None:
            batch = self._columns.copy()
            for name, value in self.written.items():
                batch[name] = value
            if "token_level_scores" in batch.names and "scores" not in batch:
                batch["scores"] = sample_scores(batch["token_level_scores"], batch["response_mask"])
            if "scores" in batch and "acc" not in batch:
                batch["acc"] = batch["scores"]
            batch.keep_derived("token_level_scores", "token_level_rewards")
            self._batch = batch

        return self._batch.copy()


def sample_of_row(
    prompt_group: PromptGroup,
    row: PromptRow,
    index: int,
    segments: Sequence[Segment],
    text: str,
    finish_reason: str = "stop",
) -> Sample:
    """Sample `index` of the group of a row. segments: of the response. text: as in
    `Group.sample`."""
    return Sample(
        uid=f"{prompt_group.group_id}-{index}",
        group_index=prompt_group.group_id,
        episode=index,
        segments=[Segment("prompt", tuple(row.prompt_ids), images=row.images), *segments],
        prompt=row.prompt_text,
        response=text,
        domain=row.domain,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info or {},
        finish_reason=finish_reason,
    )


def finished_group(
    prompt_group: PromptGroup, batch: Batch, measured: Sequence[Measured]
) -> FinishedGroup[Batch]:
    """A complete group, for the sample queue. batch: with the columns of all nodes. measured: by
    the nodes."""
    failure = None
    if "reward_errors" in batch and not bool(batch["valid"].any()):
        first = next(filter(None, batch["reward_errors"]), "no score")
        failure = Failure(first, users=True)

    versions = batch.flat("versions")
    versions = versions[versions >= 0]  # only those of the policy's tokens
    return FinishedGroup(
        prompt_group,
        batch,
        int(batch.lengths("sequence").sum()),
        int(versions.min()) if len(versions) else None,
        measured,
        score=mean_score(batch),
        failure=failure,
    )


def mean_score(batch: Batch) -> float | None:
    """The mean of the group's responses that have a score; None if none has."""
    scores = [score for score in scores_of(batch, "token_level_scores") if score is not None]
    return sum(scores) / len(scores) if scores else None
