"""`distflow doctor`: what this machine has, what extras would add, which ports a run has open, and
faults; with `--device` whether its accelerator matches the CPU, and can run a config; with
`--template` what a chat template does in episodes. `distflow selftest`: verifies that a tiny run
gives the same numbers on each path."""

import argparse
import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import platform
import re
import shutil
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distflow import __version__
from distflow.commands.arguments_and_run_folders import (
    add_trust_argument,
    find_run,
    importing,
    newest_run,
)
from distflow.errors import UserError, count_of
from distflow.import_target import load_modules
from distflow.observe.crash_safe_files import JSON, read_object, to_json
from distflow.observe.sanitized_output import escape_control
from distflow.observe.writing.run_folder import writer_of

if TYPE_CHECKING:
    from distflow.observe.report.summary_sentences import Finding

EXTRAS = tomllib.loads(Path(__file__).with_name("extras.toml").read_text("utf-8"))
NEEDED = (
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "hydra-core",
    "datasets",
    "math-verify",
)
MIN_FREE_BYTES = 2 * 1024**3
_OF_A_RUN = ("run.json", "ledger.jsonl")


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", nargs="?", metavar="RUN", help="a run's folder: what is wrong with the run"
    )
    parser.add_argument("--json", action="store_true", help="print the findings on RUN as JSON")
    wanted = "try the accelerator before a first run, and whether a config's models fit"
    parser.add_argument("--device", nargs="*", metavar="CONFIG key=value", help=wanted)
    parser.add_argument(
        "--template", metavar="MODEL", help="show what a model's chat template does in episodes"
    )
    add_trust_argument(parser, "the config of --device, or trainer.imports of RUN, names")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examine this machine; returns 1 if something would prevent runs from working. Loads torch. Or
    examine a run; returns 1 after warnings, 2 after errors."""
    if arguments.device is not None:
        return _check_device(arguments.device, arguments.trust_code)
    if arguments.template is not None:
        with importing():
            from distflow.launch.startup_messages import template_lines

        print(
            "\n".join(
                escape_control(line, one_line=True) for line in template_lines(arguments.template)
            )
        )
        return 0
    if arguments.run_dir is not None:
        return _examine(find_run(arguments.run_dir), arguments.json, arguments.trust_code)
    from distflow.launch.device_and_threads import find_thread_faults

    ports = _of_run(None)
    versions = {name: _version(name) for name in NEEDED}
    packages = [f"{name} {version or 'missing'}" for name, version in versions.items()]
    missing = [name for name, version in versions.items() if version is None]
    faults = [f"the package {name} is missing: pip install {name}" for name in missing]
    faults += [*_disk_faults(), *find_thread_faults()]
    lines = [
        f"distflow {__version__}",
        "",
        "machine",
        *_indent(_machine()),
        "",
        "packages",
        *_indent(packages),
    ]
    lines += [
        "",
        "extras",
        *_indent(_extras()),
        *ports,
        "",
        "wrong",
        *_indent(faults or ["nothing found"]),
    ]
    print("\n".join(lines))
    return 1 if faults else 0


def _examine(run_dir: Path, as_json: bool, trusted: bool) -> int:
    from distflow.observe.report import doctor
    from distflow.observe.report.doctor_run_rules import RunRecords

    ports = _of_run(str(run_dir))
    run = RunRecords(run_dir)
    own = _own_rules(run.config, trusted)
    examined = doctor.examine(run)
    problems = doctor.problems(run, examined, writer_of(run_dir) is not None)
    numbers = Counter(found.level for found in problems)
    if as_json:
        listed = [found._asdict() for found in problems]
        content = {
            "run": str(run_dir),
            "findings": listed,
            "clean": examined.clean,
            "lacking": examined.lacking,
        }
        print(json.dumps(to_json(content), indent=1))
    else:
        counts = " and ".join(
            count_of(numbers[level], level) for level in ("error", "warning") if numbers[level]
        )
        num_steps = sum(step > 0 for step in run.steps)  # step 0 is a validation
        lines = [f"{count_of(num_steps, 'step')} of {run_dir}: {counts or 'no problem found'}"]
        lines += [line for found in problems for line in _described(found)]
        lines += [
            f"no problem: {count_of(len(examined.clean), 'rule')}",
            *_indent([", ".join(examined.clean)]),
        ]
        lines += [f"no data: {count_of(len(examined.lacking), 'rule')}"]
        lines += _indent([f"{name} {why}" for name, why in examined.lacking.items()] + own)
        print("\n".join([*(escape_control(line, one_line=True) for line in lines), *ports]))
    return 2 if numbers["error"] else 1 if numbers["warning"] else 0


def _own_rules(config: "Mapping[str, JSON]", trusted: bool) -> list[str]:
    """Import the run's modules, which may register rules; what to say if they are not trusted."""
    trainer = config.get("trainer")
    modules = trainer.get("imports") if isinstance(trainer, dict) else None
    if not modules or not isinstance(modules, list):
        return []
    if not trusted:
        return ["rules of trainer.imports are left out: --trust-code imports these modules"]
    load_modules(map(str, modules))
    return []


