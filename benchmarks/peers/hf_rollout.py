"""Transformers' `generate` over given lengths: `python hf_rollout.py FOLDER`.

FOLDER/job.json has `steps`, each a list of [prompt ids, tokens wanted]; `batch`; `dtype`.
FOLDER/done.json gets the seconds of each step. Rows of a batch go on until its longest is done:
lengths are not known beforehand, so a batch is of whatever comes together.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def step(model: Any, work: list[tuple[list[int], int]], batch_size: int) -> float:
    start = time.perf_counter()
    for first in range(0, len(work), batch_size):
        batch = work[first : first + batch_size]
        prompts = torch.tensor([prompt for prompt, _ in batch], device=model.device)
        longest = max(length for _, length in batch)
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape[1] == prompts.shape[1] + longest

    return time.perf_counter() - start


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=job["dtype"]).eval()
    step(model, job["steps"][0][:8], 8)  # warms up
    with torch.inference_mode():
        seconds = [step(model, work, job["batch"]) for work in job["steps"]]
    (folder / "done.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
