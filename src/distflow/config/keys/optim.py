"""Keys of `optim`."""

from dataclasses import dataclass

from distflow.builtin_names import OPTIMIZERS, SCHEDULERS
from distflow.config.keys.declare import key


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule; the schedule advances per optimizer step."""

    optimizer: str = key("adamw", "optimizer", choices=OPTIMIZERS)
    lr: float = key(1e-6, "peak learning rate", minimum=0)
    weight_decay: float = key(0.01, "weight decay", minimum=0)
    betas: tuple[float, float] = key(
        (0.9, 0.999),
        "decay of Adam's first and second moments, each in [0, 1)",
        taken_if=lambda own: own.optimizer != "sgd",
    )
    eps: float = key(1e-8, "Adam's epsilon", above=0, taken_if=lambda own: own.optimizer != "sgd")
    scheduler: str = key("cosine_with_warmup", "learning-rate schedule", choices=SCHEDULERS)
    warmup_ratio: float = key(
        0.1,
        "warm-up, as a share of the optimizer steps",
        minimum=0,
        maximum=1,
        taken_if=lambda own: own.scheduler != "constant",
    )
    lr_warmup_steps: int = key(
        -1,
        "number of warm-up optimizer steps; -1: by warmup_ratio",
        minimum=-1,
        taken_if=lambda own: own.scheduler != "constant",
    )
    min_lr_ratio: float = key(
        0.0,
        "final learning rate, as a share of lr",
        minimum=0,
        maximum=1,
        taken_if=lambda own: not own.scheduler.startswith("constant"),
    )
