"""What is certain about a start of slime or miles, by the options of a release."""

from __future__ import annotations

import re
from typing import Any

from pytest_gkd.job.frameworks import recorded_options, sglang_server
from pytest_gkd.job.frameworks.recorded_options import UnsureError, parser
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given, Override
from pytest_gkd.job.releases import Release

# The tables of the two parsers: SGLang's ("served") and Megatron's.
TABLES = ("served", "options")
# An array that the script itself never fills is assumed to be empty, except the one
# that a sourced file, by slime's convention, sets to the model's shape options.
SHAPE = {"MODEL_ARGS"}
ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
SHAPE_KEYS = {
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups"),
    *("ffn_hidden_size", "moe_ffn_hidden_size", "num_experts", "layernorm_epsilon"),
    *("untie_embeddings_and_output_weights", "rotary_base", "group_query_attention"),
    *("mtp_num_layers", "moe_shared_expert_intermediate_size", "vocab_size"),
    *("decoder_last_pipeline_num_layers", "multi_latent_attention"),
}
# Names in slime up to 0.2.4, after SGLang's own long names.
OLD_NAMES = {
    "sglang_dp_size": "sglang_data_parallel_size",
    "sglang_pp_size": "sglang_pipeline_parallel_size",
    "sglang_ep_size": "sglang_expert_parallel_size",
}


class Known(recorded_options.Known):
    """The settings of a start, as far as they are certain."""

    # Numbers of processes, samples and parts.
    SIZES = frozenset(
        {
            *("actor_num_nodes", "actor_num_gpus_per_node"),
            *("rollout_num_gpus_per_engine", "tensor_model_parallel_size"),
            *("pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size"),
            *("rollout_batch_size", "n_samples_per_prompt", "global_batch_size"),
            *("num_steps_per_rollout", "num_query_groups"),
            *("sglang_dp_size", "sglang_pp_size", "sglang_ep_size"),
        }
    )

    def __init__(self, release: Release, launch: Launch, said: list[Override]) -> None:
        super().__init__(release, parser(release, *TABLES), launch, said)
        self.shape, self.open = frozenset[str](), frozenset[str]()
        for override in said:
            found = ARRAY.fullmatch(override.word.source)
            if override.key:
                continue
            if override.needs == SHAPE or (found and override.needs == {found[1]}):
                self.shape |= override.needs
            else:
                self.open |= override.needs
        self.servers = list(sglang_server.servers(launch.beside))

    def find(self, key: str) -> Given:
        """A key's value; a default is uncertain if undetermined words may set it."""
        if not super().has(key):
            key = OLD_NAMES.get(key, key)
        given = super().find(key)
        if given.source == "default" and key in SHAPE_KEYS and self.shape:
            return Given("undetermined", None, None, self.shape)
        return given

    def __getitem__(self, key: str) -> Any:
        """A key's certain value. Raises UnsureError.

        A required option that is not given cannot be determined, either.
        """
        value = super().__getitem__(key)
        if value is None and key == "rollout_batch_size":
            raise UnsureError(key)
        return value

    def has(self, key: str) -> bool:
        """Whether the release has an option with this key."""
        return super().has(key) or super().has(OLD_NAMES.get(key, key))

    def is_at_least(self, release: str) -> bool:
        """Whether this is slime in this release or a later one."""
        return self.name == "slime" and self.release.is_at_least(release)
