"""Every tokenizer behind one interface: nothing is added, nothing is lost, and what it says of itself is so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megalite.data.tokenizers import END_OF_TEXT, open_tokenizer
from tests.data import small_tokenizers as small

TEXTS = ["the quick brown fox", "", "Zwölf 数据 🙂\n\n    indented", "don't  stop   \r\n", "<|endoftext|> is text"]
KINDS = ["bytes", "byte_level", "ranks", "named", "pieces"]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The name by which each kind is opened."""
    _install_encoding(tmp_path / "plugin", monkeypatch)
    return {
        "bytes": "bytes",
        "byte_level": str(small.byte_level(tmp_path / "tokenizer.json")),
        "ranks": str(small.ranks(tmp_path / "small.tiktoken")),
        "named": "tiktoken:small",
        "pieces": str(small.pieces(tmp_path / "small.model")),
    }


def _install_encoding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoding of tiktoken's by name, with a hole before its special token, as o200k_base has."""
    import tiktoken.registry

    (folder / "tiktoken_ext").mkdir(parents=True)
    (folder / "tiktoken_ext" / "small.py").write_text(
        "def small():\n"
        "    ranks = {bytes([b]): b for b in range(256)}\n"
        f"    return dict(name='small', pat_str={small.GPT2_LIKE!r}, mergeable_ranks=ranks,\n"
        f"        special_tokens={{{END_OF_TEXT!r}: 300}})\n"
        "ENCODING_CONSTRUCTORS = {'small': small}\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", None)
    tiktoken.registry._available_plugin_modules.cache_clear()
    sys.modules.pop("tiktoken_ext", None)


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back_and_no_token_is_added(made: dict[str, str], kind: str) -> None:
    tokenizer = open_tokenizer(made[kind])
    found = tokenizer.encode(TEXTS)
    assert [tokenizer.decode(one.tolist()) for one in found] == TEXTS
    assert len(found[1]) == 0
    special = {tokenizer.end_of_document, tokenizer.id_of("<|begin|>")}
    assert not special & set(np.concatenate(found).tolist())
    assert tokenizer.encode([]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_id_is_below_the_vocabulary_and_the_end_of_a_document_is_one(made: dict[str, str], kind: str) -> None:
    tokenizer = open_tokenizer(made[kind])
    assert tokenizer.end_of_document is not None
    assert max(np.concatenate(tokenizer.encode(TEXTS)).max(), tokenizer.end_of_document) < tokenizer.vocab_size


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(made: dict[str, str], kind: str) -> None:
    """sentencepiece puts one space in front of a text that is not empty."""
    tokenizer = open_tokenizer(made[kind])
    assert tokenizer.token_bytes is not None
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,) and tokenizer.token_bytes.dtype == np.int32
    assert tokenizer.token_bytes[tokenizer.end_of_document] == 0
    for text, tokens in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert tokenizer.token_bytes[tokens].sum() == len(text.encode()) + (kind == "pieces" and bool(text))


@pytest.mark.parametrize("kind", ["byte_level", "ranks", "named"])
def test_the_text_of_a_special_token_becomes_it_only_where_that_is_asked_for(made: dict[str, str], kind: str) -> None:
    text = f"a{END_OF_TEXT}b"
    plain, asked = (open_tokenizer(made[kind], special_tokens=asked) for asked in (False, True))
    assert plain.end_of_document not in plain.encode([text])[0]
    assert asked.encode([text])[0].tolist().count(asked.end_of_document) == 1
    assert plain.decode(plain.encode([text])[0].tolist()) == text


def test_added_tokens_count_in_the_vocabulary_also_past_a_hole(made: dict[str, str], tmp_path: Path) -> None:
    assert open_tokenizer(made["bytes"]).vocab_size == 257
    assert open_tokenizer(made["named"]).vocab_size == 301
    assert open_tokenizer(made["ranks"]).vocab_size == 263
    # 320 trained, then three added
    assert open_tokenizer(made["byte_level"]).vocab_size == 323
    content = json.loads(Path(made["byte_level"]).read_text())
    content["model"]["vocab"]["unseen"] = 500
    (tmp_path / "hole.json").write_text(json.dumps(content))
    hole = open_tokenizer(str(tmp_path / "hole.json"))
    assert hole.vocab_size == 501 and hole.encode(["the"])[0].max() < 501


