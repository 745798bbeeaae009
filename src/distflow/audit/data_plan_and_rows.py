"""Checks: the data plan matches the config, and the rows match their files, read again by code other than the loader's;
the shares that a curriculum gives to the domains, and the rows that the difficulty filter skips, follow from what each
step reports."""

import csv
import json
import math
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from distflow.audit.recorded_step import NOT_APPLICABLE, AuditedRun, RecordedStep, Sample, Wrong, by_group_of, check
from distflow.config import Config
from distflow.config.derived_settings import filters_groups, is_rl, reads_pairs, reward_functions
from distflow.config.keys.data import DataConfig
from distflow.data.encoded_prompts import PromptRow, PromptRows
from distflow.data.sources import BUILTIN_FOLDER
from distflow.models.image_inputs import images_of
from distflow.rewards.startup_checks import find_broken
from distflow.scheduling.data_plan import UNKNOWN_ROWS
from distflow.scheduling.group_states import PromptGroup
from distflow.untrusted_files import matching_files

NUM_ROWS, NUM_PROMPTS, MOST_ROWS, MOST_BYTES = 256, 32, 2**14, 2**28
_ORIGIN = re.compile(r"(.+?)(?::|, row |, entry )(\d+)")


@check(
    "data",
    "prompt, response, turns, ground truth, domain, tag and extra info of some rows of the training and validation "
    "data equal those in their files, and each row of a file is either used or counted as excluded for its length "
    "or pass rate; with data.lazy the rows keep the order of the files; the data plan follows from the config",
    needs=".jsonl, .json, .csv and .parquet files, and built-in ones, up to 256 MiB; distflow train",
    limit=f"equal; {NUM_ROWS} rows per file, and the tokens of {NUM_PROMPTS} prompts",
)
def audit_data(run: AuditedRun) -> str | None:
    domains, validation = run.spec.config.data.domains, run.spec.validation
    _check_plan(run)
    trained = [name for name, domain in domains.items() if domain.weight] or [""]
    unread = _audit_set(run, "train", trained, run.spec.rows)
    by_tags = [chosen for chosen in validation if domains and not domains[chosen.name].val_files]
    for sets in (by_tags, *([chosen] for chosen in validation if chosen not in by_tags)):
        rows = sets[0].rows if len(sets) == 1 else [row for chosen in sets for row in chosen.rows]
        unread |= _audit_set(run, "val", [chosen.name if domains else "" for chosen in sets], rows)
    return f"not read a second time: {', '.join(sorted(unread))}" if unread else None


def _check_plan(run: AuditedRun) -> None:
    spec, config, data = run.spec, run.spec.config, run.spec.config.data
    steps = config.trainer.total_training_steps
    generates, num_groups = is_rl(config), config.trainer.total_epochs * len(spec.rows)
    wanted: dict[str, Any] = {
        "shuffle": data.shuffle,
        "seed": data.seed if data.shuffle else 0,
        "consumer_batch": data.train_batch_size,
        "group_size": config.actor_rollout_ref.rollout.n if generates else 1 + reads_pairs(config),
        "max_concurrent": config.async_.max_concurrent_rollouts,
        "max_staleness": min(spec.data.max_staleness, config.async_.max_staleness if generates else 0),  # at most
        "total_steps": steps or math.ceil(num_groups / data.train_batch_size),
        "total_groups": None if steps or data.domains else num_groups,
        "domains": {name: (own.weight, own.n) for name, own in data.domains.items() if own.weight},
    }
    domains = {each.name: (each.weight, each.group_size) for each in spec.data.domains}
    for name, value in wanted.items():
        if (found := {**vars(spec.data), "domains": domains}[name]) != value:
            raise Wrong(f"{name} of the data plan is {found}, but according to the config it should be {value}")


