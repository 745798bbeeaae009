"""Drawing a graph as a Mermaid flowchart (https://mermaid.js.org)."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from distflow.graph.contract import Contract, canonical
from distflow.graph.fields import DERIVED


@dataclass(frozen=True)
class Box:
    """A node as it is drawn. Boxes of one plane stand together; None is no plane."""

    node_id: str
    role: str
    contract: Contract
    deps: tuple[str, ...]
    plane: str | None = None
    engines: tuple[str, ...] = ()


def flowchart(boxes: Sequence[Box]) -> str:
    """Mermaid text. An edge shows the fields that its end reads of what its start writes."""
    names = {box.node_id: f"n{i}" for i, box in enumerate(boxes)}
    lines = ["flowchart TD"]
    for plane in dict.fromkeys(box.plane for box in boxes):
        inside = [f"{names[box.node_id]}{_label(box)}" for box in boxes if box.plane == plane]
        if plane is None:
            lines += [f"    {line}" for line in inside]
        else:
            lines += [f'    subgraph {plane}["{plane} plane"]', *(f"        {line}" for line in inside), "    end"]
    by_id = {box.node_id: box for box in boxes}
    for box in boxes:
        lines += [f"    {names[dep]} {_arrow(by_id[dep], box)} {names[box.node_id]}" for dep in box.deps]
    return "\n".join(lines) + "\n"


def _label(box: Box) -> str:
    engines = f" · {', '.join(box.engines)}" if box.engines else ""
    return f'["{_text(box.node_id)}<br/><i>{_text(box.role)}{_text(engines)}</i>"]'


def _arrow(start: Box, end: Box) -> str:
    """Thick across the experience edge."""
    line = "==>" if start.plane != end.plane else "-->"
    read = [canonical(name) for name in (*end.contract.reads, *end.contract.optional)]
    for name in read:  # grows: what a derived column is made of is passed too
        read += (source for source in DERIVED.get(name, ()) if source not in read)
    passed = [name for name in map(canonical, start.contract.writes) if name in read]
    return f'{line}|"{_text(", ".join(passed))}"|' if passed else line


def _text(text: str) -> str:
    """Mermaid reads HTML entities inside quotes, with # in place of &."""
    return escape(text, quote=True).replace("&", "#")
