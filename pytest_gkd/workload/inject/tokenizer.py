"""Tokenizers that do not work, or not together."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pytest_gkd.workload.inject.site import Site, changed
from pytest_gkd.workload.models import model_files, tiny_text

CONFIG = "tokenizer_config.json"
VOCABULARY = "tokenizer.json"
ADDED = 40  # more than the padding rows of the generated model's embedding

OWN_TOKENIZER = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
OWN_CONFIG = """
from transformers import Qwen2Config


class OwnConfig(Qwen2Config):
    model_type = "own"
"""


def missing_files(site: Site) -> None:
    """As after saving the model without its tokenizer."""
    directory = site.copied_model()
    names = (CONFIG, "special_tokens_map.json", "added_tokens.json", "merges.txt")
    for name in (*model_files.TOKENIZER_FILES, *names):
        (directory / name).unlink(missing_ok=True)


def truncated(site: Site) -> None:
    """An interrupted download."""
    path = site.copied_model() / VOCABULARY
    os.truncate(path, path.stat().st_size // 2)


def broken_merges(site: Site) -> None:
    """From outside the file looks complete."""
    with changed(site.copied_model() / VOCABULARY) as vocabulary:
        vocabulary["model"]["merges"].insert(0, ["\u0394", "\u0394"])


def no_chat_template(site: Site) -> None:
    """A template is in the configuration or in a file of its own."""
    _template(site, None)


def no_chat_template_for_text(site: Site) -> None:
    """Like a base model with prompts that it should continue."""
    no_chat_template(site)
    rows = [json.dumps({"prompt": text}) for text in tiny_text.prompts()]
    site.train_file("prompts.jsonl").write_text("\n".join(rows), "utf-8")


def broken_chat_template(site: Site) -> None:
    """Only rendering it shows."""
    _template(site, tiny_text.CHAT_TEMPLATE.replace("{% endfor %}", ""))


def no_pad_token(site: Site) -> None:
    """As Llama's tokenizers are."""
    _unname(site.copied_model(), "pad_token")


def no_end_token(site: Site) -> None:
    """Like a model with a handwritten configuration."""
    directory = site.copied_model()
    (directory / "generation_config.json").unlink(missing_ok=True)
    with changed(directory / "config.json") as config:
        config.pop("eos_token_id", None)
    _unname(directory, "eos_token")


def pad_token_outside(site: Site) -> None:
    """As after add_special_tokens() without resize_token_embeddings()."""
    ids_outside(site, special=True)
    with changed(site.folder / "student" / CONFIG) as config:
        config["pad_token"] = "<|extra_39|>"  # noqa: S105 - no secret


def other_vocabulary(site: Site) -> None:
    """As many tokens as before, and both sides know all of them."""
    with changed(site.copied_model("teacher") / VOCABULARY) as vocabulary:
        ids = vocabulary["model"]["vocab"]
        one, other = list(ids)[-2:]
        ids[one], ids[other] = ids[other], ids[one]


def other_merges(site: Site) -> None:
    """A vocabulary alone does not say how text is split."""
    with changed(site.copied_model("teacher") / VOCABULARY) as vocabulary:
        vocabulary["model"]["merges"] = []


def other_class(site: Site) -> None:
    """Qwen2Tokenizer splits by its own rule, whatever the file says."""
    directory = site.copied_model("teacher")
    with changed(directory / VOCABULARY) as vocabulary:
        split = vocabulary["pre_tokenizer"]["pretokenizers"][0]
        split["pattern"] = {"Regex": r"\s|\S+"}
    with changed(directory / "config.json") as config:
        config["model_type"] = "glm4"


def ids_outside(site: Site, *, special: bool = False) -> None:
    """As after add_tokens() without resize_token_embeddings()."""
    directory = site.copied_model()
    with changed(directory / VOCABULARY) as vocabulary:
        known = vocabulary["model"]["vocab"].values()
        first = 1 + max(*known, *(token["id"] for token in vocabulary["added_tokens"]))
        flags = vocabulary["added_tokens"][0] | {"special": special}
        new = [
            {**flags, "id": first + number, "content": f"<|extra_{number}|>"}
            for number in range(ADDED)
        ]
        vocabulary["added_tokens"] += new
    with changed(directory / CONFIG) as config:
        decoder = config.setdefault("added_tokens_decoder", {})
        for token in new:
            decoder[str(token.pop("id"))] = token


def embedding_too_small(site: Site) -> None:
    """Like the config of a model with fewer tokens, one of them the padding token."""
    with changed(site.copied_model() / "config.json") as config:
        config["vocab_size"] = 400


def remote_code(site: Site) -> None:
    """The library knows neither the model type nor the tokenizer class."""
    directory = site.copied_model()
    (directory / "tokenization_own.py").write_text(OWN_TOKENIZER)
    (directory / "configuration_own.py").write_text(OWN_CONFIG)
    with changed(directory / "config.json") as config:
        config["model_type"] = "own"
        config["auto_map"] = {"AutoConfig": "configuration_own.OwnConfig"}
    with changed(directory / CONFIG) as config:
        config["tokenizer_class"] = "OwnTokenizer"
        own = "tokenization_own.OwnTokenizer"
        config["auto_map"] = {"AutoTokenizer": [own, own]}


def no_blanks(site: Site) -> None:
    """Like a vocabulary trained without a decoder for its words."""
    directory = site.copied_model()
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = [{"type": "WhitespaceSplit"}, {"type": "ByteLevel", **flags}]
    with changed(directory / VOCABULARY) as vocabulary:
        vocabulary["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    # Qwen2's own class has its own rule for spaces, whatever the file says.
    with changed(directory / CONFIG) as config:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    with changed(directory / "config.json") as config:
        config["model_type"] = "glm4"


def unread_prompts(site: Site) -> None:
    """What the data stage would report if it were part of the run."""
    site.copied_model()
    site.train_file("prompts.jsonl").write_text('{"prompt": \n', "utf-8")


def hub_unreachable(site: Site) -> None:
    """A student with the name of a model on the hub."""
    site.no_hub()
    site.copied_model()
    site.settings(student="some-lab/some-model")


def missing_directory(site: Site) -> None:
    site.copied_model()
    site.settings(student=str(site.folder / "students"))


def _template(site: Site, template: str | None) -> None:
    directory = site.copied_model()
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    with changed(directory / CONFIG) as config:
        config["chat_template"] = template


def _unname(directory: Path, token: str) -> None:
    """Write null rather than nothing: a class for one family has default tokens."""
    (directory / "special_tokens_map.json").unlink(missing_ok=True)
    with changed(directory / CONFIG) as config:
        config[token] = None