def _audit_set(run: AuditedRun, split: str, domains: Sequence[str], rows: Sequence[PromptRow]) -> set[str]:
    """Returns the sources that have no second reader. domains: those that share files by tags are passed together."""
    spec, read, num_rows, num_wanted, named = run.spec, cache(_read), dict[str, int](), 0, list[str]()
    data = spec.config.data
    tagged = [domain for domain in domains if domain and not getattr(data.domains[domain], f"{split}_files")]
    domain_of_tag = {tag: domain for domain in tagged for tag in data.domains[domain].tags}
    streams = split == "train" and any(source.num_rows == UNKNOWN_ROWS for source in spec.data.sources)
    for domain in domains:
        owner, most = "" if domain in tagged else domain, _setting(spec.config, domain, f"{split}_max_samples")
        files = _files(_setting(spec.config, owner, f"{split}_files"))
        named += files
        found = [read(_path(file)) for file in files if not streams and _is_readable(_path(file))]
        num_rows[owner] = num_own = sum(len(numbers) for numbers, _ in found)
        if domain in tagged:
            num_own = sum(domain_of_tag.get(_tag(data, get, n)) == domain for numbers, get in found for n in numbers)
        num_wanted += num_own if most < 0 else min(num_own, most)
    unread = {file for file in named if not _is_readable(_path(file))}
    names = ["train"] if split == "train" else [f"val {domain}" for domain in domains]
    num, most = len(rows) + sum(spec.num_left_out[name] for name in names), sum(num_rows.values())
    if not streams and not unread and not num_wanted <= num <= most:  # more if bad rows are among the first
        raise Wrong(
            f"{num_wanted:,} rows of the {split}_files are wanted, but {len(rows):,} are used and {num - len(rows):,} "
            "counted as left out: rows were lost or duplicated"
        )
    places = _first_rows(run) if streams else range(len(rows))
    drawn = random.Random(len(rows)).sample(places, min(NUM_ROWS * len(named), len(places)))
    usable = list(rows.some(drawn) if isinstance(rows, PromptRows) else (rows[index] for index in drawn))
    if split == "train" and data.lazy:
        _check_order(run, usable, read)
    elif split == "train" and num > len(rows) and not tagged and len(rows) <= MOST_ROWS and data.bad_rows == "error":
        used = [(Path(place[1]), int(place[2])) for row in rows if (place := _ORIGIN.fullmatch(row.origin))]
        for domain in domains:
            _check_left_out(run, domain, set(used), read)
    for number_drawn, row in enumerate(usable):
        place = _ORIGIN.fullmatch(row.origin)
        if place is not None and _is_readable(path := Path(place[1])):
            get, number = read(path)[1], int(place[2])
            tag = _tag(data, get, number) if row.domain in tagged or split == "val" else ""
            if tag != row.tag:
                raise Wrong(f"the tag of {row.origin} is {row.tag!r}, but {tag!r} in the file")
            domain = domain_of_tag.get(tag, row.domain) if domains != [""] else ""
            _compare(run, row, get(number), domain)
            if row.turns is None and row.rejected_ids is None and number_drawn < NUM_PROMPTS * len(named):
                _compare_prompt(run, row, get(number), domain)
            if row.rejected_ids is not None:
                _compare_pair(run, row)
            elif row.response_ids is not None:
                _compare_response(run, row, get(number))
    return unread


def _check_order(run: AuditedRun, rows: Sequence[PromptRow], read: Callable[[Path], Any]) -> None:
    """With `data.lazy` a row's number is its position in its files, which are read again when they end."""
    config, first = run.spec.config, 0
    for source in run.spec.data.sources:
        tags = config.data.domains[source.name].tags if source.name else ()
        by_tags = tags and not config.data.domains[source.name].train_files
        paths = list(map(_path, _files(_setting(config, "" if by_tags else source.name, "train_files"))))
        own, most = range(first, first + source.num_rows), _setting(config, source.name, "train_max_samples")
        first += source.num_rows
        own_rows, order = [row for row in rows if row.index in own], list[tuple[Path, int]]()
        last = max((row.index for row in own_rows), default=first) - own.start
        for path in map(Path.resolve, paths if own_rows and all(map(_is_readable, paths)) else ()):
            if len(order) <= last:  # do not read files that are not due
                numbers, get = read(path)
                order += [(path, n) for n in numbers if not by_tags or _tag(config.data, get, n) in tags]
        order = order[: most if most >= 0 else None]
        for row in own_rows if order else []:
            place, wanted = _ORIGIN.fullmatch(row.origin), order[(row.index - own.start) % len(order)]
            if place is not None and (Path(place[1]).resolve(), int(place[2])) != wanted:
                by_order = f"row {wanted[1]} of {wanted[0]}"
                raise Wrong(f"row {row.index} of the data is {row.origin}, but by the order of its files {by_order}")


