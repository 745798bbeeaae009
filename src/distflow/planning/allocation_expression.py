"""AReaL's allocation expression: which engine runs which role on how many devices.

allocation = devices ("+" devices)*              each on devices of its own
devices    = part ("|" part)*                    all on the same devices
part       = ENGINE ["[" ROLE "]"] ":" sizes | ENGINE "." sizes | sizes
sizes      = (LETTER NUMBER)+                    d data, t (or m) tensor, p pipeline, c context, e
expert

The last two are AReaL's older forms, `sglang.d4p1m1+d2` and `sglang:d4+d2`: sizes alone, after the
rollout's engine, are the trainer's, with FSDP if it has no stages.
Keys that are not set follow the allocation; a key that contradicts it is an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from distflow.planning.layouts import Axis, Sizes

KEY = "trainer.allocation"
STRATEGY = "actor_rollout_ref.actor.strategy"
NAME = "actor_rollout_ref.rollout.name"
_LETTERS: dict[str, Axis] = {
    "d": "data",
    "t": "tensor",
    "m": "tensor",
    "p": "pipeline",
    "c": "context",
    "e": "expert",
}
_ENGINES: dict[str, RolloutEngineEntry | TrainEngineEntry] = {**ROLLOUT_ENGINES, **TRAIN_ENGINES}
_EXAMPLE = "embedded[rollout]:d2+fsdp[actor]:d4"
_TOKEN = re.compile(r"(?P<word>[^\W\d_]\w*)|(?P<sign>[+|:.\[\]])|(?P<other>\S)")
_SIZE = re.compile(r"([a-zA-Z])([0-9]{1,6})")


@dataclass(frozen=True)
class AllocatedPart:
    """An engine for a role, and its sizes. at: the position of its first character in the text."""

    engine: str
    role: str
    sizes: Sizes
    at: int


@dataclass(frozen=True)
class Allocation:
    """Parts by the devices that they share. text: the expression."""

    text: str
    groups: tuple[tuple[AllocatedPart, ...], ...]

    @property
    def parts(self) -> tuple[AllocatedPart, ...]:
        return tuple(part for group in self.groups for part in group)

    @property
    def num_devices(self) -> int:
        return sum(group[0].sizes.num_devices for group in self.groups)

    def find(self, role: str) -> AllocatedPart | None:
        """The part of that role; None if there is none."""
        return next((part for part in self.parts if part.role == role), None)

    def refuse(self, at: int, what: str) -> NoReturn:
        """Raises UserError with a caret below that character."""
        raise UserError(f"{KEY}: {what}\n  {self.text}\n  {' ' * at}^")


def parse_allocation(text: str) -> Allocation:
    """Raises UserError with a caret below the first unreadable character or the part that is wrong.
    Engines that are not implemented yet pass: see `require_engines`."""
    return _Parser(Allocation(" ".join(text.split()), ())).allocation()


def require_engines(allocation: Allocation) -> None:
    """Raises UserError for an engine that is known and not implemented yet."""
    for part in allocation.parts:
        if not _ENGINES[part.engine].target:
            table = ROLLOUT_ENGINES if part.engine in ROLLOUT_ENGINES else TRAIN_ENGINES
            there = ", ".join(name for name, entry in table.items() if entry.target)
            allocation.refuse(
                part.at, f"the engine '{part.engine}' is not implemented yet; choose from {there}"
            )
        if part.engine in ROLLOUT_ENGINES and part.sizes.pipeline > 1:
            allocation.refuse(
                part.at,
                "a rollout engine with pipeline stages is not implemented yet; write d and t",
            )


class _Parser:
    def __init__(self, written: Allocation) -> None:
        found = _TOKEN.finditer(written.text)
        self._written = written
        self._tokens = [(str(match.lastgroup), match[0], match.start()) for match in found]
        self._tokens.append(("end", "", len(written.text)))
        self._has_rollout = False

    def allocation(self) -> Allocation:
        groups = [self._group()]
        while self._takes("+"):
            groups.append(self._group())
        if self._tokens[0][0] != "end":
            self._refuse("expected '+', '|' or the end of the expression here")
        found = replace(self._written, groups=tuple(groups))
        actor = found.find("actor")
        for part in found.parts:
            if found.find(part.role) != part:
                named = (
                    f"name another role, e.g. {part.engine}[critic]"
                    if part.role == "actor"
                    else "leave one out"
                )
                found.refuse(part.at, f"a second part is the {part.role}; {named}")
            if actor and part.engine not in (actor.engine, *ROLLOUT_ENGINES):
                wrong = (
                    f"the {part.role} has the engine of the actor, '{actor.engine}', not "
                    f"'{part.engine}'"
                )
                found.refuse(part.at, wrong)
        return found

    def _group(self) -> tuple[AllocatedPart, ...]:
        parts = [self._part()]
        while self._takes("|"):
            parts.append(self._part())
            first = parts[0]
            last = parts[-1]
            if first.sizes.num_devices != last.sizes.num_devices:
                self._written.refuse(
                    last.at,
                    f"'{first.role}' takes {first.sizes.num_devices} devices and '{last.role}' "
                    f"{last.sizes.num_devices}, but '|' puts both on the same devices; write '+' "
                    "for separate devices",
                )
        return tuple(parts)

    def _part(self) -> AllocatedPart:
        at, engine = self._word("an engine")
        if engine not in _ENGINES:
            if re.fullmatch(rf"(?:{_SIZE.pattern})+", engine):
                if not self._has_rollout:
                    self._written.refuse(at, f"sizes without an engine; write e.g. fsdp:{engine}")
                trainer = "megatron" if re.search(r"p([2-9]|\d\d)", engine) else "fsdp"
                return AllocatedPart(trainer, "actor", self._sizes(trainer, at, engine), at)
            theirs = find_synonyms(STRATEGY, engine, TRAIN_ENGINES) or find_synonyms(
                NAME, engine, ROLLOUT_ENGINES
            )
            meant = f"; did you mean '{theirs[0]}'?" if theirs else hint(engine, _ENGINES)
            self._written.refuse(at, f"there is no engine '{engine}'{meant}")
        role = "rollout" if engine in ROLLOUT_ENGINES else "actor"
        self._has_rollout |= role == "rollout"
        if self._takes("["):
            role = self._role(engine)
            if not self._takes("]"):
                self._refuse("expected ']' here")
        elif self._takes("."):
            return AllocatedPart(engine, role, self._sizes(engine, *self._word("sizes")), at)
        if not self._takes(":"):
            self._refuse(f"expected ':' and the sizes of '{engine}' here, e.g. {engine}:d2")
        return AllocatedPart(engine, role, self._sizes(engine, *self._word("sizes")), at)

    def _role(self, engine: str) -> str:
        at, role = self._word("a role")
        role = "reward_model" if role == "reward" else role  # the name in other systems
        # others have names from the config
        if role in ENGINES and (role == "rollout") != (engine in ROLLOUT_ENGINES):
            does = (
                "generates, and cannot train"
                if engine in ROLLOUT_ENGINES
                else "trains, and cannot generate"
            )
            table = ROLLOUT_ENGINES if role == "rollout" else TRAIN_ENGINES
            self._written.refuse(
                at, f"'{engine}' {does}; for '{role}' choose from {', '.join(table)}"
            )
        return role

    def _sizes(self, engine: str, start: int, text: str) -> Sizes:
        refuse = self._written.refuse
        has = _ENGINES[engine].sizes
        found: dict[Axis, int] = {}
        at = 0
        while at < len(text):
            match = _SIZE.match(text, at)
            if match is None:
                refuse(start + at, "expected a size here: a letter and a number, as in d4t2")
            axis = _LETTERS.get(match[1])
            size = int(match[2])
            if axis is None:
                refuse(
                    start + at, f"there is no size '{match[1]}'; the sizes are d, t (or m), p, c, e"
                )
            if axis in found:
                refuse(start + at, f"the {axis} size is given twice")
            if size < 1:
                refuse(start + at + 1, f"the {axis} size is at least 1")
            if size > 1 and axis not in (_LETTERS[letter] for letter in has):
                lacks = f"the engine '{engine}' has no {axis} parallelism"
                refuse(start + at, f"{lacks}; its sizes are {', '.join(has)}")
            found[axis] = size
            at = match.end()
        sizes = Sizes(**found)
        if sizes.data * sizes.context % sizes.expert:
            among = f"the {sizes.data * sizes.context} ranks along data and context"
            refuse(
                start + text.index("e"),
                f"experts shared by {sizes.expert} ranks do not divide {among}",
            )
        return sizes

    def _word(self, wanted: str) -> tuple[int, str]:
        """The next word, and its first character's position."""
        kind, word, at = self._tokens[0]
        if kind != "word":
            self._refuse(f"expected {wanted} here, as in {_EXAMPLE}")
        del self._tokens[0]
        return at, word

    def _takes(self, sign: str) -> bool:
        if self._tokens[0][:2] != ("sign", sign):
            return False
        del self._tokens[0]
        return True

    def _refuse(self, what: str) -> NoReturn:
        self._written.refuse(self._tokens[0][2], what)


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
    said = [*_devices(allocation, loaded), *_engines(allocation, loaded.config)]
    changes = [
        (key, value, f"{KEY} says so")
        for key, there, value in said
        if there != value and is_free(loaded.origins, key)
    ]
    return with_changes(loaded, changes)


def check_agreement(allocation: Allocation, config: Config) -> None:
    """Raises UserError for a key that contradicts the allocation."""
    nodes = config.trainer.nnodes
    devices = config.trainer.n_gpus_per_node
    if nodes * devices != allocation.num_devices:
        raise UserError(
            f"{KEY}='{allocation.text}' takes {allocation.num_devices} devices, but "
            f"{_NODES}={nodes} × "
            f"{_DEVICES}={devices} are {nodes * devices}: change one of them"
        )
    for key, there, said in _engines(allocation, config):
        if there != said:
            raise UserError(
                f"{key}={there} contradicts {KEY}='{allocation.text}', which says {said}: remove "
                "one"
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
