"""The default corpus: what every machine that runs this has anyway, the source of Python's own standard library.

Some ten million bytes of code and English, no download, no account. As a rule the same Python version gives
the same bytes on every machine, so curves can be compared. It is written once into a cache file and memory-mapped
from then on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megalite.data.documents import Ends
from megalite.data.errors import DataError
from megalite.data.meta import fingerprint_of
from megalite.data.source import BYTE_VOCABULARY, Source, map_bytes

LEAST_BYTES = 1_000_000
# Tests would be half of the text; installed packages and build records differ from machine to machine.
LEFT_OUT_DIRECTORIES = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
LEFT_OUT_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


def default_cache_dir(environ: Mapping[str, str], home: Path) -> Path:
    """`megalite` in $XDG_CACHE_HOME or, where that is unset, empty or (as specified) relative, in home/.cache."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else home / ".cache") / "megalite"


@dataclass(frozen=True)
class Listing:
    """The files of a corpus: their root and, ordered by relative path, (path relative to the root, bytes)."""

    root: Path
    files: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.files)

    @property
    def cache_name(self) -> str:
        """Changes with the interpreter's version, and with any file that comes, goes, or changes its size."""
        digest = hashlib.blake2b(repr(self.files).encode(), digest_size=8).hexdigest()
        return f"stdlib-{platform.python_version()}-{digest}.bin"


def list_sources(root: Path) -> Listing:
    """Every .py file under root but tests, installed packages and build records, by relative path with `/`."""
    files = []
    for directory, names, found in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_OUT_DIRECTORIES]
        for name in found:
            path = Path(directory, name)
            if path.suffix == ".py" and not name.startswith(LEFT_OUT_FILES) and path.is_file():
                files.append((path.relative_to(root).as_posix(), path.stat().st_size))
    return Listing(root, tuple(sorted(files)))


def open_standard_library(cache_dir: Path, *, root: Path | None = None) -> Source:
    """The standard library of the running interpreter (or what lies under `root`) as bytes, one file after another.

    Each file is a document.

    Any number of processes may call this at once: each that finds no cache file writes one under a name of its own
    and renames it, so a reader sees the whole file or none, and whose rename comes last does not matter, since all
    wrote the same bytes.

    Raises DataError if there are less than a million bytes (a stripped Python), or if the cache cannot be written.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    try:
        listing = list_sources(root)
        if listing.total_bytes < LEAST_BYTES:
            raise DataError(
                f"the default corpus is Python's own source, but {root} holds {listing.total_bytes} bytes of it and "
                f"{LEAST_BYTES} are needed (a stripped Python); give a text of your own: data.paths=[my.txt]"
            )
        path = cache_dir / listing.cache_name
        if not (path.exists() and path.stat().st_size == listing.total_bytes):
            _write(listing, path)
        return Source(
            f"Python {platform.python_version()} standard library",
            map_bytes(path),
            BYTE_VOCABULARY,
            documents=Ends(np.cumsum([size for _, size in listing.files])),
            mean_bytes=1.0,
            tokenizer="bytes",
            fingerprint=fingerprint_of(path),
        )
    except OSError as error:
        raise DataError(
            f"the default corpus cannot be cached in {cache_dir} ({error}); "
            "set XDG_CACHE_HOME to a directory that you may write, or give a text of your own: data.paths=[my.txt]"
        ) from None


def _write(listing: Listing, path: Path) -> None:
    """Write the corpus to `path` so that no reader ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # On a file system shared by several machines two of them may have the same process number, hence the random part.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as out:
            for name, size in listing.files:
                content = (listing.root / name).read_bytes()
                if len(content) != size:
                    raise DataError(f"{listing.root / name} had {size} bytes and now has {len(content)}; start again")
                out.write(content)
            out.flush()
            os.fsync(out.fileno())  # else a crash soon after the rename can leave the name on a file without its bytes
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