def _check_left_out(run: AuditedRun, domain: str, used: Collection[object], read: Callable[[Path], Any]) -> None:
    """Check that unused rows have too many tokens, another pass rate, or tests that no response can pass."""
    config, functions = run.spec.config, reward_functions(run.spec.config)
    paths = list(map(_path, _files(_setting(config, domain, "train_files"))))
    if not is_rl(config) or _setting(config, domain, "train_max_samples") >= 0 or not all(map(_is_readable, paths)):
        return
    left = [(path, n) for path in paths for n in read(path)[0] if (path, n) not in used]
    low, high = _setting(config, domain, "pass_rate") or (-math.inf, math.inf)
    for path, n in random.Random(len(left)).sample(left, min(NUM_PROMPTS, len(left))):
        record = read(path)[1](n)
        rate = float(_at(record, _setting(config, domain, "pass_rate_key")) or 0.0) if high < math.inf else 0.0
        named = domain or str(_at(record, config.data.domain_key) or "default")
        parts = [part.name for part in functions.get(named) or functions.get("default", ())]
        extra = record | (inner if isinstance(inner := record.get("extra_info"), dict) else {})
        is_broken = find_broken(parts, _at(record, _setting(config, domain, "answer_key")), extra)
        encoded = _prompt_of(run, record, domain)
        if encoded and low <= rate <= high and len(encoded[1]) <= config.data.max_prompt_length and not is_broken:
            raise Wrong(f"row {n} of {path} is left out, but it is neither too long nor outside of data.pass_rate")


def _first_rows(run: AuditedRun) -> list[int]:
    """The first rows of each source if some have an unknown number of rows."""
    found, first = list[int](), 0
    for source in run.spec.data.sources:
        found += range(first, first + min(source.num_rows, NUM_ROWS))
        first += source.num_rows
    return found


def _tag(data: DataConfig, get: Callable[[int], Any], number: int) -> str:
    """The tag of a row by its number; empty for an unreadable row."""
    try:
        return "" if data.tag_key is None else str(_at(get(number), data.tag_key))
    except (ValueError, AttributeError):
        return ""


def _compare(run: AuditedRun, row: PromptRow, record: Mapping[str, Any], domain: str) -> None:
    config = run.spec.config
    own = {name: _setting(config, domain, f"{name}_key") for name in ("prompt", "answer", "response", "messages")}
    named = domain or _at(record, config.data.domain_key)
    used = {*own.values(), "extra_info", *([] if domain else [config.data.domain_key])}
    used |= {config.data.image_key} if images_of(run.resources.tokenizer) else set()
    expected: dict[str, Any] = {"ground truth": _at(record, own["answer"])}
    expected["domain"] = "default" if named in (None, "") else str(named)
    expected |= {name: value for name, value in record.items() if name not in used and value is not None}
    expected |= inner if isinstance(inner := record.get("extra_info"), dict) else {}
    found = {"ground truth": row.ground_truth, "domain": row.domain, **(row.extra_info or {})}
    for name, value in expected.items():
        with suppress(TypeError):  # dates, decimals and bytes, which the loader converts, are not compared
            if json.dumps(found.get(name), sort_keys=True) != json.dumps(value, sort_keys=True):
                raise Wrong(f"{name} of {row.origin} is {found.get(name)!r:.80}, but {value!r:.80} in the file")