def _described(found: "Finding") -> list[str]:
    until = f" to {found.last}" if found.last and found.last != found.first else ""
    since = (
        f", step {found.first}{until}{', over' if found.is_over else ''}"
        if found.first is not None
        else ""
    )
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in found.numbers.items())
    parts = {
        "": " ".join(filter(None, (found.text, found.advice))),
        "try ": found.action,
        "numbers ": numbers,
        "samples ": ", ".join(found.uids),
        "files ": ", ".join(found.files),
    }
    return [
        f"{found.level} {found.rule}{since}",
        *_indent([name + text for name, text in parts.items() if text]),
    ]


def _check_device(words: list[str], trusted: bool) -> int:
    """words: a config and its overrides. Returns 1 if a check fails."""
    from distflow.config import load_config

    started = time.monotonic()
    failed = 0
    preset, *overrides = ["grpo", *words] if not words or "=" in words[0] else words
    config = load_config(preset, overrides, complete=False, trust_code=trusted).config
    print(f"distflow {__version__} · device", flush=True)
    with importing():
        from distflow.commands.selftest.compared_runs import check_all
        from distflow.launch.device_and_threads import make_process_ready
        from distflow.launch.select_pipeline import import_user_modules
        from distflow.launch.user_code_trust_and_importability import (
            model_code,
            only_if_trusted,
            pipeline_code,
        )

    only_if_trusted([*pipeline_code(config), *model_code(config)], trusted, say=print)
    import_user_modules(config)
    make_process_ready(config)
    with tempfile.TemporaryDirectory(prefix="distflow-device-") as folder:
        for found in check_all(config, Path(folder)):
            failed += found.outcome == "failed"
            print(
                f"{found.name:<24} {found.outcome:<9} {escape_control(found.text, one_line=True)}",
                flush=True,
            )
    print(f"{time.monotonic() - started:.0f} s; {failed or 'nothing'} failed")
    return int(failed > 0)


def add_selftest_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no arguments."""


def run_selftest(arguments: argparse.Namespace) -> int:
    """Returns 1 if a pair differs; then the folders of its runs are kept."""
    started = time.monotonic()
    print(f"distflow {__version__} · selftest", flush=True)
    with importing():
        from distflow.commands.selftest.compared_runs import (
            advice,
            compare_all,
            head,
            left_out,
            line,
        )
        from distflow.commands.selftest.runs import RECORDED, read_recorded

    rows = []
    failed = []
    folder = Path(tempfile.mkdtemp(prefix="distflow-selftest-"))
    try:
        print(head(), flush=True)
        for row in compare_all(read_recorded(RECORDED), folder):
            print(line(row), flush=True)
            rows.append(row)
            failed += [] if row.ok or row.left_out else [row]
    finally:
        if not failed:
            # reward processes of an interrupted run may still be ending
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    for text in (*left_out(rows), *(advice(failed, folder) if failed else ())):
        print(text)
    return 1 if failed else 0


def _machine() -> list[str]:
    from distflow.launch.device_and_threads import describe_hardware
    from distflow.sandbox.local_sandbox import probe

    return [
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        *describe_hardware(),
        f"sandbox for code under test: {escape_control(str(probe()), one_line=True)}",
        f"{shutil.disk_usage(Path.cwd()).free / 1024**3:.0f} GiB free on the disk of {Path.cwd()}",
    ]


def _extras() -> list[str]:
    lines = []
    for name, (modules, adds) in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        state = f"pip install 'distflow[{name}]'" if missing else "installed"
        lines.append(f"{name}: {adds} — {state}")
    return lines


def _of_run(given: str | None) -> list[str]:
    """Sections on the given run, or on the current folder's newest if it is running: its open
    ports, and the isolation of code that its reward functions ran."""
    run_dir = newest_run() if given is None else find_run(given)
    writer = writer_of(run_dir) if run_dir else None
    if (
        run_dir is not None
        and writer is None
        and not any((run_dir / name).is_file() for name in _OF_A_RUN)
    ):
        raise UserError(f"{run_dir} is not a run's folder: it has no {_OF_A_RUN[0]}")
    if run_dir is None or (writer is None and given is None):
        return []
    name = escape_control(str(run_dir), one_line=True)
    lines = ["", f"ports of {name}", *_indent(_ports_of(writer))]
    level = read_object(run_dir / "run.json").get("sandbox")
    if isinstance(level, str):
        lines += ["", f"sandbox of {name}", f"  {escape_control(level, 80, one_line=True)}"]
    return lines


def _ports_of(writer: int | None) -> list[str]:
    """One line per process and place."""
    if not writer:
        return ["no process on this machine writes to it" if writer == 0 else "it does not run"]
    ports: dict[tuple[int, str, str], list[int]] = {}
    for listener in listeners(family(writer)):
        ports.setdefault((listener.pid, listener.process, listener.where), []).append(listener.port)
    lines = [
        (
            f"{escape_control(process, one_line=True)} ({pid}): {', '.join(map(str, numbers))} on "
            f"{where}"
        )
        for (pid, process, where), numbers in ports.items()
    ]
    return lines or ["none"]


def _disk_faults() -> list[str]:
    faults = []
    for folder in {Path.cwd(), Path(tempfile.gettempdir())}:
        if not os.access(folder, os.W_OK):
            faults.append(f"{folder} cannot be written to")
        elif shutil.disk_usage(folder).free < MIN_FREE_BYTES:
            faults.append(f"less than 2 GiB are free in {folder}: checkpoints may not fit")
    return faults


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _indent(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


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
