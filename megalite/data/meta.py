"""What is known of a token file beside its tokens, and what it is recognised by.

PREFIX.json              `Meta`
PREFIX.token_bytes.npy   optional: int32, how many bytes of text each token of the vocabulary stands for
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megalite.data.errors import DataError

BLOCKS = 64
BLOCK_BYTES = 4096


def prefix_of(path: str | os.PathLike[str]) -> str:
    """PREFIX of PREFIX, PREFIX.bin or PREFIX.idx."""
    name = os.fspath(path)
    return name[:-4] if name.endswith((".bin", ".idx")) else name


def is_indexed(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a pair rather than a file of another kind: by its name, or since PREFIX.idx is there.

    A .bin without its .idx is one too: a partner that is missing, not a text.
    """
    name = os.fspath(path)
    return name.endswith((".bin", ".idx")) or os.path.isfile(f"{name}.idx")


@dataclass(frozen=True)
class Meta:
    """What wrote a token file and what it says of it.

    tokenizer: its name. vocab_size: one more than its largest token. end_of_document: the last token of each document,
    None where there is none. tokens, documents: how many. text_bytes: of the text before it was cut into tokens.
    dtype: NumPy's name of the type. fingerprint: as `fingerprint` gives it of the pair.
    """

    tokenizer: str
    vocab_size: int
    end_of_document: int | None
    tokens: int
    documents: int
    text_bytes: int
    dtype: str
    fingerprint: str


def write_meta(prefix: str | os.PathLike[str], meta: Meta) -> None:
    """Write PREFIX.json, whole or not at all."""
    path = Path(f"{os.fspath(prefix)}.json")
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_meta(prefix: str | os.PathLike[str]) -> Meta | None:
    """PREFIX.json, None where there is none. Raises DataError where it is not what `write_meta` writes."""
    path = Path(f"{os.fspath(prefix)}.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); write the set anew, or remove the file") from None
    legal: dict[str, tuple[type, ...]] = {one.name: (str,) if one.type == "str" else (int,) for one in fields(Meta)}
    legal["end_of_document"] = (int, type(None))
    wrong = sorted(set(values) ^ set(legal)) if isinstance(values, dict) else list(legal)
    wrong = wrong or [name for name, types in legal.items() if type(values[name]) not in types]
    if wrong:
        raise DataError(f"{path} is no description of a token file: wrong or missing is {', '.join(wrong)}")
    return Meta(**values)


def write_token_bytes(prefix: str | os.PathLike[str], counts: npt.ArrayLike) -> None:
    """Write PREFIX.token_bytes.npy: (vocab_size,) bytes of text of each token, 0 for those that stand for none."""
    np.save(f"{os.fspath(prefix)}.token_bytes.npy", np.asarray(counts, dtype=np.int32))


def read_token_bytes(prefix: str | os.PathLike[str], *, vocab_size: int) -> npt.NDArray[np.int32] | None:
    """PREFIX.token_bytes.npy, None where there is none. Raises DataError where it does not fit the vocabulary."""
    path = f"{os.fspath(prefix)}.token_bytes.npy"
    if not os.path.exists(path):
        return None
    try:
        counts = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); write the set anew, or remove the file") from None
    if counts.shape != (vocab_size,) or counts.dtype != np.int32:
        raise DataError(
            f"{path} holds {counts.dtype} of shape {counts.shape}, not int32 of ({vocab_size},), one a token; "
            "write the set anew, or remove the file"
        )
    return counts


def fingerprint(path: str | os.PathLike[str]) -> str:
    """16 hexadecimal digits by which a text file, or a pair of token files, is recognised; as fast for any size.

    A hash of the lengths and of 64 blocks of 4096 bytes, evenly spread from the first to the last, of each file: it
    tells of another text, tokenizer, type or length, and not of every single byte in a large file.
    """
    return fingerprint_of(*([f"{prefix_of(path)}{end}" for end in (".bin", ".idx")] if is_indexed(path) else [path]))


def fingerprint_of(*files: str | os.PathLike[str]) -> str:
    """`fingerprint` of these files, whatever they are called."""
    digest = hashlib.blake2b(digest_size=8)
    for name in files:  # the type of the tokens is in the head of the index
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            last = max(0, size - BLOCK_BYTES)
            for block in range(BLOCKS):
                file.seek(last * block // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
