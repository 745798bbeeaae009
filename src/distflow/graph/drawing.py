"""Draws a graph as a Mermaid flowchart (https://mermaid.js.org), or as text for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from distflow.graph.contract_from_signature import Contract
from distflow.graph.fields import DERIVED, canonical


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
    """Nodes in order; below each is what it reads from which node."""
    by_id = {box.node_id: box for box in boxes}
    lines = []
    plane = None
    for box in boxes:
        if box.plane != plane:
            plane = box.plane
            lines.append(f"{plane} loop")

        lines.append(f"  {box.node_id}  ({box.kind})")
        for dep in box.deps:
            fields = ", ".join(_passed(by_id[dep], box)) or "(order only)"
            lines.append(f"      {fields}  ◀ {dep}")

    return "\n".join(lines) + "\n"


def _arrow(start: Box, end: Box) -> str:
    """The edge between two boxes, with the fields that it carries; thick across the sample
    queue."""
    line = "==>" if start.plane != end.plane else "-->"
    passed = _passed(start, end)
    if passed:
        return f'{line}|"{_text(", ".join(passed))}"|'
    return line


def _passed(start: Box, end: Box) -> list[str]:
    read = [canonical(name) for name in (*end.contract.reads, *end.contract.optional)]
    for name in read:  # grows in the loop: the sources of a derived column are passed too
        read += (source for source in DERIVED.get(name, ()) if source not in read)
    return [name for name in map(canonical, start.contract.writes) if name in read]


def _text(text: str) -> str:
    """Escape text for Mermaid, which reads HTML entities inside quotes, with # in place of &."""
    return escape(text, quote=True).replace("&", "#")
