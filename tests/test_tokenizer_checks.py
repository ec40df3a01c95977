"""What is found wrong with tokenizers, alone and against each other."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import fresh_python
import pytest

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.data import prompts, survey
from pytest_gkd.workload.models import model_files, tokenizer_load
from pytest_gkd.workload.models import tokenizer_check as check


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def load(model: Path) -> Any:
    return tokenizer_load.load(str(model), "--gkd-student", trust_remote_code=False)


def fault(call: Callable[[], Any]) -> StageFault:
    with pytest.raises(StageFault) as caught:
        call()
    json.dumps(caught.value.facts)
    return caught.value


def test_a_sound_tokenizer_passes_every_check(model: Path) -> None:
    tokenizer = load(model)
    assert check.check_round_trip(tokenizer, "x") == {}
    assert str(check.check_chat_template(tokenizer, "x", "p")).endswith("assistant\n")
    assert check.check_special_tokens(tokenizer, 512, "x") == []
    check.check_ids(tokenizer.get_vocab(), 512, "x")
    check.check_same_ids(tokenizer, tokenizer)


def test_the_light_way_needs_no_torch_and_gives_auto_tokenizers_ids(
    model: Path,
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    code = (
        "import json, sys\n"
        "from pytest_gkd.workload.models import tokenizer_check as check\n"
        "from pytest_gkd.workload.models import tokenizer_load\n"
        f"own = tokenizer_load.load({str(model)!r}, 'x', trust_remote_code=False)\n"
        "ids = [own.encode(text) for text in check.SAMPLES.values()]\n"
        "print(json.dumps([type(own).__name__, 'torch' in sys.modules, ids]))"
    )
    auto = transformers.AutoTokenizer.from_pretrained(model)
    ids = [auto.encode(text) for text in check.SAMPLES.values()]
    assert json.loads(fresh_python.output(code)) == [type(auto).__name__, False, ids]


@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen2", "qwen3", "qwen2_vl", "llama", "mistral", "gemma2", "phi3"),
        *("olmo2", "deepseek_v3", "glm4", "gpt2", "gpt_neox", "cohere", "t5"),
        "unheard_of",
    ],
)
def test_the_light_way_takes_the_class_that_auto_tokenizer_takes(
    model: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    auto = transformers.AutoTokenizer.from_pretrained
    edit(model / "config.json", lambda config: config.update(model_type=model_type))
    imported = "transformers.models.auto.tokenization_auto"
    for name in ("Qwen2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"):
        edit(
            model / "tokenizer_config.json",
            methodcaller("update", tokenizer_class=name),
        )
        wanted = auto(model)
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, imported)
            found = load(model)
        assert type(found) is type(wanted), name


def test_a_tokenizer_that_cannot_be_built_names_the_file_and_reason(
    model: Path,
) -> None:
    edit(model / "tokenizer.json", lambda value: value.update(model={"type": "no"}))
    found = fault(lambda: load(model))
    assert found.cause == "tokenizer.load"
    assert str(model) in found.message


def test_code_of_the_models_own_needs_the_option(model: Path) -> None:
    edit(
        model / "tokenizer_config.json",
        lambda value: value.update(
            auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own"
        ),
    )
    edit(model / "config.json", lambda value: value.update(model_type="own"))
    (model / "own.py").write_text("class Own: pass\n")
    assert fault(lambda: load(model)).cause == "model.trust-remote-code"


def test_no_chat_template_is_its_own_cause(model: Path) -> None:
    edit(model / "tokenizer_config.json", lambda value: value.pop("chat_template"))
    assert check.check_chat_template(load(model), "--gkd-student", "") is None
    found = fault(
        lambda: check.check_chat_template(load(model), "--gkd-student", "p.jsonl")
    )
    assert found.cause == "tokenizer.chat-template"
    assert "has no chat template" in found.message


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ messages[5]['content'] }}", "fails on one turn"),
        ("{% for m in messages %}", "fails on one turn"),
        ("{{ raise_exception('system turn wanted') }}", "system turn wanted"),
        ("hello", "drops the user's text"),
    ],
)
def test_a_chat_template_that_does_not_work_says_how(
    model: Path, template: str, part: str
) -> None:
    edit(
        model / "tokenizer_config.json",
        lambda value: value.update(chat_template=template),
    )
    found = fault(lambda: check.check_chat_template(load(model), "x", ""))
    assert found.cause == "tokenizer.chat-template"
    assert part in found.message


class Special:
    """The special tokens of a tokenizer."""

    name_or_path = "m"

    def __init__(self, pad: int | None, eos: int | None) -> None:
        self.pad_token_id, self.eos_token_id = pad, eos
        self.pad_token = self.eos_token = "<x>"  # noqa: S105


def test_a_missing_padding_token_deserves_a_word() -> None:
    (note,) = check.check_special_tokens(Special(None, 1), 9, "x")
    assert "has no padding token; frameworks take the end token '<x>'" in note


def test_a_padding_id_without_an_embedding_row_is_named() -> None:
    found = fault(lambda: check.check_special_tokens(Special(9, 1), 9, "x"))
    assert found.cause == "tokenizer.pad-token"
    assert "id 9, but the embedding has 9 rows" in found.message


def test_a_missing_end_token_fails_unless_the_configuration_has_one() -> None:
    found = fault(lambda: check.check_special_tokens(Special(0, None), 9, "x"))
    assert found.cause == "tokenizer.eos-token"
    (note,) = check.check_special_tokens(Special(0, None), 9, "x", {1})
    assert "only the model's configuration does" in note


def test_special_tokens_that_no_text_comes_to_may_lie_beyond(model: Path) -> None:
    tokenizer = load(model)
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    tokenizer.add_tokens(["plain"])
    vocab = tokenizer.get_vocab()
    found = fault(lambda: check.check_ids(vocab, rows, "x", tokenizer))
    assert "'plain' is" in found.message
    assert found.facts["beyond"] == 1
    del vocab["plain"]
    assert check.check_ids(vocab, rows, "x", tokenizer) == ["<|tool|>"]
    tokenizer.chat_template += "<|tool|>"
    fault(lambda: check.check_ids(vocab, rows, "x", tokenizer))


class Added:
    """As MistralCommonBackend of transformers: the added tokens are a method's."""

    def added_tokens_decoder(self) -> dict[int, Any]:
        raise AssertionError("not to be called")


