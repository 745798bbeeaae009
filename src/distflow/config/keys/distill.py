"""Keys of `distill`: teachers that score the policy's own samples, and the loss that they give."""

from dataclasses import dataclass

from distflow.config.compose.typed_values import Mismatch, parse_differing
from distflow.config.keys.declare import collect, group, key, plain_settings

TEACHER = "teacher"
"""The engine of `distill.teacher`; that of `distill.teachers.NAME` is `teacher_NAME`."""


@dataclass(frozen=True)
class TeacherConfig:
    """A frozen language model with the policy's tokens."""

    path: str | None = key(
        None, "folder or hub id of a language model or an adapter, or a run; null is none"
    )
    domains: tuple[str, ...] = key(
        (), "the only domains whose responses it scores; [] is all that no other teacher names"
    )
    param_offload: bool = key(False, "keep weights in host memory while they are not in use")


_FORM = "write e.g. {math: {path: DIR, domains: [math]}, code: {path: DIR, domains: [code]}}"


def parse_teachers(value: object) -> dict[str, TeacherConfig]:
    """Teachers by name from plain data. Raises Mismatch."""
    found = parse_differing(value, collect(TeacherConfig()), _FORM, of="teacher")
    for name, settings in found.items():
        if not name.isidentifier():
            raise Mismatch(f"has a teacher '{name}'", "choose a word")
        if not (settings.get("path") and settings.get("domains")):
            raise Mismatch(f"has no 'path' or no 'domains' of the teacher '{name}'", _FORM)

    return {name: TeacherConfig(**settings) for name, settings in found.items()}


@dataclass(frozen=True)
class DistillConfig:
    """Distillation from teachers; a pipeline that generates has it if there is one."""

    teacher: TeacherConfig = group(TeacherConfig)
    teachers: dict[str, TeacherConfig] = key(
        {},
        f"name → {', '.join(collect(TeacherConfig()))}: teachers of domains",
        parse=parse_teachers,
        plain=plain_settings,
    )
    signal: str = key(
        "top_k",
        "sampled: the log-ratio of teacher to policy is the advantage of each token; top_k: a "
        "divergence over the teacher's likeliest tokens",
        choices=("sampled", "top_k"),
    )
    top_k: int = key(
        16,
        "likeliest tokens of the teacher in place of each token",
        minimum=1,
        taken_if=lambda own: own.signal == "top_k",
    )
    divergence: str = key(
        "reverse_kl",
        "forward_kl is that of the policy from the teacher, reverse_kl the opposite, jsd the "
        "generalised Jensen-Shannon divergence",
        choices=("forward_kl", "reverse_kl", "jsd"),
        taken_if=lambda own: own.signal == "top_k",
    )
    beta: float = key(
        0.5,
        "share of the teacher in the mixture of jsd",
        above=0,
        below=1,
        taken_if=lambda own: own.signal == "top_k" and own.divergence == "jsd",
    )
    rl_coef: float = key(1.0, "coefficient of the advantages by rewards", minimum=0)
    kl_coef: float = key(1.0, "coefficient of the teacher's signal", above=0)
    ce_coef: float = key(
        0.0, "coefficient of −log π of the tokens, times the sample's accuracy", minimum=0
    )


def teachers_of(config: DistillConfig) -> dict[str, TeacherConfig]:
    """The teachers by engine name."""
    found = {} if config.teacher.path is None else {TEACHER: config.teacher}
    for name, own in config.teachers.items():
        found[f"{TEACHER}_{name}"] = own
    return found
