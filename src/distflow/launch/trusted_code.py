"""Python code that a config names. Commands that run the user's config report it; those that read a run's folder, which
may be another person's, run it only when asked to."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from distflow.config import Config
from distflow.config.derived_settings import functions_of_pipeline
from distflow.config.per_domain import named_rewards, train_files, val_files
from distflow.data.sources import is_function
from distflow.errors import UserError
from distflow.models.paths import code_of

TRUST_CODE = "--trust-code"


def named_code(config: Config) -> list[str]:
    """Everything that a run imports or calls, as `key: name`."""
    custom = config.custom_reward_function
    reward = [f"custom_reward_function: {custom.path}:{custom.name}"] if custom.path else []
    return [*pipeline_code(config), *reward, *_reward_code(config), *_data_code(config), *model_code(config)]


def pipeline_code(config: Config) -> list[str]:
    """The code of the pipeline."""
    names = functions_of_pipeline(config)
    return _imports(config) + [f"dag.pipeline: {name}" for name in names if not name.startswith("distflow.")]


def replayed_code(config: Config) -> list[str]:
    """The code that registers losses, or comes with the models."""
    return [*_imports(config), *model_code(config)]


def model_code(config: Config) -> list[str]:
    """The code of models and tokenizers, where `trust_remote_code` lets it run."""
    model = config.actor_rollout_ref.model
    if not model.trust_remote_code:
        return []
    paths = dict.fromkeys(path for path in (model.path, model.tokenizer_path, config.critic.model.path) if path)
    return [f"actor_rollout_ref.model.trust_remote_code: {code}" for path in paths for code in code_of(path)]


def only_if_trusted(code: list[str], trusted: bool, say: Callable[[str], None]) -> None:
    """Report what is about to run. Raises UserError with the same where nobody asked for it."""
    lines = "".join(f"\n  {line}" for line in code)
    if code and not trusted:
        raise UserError(
            f"this would run Python code that it names:{lines}\n"
            f"Nothing was run. Read that code; if you trust it, say so with {TRUST_CODE}"
        )
    if code:
        say(f"running Python code, as {TRUST_CODE} allows:{lines}")


def without_model_code(config: Config) -> Config:
    """The config with `trust_remote_code` off."""
    settings = config.actor_rollout_ref
    model = replace(settings.model, trust_remote_code=False)
    return replace(config, actor_rollout_ref=replace(settings, model=model))


def _imports(config: Config) -> list[str]:
    return [f"trainer.imports: {name}" for name in config.trainer.imports]


def _reward_code(config: Config) -> Iterator[str]:
    """Reward functions that are named by their place: module:function, file.py:function."""
    for key, _, named in named_rewards(config):
        for part in named:
            if ":" in part.name and not part.name.startswith("distflow."):
                yield f"{key}: {part.name}"


def _data_code(config: Config) -> Iterator[str]:
    for key, files in (*train_files(config), *val_files(config)):
        for file in files:
            if is_function(file):
                yield f"{key}: {file}"
