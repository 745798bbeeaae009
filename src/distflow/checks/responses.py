"""Check: a sample is the engine's response to the row's prompt, with its text, versions and end."""

from itertools import chain

import torch

from distflow.checks.check import NOT_APPLICABLE, Wrong, check, check_same, shortened
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.samples import Sample
from distflow.config.derived_settings import response_limit, trains_scores
from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Segment
from distflow.models.image_inputs import images_of

MOST = 64
MOST_IMAGES = 2
"""Samples whose images are read again."""
BY_ROW = "the row of its group"


@check(
    "responses",
    "prompt, tokens, versions and text of a sample equal those of the row and the engine; a "
    "finished response ends with a stop, any other has the maximum length; the model gets the "
    "pixels of each image's file",
    needs="the built-in generation; for the engine's response, and with domains: samples that this "
    "process generated",
    limit="equal",
)
def check_responses(recorded: RecordedStep) -> str | None:
    _check_pixels(recorded)
    if recorded.config.actor_rollout_ref.rollout.workflow is not None:
        return NOT_APPLICABLE  # "turns" and "episodes" compare what it did
    if not recorded.is_ours("responses"):
        return "a user's node generates the responses"

    is_any_known = False
    for sample in recorded.some_samples(MOST):
        group = recorded.prompt_group(sample)
        if group is None:
            continue

        is_any_known = True
        row = recorded.run.row(group.row)
        if row.rejected_ids is not None and not sample["uid"].endswith("-0"):
            row = row.rejected
        _check_prompt(sample, row)

        requests = recorded.requests(sample)
        if requests:
            request, generation = requests[0]
            _check_generated(sample, generation, group.version)
            check_same(
                sample, "images", _images(sample), list(request.images), "the engine's request"
            )
        elif recorded.record_of(sample) is not None and row.response_ids is None:
            raise Wrong(f"no request to the engine was recorded for sample {sample['uid']}")

        if row.response_ids is None:
            _check_end(recorded, sample)
        else:
            _check_response_of_row(recorded, sample, row)

        # A conversation from the data keeps its special tokens, which mark where each turn begins.
        tokenizer = recorded.run.resources.tokenizer
        ids = sample["response_ids"].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=row.turns is None)
        check_same(sample, "responses", sample["responses"], text, "its decoded tokens")

    if is_any_known:
        return None
    return "no sample's row is known: other processes generated them"


def _images(sample: Sample) -> list[str]:
    return list(chain.from_iterable(sample.get("images", ())))


def _check_prompt(sample: Sample, row: PromptRow) -> None:
    prompt = sample["prompt_ids"].tolist()
    check_same(sample, "prompt_ids", prompt, list(row.prompt_ids), BY_ROW)
    check_same(sample, "domain", sample["domain"], row.domain, BY_ROW)
    check_same(sample, "images", _images(sample), list(row.images), BY_ROW)


def _check_generated(sample: Sample, generation: Segment, version: int) -> None:
    """Check that the sample is the engine's generation. version: of the engine when the group was
    requested."""
    response = sample["response_ids"].tolist()
    check_same(sample, "response_ids", response, list(generation.token_ids), "the engine")

    log_probs = torch.tensor(generation.rollout_log_probs, dtype=torch.float32)
    if not torch.equal(sample["rollout_log_probs"], log_probs):
        raise Wrong(
            f"rollout_log_probs of sample {sample['uid']} are not those that the engine returned"
        )

    versions = sample["versions"].tolist()
    check_same(sample, "versions", versions, list(generation.versions), "the engine")

    if min(generation.versions, default=version) < version:
        raise Wrong(
            f"sample {sample['uid']} was requested when the engine had version {version}, but has "
            f"tokens of version {min(generation.versions)}: the engine went back to older weights"
        )


def _check_response_of_row(recorded: RecordedStep, sample: Sample, row: PromptRow) -> None:
    """The response is that of the data, and its turns are trained on."""
    response = sample["response_ids"].tolist()
    wanted = list(row.response_ids or ())
    check_same(sample, "response_ids", response, wanted, "the data")
    is_full = len(wanted) >= recorded.config.data.max_response_length
    has_end = not trains_scores(recorded.config)
    if has_end and not is_full and wanted[-1] not in recorded.run.resources.stop_token_ids:
        raise Wrong(f"the response of sample {sample['uid']} does not end with a stop token")

    turns = torch.zeros(len(wanted), dtype=torch.bool)
    for start, end in row.turns or ((0, len(wanted)),):
        turns[start:end] = True
    mask = (sample["response_mask"] > 0).tolist()
    check_same(sample, "response_mask", mask, turns.tolist(), "the turns of its row")


def _check_end(recorded: RecordedStep, sample: Sample) -> None:
    """Check that a sample ends with a stop token or string, or else has the maximum length."""
    stops = recorded.sampling(sample).stop
    uid = sample["uid"]
    ids = sample["response_ids"].tolist()
    stop_ids = recorded.run.resources.stop_token_ids
    decode = recorded.run.resources.tokenizer.decode
    text = decode(ids, skip_special_tokens=False)
    before = decode(ids[:-1], skip_special_tokens=False)
    if any(token in stop_ids for token in ids[:-1]) or any(stop in before for stop in stops):
        raise Wrong(f"sample {uid} continues after a stop token or text: {shortened(text)}")

    stopped = bool(ids) and (ids[-1] in stop_ids or any(stop in text for stop in stops))
    expected = "stop" if stopped else "length"
    if sample["finish_reason"] != expected or bool(sample["truncated"]) == stopped:
        counted = "truncated" if sample["truncated"] else "finished"
        raise Wrong(
            f"sample {uid} counts as {counted} ({sample['finish_reason']}), but its {len(ids)} "
            f"tokens {'end' if stopped else 'do not end'} with a stop token or text"
        )

    longest = response_limit(recorded.config, sample["domain"])
    if not stopped and len(ids) != longest:
        raise Wrong(
            f"sample {uid} ended after {len(ids)} of {longest} tokens without a stop: it is a part "
            "of a response, which a weight update or a lost request cut off"
        )


def _check_pixels(recorded: RecordedStep) -> None:
    """What the model gets of some samples' images is what its family's processor makes of each
    file, read again."""
    processor = images_of(recorded.run.resources.tokenizer)
    paths = []
    for sample in recorded.some_samples(MOST_IMAGES):
        paths.extend(_images(sample))
    if processor is None or not paths:
        return

    from PIL import Image

    given = processor.inputs(paths)["pixel_values"]
    start = 0
    for path in paths:
        with Image.open(path) as image:
            made = processor._processor.image_processor(
                images=[image.convert("RGB")], return_tensors="pt"
            )

        wanted = made["pixel_values"]
        number = len(wanted)

        found = given[(slice(start, start + number), *map(slice, wanted.shape[1:]))]
        if not torch.equal(found, wanted):
            raise Wrong(
                f"the model gets other pixels than those of {path}: the image was mixed up with "
                "another, its channels were swapped, or it was changed before the model's "
                "processor read it"
            )

        start += number
