"""What the stages run: models, data, ranks, engines, the GKD step.

The only part of the package that may import torch, vllm, ray, transformers and
datasets, and it does so inside functions. The pytest controller never imports it.
"""
