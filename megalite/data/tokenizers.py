"""Tokenizers: text to numbers and back, whichever library does it, behind one small interface.

    bytes                  built in: the 256 bytes, and 256 for the end of a document
    FOLDER, FILE.json      Hugging Face's tokenizer.json (library tokenizers)
    tiktoken:NAME          an encoding that tiktoken knows, as o200k_base
    FILE.tiktoken          a file of ranks as tiktoken reads them; the pattern that cuts words is not in it
    FILE.model             a sentencepiece model

A tokenizer adds nothing of its own: no first token, no last one. Text that reads like a special token (an
`<|endoftext|>` in a web page) stays text unless special_tokens is asked for. Libraries are imported where one of
their tokenizers is opened.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer]

BYTES = "bytes"
TIKTOKEN = "tiktoken:"
GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
"""How cl100k_base cuts words: what a file of ranks is read with where no pattern is given."""
END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
"""Names of the token that ends a document in published tokenizers, looked for where no configuration names it."""


class Tokenizer(ABC):
    """name: what `open_tokenizer` opens it by. vocab_size: one more than the largest id, added tokens included.

    end_of_document: an id, None where the tokenizer has none of its own.
    token_bytes: (vocab_size,) int32, how many bytes of text each token stands for, 0 for special tokens and unused
    ids; of the text as the tokenizer normalises it (a space that it puts in front counts). None where a token has no
    length of its own.
    """

    name: str
    vocab_size: int
    end_of_document: int | None = None
    token_bytes: npt.NDArray[np.int32] | None = None

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Each text as (length,) whole numbers in [0, vocab_size); an empty text as none. Uses one thread."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, special ones by their names; what is no whole character shows as U+FFFD."""

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """The id of a token, special or not, by its text; None where there is none."""


def open_tokenizer(
    name: str, *, special_tokens: bool = False, end_of_document: str | None = None, pattern: str | None = None
) -> Tokenizer:
    """The tokenizer that `name` names, in one of the forms above.

    special_tokens: text that reads like a special token becomes it. end_of_document: the token that ends a document,
    by its text or, in digits, by its id; None takes the tokenizer's own. pattern: the regular expression that cuts
    words, for a file of ranks.

    Raises ValueError, in one line, where the library is missing, the file is not what its name says, or there is no
    such token.
    """
    path = _file_of(name)
    if pattern is not None and not path.endswith(".tiktoken"):
        raise ValueError(f"--pattern goes with a file of ranks (.tiktoken), and --tokenizer is {name}; leave it out")
    opened: Tokenizer
    if name == BYTES:
        opened = ByteTokenizer()
    elif name.startswith(TIKTOKEN):
        opened = TiktokenTokenizer(name, _known_encoding(name.removeprefix(TIKTOKEN)), special_tokens=special_tokens)
    elif path.endswith(".tiktoken"):
        named = end_of_document if end_of_document is not None and not end_of_document.isdigit() else END_OF_TEXT
        encoding = _encoding_of_ranks(path, pattern=pattern or GPT4_PATTERN, end=named)
        opened = TiktokenTokenizer(os.path.abspath(path), encoding, special_tokens=special_tokens)
    elif path.endswith(".model"):
        opened = SentencePieceTokenizer(path, special_tokens=special_tokens)
    else:
        opened = HuggingFaceTokenizer(path, special_tokens=special_tokens)
    if end_of_document is not None:
        opened.end_of_document = _id_in(opened, end_of_document)
    return opened


def _file_of(name: str) -> str:
    """The file that a name means; the name itself for tokenizers that are none."""
    if name == BYTES or name.startswith(TIKTOKEN):
        return name
    path = Path(name)
    if path.is_dir():
        path = next((path / file for file in ("tokenizer.json", "tokenizer.model") if (path / file).is_file()), path)
    if path.is_file() and path.suffix in (".json", ".model", ".tiktoken"):
        return str(path)
    raise ValueError(
        f"--tokenizer {name} is none: give bytes, tiktoken:NAME, a tokenizer.json (or its folder), a sentencepiece "
        f".model or a .tiktoken file that exists (looked in {Path.cwd()})"
    )


