"""Rules of teachers: the pipeline has one, and its signal is used."""

from distflow.config.derived_settings import find_pipeline, pipeline_name
from distflow.config.keys.distill import teachers_of
from distflow.config.keys.schema import Config
from distflow.config.rules import Finding, Findings

_PATH = "distill.teacher.path"


def has_teacher(config: Config) -> Findings:
    """The pipeline `distill` has a teacher."""
    pipeline = find_pipeline(config)
    if pipeline is not None and pipeline.has_teacher and not teachers_of(config.distill):
        what = f"the pipeline {pipeline_name(config)} needs a teacher"
        yield Finding((_PATH,), what, f"set {_PATH}=FOLDER, or choose dag.pipeline=grpo", True)


def one_teacher_of_domain(config: Config) -> Findings:
    """A domain has one teacher."""
    owner = dict[str, str]()
    for name, teacher in teachers_of(config.distill).items():
        for domain in teacher.domains:
            if domain in owner:
                what = f"'{domain}' is a domain of {owner[domain]} and {name}"
                yield Finding(("distill.teachers",), what, "leave it to one of them")
            owner[domain] = name


RULES = (has_teacher, one_teacher_of_domain)