def test_an_added_token_that_is_not_special_is_read_in_text_and_has_its_bytes(made: dict[str, str]) -> None:
    tokenizer = open_tokenizer(made["byte_level"])
    tokens = tokenizer.encode(["a<tab>b"])[0]
    assert tokenizer.id_of("<tab>") in tokens
    assert tokenizer.token_bytes is not None and tokenizer.token_bytes[tokens].sum() == 7


def test_lengths_are_none_where_a_token_has_no_length_of_its_own(tmp_path: Path) -> None:
    """Words without the spaces between them; pieces where one token stands for all that is unknown."""
    assert open_tokenizer(str(small.words(tmp_path / "words.json", 10))).token_bytes is None
    assert open_tokenizer(str(small.pieces(tmp_path / "few.model", byte_fallback=False))).token_bytes is None


def test_the_end_of_a_document_is_what_the_configuration_beside_the_file_says(tmp_path: Path) -> None:
    path = small.byte_level(tmp_path / "tokenizer.json")
    for eos in ("<|begin|>", {"content": "<|begin|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        opened = open_tokenizer(str(tmp_path))  # the folder, as it is downloaded
        assert opened.end_of_document == opened.id_of("<|begin|>") is not None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert open_tokenizer(str(path)).end_of_document == open_tokenizer(str(path)).id_of(END_OF_TEXT)


def test_of_two_tokens_that_could_end_a_document_none_is_guessed(tmp_path: Path) -> None:
    path = small.byte_level(tmp_path / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_special_tokens(["</s>"])
    inner.save(str(path))
    assert open_tokenizer(str(path)).end_of_document is None
    assert open_tokenizer(str(path), end_of_document="</s>").end_of_document == inner.token_to_id("</s>")


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_document_can_be_given_by_text_or_id(made: dict[str, str], kind: str) -> None:
    a = open_tokenizer(made[kind]).id_of("a")
    assert a is not None
    assert open_tokenizer(made[kind], end_of_document="7").end_of_document == 7
    if kind == "ranks":  # its file names no special token, so a name makes one, unless it is a rank's
        named = open_tokenizer(made[kind], end_of_document="<end>")
        assert named.end_of_document == 262 and named.vocab_size == 263
    assert open_tokenizer(made[kind], end_of_document="a").end_of_document == a
    with pytest.raises(ValueError, match=r"--end-of-document 999999 is no token of .*id below \d+"):
        open_tokenizer(made[kind], end_of_document="999999")


def test_a_pattern_decides_where_a_file_of_ranks_cuts_words(made: dict[str, str]) -> None:
    path = made["ranks"]
    assert len(open_tokenizer(path).encode(["the the"])[0]) == 2
    assert len(open_tokenizer(path, pattern=r"\S|\s").encode(["the the"])[0]) == 7
    with pytest.raises(ValueError, match="--pattern goes with a file of ranks"):
        open_tokenizer(made["byte_level"], pattern=".")


def test_a_file_of_ranks_that_has_changed_is_read_anew(tmp_path: Path) -> None:
    path = small.ranks(tmp_path / "small.tiktoken")
    before = open_tokenizer(str(path)).vocab_size
    path.write_bytes(b"\n".join(path.read_bytes().splitlines()[:-1]))
    assert open_tokenizer(str(path)).vocab_size == before - 1


@pytest.mark.parametrize(
    ("library", "kind"), [("tokenizers", "byte_level"), ("tiktoken", "ranks"), ("sentencepiece", "pieces")]
)
def test_a_missing_library_is_one_line_with_the_command_that_installs_it(
    made: dict[str, str], monkeypatch: pytest.MonkeyPatch, library: str, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError) as refusal:
        open_tokenizer(made[kind])
    assert f"needs the library {library}, which is not installed: pip install 'megalite[data]'" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["broken.json", "broken.model", "broken.tiktoken", "none.json", "gpt2", "tiktoken:no"])
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    if name.startswith("broken"):
        (tmp_path / name).write_text("{not a tokenizer\n")
    with pytest.raises(ValueError, match=name.split(":")[-1].split(".")[0]) as refusal:
        open_tokenizer(name if ":" in name else str(tmp_path / name))
    assert "\n" not in str(refusal.value)


def test_a_model_of_sentencepiece_without_an_end_has_none(tmp_path: Path) -> None:
    assert open_tokenizer(str(small.pieces(tmp_path / "open.model", end=False))).end_of_document is None
    with pytest.raises(ValueError, match="--special-tokens: sentencepiece reads none"):
        open_tokenizer(str(tmp_path / "open.model"), special_tokens=True)