def _prompt_of(run: AuditedRun, record: Mapping[str, Any], domain: str) -> tuple[str, list[int]] | None:
    """The prompt's text and tokens, uncut; None for messages with more than roles and texts."""
    config, tokenizer = run.spec.config, run.resources.tokenizer
    own = {name: _setting(config, domain, name) for name in ("prompt_key", "prompt_format", "prompt_template")}
    asked = _at(record, own["prompt_key"])
    is_text = isinstance(asked, str) and own["prompt_format"] == "text"
    if isinstance(asked, str):
        text = asked if own["prompt_template"] is None else own["prompt_template"].format(prompt=asked)
        asked = [{"role": "user", "content": text}]
    if not is_text:
        if not isinstance(asked, list) or any({*map(type, each.values())} != {str} or len(each) != 2 for each in asked):
            return None
        system = _setting(config, domain, "system_prompt")
        first = [{"role": "system", "content": system}] if system and asked[0]["role"] != "system" else []
        options = {"enable_thinking": _setting(config, domain, "enable_thinking")}
        options |= config.data.apply_chat_template_kwargs | (record.get("chat_template_kwargs") or {})
        tools = _at(record, config.data.tools_key) or None
        text = tokenizer.apply_chat_template(
            [*first, *asked], tools=tools, tokenize=False, add_generation_prompt=True, **options
        )
    return text, list(tokenizer(text, add_special_tokens=is_text, verbose=False)["input_ids"])


def _compare_prompt(run: AuditedRun, row: PromptRow, record: Mapping[str, Any], domain: str) -> None:
    """Compare the prompt's text and tokens, cut if there are too many."""
    data = run.spec.config.data
    if row.images:
        _compare_images(row, _at(record, str(data.image_key)))
        return
    found = _prompt_of(run, record, domain)
    if found is None:
        return
    text, ids = found
    if len(ids) > data.max_prompt_length:
        most = data.max_prompt_length
        head = {"left": 0, "middle": most // 2, "right": most}[data.truncation]
        ids = [*ids[:head], *ids[len(ids) - most + head :]]
    elif row.prompt_text != text:
        raise Wrong(f"the prompt of {row.origin} is {row.prompt_text!r:.80}, but {text!r:.80} by the file")
    if list(row.prompt_ids) != ids:
        raise Wrong(f"the prompt of {row.origin} has the tokens {list(row.prompt_ids)!s:.80}, not {ids!s:.80}")


def _compare_images(row: PromptRow, given: object) -> None:
    """Compare the number of images, and the pixels of those that the row holds as bytes."""
    from PIL import Image

    listed = given if isinstance(given, list) else [given]
    if len(listed) != len(row.images):
        raise Wrong(f"{row.origin} has {len(row.images)} images, and {len(listed)} in the file")
    for path, value in zip(row.images, listed, strict=True):
        content = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(content, bytes):
            with Image.open(BytesIO(content)) as there, Image.open(path) as here:
                if there.convert("RGB").tobytes() != here.tobytes():
                    raise Wrong(f"an image of {row.origin} has other pixels than in the file")


def _compare_response(run: AuditedRun, row: PromptRow, record: Mapping[str, Any]) -> None:
    """For fine-tuning, compare the tokens of the text, or check that turns contain all that the assistant says."""
    tokenizer, data, ids = run.resources.tokenizer, run.spec.config.data, list(row.response_ids or ())
    response, messages = _at(record, data.response_key), _at(record, data.messages_key)
    if row.turns is None and isinstance(response, str):
        tokens = tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]
        if ids not in (tokens, [*tokens, tokenizer.eos_token_id]) and len(ids) < data.max_response_length:
            raise Wrong(f"the response of {row.origin} is not the tokens of its text in the file, {response!r:.80}")
    messages = json.loads(messages) if isinstance(messages, str) else messages or ()
    said = [message.get("content") or "" for message in messages if message.get("role") == "assistant"]
    ids, before, same = [*row.prompt_ids, *ids], 0, len(said) == len(row.turns or ())
    for content, turn in zip(said, row.turns or (), strict=True) if same else ():
        start, end = (len(row.prompt_ids) + place for place in turn)
        whole, own = (tokenizer.decode(ids[place:end]) for place in (before, start))
        if content.strip() in whole and content.strip() not in own:
            raise Wrong(f"a turn of the assistant in {row.origin} is not trained on whole: {content!r:.80}")
        before = end