def test_a_tokenizer_without_a_table_of_added_tokens_is_judged_by_its_ids() -> None:
    vocab = {"a": 0, "b": 2}
    assert check.check_ids(vocab, 3, "x", Added()) == []
    found = fault(lambda: check.check_ids(vocab, 2, "x", Added()))
    assert "'b' is 2" in found.message


def test_ids_beyond_the_embedding_are_counted_and_shown() -> None:
    found = fault(lambda: check.check_ids({"a": 0, "b": 2, "c": 3}, 2, "x"))
    assert found.cause == "tokenizer.vocab-mismatch"
    assert "2 token ids" in found.message
    assert found.facts["largest_id"] == 3


def test_padded_embeddings_of_different_size_are_fine() -> None:
    vocab = {"a": 0, "b": 1}
    check.check_ids(vocab, 2, "x")
    check.check_ids(vocab, 64, "x")
    assert check.compare(vocab, dict(vocab), (2, 64)) == check.Agreement(2)


def test_the_first_differences_of_two_vocabularies_are_shown() -> None:
    student = {token: i for i, token in enumerate("abcdef")}
    teacher = {token: i for i, token in enumerate("abdcfe")}
    found = fault(lambda: check.compare(student, teacher, (6, 6)))
    assert found.cause == "tokenizer.vocab-mismatch"
    assert found.facts["differences"] == 4
    assert found.facts["first"] == [["c", 2, 3], ["d", 3, 2], ["e", 4, 5]]
    assert "'c' is 2 and 3" in found.message


def test_a_few_added_tokens_at_free_ids_are_allowed() -> None:
    student = {"a": 0, "b": 1, "<think>": 2}
    found = check.compare(student, {"a": 0, "b": 1}, (8, 8))
    assert (found.only_student, found.only_teacher) == (1, 0)


