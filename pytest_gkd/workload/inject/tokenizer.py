"""Tokenizers that cannot be used, or not together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pytest_gkd.workload.inject.site import Site
from pytest_gkd.workload.models import model_files, tiny_text

CONFIG = "tokenizer_config.json"
VOCABULARY = "tokenizer.json"
ADDED = 40  # more than the padding rows of the made model's embedding

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
    """A download that stopped early."""
    path = site.copied_model() / VOCABULARY
    os.truncate(path, path.stat().st_size // 2)


def broken_merges(site: Site) -> None:
    """From outside the file looks whole."""
    directory = site.copied_model()
    vocabulary = _read(directory / VOCABULARY)
    merges = vocabulary["model"]["merges"]
    vocabulary["model"]["merges"] = [["\u0394", "\u0394"], *merges]
    _write(directory / VOCABULARY, vocabulary)


def no_chat_template(site: Site) -> None:
    """A template is in the configuration or in a file of its own."""
    directory = site.copied_model()
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    _change(directory / CONFIG, chat_template=None)


def no_chat_template_for_text(site: Site) -> None:
    """As a base model with prompts that it is to go on with."""
    no_chat_template(site)
    path = site.folder / "prompts.jsonl"
    rows = [json.dumps({"prompt": text}) for text in tiny_text.prompts()]
    path.write_text("\n".join(rows), "utf-8")
    site.settings(train_files=(str(path),))


def broken_chat_template(site: Site) -> None:
    """Only rendering it tells."""
    directory = site.copied_model()
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    template = tiny_text.CHAT_TEMPLATE.replace("{% endfor %}", "")
    _change(directory / CONFIG, chat_template=template)


def no_pad_token(site: Site) -> None:
    """As Llama's tokenizers are."""
    directory = site.copied_model()
    (directory / "special_tokens_map.json").unlink(missing_ok=True)
    _unname(directory, "pad_token")


def no_end_token(site: Site) -> None:
    """As a model whose configuration was written by hand."""
    directory = site.copied_model()
    (directory / "special_tokens_map.json").unlink(missing_ok=True)
    (directory / "generation_config.json").unlink(missing_ok=True)
    _change(directory / "config.json", eos_token_id=None)
    _unname(directory, "eos_token")


def pad_token_outside(site: Site) -> None:
    """As after add_special_tokens() without resize_token_embeddings()."""
    ids_outside(site, special=True)
    pad = {"pad_token": "<|extra_39|>"}
    _change(site.folder / "student" / CONFIG, **pad)


def other_vocabulary(site: Site) -> None:
    """As many tokens as before, and all of them known to both sides."""
    directory = site.copied_model("teacher")
    vocabulary = _read(directory / VOCABULARY)
    ids = vocabulary["model"]["vocab"]
    one, other = list(ids)[-2:]
    ids[one], ids[other] = ids[other], ids[one]
    _write(directory / VOCABULARY, vocabulary)


def other_merges(site: Site) -> None:
    """A vocabulary alone does not tell how text is cut."""
    directory = site.copied_model("teacher")
    vocabulary = _read(directory / VOCABULARY)
    vocabulary["model"]["merges"] = []
    _write(directory / VOCABULARY, vocabulary)


def other_class(site: Site) -> None:
    """Qwen2Tokenizer has a rule of its own for cutting, whatever the file says."""
    directory = site.copied_model("teacher")
    vocabulary = _read(directory / VOCABULARY)
    split = vocabulary["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"] = {"Regex": r"\s|\S+"}
    _write(directory / VOCABULARY, vocabulary)
    _change(directory / "config.json", model_type="glm4")


def ids_outside(site: Site, *, special: bool = False) -> None:
    """As after add_tokens() without resize_token_embeddings()."""
    directory = site.copied_model()
    vocabulary = _read(directory / VOCABULARY)
    known = vocabulary["model"]["vocab"].values()
    first = 1 + max(*known, *(token["id"] for token in vocabulary["added_tokens"]))
    flags = vocabulary["added_tokens"][0] | {"special": special}
    new = [
        {**flags, "id": first + number, "content": f"<|extra_{number}|>"}
        for number in range(ADDED)
    ]
    vocabulary["added_tokens"] += new
    _write(directory / VOCABULARY, vocabulary)
    decoder = _read(directory / CONFIG).get("added_tokens_decoder", {})
    for token in new:
        decoder[str(token.pop("id"))] = token
    _change(directory / CONFIG, added_tokens_decoder=decoder)


def embedding_too_small(site: Site) -> None:
    """As a config that belongs to a model with fewer tokens; padding is one of them."""
    directory = site.copied_model()
    _change(directory / "config.json", vocab_size=400)


def remote_code(site: Site) -> None:
    """The library knows neither the model's type nor the tokenizer's class."""
    directory = site.copied_model()
    (directory / "tokenization_own.py").write_text(OWN_TOKENIZER)
    (directory / "configuration_own.py").write_text(OWN_CONFIG)
    _change(
        directory / "config.json",
        model_type="own",
        auto_map={"AutoConfig": "configuration_own.OwnConfig"},
    )
    own = ["tokenization_own.OwnTokenizer", "tokenization_own.OwnTokenizer"]
    _change(
        directory / CONFIG,
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": own},
    )


def no_blanks(site: Site) -> None:
    """As a vocabulary that was trained without a decoder for its words."""
    directory = site.copied_model()
    vocabulary = _read(directory / VOCABULARY)
    vocabulary["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "WhitespaceSplit"},
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        ],
    }
    _write(directory / VOCABULARY, vocabulary)
    # Qwen2's own class has its own rule for blanks, whatever the file says.
    _change(directory / CONFIG, tokenizer_class="PreTrainedTokenizerFast")
    _change(directory / "config.json", model_type="glm4")


def unread_prompts(site: Site) -> None:
    """What the data stage would tell, if it were part of the run."""
    path = site.folder / "prompts.jsonl"
    path.write_text('{"prompt": \n', "utf-8")
    site.copied_model()
    site.settings(train_files=(str(path),))


def hub_unreachable(site: Site) -> None:
    """As on a node without a network; port 9 is for discarding."""
    site.environ("HF_ENDPOINT", "http://127.0.0.1:9")
    site.environ("NO_PROXY", "127.0.0.1")
    site.copied_model()
    site.settings(student="some-lab/some-model")


def missing_directory(site: Site) -> None:
    """A path where nothing is."""
    site.copied_model()
    site.settings(student=str(site.folder / "students"))


def _unname(directory: Path, token: str) -> None:
    """Say null, and not nothing: a class for one family has tokens of its own."""
    _write(directory / CONFIG, _read(directory / CONFIG) | {token: None})


def _change(path: Path, **values: Any) -> None:
    """Set keys of a JSON object in a file; None takes one out."""
    now = {**_read(path), **values}
    _write(path, {name: value for name, value in now.items() if value is not None})


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), "utf-8")
