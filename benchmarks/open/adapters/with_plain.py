"""A loop of plain transformers and torch, without any system: the row that all others are beside.

python adapters/with_plain.py FOLDER OUT"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer


class Plain:
    """One run. A subclass may do one thing differently."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder = folder
        self.out = out
        self.task: dict[str, Any] = json.loads((folder / "task.json").read_text())
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        self.model = self.load()
        self.reference = self.load() if self.task["kind"] == "dpo" else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.task["lr"], eps=1e-8, weight_decay=0.0
        )
        torch.manual_seed(self.task["seed"])

    def load(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype=torch.float32)

    def run(self) -> None:
        lines = (self.folder / "rows.jsonl").read_text().splitlines()
        size = self.task["rows"]
        self.out.mkdir(exist_ok=True)
        begin = time.time()

        with (self.out / "updates.jsonl").open("w") as file:
            for number, start in enumerate(range(0, len(lines), size), 1):
                rows = [json.loads(line) for line in lines[start : start + size]]
                record = self.update(rows)
                record["seconds"] = time.time() - begin
                file.write(json.dumps(record) + "\n")
                if number % self.task["saved_every"] == 0 or number == self.task["updates"]:
                    self.model.save_pretrained(self.out / "weights" / str(number))

    def update(self, rows: list[dict[str, str]]) -> dict[str, Any]:
        recorded = self.sampled(rows) if self.task["kind"] == "grpo" else self.encoded(rows)
        loss = self.loss(recorded)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": float(loss.detach()), "grad_norm": float(norm), "rows": recorded}

    def encoded(self, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
        sides = {"response_ids": "answer"}
        if self.task["kind"] == "dpo":
            sides = {"chosen_ids": "chosen", "rejected_ids": "rejected"}

        recorded = []
        for row in rows:
            tokens = {name: self.with_end(row[column]) for name, column in sides.items()}
            recorded.append({"prompt_ids": self.tokenizer(row["prompt"])["input_ids"], **tokens})
        return recorded

    def with_end(self, text: str) -> list[int]:
        return [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]

    def sampled(self, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
        samples = self.task["samples"]
        prompts = [row["prompt"] for row in rows for _ in range(samples)]
        answers = [row["answer"] for row in rows for _ in range(samples)]
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        self.model.eval()
        with torch.no_grad():
            ids = self.generate(inputs)[:, inputs["input_ids"].shape[1] :]

        score = self.reward()
        recorded = []
        for prompt, answer, row in zip(prompts, answers, ids.tolist(), strict=True):
            end = self.tokenizer.eos_token_id
            response = row[: row.index(end) + 1] if end in row else row
            text = self.tokenizer.decode(response, skip_special_tokens=True)
            recorded.append(
                {
                    "prompt_ids": self.tokenizer(prompt)["input_ids"],
                    "response_ids": response,
                    "reward": score(text, answer),
                }
            )
        return recorded

    def generate(self, inputs: Any) -> Tensor:
        ids: Tensor = self.model.generate(
            **inputs, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=self.task["longest"]
        )
        return ids

    def reward(self) -> Any:
        spec = importlib.util.spec_from_file_location("reward", self.folder / "reward.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.score

    def loss(self, rows: list[dict[str, Any]]) -> Tensor:
        if self.task["kind"] == "dpo":
            chosen = self.log_ratio(rows, "chosen_ids")
            rejected = self.log_ratio(rows, "rejected_ids")
            return -logsigmoid(self.task["beta"] * (chosen - rejected)).mean()

        log_probs, mask = self.log_probs(self.model, rows, "response_ids")
        if self.task["kind"] == "sft":
            return -(log_probs * mask).sum() / mask.sum()

        rewards = torch.tensor([row["reward"] for row in rows]).view(-1, self.task["samples"])
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
        ratios = (log_probs - log_probs.detach()).exp()
        return -(advantages * ratios * mask).sum() / mask.sum()

    def log_ratio(self, rows: list[dict[str, Any]], side: str) -> Tensor:
        log_probs, mask = self.log_probs(self.model, rows, side)
        with torch.no_grad():
            reference, _ = self.log_probs(self.reference, rows, side)
        return ((log_probs - reference) * mask).sum(1)

    def log_probs(self, model: Any, rows: list[dict[str, Any]], side: str) -> tuple[Tensor, Tensor]:
        texts = [row["prompt_ids"] + row[side] for row in rows]
        longest = max(len(text) for text in texts)
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        place = torch.arange(longest)
        begins = torch.tensor([[len(row["prompt_ids"])] for row in rows])
        ends = torch.tensor([[len(text)] for text in texts])
        logits = model(input_ids=ids, attention_mask=(place < ends).long()).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        mask = ((place >= begins) & (place < ends))[:, 1:]
        return log_probs, mask.float()


if __name__ == "__main__":
    Plain(Path(sys.argv[1]), Path(sys.argv[2])).run()
