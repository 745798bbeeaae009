"""`distflow doctor`: what this machine has, and faults.

With `--device` it tells whether the accelerator matches the CPU and can run a config, with
`--template` what a chat template does in episodes, and with a run's folder what is wrong with the
run.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distflow import __version__
from distflow.commands.arguments import add_trust_argument
from distflow.commands.find_run import find_run
from distflow.commands.printing import print_escaped
from distflow.commands.quick_start import importing
from distflow.errors import count_of
from distflow.import_target import load_modules
from distflow.observe.crash_safe_files import JSON, to_json
from distflow.observe.sanitized_output import escape_control
from distflow.observe.writing.run_folder import writer_of

if TYPE_CHECKING:
    from distflow.observe.findings.finding import Finding


NEEDED = (
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "omegaconf",
    "datasets",
    "math-verify",
)
MIN_FREE_BYTES = 2 * 1024**3


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

        print_escaped(template_lines(arguments.template))
        return 0

    if arguments.run_dir is not None:
        return _examine(find_run(arguments.run_dir), arguments.json, arguments.trust_code)
    return _examine_machine()


def _examine_machine() -> int:
    packages = []
    faults = []
    for name in NEEDED:
        version = _version(name)
        packages.append(f"{name} {version or 'missing'}")
        if version is None:
            faults.append(f"the package {name} is missing: pip install {name}")

    faults += _disk_faults()

    print(f"distflow {__version__}")
    parts = {"machine": _machine(), "packages": packages, "wrong": faults or ["nothing found"]}
    for title, lines in parts.items():
        print("\n".join(["", title, *_indent(lines)]))

    return 1 if faults else 0


def _examine(run_dir: Path, as_json: bool, trusted: bool) -> int:
    from distflow.observe.findings import doctor
    from distflow.observe.run_records import RunRecords

    run = RunRecords(run_dir)
    own = _own_rules(run.config, trusted)
    examined = doctor.examine(run)
    problems = doctor.problems(run, examined, writer_of(run_dir) is not None)
    numbers = Counter(found.level for found in problems)

    if as_json:
        content = {
            "run": str(run_dir),
            "findings": [found._asdict() for found in problems],
            "lacking": examined.lacking,
        }
        print(json.dumps(to_json(content), indent=1))
    else:
        levels = [level for level in ("error", "warning") if numbers[level]]
        counts = [count_of(numbers[level], level) for level in levels]
        num_steps = sum(step > 0 for step in run.steps)  # step 0 is a validation
        outcome = " and ".join(counts) or "no problem found"

        lines = [f"{count_of(num_steps, 'step')} of {run_dir}: {outcome}"]
        for found in problems:
            lines += _described(found)
        lines.append(f"no data: {count_of(len(examined.lacking), 'rule')}")
        lines += _indent([f"{name} {why}" for name, why in examined.lacking.items()] + own)
        print_escaped(lines)

    if numbers["error"]:
        return 2
    if numbers["warning"]:
        return 1

    return 0


def _own_rules(config: "Mapping[str, JSON]", trusted: bool) -> list[str]:
    """Import the run's modules, which may register rules; what to say if they are not trusted."""
    trainer = config.get("trainer")
    modules = None
    if isinstance(trainer, dict):
        modules = trainer.get("imports")

    if not modules or not isinstance(modules, list):
        return []
    if not trusted:
        return ["rules of trainer.imports are left out: --trust-code imports these modules"]

    load_modules(map(str, modules))

    return []


def _described(found: "Finding") -> list[str]:
    title = f"{found.level} {found.rule}"
    if found.first is not None:
        title += f", step {found.first}"
        if found.last and found.last != found.first:
            title += f" to {found.last}"
        if found.is_over:
            title += ", over"

    lines = [f"{found.text} {found.advice}".strip()]
    if found.action:
        lines.append(f"try {found.action}")

    if found.numbers:
        numbers = [f"{name} {value:.4g}" for name, value in found.numbers.items()]
        lines.append(f"numbers {', '.join(numbers)}")

    if found.uids:
        lines.append(f"samples {', '.join(found.uids)}")
    return [title, *_indent(lines)]


def _check_device(words: list[str], trusted: bool) -> int:
    """words: a config and its overrides. Returns 1 if a check fails."""
    from distflow.config import load_config

    started = time.monotonic()
    failed = 0
    preset, *overrides = ["grpo", *words] if not words or "=" in words[0] else words
    config = load_config(preset, overrides, complete=False, trust_code=trusted).config
    print(f"distflow {__version__} · device", flush=True)

    with importing():
        from distflow.commands.selftest.device import check_device
        from distflow.launch.select_pipeline import import_user_modules
        from distflow.launch.threads import make_process_ready
        from distflow.launch.user_code import model_code, only_if_trusted, pipeline_code

    only_if_trusted([*pipeline_code(config), *model_code(config)], trusted, say=print)
    import_user_modules(config)
    make_process_ready(config)

    with tempfile.TemporaryDirectory(prefix="distflow-device-") as folder:
        for found in check_device(config, Path(folder)):
            failed += found.outcome == "failed"
            print(
                f"{found.name:<24} {found.outcome:<9} {escape_control(found.text, one_line=True)}",
                flush=True,
            )

    print(f"{time.monotonic() - started:.0f} s; {failed or 'nothing'} failed")
    return int(failed > 0)


def _machine() -> list[str]:
    from distflow.launch.devices import describe_hardware
    from distflow.sandbox.local_sandbox import probe

    return [
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        *describe_hardware(),
        f"sandbox for code under test: {escape_control(str(probe()), one_line=True)}",
        f"{shutil.disk_usage(Path.cwd()).free / 1024**3:.0f} GiB free on the disk of {Path.cwd()}",
    ]


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
