"""Reward functions of TRL's `reward_funcs`, as `reward.functions` names them."""

_REWARDS = "my_rewards.py"


def convert_rewards(values: dict[str, object], remarks: list[str]) -> None:
    """Replace `reward_funcs`, each a function's name or a reward model, and the weights that stand
    beside them."""
    names = values.get("reward_funcs")
    names = names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) for name in names):
        return
    del values["reward_funcs"]
    parts = [_reward(str(name), remarks) for name in names]
    if "math" in parts:
        values.setdefault("data.answer_key", "solution")  # which TRL's accuracy_reward reads
    weights = values.get("reward_weights")
    if isinstance(weights, list) and len(weights) == len(parts):
        named = [part if isinstance(part, dict) else {"name": part} for part in parts]
        parts = [part | {"weight": weight} for part, weight in zip(named, weights, strict=True)]
        del values["reward_weights"]
    values["reward.functions"] = {"default": parts}


def _reward(text: str, remarks: list[str]) -> object:
    module, _, name = text.rpartition(".")
    if not text.replace(".", "").isidentifier():
        return {"name": "model", "options": {"path": text}}
    if name == "accuracy_reward" and module in ("", "trl", "trl.rewards"):
        return "math"
    if module.startswith("trl."):
        remarks.append(f"reward_funcs: {name} is a function of TRL, which must be installed")
        return f"{module}:{name}"
    remarks.append(
        f"reward_funcs: put {name} into {_REWARDS} unchanged; data.answer_key names its ground "
        "truth"
    )
    return f"{_REWARDS}:{name}"
