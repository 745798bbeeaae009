"""The command line: parse, config, program, plan, launch. Heavy imports wait until they are needed."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distflow import __version__

USER_FAULT, OUR_FAULT = 2, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for a mistake of the user's, 1 for anything else."""
    arguments = _parse(argv)
    sys.path.insert(0, "")  # "module:function" of the user's is looked for in the current folder first
    try:
        return int(arguments.run(arguments) or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as err:  # the process's edge: one message, a status, the traceback on request
        if arguments.debug:
            traceback.print_exc()
        else:
            print(f"distflow: {_message(err)}", file=sys.stderr)
        return USER_FAULT if _is_users(err) else OUR_FAULT


def _message(err: Exception) -> str:
    from distflow.observe.text import visible

    text = str(err) if _is_users(err) else f"{type(err).__name__}: {err} (--debug shows where)"
    return visible(text)


def _is_users(err: BaseException) -> bool:
    from distflow.config.errors import UserError
    from distflow.graph import PipelineError
    from distflow.observe.run_folder import RunFolderError
    from distflow.observe.trackers import TrackerError

    return isinstance(err, UserError | PipelineError | RunFolderError | TrackerError)


# No training data are needed to evaluate: the held-out ones stand for them.
_EVAL_ONLY = (
    "data.train_files=${data.val_files}",
    "data.train_batch_size=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
)


def _train(arguments: argparse.Namespace) -> int:
    from distflow.config import describe, load_config

    if "=" in arguments.preset and arguments.command == "sft":  # the preset may be left out
        arguments.preset, arguments.overrides = "sft", [arguments.preset, *arguments.overrides]
    print(f"distflow {__version__} · {arguments.preset}", flush=True)
    loaded = load_config(arguments.preset, arguments.overrides)
    for line in describe(loaded.config):
        print(line, flush=True)
    from distflow.pipelines.assembly import assemble
    from distflow.runtime.local import launch_local

    parts = assemble(loaded, say=lambda line: print(line, flush=True))
    resume = arguments.resume or loaded.config.trainer.resume_mode
    outcome = launch_local(parts, resume=resume, allow_change=tuple(arguments.allow_change))
    if outcome.accuracy_before is not None and outcome.accuracy_after is not None:
        print(f"accuracy before RL: {outcome.accuracy_before:.2f}")
        print(f"accuracy after RL: {outcome.accuracy_after:.2f}")
    print(f"report: {outcome.report}")
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from distflow.config import load_config
    from distflow.pipelines.assembly import assemble
    from distflow.runtime.evaluate import evaluate

    print(f"distflow {__version__} · evaluating {arguments.preset}", flush=True)
    loaded = load_config(arguments.preset, [*arguments.overrides, *_EVAL_ONLY])
    metrics = evaluate(assemble(loaded, say=lambda line: print(line, flush=True)))
    for name, value in sorted(metrics.items()):
        print(f"{name}: {value:.4f}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from distflow.pipelines.export import export_checkpoint

    folder = export_checkpoint(Path(arguments.checkpoint), Path(arguments.to))
    print(f"exported to {folder}")
    return 0


def _config(arguments: argparse.Namespace) -> int:
    from distflow.config import explain, load_config

    loaded = load_config(arguments.preset, arguments.overrides, complete=False)
    if arguments.explain:
        print(explain(arguments.explain, loaded))
    elif arguments.graph:
        from distflow.pipelines.assembly import bind

        print(bind(loaded.config).to_mermaid())
    else:
        print(loaded.text, end="")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from distflow.doctor import examine

    report = examine()
    print("\n".join(report.lines))
    return OUR_FAULT if report.faults else 0


def _replay(arguments: argparse.Namespace) -> int:
    from distflow.pipelines.replay import replay_bundle

    for line in replay_bundle(Path(arguments.bundle)):
        print(line)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from distflow.config.errors import UserError
    from distflow.observe.report import write_report

    run_dir = Path(arguments.run_dir)
    if run_dir.is_dir() and not (run_dir / "events.jsonl").is_file():
        raise UserError(f"{run_dir} is no run's folder: it holds no events.jsonl")
    print(f"report: {write_report(run_dir)}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """key=value may stand before and after options; by itself argparse takes only those that stand together."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distflow", description="RL post-training of language models as a dataflow")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in (("train", "train by a preset or a YAML file"), ("sft", "supervised fine-tuning")):
        train = _command(commands, name, help_text, _train)
        _add_config_arguments(train, default="sft" if name == "sft" else None)
        train.add_argument("--resume", metavar="auto|never|PATH", help="where to go on from (default: auto)")
        train.add_argument("--allow-change", action="append", default=[], metavar="KEY", help="may differ on resume")
    _add_config_arguments(_command(commands, "eval", "answer data.val_files and print the accuracy", _eval))
    export = _command(commands, "export", "write a checkpoint as a Hugging Face folder", _export)
    export.add_argument("checkpoint", help="a run's folder, or one of its checkpoints")
    export.add_argument("--to", required=True, metavar="DIR", help="a folder that is empty or not there yet")
    config = _command(commands, "config", "print the resolved config", _config)
    _add_config_arguments(config)
    config.add_argument("--explain", metavar="KEY", help="what one key means, its default and where it was set")
    config.add_argument("--graph", action="store_true", help="the program as a Mermaid flowchart")
    _command(commands, "doctor", "what this machine has, what extras would add, what is wrong", _doctor)
    replay = _command(commands, "replay", "run a saved non-finite update again, on the CPU", _replay)
    replay.add_argument("bundle", help="a folder below RUN/bundles")
    report = _command(commands, "report", "write report.html of a run again", _report)
    report.add_argument("run_dir")
    return parser


def _command(commands: Any, name: str, help_text: str, run: Callable[..., int]) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help_text, description=help_text)
    command.set_defaults(run=run)
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def _add_config_arguments(command: argparse.ArgumentParser, default: str | None = None) -> None:
    optional = {"nargs": "?", "default": default} if default else {}
    command.add_argument("preset", help="a preset's name, or a YAML file", **optional)  # type: ignore[arg-type]
    command.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra's override syntax")
