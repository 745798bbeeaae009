"""The update of a GRPO step as one writes it over transformers, padded:
`python hf_update.py FOLDER`.

FOLDER/job.json has `steps`, each a list of [prompt ids, answer ids, advantage], all prompts of the
same length; `micro_batch`; `by_length`: answers are sorted by their length, so that those that are
padded together are alike; `mask`: the model is given an attention mask, which a causal model padded
on the right can do without; `bfloat16`. FOLDER/done.json gets seconds, the gradient's norm and the
trained tokens of each step.

Logits are made of the answers' positions alone, their log-probs by the fused cross entropy.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

CLIP = 0.2


def step(
    model: Any, optimizer: torch.optim.Optimizer, samples: list[Any], job: dict[str, Any]
) -> tuple[float, float]:
    """Seconds, and the gradient's norm."""
    start = time.perf_counter()
    if job["by_length"]:
        samples = sorted(samples, key=lambda sample: len(sample[1]))
    num_tokens = sum(len(answer) for _, answer, _ in samples)

    for first in range(0, len(samples), job["micro_batch"]):
        prompts, answers, advantages = zip(
            *samples[first : first + job["micro_batch"]], strict=True
        )
        longest = max(map(len, answers))
        ids = torch.tensor(
            [[*p, *a, *[0] * (longest - len(a))] for p, a in zip(prompts, answers, strict=True)]
        )
        is_answer = (
            torch.arange(longest) < torch.tensor([len(answer) for answer in answers])[:, None]
        )
        seen = torch.cat(
            (torch.ones(len(ids), len(prompts[0]), dtype=torch.bool), is_answer), dim=1
        )

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=job["bfloat16"]):
            logits = model(
                input_ids=ids,
                attention_mask=seen.long() if job["mask"] else None,
                use_cache=False,
                logits_to_keep=longest + 1,
            ).logits[:, :-1]

        log_probs = -cross_entropy(
            logits.float().flatten(0, 1), ids[:, -longest:].flatten(), reduction="none"
        )
        ratio = (log_probs - log_probs.detach()).exp().view_as(is_answer)
        gain = torch.tensor(advantages)[:, None]
        surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
        (-(surrogate * is_answer).sum() / num_tokens).backward()

    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - start, float(norm)


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.01, fused=True)

    found = []
    for samples in job["steps"]:
        seconds, norm = step(model, optimizer, samples, job)
        found.append(
            {
                "seconds": seconds,
                "norm": norm,
                "tokens": sum(len(answer) for _, answer, _ in samples),
            }
        )

    (folder / "done.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
