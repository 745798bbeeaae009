"""Draws a graph as a Mermaid flowchart (https://mermaid.js.org), or as text for a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from distflow.graph.contract_from_signature import Contract, canonical
from distflow.graph.fields import DERIVED


@dataclass(frozen=True)
class Box:
    """A node in a drawing. Boxes of one plane are grouped; None means no plane."""

    node_id: str
    role: str
    contract: Contract
    deps: tuple[str, ...]
    plane: str | None = None
    engines: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return " · ".join(filter(None, [self.role, ", ".join(self.engines)]))


def flowchart(boxes: Sequence[Box]) -> str:
    """Mermaid text. An edge shows the fields that its start writes and its end reads."""
    names = {box.node_id: f"n{i}" for i, box in enumerate(boxes)}
    lines = ["flowchart TD"]
    for plane in dict.fromkeys(box.plane for box in boxes):
        inside = [
            f'{names[box.node_id]}["{_text(box.node_id)}<br/><i>{_text(box.kind)}</i>"]'
            for box in boxes
            if box.plane == plane
        ]
        if plane is None:
            lines += [f"    {line}" for line in inside]
        else:
            lines += [
                f'    subgraph {plane}["{plane} loop"]',
                *(f"        {line}" for line in inside),
                "    end",
            ]
    by_id = {box.node_id: box for box in boxes}
    for box in boxes:
        lines += [
            f"    {names[dep]} {_arrow(by_id[dep], box)} {names[box.node_id]}" for dep in box.deps
        ]
    return "\n".join(lines) + "\n"


def text_drawing(boxes: Sequence[Box]) -> str:
    """Nodes in order, with rails on the left from each node (●) down to those that run after it;
    below each node is what it reads from which node."""
    by_id = {box.node_id: box for box in boxes}
    last_use = {dep: box.node_id for box in boxes for dep in box.deps}
    rails: list[str | None] = []  # the node of the rail in each column
    lines: list[tuple[str, str]] = []
    plane = None
    for box in boxes:
        if box.plane != plane:
            plane = box.plane
            lines.append((_rails(rails), f"═══ {plane} loop ═══"))
        lines.append((_joint(rails, box, last_use), f"{box.node_id}  ({box.kind})"))
        read = {dep: ", ".join(_passed(by_id[dep], box)) or "(order only)" for dep in box.deps}
        lines += [(_rails(rails), f"    {fields}  ◀ {dep}") for dep, fields in read.items()]
    width = max(len(drawn) for drawn, _ in lines)
    return "".join(f"{drawn:<{width}} {text}\n" for drawn, text in lines)


def _rails(rails: Sequence[str | None]) -> str:
    return " ".join("│" if rail else " " for rail in rails)


def _joint(rails: list[str | None], box: Box, last_use: Mapping[str, str]) -> str:
    """The node's mark joined with the rails of its dependencies; changes `rails` to those that
    continue below."""
    joined = {i for i, rail in enumerate(rails) if rail in box.deps}
    ended = {i for i in joined if last_use[str(rails[i])] == box.node_id}
    own = min([*ended, *(i for i, rail in enumerate(rails) if rail is None), len(rails)])
    first = min(joined | {own})
    last = max(joined | {own})
    rails += [None] * (own + 1 - len(rails))
    drawn = ""
    for i, rail in enumerate(rails):
        if i == own:
            mark = "●"
        elif i in joined:
            mark = (
                ("├", "└")[i in ended]
                if i == first
                else ("┤", "┘")[i in ended]
                if i == last
                else "┼┴"[i in ended]
            )
        else:
            mark = "│" if rail else "─" if first < i < last else " "
        drawn += mark + ("─" if first <= i < last else " ")
    for i in ended:
        rails[i] = None
    rails[own] = box.node_id if box.node_id in last_use else None
    while rails and rails[-1] is None:
        rails.pop()
    return drawn.rstrip()


def _arrow(start: Box, end: Box) -> str:
    """The edge between two boxes, with the fields that it carries; thick across the sample
    queue."""
    line = "==>" if start.plane != end.plane else "-->"
    passed = _passed(start, end)
    return f'{line}|"{_text(", ".join(passed))}"|' if passed else line


def _passed(start: Box, end: Box) -> list[str]:
    read = [canonical(name) for name in (*end.contract.reads, *end.contract.optional)]
    for name in read:  # grows in the loop: the sources of a derived column are passed too
        read += (source for source in DERIVED.get(name, ()) if source not in read)
    return [name for name in map(canonical, start.contract.writes) if name in read]


def _text(text: str) -> str:
    """Escape text for Mermaid, which reads HTML entities inside quotes, with # in place of &."""
    return escape(text, quote=True).replace("&", "#")
