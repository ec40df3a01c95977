"""The reward of reinforce.py: how many letters of the question the answer uses."""


def score(row, text):
    asked = set(row["prompt"][-1]["content"])
    return len(asked & set(text)) / len(asked)