@pytest.mark.parametrize(
    ("teacher", "rows"),
    [
        ({"a": 0, "b": 1, "<call>": 2}, (8, 8)),  # the id means something else
        ({"a": 0, "b": 1}, (8, 2)),  # the teacher has no such row
        ({"a": 0, "b": 1}, (8, None)),  # not known
    ],
)
def test_added_tokens_that_the_other_model_cannot_hold_are_a_mismatch(
    teacher: dict[str, int], rows: tuple[int | None, int | None]
) -> None:
    student = {"a": 0, "b": 1, "<think>": 2}
    found = fault(lambda: check.compare(student, teacher, rows))
    assert found.cause == "tokenizer.vocab-mismatch"
    assert "<think>" in found.message


def test_many_tokens_on_one_side_are_another_vocabulary() -> None:
    student = {str(i): i for i in range(200)}
    teacher = {str(i): i for i in range(100)}
    assert fault(lambda: check.compare(student, teacher, (200, 200))).cause == (
        "tokenizer.vocab-mismatch"
    )


class Codec:
    """A tokenizer whose decoding is given."""

    def __init__(self, back: Callable[[str], str]) -> None:
        self.back = back
        self.text = ""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.text = text
        return [0]

    def decode(self, ids: list[int], **options: Any) -> str:
        return self.back(self.text)


def test_a_blank_at_the_start_is_sentencepieces_way() -> None:
    assert check.check_round_trip(Codec(lambda text: " " + text), "x") == {}


def test_lost_blanks_are_noted_and_lost_letters_fail() -> None:
    noted = check.check_round_trip(Codec(lambda text: " ".join(text.split())), "x")
    assert list(noted) == ["code", "whitespace"]
    found = fault(
        lambda: check.check_round_trip(Codec(lambda text: text.replace("o", "?")), "x")
    )
    assert found.cause == "tokenizer.load"
    assert "does not give back" in found.message


def made_tokenizer(directory: Path, *, decoder: bool, words: str) -> Any:
    """One that is saved and loaded, of whole words, that knows those of ``words``."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    splits = tokenizers.pre_tokenizers.Metaspace() if decoder else None
    blanks = splits or tokenizers.pre_tokenizers.Whitespace()
    vocabulary = {"[UNK]": 0, "[END]": 1}
    for word, _ in blanks.pre_tokenize_str(words):
        vocabulary.setdefault(word, len(vocabulary))
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")  # noqa: S106
    )
    made.pre_tokenizer = blanks
    made.decoder = (
        tokenizers.decoders.Metaspace() if decoder else tokenizers.decoders.Fuse()
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[UNK]",  # noqa: S106
        eos_token="[END]",  # noqa: S106
    ).save_pretrained(directory)
    return load(directory)


def test_a_tokenizer_without_any_blanks_fails(tmp_path: Path) -> None:
    tokenizer = made_tokenizer(
        tmp_path, decoder=False, words=" ".join(check.SAMPLES.values())
    )
    found = fault(lambda: check.check_round_trip(tokenizer, "--gkd-student"))
    assert found.cause == "tokenizer.load"
    assert "became 'Thequickbrown" in found.message


def test_marks_without_a_width_may_be_lost() -> None:
    """As BERT's normaliser does with what joins emoji."""
    joined = check.SAMPLES["emoji"]
    codec = Codec(lambda text: text.replace("\u200d", ""))
    assert list(check.check_round_trip(codec, "x")) == ["emoji"]
    assert "\u200d" in joined


def test_a_template_that_does_not_begin_an_answer_is_told(model: Path) -> None:
    tokenizer = load(model)
    assert check.check_generation_prompt(tokenizer, "x") == []
    whole = tokenizer.chat_template
    tokenizer.chat_template = whole.partition("{% if add_generation_prompt")[0]
    (note,) = check.check_generation_prompt(tokenizer, "x")
    assert "'<|im_start|>assistant\\n' before an answer" in note
    # As Llama 2 and Mistral: what ends the question is all that there is.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    assert check.check_generation_prompt(tokenizer, "x") == []
    # Blanks that a vocabulary has as tokens of their own are no such mark.
    tokenizer.add_tokens([" "])
    assert check.check_generation_prompt(tokenizer, "x") == []
    tokenizer.chat_template = whole + "{{ raise_exception('no') if messages[1] }}"
    assert check.check_generation_prompt(tokenizer, "x") == []


