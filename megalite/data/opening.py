"""From what a user names to sources: texts as bytes, token files with what is known of them, the default corpus."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from megalite.data.corpus import open_standard_library
from megalite.data.errors import DataError
from megalite.data.indexed import Indexed, open_indexed
from megalite.data.meta import Meta, fingerprint, fingerprint_of, is_indexed, prefix_of, read_meta, read_token_bytes
from megalite.data.source import BYTE_VOCABULARY, Source, map_bytes
from megalite.data.split import CHUNK


def open_source(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    key: str = "data.paths",
    least_bytes: int = 2 * CHUNK,
) -> Source:
    """What a path names: a pair of token files (PREFIX, PREFIX.bin or PREFIX.idx), else a text.

    vocab_size: the model's, which a pair without PREFIX.json is held to. least_bytes: of a text. Raises DataError as
    `open_pair` and `open_text`, and for a name that is both.
    """
    name = os.fspath(path)
    if not is_indexed(name):
        return open_text(name, key=key, least_bytes=least_bytes)
    if prefix_of(name) == name and os.path.isfile(name):
        raise DataError(
            f"{key}: {name} is a file, and {name}.idx makes it a pair of token files; name {name}.bin for it"
        )
    return open_pair(name, vocab_size=vocab_size, key=key)


def open_sources(
    paths: Sequence[str | os.PathLike[str]] | None, *, cache_dir: Path, vocab_size: int | None = None
) -> list[Source]:
    """What `data.paths` names, one source a path, or the default corpus where it names none; DataError as they do."""
    if not paths:
        return [open_standard_library(cache_dir)]
    return [open_source(path, vocab_size=vocab_size, key=f"data.paths[{place}]") for place, path in enumerate(paths)]


def open_pair(path: str | os.PathLike[str], *, vocab_size: int | None = None, key: str = "data.paths") -> Source:
    """A pair of token files with its PREFIX.json, PREFIX.mask and PREFIX.token_bytes.npy, as far as they are there.

    Raises DataError as `open_indexed`; where PREFIX.json tells of other files than lie beside it; and where there is
    neither it nor a vocab_size.
    """
    pair = open_indexed(path, key=key)
    name, meta = os.fspath(path), read_meta(pair.prefix)
    found = fingerprint(path)
    if meta is None:
        if vocab_size is None:
            raise DataError(
                f"{key}: {pair.prefix}.json does not exist, so the vocabulary must be given: model.vocab_size"
            )
        return Source(name, pair.tokens, vocab_size, "model.vocab_size", pair.documents, pair.mask, fingerprint=found)
    _compare(meta, pair, found, key=key)
    return Source(
        name,
        pair.tokens,
        meta.vocab_size,
        f"{pair.prefix}.json: vocab_size",
        pair.documents,
        pair.mask,
        read_token_bytes(pair.prefix, vocab_size=meta.vocab_size),
        meta.text_bytes / meta.tokens if meta.text_bytes else None,
        meta.tokenizer,
        found,
    )


def _compare(meta: Meta, pair: Indexed, found: str, *, key: str) -> None:
    """Refuse files that were swapped under their description."""
    facts = {
        "tokens": len(pair.tokens),
        "documents": len(pair.documents),
        "dtype": pair.tokens.dtype.name,
        "fingerprint": found,
    }
    for fact, value in facts.items():
        if (told := getattr(meta, fact)) != value:
            raise DataError(
                f"{key}: {pair.prefix}.bin and .idx have {fact}={value}, but {pair.prefix}.json tells of {told}; "
                "they are of another set: write it anew, or remove the .json if the tokens are right"
            )


def open_text(path: str | os.PathLike[str], *, key: str = "data.paths", least_bytes: int = 2 * CHUNK) -> Source:
    """A text file of one's own, as bytes, memory-mapped; no encoding is assumed and next to nothing is read yet.

    Raises DataError naming `key` and the path if it is missing, not a regular file, shorter than least_bytes, or
    unreadable.
    """
    name = os.fspath(path)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise DataError(
            f"{key}: {name} does not exist (looked in {Path.cwd()}); give the path of a text or of token files"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {name} cannot be read ({_reason(error)}); give the path of a text file") from None
    if stat.S_ISDIR(status.st_mode):
        inside = os.path.join(name, "my.txt")
        raise DataError(f"{key}: {name} is a directory; list the files in it, as in data.paths=[{inside}]")
    if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for its writer
        raise DataError(f"{key}: {name} is not a regular file, and only those can be memory-mapped; copy it into one")
    if status.st_size < least_bytes:  # mapping an empty file fails with a message that does not name it
        raise DataError(
            f"{key}: {name} holds {status.st_size} bytes, and the least is {least_bytes}; give a longer text"
        )
    try:
        tokens, found = map_bytes(path), fingerprint_of(path)
    except OSError as error:
        raise DataError(f"{key}: {name} cannot be read ({_reason(error)}); give a file that you may read") from None
    return Source(name, tokens, BYTE_VOCABULARY, mean_bytes=1.0, tokenizer="bytes", fingerprint=found)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