def _library(name: str, *, needed_by: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(
            f"--tokenizer {needed_by} needs the library {name}, which is not installed: pip install 'megalite[data]'"
        ) from None


def _id_in(tokenizer: Tokenizer, token: str) -> int:
    """A token that the user named, by its id or its text."""
    found = int(token) if token.isdigit() else tokenizer.id_of(token)
    if found is None or found >= tokenizer.vocab_size:
        raise ValueError(
            f"--end-of-document {token} is no token of {tokenizer.name}; give the text of one, "
            f"or an id below {tokenizer.vocab_size}"
        )
    return found


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 as they are, and one id more for the end of a document."""

    def __init__(self) -> None:
        self.name, self.end_of_document, self.vocab_size = BYTES, 256, 257
        self.token_bytes = np.array([1] * 256 + [0], dtype=np.int32)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        runs: list[bytes] = [bytes([token]) if token < 256 else END_OF_TEXT.encode() for token in tokens]
        return b"".join(runs).decode(errors="replace")

    def id_of(self, token: str) -> int | None:
        encoded = token.encode()
        return 256 if token == END_OF_TEXT else encoded[0] if len(encoded) == 1 else None


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json. Its own padding and cutting to a length are switched off: they are for batches of a model.

    The end of a document is `eos_token` of the tokenizer_config.json beside it or, without one, the special token
    whose name is known for it. token_bytes: of byte-level BPE.
    """

    def __init__(self, path: str, *, special_tokens: bool) -> None:
        library = _library("tokenizers", needed_by=path)
        self.name = os.path.abspath(path)
        try:
            self._inner = library.Tokenizer.from_file(path)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"--tokenizer {path} is no tokenizer.json of Hugging Face ({_line(error)})") from None
        self._inner.no_padding()
        self._inner.no_truncation()
        self._inner.encode_special_tokens = not special_tokens
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        # Not the number of entries: ids may have holes, and the table of embeddings must reach the largest.
        self.vocab_size = max(vocabulary.values()) + 1
        added = self._inner.get_added_tokens_decoder()
        self.end_of_document = self._end(path, [token.content for token in added.values() if token.special])
        self.token_bytes = _byte_level_lengths(json.loads(self._inner.to_str()), vocabulary, added, self.vocab_size)

    def _end(self, path: str, special: Sequence[str]) -> int | None:
        try:
            named = json.loads(Path(path).with_name("tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
            return self.id_of(named["content"] if isinstance(named, dict) else named)
        except (OSError, ValueError, KeyError, TypeError):
            known = [token for token in KNOWN_ENDS if token in special]
            return self.id_of(known[0]) if len(known) == 1 else None  # of two, a guess would be wrong in silence

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int32) for one in found]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        return self._inner.token_to_id(token)


