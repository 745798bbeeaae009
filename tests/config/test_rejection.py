"""The forms in which rejections and their bounds may be written, ours and verl's."""

import pytest

from distflow.config import config_from_dict, load_config, to_dict
from distflow.config.keys.algorithm import spread

KEY = "algorithm.rollout_correction"
GOOD = ("data.train_files=train.jsonl", "actor_rollout_ref.model.path=model")


@pytest.mark.parametrize(
    ("names", "bounds", "wanted"),
    [
        ("token_k1", "[[0.5,2.0]]", ((0.5, 2.0),)),
        ("token_k1", "'0.5_2.0'", ((0.5, 2.0),)),
        ("token_k1", "'1_2'", ((1.0, 2.0),)),
        ("token_k1", "1.5", ((None, 1.5),)),
        ("token_k3", "1e-3", ((None, 0.001),)),
        ("[token_k1,seq_mean_k3]", "[[1,2],0.1]", ((1.0, 2.0), (None, 0.1))),
        ("'token_k1, seq_mean_k3'", "'0.5_2.0, 0.1'", ((0.5, 2.0), (None, 0.1))),
        ("[token_k2,seq_max_k3]", "0.1", ((None, 0.1), (None, 0.1))),
    ],
)
def test_bounds(names, bounds, wanted):
    loaded = load_config(
        "grpo", [*GOOD, f"{KEY}.rollout_rs={names}", f"{KEY}.rollout_rs_threshold={bounds}"]
    )
    correction = loaded.config.algorithm.rollout_correction
    assert spread(correction.rollout_rs_threshold, len(correction.rollout_rs)) == wanted
    assert config_from_dict(to_dict(loaded.config)) == loaded.config


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("3", 3.0),
        ("[0.5,2]", (0.5, 2.0)),
        ("[0,2]", (0.0, 2.0)),
        ("0.5_5.0", (0.5, 5.0)),
        ("'1_2'", (1.0, 2.0)),
    ],
)
def test_thresholds_of_weights(given, wanted):
    loaded = load_config(
        "grpo", [*GOOD, f"{KEY}.rollout_is=token", f"{KEY}.rollout_is_threshold={given}"]
    )
    assert loaded.config.algorithm.rollout_correction.rollout_is_threshold == wanted
    assert config_from_dict(to_dict(loaded.config)) == loaded.config