def test_an_end_token_that_the_model_does_not_end_at_is_told(model: Path) -> None:
    ends = model_files.end_tokens(model, "x")
    assert check.check_special_tokens(load(model), None, "x", ends) == []
    edit(model / "tokenizer_config.json", lambda v: v.update(eos_token="</s>"))  # noqa: S106
    (note,) = check.check_special_tokens(load(model), None, "x", ends)
    assert "end token '</s>' has id 496" in note
    edit(model / "config.json", lambda v: v.update(eos_token_id=[7, 496]))
    assert model_files.end_tokens(model, "x") == ends | {7, 496}


def test_characters_that_a_vocabulary_lacks_are_noted(tmp_path: Path) -> None:
    """As of a model of one language without bytes to fall back to."""
    tokenizer = made_tokenizer(tmp_path, decoder=True, words=check.SAMPLES["ascii"])
    lossy = check.check_round_trip(tokenizer, "--gkd-student")
    assert "chinese" in lossy
    assert "ascii" not in lossy
    poor = made_tokenizer(tmp_path, decoder=True, words="The quick brown fox")
    found = fault(lambda: check.check_round_trip(poor, "--gkd-student"))
    assert "'The quick brown fox[UNK]" in found.message


def test_the_same_vocabulary_cut_differently_is_a_mismatch(
    model: Path, whole: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    edit(model / "tokenizer.json", lambda value: value["model"].update(merges=[]))
    ours, theirs = (
        Wrapped(tokenizers.Tokenizer.from_file(str(at / "tokenizer.json")))
        for at in (whole, model)
    )
    assert ours.vocab == theirs.vocab
    found = fault(lambda: check.check_same_ids(ours, theirs))
    assert found.cause == "tokenizer.vocab-mismatch"


class Wrapped:
    """tokenizers' Tokenizer with the call of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab = tokenizer.get_vocab()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoding = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids)


def test_the_bound_holds_for_a_real_tokenizer_and_template(model: Path) -> None:
    renderer = prompts.Renderer(load(model))
    for text in check.SAMPLES.values():
        for prompt in (text, [{"role": "user", "content": text}] * 3):
            (bound,) = renderer.bounds(survey.survey_values([prompt]).sizes)
            assert bound >= renderer.lengths([prompt])[0]


@pytest.fixture(scope="module")
def seeing(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real vision-language model, tiny and random, as it is saved by transformers."""
    import transformers

    text = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    }
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 128, "num_heads": 2}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=500,
        video_token_id=501,
        tie_word_embeddings=True,
    )
    directory = tmp_path_factory.mktemp("seeing")
    transformers.Qwen2VLForConditionalGeneration(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(whole / name, directory)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.needs("torch", "transformers")
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is here"
)
def test_a_model_that_sees_names_the_package_that_it_lacks(seeing: Path) -> None:
    """Its processor's own error begins with an empty line."""
    found = fault(
        lambda: tokenizer_load.load_processor(
            str(seeing), "--gkd-student", trust_remote_code=False
        )
    )
    assert found.cause == "env.package-missing"
    assert found.facts["package"] == "torchvision"
    files = model_files.inspect(str(seeing), "--gkd-student")
    assert files is not None
    again = fault(lambda: model_files.check_student(files, "--gkd-student", "cpu"))
    assert again.facts["package"] == "torchvision"


def test_an_error_that_begins_with_an_empty_line_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoProcessor

    (model / "processor_config.json").write_text("{}")

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("\n  no such thing\nas this")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", refuse)
    found = fault(
        lambda: tokenizer_load.load_processor(str(model), "x", trust_remote_code=False)
    )
    assert found.message.endswith("ValueError: no such thing")