def _compare_pair(run: AuditedRun, row: PromptRow) -> None:
    """Check that each text of the pair contains its response, which was compared with the file."""
    data, extra = run.spec.config.data, dict[str, Any](row.extra_info or {})
    for name, ids in ((data.chosen_key, row.response_ids), (data.rejected_key, row.rejected_ids)):
        found = extra[name][-1]["content"] if isinstance(extra[name], list) else extra[name]
        text = run.resources.tokenizer.decode([*row.prompt_ids, *(ids or ())])
        if found.strip() not in text:
            raise Wrong(f"the text of '{name}' in {row.origin} is {text!r:.80}, without {found!r:.80} of the file")


def _setting(config: Config, domain: str, name: str) -> Any:
    value = getattr(config.data.domains[domain], name) if domain else None
    return getattr(config.data, name) if value is None else value


def _at(record: Mapping[str, Any], name: str) -> Any:
    """The value of a column; a dotted name that is not a column is a path."""
    first, _, rest = name.partition(".")
    inner = record.get(name, record.get(first))
    return _at(inner, rest) if name not in record and rest and isinstance(inner, dict) else record.get(name)


def _files(named: Sequence[str]) -> list[str]:
    """The files, with those of patterns in the order of their names."""
    return [each for file in named for each in (list(map(str, matching_files(file))) or [file])]


def _path(file: str) -> Path:
    builtin = file.removeprefix("builtin:")
    return Path(file).expanduser() if builtin == file else BUILTIN_FOLDER / f"{builtin}.jsonl"


def _read(path: Path) -> tuple[Sequence[int], Callable[[int], Any]]:
    """The row numbers in the file, as used in messages, and a function that returns a row by its number."""
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        return range(1, table.num_rows + 1), lambda number: table.slice(number - 1, 1).to_pylist()[0]
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            names, *rows = [(reader.line_num, values) for values in reader if values]
        lines = {line: {name: value for name, value in zip(names[1], own, strict=False) if value} for line, own in rows}
        return list(lines), lines.__getitem__
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if path.suffix.lower() == ".json" and content.lstrip().startswith(b"["):
        entries = json.loads(content)
        return range(1, len(entries) + 1), lambda number: entries[number - 1]
    texts = content.split(b"\n")
    return [number for number, text in enumerate(texts, 1) if text.strip()], lambda number: json.loads(
        texts[number - 1]
    )


def _is_readable(path: Path) -> bool:
    suffixes = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
    return path.suffix.lower() in suffixes and path.is_file() and path.stat().st_size <= MOST_BYTES


ROUNDING = 2e-6
"""Shares are multiples of a millionth."""


