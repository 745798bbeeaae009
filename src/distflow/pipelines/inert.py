"""Keys that were set and that nothing read while the run was built: each would be a silent mistake."""

from distflow.config import Loaded, flatten
from distflow.config.errors import UserError
from distflow.config.foreign.defaults import is_verls
from distflow.config.sources import is_preset
from distflow.graph import Program
from distflow.runtime.blame import is_ours

_WAITS = "with async.max_staleness=0 the trainer's thread generates, and no answer runs while weights change"
_REASONS = {
    **{f"actor_rollout_ref.rollout.{name}": _WAITS for name in ("kv_on_update", "num_threads")},
    "actor_rollout_ref.actor.weight_update_mode": "every worker that generates trains as well, and weights stay in its "
    "process; trainer.allocation can have some that only generate",
}
# Of terms that a program may leave out: 0 says the same as leaving it out.
_COEFFICIENTS = ("algorithm.kl_ctrl.kl_coef", "actor_rollout_ref.actor.kl_loss_coef")


def refuse_inert_keys(loaded: Loaded, reads: set[str], program: Program) -> list[str]:
    """Raises UserError with the keys and where they were set. Those of a preset of ours are no mistake of whoever took
    another program than it was made for: they are returned, as they are shown.

    A function of the user's that is handed a group of the config, or the context, may read keys when it runs: of that
    group (of its role's), and of groups that users registered. Of other groups it should name a key as an option.
    The presets that spell out verl's defaults may have more of them than a program reads.
    """
    handed = [node for node in program.nodes if not is_ours(node) and {"ctx", "config"} & set(node.contract.reserved)]
    groups = {*loaded.config.user_groups, *(node.config_key for node in handed if node.config_key)} if handed else ()
    values = flatten(loaded.config)
    inert = {
        key: f"{key} ({origin})" + (f": {_REASONS[key]}" if key in _REASONS and program.experience else "")
        for key, origin in loaded.set_keys.items()
        if key not in reads and not any(key == group or key.startswith(f"{group}.") for group in groups)
        if not is_verls(origin) and not (key in _COEFFICIENTS and values[key] == 0)
    }
    users = [shown for key, shown in inert.items() if not is_preset(loaded.set_keys[key])]
    if users:
        shown = "\n".join(f"  {line}" for line in users)
        raise UserError(
            f"keys that do nothing in program '{program.graph_id}':\n{shown}\n"
            "Take them out, or choose a program, estimator or loss that uses them; what only a node of your own reads, "
            "make an option of its function"
        )
    return list(inert.values())
