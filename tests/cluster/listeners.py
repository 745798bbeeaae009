"""Which ports the processes of a run listen on, by the files of /proc."""

import ipaddress
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"
_PROC = Path("/proc")


@dataclass(frozen=True)
class Listener:
    """A port that a process listens on. process: its name, such as "raylet"."""

    pid: int
    process: str
    address: str
    port: int

    @property
    def where(self) -> str:
        """Where it can be reached from, in words."""
        address = ipaddress.ip_address(self.address)
        if address.is_unspecified:
            return "EVERY ADDRESS of this machine"
        return "loopback" if address.is_loopback else f"the address {self.address} of this machine"


def family(pid: int) -> list[int]:
    """The processes of a run: `pid` and its descendants. A Ray worker is a child of a raylet,
    which, unless Ray runs separately, is a child of the driver: the family is then the driver's."""
    parents = _parents()
    root = pid
    while _name(parents.get(root, 0)) == "raylet":
        raylet = parents[root]
        root = raylet if parents[raylet] <= 1 else parents[raylet]

    found = [root]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found


def listeners(pids: list[int]) -> list[Listener]:
    """Listeners by process, then by port. Processes that ended, or whose files are not readable,
    have none."""
    found: set[Listener] = set()
    for pid in pids:
        try:
            sockets = _sockets(pid)
            open_here = {
                inode: place for name in ("tcp", "tcp6") for inode, place in _listening(pid, name)
            }
        except OSError:
            continue

        found |= {
            Listener(pid, _name(pid), *open_here[inode]) for inode in sockets & open_here.keys()
        }

    return sorted(
        found, key=lambda listener: (pids.index(listener.pid), listener.port, listener.address)
    )


def _parents() -> dict[int, int]:
    parents = {}
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process ended
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )

    return parents


def _name(pid: int) -> str:
    """A process's name; for Python processes, which all have the same, with its script."""
    try:
        name = (_PROC / str(pid) / "comm").read_text().strip()
        words = (_PROC / str(pid) / "cmdline").read_text("utf-8", "replace").split("\0")
    except OSError:
        return ""

    if words[0].startswith(name):  # the name ends at 15 characters; a process may change it
        name = words[0].strip()
    script = next((Path(word).name for word in words[1:] if word.endswith(".py")), "")
    return f"{name} {script}".strip() if name.startswith("python") else name


def _sockets(pid: int) -> set[int]:
    inodes = set()
    for link in (_PROC / str(pid) / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if match := re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink())):
                inodes.add(int(match[1]))
    return inodes


def _listening(pid: int, name: str) -> Iterator[tuple[int, tuple[str, int]]]:
    """(inode, (address, port)) of the listening sockets of the process's network."""
    table = _PROC / str(pid) / "net" / name
    for line in table.read_text().splitlines()[1:] if table.exists() else ():
        fields = line.split()
        if fields[3] == _LISTENS:
            address, port = fields[1].split(":")
            yield int(fields[9]), (_address(address), int(port, 16))


def _address(code: str) -> str:
    """An address from /proc, which writes 32-bit words in this machine's byte order
    (little-endian). An IPv4-mapped IPv6 address becomes IPv4."""
    address = ipaddress.ip_address(
        b"".join(bytes.fromhex(code[i : i + 8])[::-1] for i in range(0, len(code), 8))
    )
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
