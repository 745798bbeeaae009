"""`distflow chat`: lines become prompts as in training, responses are the model's, and what is
wrong with one line does not end the conversation."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distflow.cli import main
from tests.e2e.runs import Playground
from tests.tiny_models import write_tiny_model

Ask = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def ask(monkeypatch, capsys):
    def run(text: str, *arguments: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        status = main(["chat", *arguments])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return run


def greedy(model: Path, prompt: str | list[dict[str, str]], num_tokens: int) -> str:
    """By transformers alone, without our code."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model)

    if not isinstance(prompt, str):
        prompt = str(
            tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        )
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    else:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]

    with torch.no_grad():
        for _ in range(num_tokens):
            best = network(ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, best], 1)
            if int(best) == tokenizer.eos_token_id:
                break

    return str(tokenizer.decode(ids[0, -num_tokens:], skip_special_tokens=True))


def test_each_line_is_answered_with_what_was_said_before(tmp_path, ask):
    model = tmp_path / "model"
    write_tiny_model(model)
    status, out, err = ask("Hello\nMore\n", str(model), "--temperature", "0", "--max-tokens", "6")
    assert status == 0, err
    messages = [{"role": "user", "content": "Hello"}]
    first = greedy(model, messages, 6)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "More"}]
    assert "\n".join(out).split() == f"{first}\n{greedy(model, messages, 6)}".split()
    assert "with its chat template" in err

    status, out, err = ask(
        "Hello\nMore\n", str(model), "--temperature", "0", "--max-tokens", "6", "--plain"
    )
    assert (
        "\n".join(out).split() == f"{greedy(model, 'Hello', 6)}\n{greedy(model, 'More', 6)}".split()
    )


def test_a_line_that_is_too_long_costs_only_itself(tmp_path, ask):
    write_tiny_model(tmp_path / "model")
    status, out, err = ask(
        "x " * 5000 + "\nHi\n", str(tmp_path / "model"), "--plain", "--max-tokens", "3"
    )
    assert status == 0 and "more than data.max_prompt_length" in err and out


def test_what_cannot_be_asked_is_one_message(tmp_path, ask):
    write_tiny_model(tmp_path / "model")
    for arguments, told in (
        (("no/such/model",), "no/such/model"),
        ((str(tmp_path),), str(tmp_path)),
        ((str(tmp_path / "model"), "--max-tokens", "1000000"), "the model's context has"),
        ((str(tmp_path / "model"), "--temperature", "-1"), "--temperature -1"),
    ):
        status, out, err = ask("Hi\n", *arguments)
        assert (status, out) == (2, []) and told in err and "Traceback" not in err


def test_it_samples_as_the_config_says_whatever_the_folder_of_the_model_recommends(tmp_path, ask):
    model = write_tiny_model(tmp_path / "model")
    asked = ("Hello\n", str(model), "--temperature", "0", "--max-tokens", "8", "--plain")
    _, plain, _ = ask(*asked)
    assert plain == greedy(model, "Hello", 8).splitlines()
    penalty = "actor_rollout_ref.rollout.repetition_penalty=8"
    _, penalised, _ = ask(*asked, penalty)
    assert penalised != plain, "the key has an effect"
    (model / "generation_config.json").write_text(
        json.dumps({"repetition_penalty": 8.0, "min_p": 0.5})
    )
    assert ask(*asked)[1] == plain
    end = plain[0][2]
    assert ask(*asked, f"actor_rollout_ref.rollout.stop=['{end}']")[1] == [
        plain[0][: plain[0].index(end) + 1]
    ]


def test_a_temperature_that_is_no_number_is_refused(tmp_path, ask):
    model = write_tiny_model(tmp_path / "model")
    for text in ("nan", "inf", "-1"):
        status, _, err = ask("Hello\n", str(model), "--temperature", text)
        assert status == 2 and f"--temperature {text}: it must be 0 (greedy) or more" in err


TALK = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
PAIR = {"prompt": "1+1=", "response": "2"}
OF_RL = (
    "reward.functions",
    "reward.num_workers",
    "custom_reward_function.path",
    "actor_rollout_ref.rollout.n",
)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "format"), [(TALK, "chat"), (PAIR, "text")])
def test_a_runs_policy_is_asked_as_it_was_trained(row, format, tmp_path, ask):
    """The config has `prompt_format=text` in both cases; the model has a chat template."""
    ground = Playground(tmp_path)
    ground.write_rows([row] * 8)
    keys = (f"~{key}" for key in OF_RL)
    limits = ("data.max_prompt_length=100", "data.max_response_length=100", "trainer.save_freq=1")
    run = ground.run("sft", *keys, *limits, "trainer.total_training_steps=1")
    assert main(["export", str(run.folder), "--to", str(tmp_path / "exported")]) == 0
    asked = "Hello" if format == "text" else [{"role": "user", "content": "Hello"}]
    expected = greedy(tmp_path / "exported", asked, 6)

    for model in (run.folder, run.folder / "checkpoints" / "step-000001", tmp_path / "exported"):
        status, out, err = ask("Hello\n", str(model), "--temperature", "0", "--max-tokens", "6")
        assert status == 0 and "\n".join(out[-1:]).split() == expected.split(), err
        assert ("chat template" in err) == (format == "chat")

    _, _, err = ask(
        "Hello\n", str(run.folder), f"data.prompt_format={'text' if format == 'chat' else 'chat'}"
    )
    assert ("chat template" in err) == (format != "chat"), "a key of the command comes first"
