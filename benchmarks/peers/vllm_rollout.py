"""vLLM on the CPU over given lengths: `.venv-vllm/bin/python vllm_rollout.py FOLDER`; files as in
`hf_rollout.py`.

Each request ends at its own length, and answers give the log-prob of each sampled token, as a
rollout must.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt


def step(llm: Any, work: list[tuple[list[int], int]]) -> float:
    start = time.perf_counter()
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in work]
    params = [
        SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0)
        for _, length in work
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    for output, (_, length) in zip(outputs, work, strict=True):
        assert len(output.outputs[0].token_ids) == length
    return seconds


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    memory = {"gpu_memory_utilization": job["memory"]} if "memory" in job else {}
    sizes = {"max_num_seqs": 256, "max_model_len": 1024, **memory}
    llm = LLM(str(folder / "model"), dtype=job["dtype"], disable_log_stats=True, **sizes)
    step(llm, job["steps"][0])  # warms up
    (folder / "done.json").write_text(json.dumps([step(llm, work) for work in job["steps"]]))


if __name__ == "__main__":
    main()