class TiktokenTokenizer(Tokenizer):
    """An `Encoding` of tiktoken. The end of a document is its `<|endoftext|>`."""

    def __init__(self, name: str, encoding: Any, *, special_tokens: bool) -> None:
        self.name, self._inner, self.vocab_size = name, encoding, encoding.n_vocab
        self._allowed: str | set[str] = "all" if special_tokens else set()
        self.end_of_document = self.id_of(END_OF_TEXT)
        self.token_bytes = np.array([self._length(token) for token in range(self.vocab_size)], dtype=np.int32)

    def _length(self, token: int) -> int:
        if self._inner.is_special_token(token):
            return 0
        try:
            return len(self._inner.decode_single_token_bytes(token))
        except KeyError:  # a hole between the ranks and the special tokens
            return 0

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        encode, allowed = self._inner.encode_to_numpy, self._allowed
        return [encode(text, allowed_special=allowed, disallowed_special=()) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(list(tokens))

    def id_of(self, token: str) -> int | None:
        try:
            return self._inner.encode_single_token(token)
        except KeyError:
            return None


def _known_encoding(name: str) -> Any:
    library = _library("tiktoken", needed_by=TIKTOKEN + name)
    if name not in library.list_encoding_names():
        raise ValueError(f"--tokenizer {TIKTOKEN}{name}: tiktoken knows {', '.join(library.list_encoding_names())}")
    try:
        return library.get_encoding(name)
    except Exception as error:  # it fetches the ranks on first use, and any error of a network may come out
        raise ValueError(
            f"--tokenizer {TIKTOKEN}{name} cannot be fetched ({_line(error)}); "
            "give the path of its .tiktoken file, or fill TIKTOKEN_CACHE_DIR where there is a network"
        ) from None


def _encoding_of_ranks(path: str, *, pattern: str, end: str) -> Any:
    """A file of ranks with one special token after the last rank."""
    library = _library("tiktoken", needed_by=path)
    try:
        # Not tiktoken's own reader: it keeps a copy under the hash of the path, and reads that when the file changes.
        lines = [line.split() for line in Path(path).read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        special = {} if end.encode() in ranks else {end: max(ranks.values()) + 1}
        return library.Encoding(Path(path).stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except Exception as error:
        raise ValueError(
            f"--tokenizer {path} is no file of ranks, or --pattern is no expression ({_line(error)})"
        ) from None


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model. The end of a document is its `</s>`.

    token_bytes: where unknown characters fall back to bytes; else one token stands for characters of any length.
    """

    def __init__(self, path: str, *, special_tokens: bool) -> None:
        library = _library("sentencepiece", needed_by=path)
        if special_tokens:
            raise ValueError(f"--special-tokens: sentencepiece reads none in text ({path}); leave it out")
        self.name = os.path.abspath(path)
        try:
            self._inner = library.SentencePieceProcessor(model_file=path)
        except Exception as error:
            raise ValueError(
                f"--tokenizer {path} is no sentencepiece model ({_line(error)}); a file of ranks must end in .tiktoken"
            ) from None
        self.vocab_size = self._inner.get_piece_size()
        end = self._inner.eos_id()
        self.end_of_document = end if end >= 0 else None
        ids = range(self.vocab_size)
        if any(self._inner.is_byte(token) for token in ids):
            self.token_bytes = np.array([self._length(token) for token in ids], dtype=np.int32)

    def _length(self, token: int) -> int:
        if self._inner.is_byte(token):
            return 1
        if self._inner.is_control(token) or self._inner.is_unknown(token) or self._inner.is_unused(token):
            return 0
        return len(self._inner.id_to_piece(token).replace("▁", " ").encode())

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        found = self._inner.encode(list(texts), out_type=int, add_bos=False, add_eos=False, num_threads=1)
        return [np.array(one, dtype=np.int32) for one in found]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode([int(token) for token in tokens])

    def id_of(self, token: str) -> int | None:
        found = self._inner.piece_to_id(token)
        return found if self._inner.id_to_piece(found) == token else None


def _byte_level_lengths(
    parts: Mapping[str, Any], vocabulary: Mapping[str, int], added: Mapping[int, Any], vocab_size: int
) -> npt.NDArray[np.int32] | None:
    """token_bytes of byte-level BPE, where each character of a token stands for one byte; None for anything else."""
    if parts["model"]["type"] != "BPE" or "ByteLevel" not in set(_types(parts["decoder"])):
        return None
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(code) for code in [*printable, *range(256, 512 - len(printable))]}
    lengths = np.zeros(vocab_size, dtype=np.int32)
    for token, number in vocabulary.items():
        if number in added:
            if added[number].special:
                continue
            if added[number].lstrip or added[number].rstrip:  # it takes the spaces around it with it
                return None
            lengths[number] = len(token.encode())
        elif alphabet.issuperset(token):
            lengths[number] = len(token)
        else:
            return None
    return lengths


def _types(part: Mapping[str, Any] | None) -> Iterable[str]:
    """The types of a decoder and of those it is a sequence of."""
    if part:
        yield part["type"]
        for inner in part.get("decoders", []):
            yield from _types(inner)


def _line(error: Exception) -> str:
    """What an error says, cut to one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
