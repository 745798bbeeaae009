"""Claim: every token that the policy made, its end token too, is trained on where its sample has a verdict."""

from distflow.config.domain_algorithm import algorithm_of
from distflow.runtime.audit.check import Check, Wrong
from distflow.runtime.audit.evidence import Evidence


def prove(evidence: Evidence) -> str | None:
    if evidence.is_written("loss_mask") and not evidence.is_ours("loss_mask"):
        return "a node of the user's writes loss_mask"
    for sample in evidence.samples:
        made = (sample["versions"] >= 0).double()
        found = evidence.generation(sample)
        if found is not None and int(made.sum()) != len(found[1].token_ids):
            raise Wrong(
                f"sample {sample['uid']}: {int(made.sum())} tokens count as the policy's, it made "
                f"{len(found[1].token_ids)}"
            )
        for name, expected in (("response_mask", made), ("loss_mask", made * float(sample["valid"]))):
            algorithm = algorithm_of(evidence.config, sample["domain"])
            bounds = (algorithm.difficulty_mask, algorithm.mask_long_errors)
            masks = algorithm.mask_truncated or any(bound is not None for bound in bounds)
            may_miss = name == "loss_mask" and (masks or bool(algorithm.rollout_correction.rollout_rs))
            differs = sample[name].double() != expected
            wrong = differs & (expected == 0) if may_miss else differs
            if bool(wrong.any()):
                token = int(wrong.nonzero()[0])
                raise Wrong(
                    f"{name} is {float(sample[name][token]):g} at token {token} of {len(expected)} of sample "
                    f"{sample['uid']}, and must be {float(expected[token]):g}: the token is "
                    f"{'the' if made[token] else 'not the'} policy's, the sample is "
                    f"{'valid' if sample['valid'] else 'without a verdict'}"
                )
    return None


CHECK = Check(
    "masks",
    "loss_mask is on each token that the policy made, the end token included, and on no other",
    "no node of the user's that writes loss_mask",
    "equal",
    prove,
)
