"""An agent as users write it, with the client of OpenAI, trained unchanged: it guesses a number in
two turns."""

from openai import OpenAI


def numbers():
    """The rows of the data."""
    return [{"prompt": "?", "answer": str(number)} for number in (1, 2, 3)]


def guess(prompt, ground_truth):
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY of the episode lead to the policy
    text = prompt
    for _ in range(2):
        reply = client.completions.create(model="any", prompt=text, max_tokens=1).choices[0].text
        if reply == ground_truth:
            return {"found": 1.0}
        is_lower = reply.isdigit() and int(reply) < int(ground_truth)
        text += reply + (">" if is_lower else "<")

    return {"found": 0.0}