@check(
    "curriculum",
    "the shares of `learnability` are the weights times the moving means of p · (1 - p), which is computed "
    "from the groups of each step; the number of groups of each domain follows from the shares so far",
    needs="data.curriculum; for shares: the function `learnability`; for groups: one rank; for reports: also "
    "async.max_staleness=0, no filter and no oversampling",
    limit=f"{ROUNDING:g} of a share, 1 + 1/2 + … + 1/n groups with n domains",
)
def audit_curriculum(recorded: RecordedStep) -> str | None:
    data, state, metrics = recorded.run.spec.data, recorded.run.state, recorded.metrics
    if data.curriculum is None:
        return NOT_APPLICABLE
    weights = {domain.name: domain.weight for domain in data.domains}
    if recorded.step == 0:
        due = dict.fromkeys(weights, 0.0)
        state["curriculum"] = {"step": 0, "due": due, "means": {}, "changes": [[0, _normal(weights)]]}
    past: dict[str, Any] = state.get("curriculum", {})
    if past.get("step") != recorded.step:
        return "steps before this one were not followed"
    past["step"] += 1
    planned = [shares for first, shares in past["changes"] if first <= recorded.step][-1]
    for name, share in planned.items():
        found = metrics[f"domains/{name}/share"]
        if data.curriculum.function == "learnability" and abs(found - share) > ROUNDING:
            raise Wrong(f"domain '{name}' has the share {found:g}, and should have {share:g}")
        past["due"][name] += found * data.consumer_batch
        if (now := metrics.get(f"domains/{name}/learnability")) is not None:
            smoothing = data.curriculum.smoothing
            past["means"][name] = smoothing * past["means"].get(name, now) + (1 - smoothing) * now
    if recorded.run.ranks.size == 1:
        _check_groups(recorded, past["due"])
        _check_measured(recorded, past)
    if (recorded.step + 1) % data.curriculum.every == 0:
        worth = {name: weight * max(past["means"].get(name, 0.25), 0.05) for name, weight in weights.items()}
        past["changes"].append([recorded.step + 1 + data.max_staleness, _normal(worth)])
        del past["changes"][: -2 - data.max_staleness]
    return None


