"""The vLLM rollout engine, and whether it answers as its weights would."""
