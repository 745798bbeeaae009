"""AReaL's allocation expression: which engine runs which role on how many devices.

allocation = devices ("+" devices)*              each on devices of its own
devices    = part ("|" part)*                    all on the same devices
part       = ENGINE ["[" ROLE "]"] ":" sizes | ENGINE "." sizes | sizes
sizes      = (LETTER NUMBER)+                    d data, c context, t (or m) tensor, e expert

The last two are AReaL's older forms, `sglang.d4p1m1+d2` and `sglang:d4+d2`: sizes alone, after the
rollout's engine, are those of a trainer with FSDP.
Keys that are not set follow the allocation; a key that contradicts it is an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

from distflow.builtin_names import (
    ROLLOUT_ENGINES,
    TRAIN_ENGINES,
    RolloutEngineEntry,
    TrainEngineEntry,
)
from distflow.config import Config, Loaded, with_changes
from distflow.config.compose.fit_defaults_to_data import is_free
from distflow.config.migration.tables import find_synonyms
from distflow.errors import UserError, hint
from distflow.graph.node_roles import ENGINES
from distflow.planning.layouts import Sizes, alternatives

KEY = "trainer.allocation"
STRATEGY = "actor_rollout_ref.actor.strategy"
NAME = "actor_rollout_ref.rollout.name"
_LETTERS = {"d": "data", "c": "context", "t": "tensor", "m": "tensor", "e": "expert"}
_NOT_THERE_YET = {"p": "pipeline"}
_ENGINES: dict[str, RolloutEngineEntry | TrainEngineEntry] = {**ROLLOUT_ENGINES, **TRAIN_ENGINES}
_PART = re.compile(r"([a-z]\w*)(?:\[(\w+)\]:|[:.])((?:[a-zA-Z]\d{1,6})+)", re.ASCII)
_SIZES_ALONE = re.compile(r"(?:[a-zA-Z]\d{1,6})+", re.ASCII)


@dataclass(frozen=True)
class AllocatedPart:
    """An engine for a role, and its sizes. text: as written."""

    engine: str
    role: str
    sizes: Sizes
    text: str

    def refuse(self, what: str) -> NoReturn:
        """Raises UserError that names the part."""
        _refuse(self.text, what)


@dataclass(frozen=True)
class Allocation:
    """Parts by the devices that they share. text: the expression."""

    text: str
    groups: tuple[tuple[AllocatedPart, ...], ...]

    @property
    def parts(self) -> tuple[AllocatedPart, ...]:
        return tuple(chain.from_iterable(self.groups))

    @property
    def num_devices(self) -> int:
        return sum(group[0].sizes.num_devices for group in self.groups)

    def find(self, role: str) -> AllocatedPart | None:
        """The part of that role; None if there is none."""
        return next((part for part in self.parts if part.role == role), None)


def parse_allocation(text: str) -> Allocation:
    """Raises UserError that names the part that is wrong. Engines that are not implemented yet
    pass: see `require_engines`."""
    text = "".join(text.split())
    groups: list[tuple[AllocatedPart, ...]] = []
    has_rollout = False
    for devices in text.split("+"):
        group: list[AllocatedPart] = []
        for word in devices.split("|"):
            part = _parse_part(word, has_rollout)
            has_rollout = has_rollout or part.role == "rollout"
            group.append(part)

            if part.sizes.num_devices != group[0].sizes.num_devices:
                part.refuse(
                    f"'|' puts it on the same devices as '{group[0].text}', which takes another "
                    "number; write '+' for separate devices"
                )

        groups.append(tuple(group))

    allocation = Allocation(text, tuple(groups))
    actor = allocation.find("actor")

    for part in allocation.parts:
        if allocation.find(part.role) is not part:
            part.refuse(f"a second part is the {part.role}; name its role, e.g. fsdp[critic]")
        if actor and part.engine not in (actor.engine, *ROLLOUT_ENGINES):
            part.refuse(f"the {part.role} needs the engine of the actor, '{actor.engine}'")

    return allocation


def require_engines(allocation: Allocation) -> None:
    """Raises UserError for an engine that is known and not implemented yet."""
    for part in allocation.parts:
        if not _ENGINES[part.engine].target:
            table = ROLLOUT_ENGINES if part.engine in ROLLOUT_ENGINES else TRAIN_ENGINES
            names = ", ".join(name for name, entry in table.items() if entry.target)
            part.refuse(f"the engine '{part.engine}' is not implemented yet; choose from {names}")


def _parse_part(text: str, has_rollout: bool) -> AllocatedPart:
    if _SIZES_ALONE.fullmatch(text):
        if not has_rollout:
            _refuse(text, f"sizes without an engine; write e.g. fsdp:{text}")
        return AllocatedPart("fsdp", "actor", _parse_sizes("fsdp", text), text)

    match = _PART.fullmatch(text)
    if match is None:
        _refuse(text, "write ENGINE:SIZES or ENGINE[ROLE]:SIZES, e.g. embedded:d2+fsdp[actor]:d4")

    engine = match[1]
    if engine not in _ENGINES:
        theirs = find_synonyms(STRATEGY, engine, TRAIN_ENGINES) or find_synonyms(
            NAME, engine, ROLLOUT_ENGINES
        )
        meant = f"; did you mean '{theirs[0]}'?" if theirs else hint(engine, _ENGINES)

        _refuse(text, f"there is no engine '{engine}'{meant}")

    generates = engine in ROLLOUT_ENGINES
    role = match[2] or ("rollout" if generates else "actor")
    role = "reward_model" if role == "reward" else role  # the name in other systems

    # others have names from the config
    if role in ENGINES and (role == "rollout") != generates:
        table = ROLLOUT_ENGINES if role == "rollout" else TRAIN_ENGINES
        _refuse(text, f"for '{role}' choose an engine from {', '.join(table)}")

    return AllocatedPart(engine, role, _parse_sizes(engine, match[3]), text)


def _parse_sizes(engine: str, text: str) -> Sizes:
    letters = _ENGINES[engine].sizes
    sizes: dict[str, int] = {}
    for letter, number in re.findall(r"([a-zA-Z])(\d+)", text):
        axis = _LETTERS.get(letter) or _NOT_THERE_YET.get(letter)
        if axis is None or axis in sizes or int(number) < 1:
            _refuse(text, f"'{letter}{number}': write each of d, t (or m), p, c, e once, from 1")
        sizes[axis] = int(number)

        if int(number) == 1:
            continue

        if axis[0] not in letters:
            lacks = f"the engine '{engine}' has no {axis} parallelism"
            _refuse(text, f"{lacks}; its sizes are {', '.join(letters)}")

    sizes.pop("pipeline", None)
    found = Sizes(**sizes)
    if found.expert > 1 and found not in alternatives(found):
        _refuse(
            text,
            f"e must be a multiple of t and divide the {found.num_devices} ranks; the nearest "
            f"sizes are {alternatives(found)[0]}",
        )

    return found


def _refuse(part: str, what: str) -> NoReturn:
    raise UserError(f"{KEY}: '{part}': {what}")


_NODES = "trainer.nnodes"
_DEVICES = "trainer.n_gpus_per_node"
_ROLLOUT = "actor_rollout_ref.rollout"


def follow_allocation(loaded: Loaded) -> Loaded:
    """The config in which keys that are not set follow the allocation; `check_agreement` rejects
    others that differ.

    Raises UserError for an invalid expression or an engine that is not implemented yet, ConfigError
    for other keys that contradict its engines."""
    if not loaded.config.trainer.allocation:
        return loaded

    allocation = parse_allocation(loaded.config.trainer.allocation)
    require_engines(allocation)
    keys = chain(_devices(allocation, loaded), _engines(allocation, loaded.config))

    changes = []
    for key, value, implied in keys:
        if value != implied and is_free(loaded.origins, key):
            changes.append((key, implied, f"{KEY} says so"))

    return with_changes(loaded, changes)


def check_agreement(allocation: Allocation, config: Config) -> None:
    """Raises UserError for a key that contradicts the allocation."""
    nodes = config.trainer.nnodes
    devices = config.trainer.n_gpus_per_node
    if nodes * devices != allocation.num_devices:
        raise UserError(
            f"{KEY}='{allocation.text}' takes {allocation.num_devices} devices, but "
            f"{_NODES}={nodes} × {_DEVICES}={devices} are {nodes * devices}: change one of them"
        )

    for key, value, implied in _engines(allocation, config):
        if value != implied:
            raise UserError(
                f"{key}={value} contradicts {KEY}='{allocation.text}', which says {implied}: "
                "remove one"
            )


def _engines(allocation: Allocation, config: Config) -> Iterator[tuple[str, object, object]]:
    """Keys of engines that the allocation determines: (key, value, value by the allocation)."""
    rollout = allocation.find("rollout")
    actor = allocation.find("actor")
    settings = config.actor_rollout_ref

    if rollout is not None:
        tensor = settings.rollout.tensor_model_parallel_size
        yield f"{_ROLLOUT}.name", settings.rollout.name, rollout.engine
        yield f"{_ROLLOUT}.tensor_model_parallel_size", tensor, rollout.sizes.tensor

    if actor is not None:
        yield "actor_rollout_ref.actor.strategy", settings.actor.strategy, actor.engine


def _devices(allocation: Allocation, loaded: Loaded) -> Iterator[tuple[str, object, object]]:
    """Keys of machines and devices per machine; a number that was set stays if it divides the
    devices."""
    nodes = loaded.config.trainer.nnodes
    devices = loaded.config.trainer.n_gpus_per_node

    total = allocation.num_devices
    if is_free(loaded.origins, _DEVICES) and total % nodes == 0:
        yield _DEVICES, devices, total // nodes
    elif is_free(loaded.origins, _NODES) and total % devices == 0:
        yield _NODES, nodes, total // devices
