"""Keys of an optimizer, of its mini-batches and of its schedule: the same for the actor and the
critic."""

from collections.abc import Callable

from tests.e2e.keys.case import Case, close, differ
from tests.e2e.keys.lab import Run

ONE = "trainer.total_training_steps=1"
FOUR = "trainer.total_training_steps=4"


def cases(role: str, base: str, group: str) -> tuple[Case, ...]:
    """role: of the engine, and in front of its metrics. base: a pipeline that trains it. group: of
    its keys."""
    optim = f"{group}.optim"
    sgd = f"{optim}.optimizer=sgd"
    falling = (FOUR, f"{optim}.scheduler=linear_with_warmup", f"{optim}.warmup_ratio=0.5")
    plain = (ONE, sgd, f"{optim}.weight_decay=0", f"{group}.max_grad_norm=1000")

    def case(
        key: str, value: str, outcome: str, check: Callable[..., None], given: tuple[str, ...] = ()
    ) -> Case:
        change = f"{group}.{key}={value}"
        return Case(f"{group}.{key}", change, outcome, check, base=base, given=given)

    return (
        case(
            "optim.optimizer",
            "sgd",
            "the move is lr · gradient",
            _moves(role, 1.0),
            (ONE, *plain[2:]),
        ),
        case("optim.lr", "0.01", "the move is ten times as far", _moves(role, 10.0), plain),
        case(
            "optim.weight_decay", "0.5", "weights shrink by lr · decay", _decays(role, 0.5), (ONE,)
        ),
        case("optim.betas", "[0.5,0.9]", "the first moments", _moments(role), (ONE,)),
        case(
            "optim.eps",
            "1.0",
            "the move is lr · g / (|g| + 1)",
            _eps(role),
            (ONE, f"{optim}.weight_decay=0"),
        ),
        case(
            "optim.scheduler",
            "constant_with_warmup",
            f"{role}/lr stays",
            _rates(role, 0, 0.5, 1, 1),
            falling,
        ),
        case("optim.warmup_ratio", "0.25", f"{role}/lr", _rates(role, 0, 1, 2 / 3, 1 / 3), falling),
        case("optim.lr_warmup_steps", "3", f"{role}/lr", _rates(role, 0, 1 / 3, 2 / 3, 1), falling),
        case("optim.min_lr_ratio", "0.5", f"{role}/lr", _rates(role, 0, 0.5, 1, 0.75), falling),
        case("max_grad_norm", "0.01", "the move is lr · 0.01", _clipped(role), plain),
        case("ppo_epochs", "3", "optimizer steps", _num_steps(role, 1, 3), (ONE,)),
        case("ppo_mini_batch_size", "1", "optimizer steps", _num_steps(role, 1, 4), (ONE,)),
        case(
            "ppo_max_token_len_per_gpu",
            "40",
            "tokens of the largest forward",
            _micro_batches(role),
            (ONE,),
        ),
    )


def _moves(role: str, factor: float) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        close(after.moved(role), factor * 0.001 * after.column(f"{role}/grad_norm")[0], 1e-3)
        differ(before.moved(role) / after.moved(role), 1.0, 0.5)

    return check


def _decays(role: str, decay: float) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        for name, start in before.start[role].items():
            close(
                after.weights(role)[name],
                before.weights(role)[name] - 0.001 * (decay - 0.01) * start,
                1e-6,
            )
        differ(after.moved(role), before.moved(role), 1e-6)

    return check


def _moments(role: str) -> Callable[[Run, Run], None]:
    """After one step they are (1 − beta) · g and (1 − beta2) · g²."""

    def check(before: Run, after: Run) -> None:
        close(after.moment("exp_avg", role) / 0.5, before.moment("exp_avg", role) / 0.1, 1e-6)
        close(
            after.moment("exp_avg_sq", role) / 0.1, before.moment("exp_avg_sq", role) / 0.001, 1e-6
        )
        differ(after.moment("exp_avg", role).norm(), before.moment("exp_avg", role).norm(), 1e-3)

    return check


def _eps(role: str) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        gradient = after.moment("exp_avg", role) / 0.1
        close(after.moved(role), 0.001 * float((gradient / (gradient.abs() + 1.0)).norm()), 1e-3)
        assert after.moved(role) < 0.5 * before.moved(role)

    return check


def _rates(role: str, *factors: float) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        close(before.column(f"{role}/lr"), [0.001 * factor for factor in (0, 0.5, 1, 0.5)], 1e-9)
        close(after.column(f"{role}/lr"), [0.001 * factor for factor in factors], 1e-9)

    return check


def _clipped(role: str) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        assert after.column(f"{role}/grad_norm")[0] > 0.01
        close(after.moved(role), 0.001 * 0.01, 1e-3)
        close(after.column(f"{role}/grad_norm")[0], before.column(f"{role}/grad_norm")[0], 1e-6)

    return check


def _num_steps(role: str, before_num: int, after_num: int) -> Callable[[Run, Run], None]:
    def check(before: Run, after: Run) -> None:
        assert (before.engine(role).num_steps, after.engine(role).num_steps) == (
            before_num,
            after_num,
        )
        other = {"actor": "critic", "critic": "actor"}[role]
        if after.engine(other) is not None:
            assert after.engine(other).num_steps == before.engine(other).num_steps

    return check


def _micro_batches(role: str) -> Callable[[Run, Run], None]:
    """Smaller forwards, the same gradient."""

    def check(before: Run, after: Run) -> None:
        assert (
            before.largest_forward(role, trains=True)
            > 40
            >= after.largest_forward(role, trains=True)
        )
        close(after.column(f"{role}/grad_norm")[0], before.column(f"{role}/grad_norm")[0], 1e-4)

    return check