def _normal(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _check_groups(recorded: RecordedStep, due: Mapping[str, float]) -> None:
    counts, batch = recorded.run.state.get("domains", {}), recorded.run.spec.data.consumer_batch
    if sum(counts.values()) == batch * (recorded.step + 1):  # no step was short
        most = sum(1 / number for number in range(1, len(due) + 1))
        rounding = ROUNDING * batch * (recorded.step + 1)
        for name, wanted in due.items():
            if not -1 - rounding < wanted - counts.get(name, 0) <= most + rounding:
                had = f"has had {counts.get(name, 0)} groups"
                raise Wrong(f"domain '{name}' {had}, but by its shares in all steps {wanted:.1f}")


def _check_measured(recorded: RecordedStep, past: dict[str, Any]) -> None:
    """past: among others `told`, by domain since the last change of shares: the sum of p · (1 - p) over the groups,
    their number, and how many of their responses are correct and have a score."""
    data, config = recorded.run.spec.data, recorded.config
    filters = filters_groups(config) or config.algorithm.filter_groups.should_accept
    if data.max_staleness or data.oversampling or filters or data.curriculum is None:
        return
    told = past.setdefault("told", {})
    for group in by_group_of(recorded.samples).values():
        if scored := [float(sample["acc"]) >= 1 - 1e-6 for sample in group if sample["valid"]]:
            before, p = told.get(str(group[0]["domain"]), (0.0, 0, 0, 0)), fmean(scored)
            now = (p * (1 - p), 1, sum(scored), len(scored))
            told[str(group[0]["domain"])] = [one + other for one, other in zip(before, now, strict=True)]
    if (recorded.step + 1) % data.curriculum.every:
        return
    past["told"] = {}
    for name in (domain.name for domain in data.domains):
        total, number, num_right, num_scored = told.get(name, (0.0, 0, 0, 0))
        means = {"learnability": (total, number), "accuracy": (num_right, num_scored)}
        for what, (own, count) in means.items():
            found, wanted = recorded.metrics.get(f"domains/{name}/{what}"), own / count if count else None
            if (found is None) != (wanted is None) or abs((found or 0.0) - (wanted or 0.0)) > ROUNDING:
                raise Wrong(f"the curriculum was told the {what} {found} of domain '{name}'; its groups show {wanted}")


RIGHT = 1 - 1e-6
EASY, HARD = "async/dropped/too_easy", "async/dropped/too_hard"


@check(
    "skipped_rows",
    "a row is skipped for skip_epochs epochs if its share of correct responses was outside data.skip_outside, and "
    "no other row is skipped",
    needs="one worker and source, the run's start, and neither staleness, filter, oversampling nor rows that repeat in "
    "a step",
    limit="equal",
)
def audit_skipped_rows(recorded: RecordedStep) -> str | None:
    data, state, config = recorded.run.spec.data, recorded.run.state, recorded.config
    if data.skips is None:
        return NOT_APPLICABLE
    filters = filters_groups(config) or config.algorithm.filter_groups.should_accept is not None
    is_mixed = data.max_staleness or data.oversampling or filters or data.domains
    if is_mixed or len(recorded.run.spec.plan.ranks) > 1 or data.num_rows < 2 * data.consumer_batch:
        return "which rows were known when a group started does not follow from the steps"
    _check_in_a_row(recorded, data.skips.epochs)
    if recorded.step == 0:
        state["skips"] = {"step": 0, "next": 0, "left": {}, "skipped": {}}
    kept = state.get("skips", {})
    if kept.get("step") != recorded.step or "reward_errors" not in recorded.batch:
        return "steps before this one were not followed"
    groups, left = by_group_of(recorded.samples), kept["left"]
    row_of, in_turn = dict[int, str](), 0
    for number in range(kept["next"], max(groups, default=-1) + 1):  # all groups of a step start before any has a score
        row = row_of[number] = str(recorded.place_of(PromptGroup(number, 0, 0, data.group_size, 0))[1])
        in_turn = 0 if number in groups else in_turn + 1
        if in_turn == data.num_rows:  # the next row is taken in any case
            state["skips"] = {}
            return "all rows of an epoch were skipped"
        if number in groups and row in left:
            raise Wrong(f"group {number} is of row {row}, which data.skip_outside skips {left[row][0]} more times")
        if number not in groups and row in left:
            name = left[row][1]
            kept["skipped"][name] = kept["skipped"].get(name, 0) + 1
            left[row][0] -= 1
            if not left[row][0]:
                del left[row]
    (low, high), reasons = next(iter(data.skips.outside.values())), dict[str, set[str]]()
    for number, group in groups.items():
        if (share := _share_right(group)) is not None:
            reasons.setdefault(row_of[number], set()).add(EASY if share > high else HARD if share < low else "")
    if any(len(found) > 1 for found in reasons.values()):
        state["skips"] = {}
        return "a row came twice in a step"
    left.update({row: [data.skips.epochs, name] for row, (name,) in reasons.items() if name})
    kept["step"], kept["next"] = recorded.step + 1, max([kept["next"] - 1, *groups]) + 1
    for name in (EASY, HARD):
        found, expected = recorded.metrics.get(name, 0.0), kept["skipped"].get(name, 0)
        if found != expected:
            raise Wrong(f"{found:.0f} rows were skipped so far as {name}, but their responses give {expected}")
    return None


def _check_in_a_row(recorded: RecordedStep, epochs: int) -> None:
    """No row is skipped more than `epochs` times in a row. Goes on where it is not known which rows must be skipped."""
    data, groups = recorded.run.spec.data, {*recorded.batch["group_index"].tolist()}
    if recorded.step == 0:
        recorded.run.state["skipped_in_a_row"] = {"step": 0, "next": 0, "times": {}}
    kept = recorded.run.state.get("skipped_in_a_row", {})
    metrics = recorded.metrics
    dropped_else = metrics.get("async/rejected", 0.0) - metrics.get(EASY, 0.0) - metrics.get(HARD, 0.0)
    if kept.get("step") != recorded.step or dropped_else:
        return
    times, others = kept["times"], 0
    for number in range(kept["next"], max(groups, default=-1) + 1):
        row = str(recorded.place_of(PromptGroup(number, 0, 0, data.group_size, 0))[1])
        times[row], others = (0, 0) if number in groups else (times.get(row, 0) + 1, others + 1)
        if times[row] > epochs and others < data.num_rows:
            raise Wrong(f"row {row} was skipped {times[row]} times in a row, but data.skip_epochs is {epochs}")
    kept["step"], kept["next"] = recorded.step + 1, max([kept["next"] - 1, *groups]) + 1


def _share_right(group: Sequence[Sample]) -> float | None:
    rights = [float(sample["acc"]) >= RIGHT for sample in group if sample["valid"]]
    return sum(rights) / len(rights) if rights else None
