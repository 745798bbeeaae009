"""What a run would take with one change."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distflow.config import Config
from distflow.errors import UserError
from distflow.launch.plans.run_planner import RunPlanner
from distflow.planning.allocation_expression import AllocatedPart, parse_allocation

_OF_REWARDS = ("reward.timeout_s", "reward.num_workers")
_FORMS = "rollout+1, rollout-1, staleness+1, rewards*2, response/2, or key=value"


@dataclass(frozen=True)
class Outcome:
    change: str
    keys: tuple[str, ...]
    """The overrides that the change stands for."""
    seconds: float
    """Of a step."""
    low: float
    """Seconds of a step, by the lower quartile of the steps that the measured run had."""
    high: float
    """By the upper quartile. Without a measured run both are `seconds`."""
    peak: float
    """Bytes of the fullest device."""
    why: str = ""
    """What does not work with the change, or empty."""

    def line(self, before: "Outcome") -> str:
        if self.why:
            return f"{self.change}: {self.why}"
        took = f"a step of {self.seconds:.3g} s"
        if self.low < self.high:
            took += f" ({self.low:.3g} to {self.high:.3g})"
        if self is not before:
            took += f", {self.seconds / before.seconds - 1:+.0%}"
        return f"{self.change}: {took}, at most {self.peak / 1e9:.2f} GB on a device"


def outcomes(planner: RunPlanner, changes: Sequence[str]) -> list[Outcome]:
    """The run as it is, then with each change. Raises UserError for one that is none."""
    keys = {change: keys_of(change, planner.loaded.config) for change in changes}
    if not planner.run.times.rates.scores:
        for change, own in keys.items():
            if any(each.startswith(_OF_REWARDS) for each in own):
                raise UserError(
                    f"--what-if {change}: this plan takes no time for rewards, so the change would "
                    "do nothing: calibrate it by a run (--from RUN), or set --reward-seconds"
                )
    before = _outcome(planner, "as it is", ())
    found = [before]
    for change, own in keys.items():
        try:
            changed = replace(planner, overrides=(*planner.overrides, *own))
            found.append(_outcome(changed, change, own))
        except UserError as error:
            why = f"it cannot run: {' '.join(str(error).split())}"
            found.append(replace(before, change=change, keys=own, why=why))
    return found


def _outcome(planner: RunPlanner, change: str, keys: tuple[str, ...]) -> Outcome:
    run = planner.run
    low, high = run.times.rates.spread
    seconds = run.step_seconds
    why = "" if run.fits else f"it does not fit: {run.excess()}"
    return Outcome(change, keys, seconds, seconds * low, seconds * high, run.fullest.peak, why)


def keys_of(change: str, config: Config) -> tuple[str, ...]:
    """The overrides that a change stands for."""
    match = re.fullmatch(r"(rollout[+-]|staleness\+|rewards\*|response/)([1-9]\d{0,3})", change)
    if match is None:
        if re.fullmatch(r"[+~]*\w+(\.\w+)+=.*", change):
            return (change,)
        raise UserError(f"--what-if {change}: write {_FORMS}")
    what = match[1]
    number = int(match[2])
    if what == "staleness+":
        return (f"async.max_staleness={config.async_.max_staleness + number}",)
    if what == "rewards*":
        return (f"reward.num_workers={config.reward.num_workers * number}",)
    if what == "response/":
        return (f"data.max_response_length={max(1, config.data.max_response_length // number)}",)
    more = -number if what == "rollout-" else number
    return (f"trainer.allocation='{_moved(change, config, more)}'",)


def _moved(change: str, config: Config, number: int) -> str:
    """The allocation after so many devices moved from training to generation."""
    text = config.trainer.allocation
    groups = parse_allocation(text).groups if text else ()
    more = {}
    for group in groups:
        roles = [part.role for part in group]
        if roles == ["rollout"]:
            more[group] = number
        elif "actor" in roles:
            more[group] = -number
    if sorted(more.values()) != sorted((number, -number)):
        raise UserError(
            f"--what-if {change}: generation and training have the same devices, and none can be "
            "moved"
        )
    sides = []
    for group in groups:
        parts = [_resized(part, more.get(group, 0), change) for part in group]
        sides.append("|".join(parts))
    return "+".join(sides)


def _resized(part: AllocatedPart, more: int, change: str) -> str:
    sizes = part.sizes
    of_each_copy = sizes.num_devices // sizes.data
    devices = sizes.num_devices + more
    if devices < 1 or devices % of_each_copy:
        raise UserError(
            f"--what-if {change}: the {part.role} would have {devices} devices, and each copy of "
            f"its model takes {of_each_copy}"
        )
    text = f"{part.engine}[{part.role}]:d{devices // of_each_copy}"
    for letter, size in (("t", sizes.tensor), ("p", sizes.pipeline), ("c", sizes.context)):
        if size > 1:
            text += f"{letter}{size}"
    return text
