"""The default corpus: cached once, whole or absent, however many processes come at once."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

from megalite.data import corpus
from megalite.data.baselines import baselines_of
from megalite.data.corpus import default_cache_dir, list_sources, open_standard_library
from megalite.data.errors import DataError
from megalite.data.opening import open_sources
from megalite.data.split import Part


@pytest.fixture
def library(tmp_path) -> Path:
    """A small standard library: 40 files of text, and what must be left out."""
    root = tmp_path / "lib"
    random = np.random.default_rng(0)
    for number in range(40):
        path = root / f"package{number % 5}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.integers(0, 128, 30_000, dtype=np.uint8).tobytes())
    for name in [
        "test/a.py", "package0/tests/a.py", "idlelib/idle_test/a.py", "site-packages/a.py", "package1/__pycache__/a.py",
        "_sysconfigdata__linux.py", "package0/data.txt",
    ]:  # fmt: skip
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left out")
    (root / "broken.py").symlink_to(root / "nowhere")
    return root


def text_of(library: Path) -> bytes:
    """All modules by relative path, by hand."""
    names = sorted(path.relative_to(library).as_posix() for path in library.glob("package*/module*.py"))
    assert len(names) == 40
    return b"".join((library / name).read_bytes() for name in names)


def read_all(source) -> bytes:
    return source.tokens.tobytes()


def test_the_corpus_is_the_modules_in_order_of_their_paths_and_nothing_else(library, tmp_path):
    source = open_standard_library(tmp_path / "cache", root=library)
    assert read_all(source) == text_of(library)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [list_sources(library).cache_name]


def at_once(context, count: int, work) -> list:
    """Run work(rank) in so many forked processes that begin together; their results."""
    barrier, queue = context.Barrier(count), context.SimpleQueue()

    def begin(rank: int) -> None:
        barrier.wait(30)
        try:
            queue.put(work(rank))
        except Exception as error:  # the parent waits for one answer a rank
            queue.put(repr(error))

    processes = [context.Process(target=begin, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    results = [queue.get() for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    return results


def test_many_processes_that_build_the_cache_at_once_all_read_the_same_bytes(library, tmp_path):
    """Eight build; two more watch for the file to appear and never see one that is not whole."""
    cache, total = tmp_path / "cache", len(text_of(library))
    path = cache / list_sources(library).cache_name

    def work(rank: int) -> str:
        if rank < 8:
            return hashlib.sha256(read_all(open_standard_library(cache, root=library))).hexdigest()
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline
        sizes = {path.stat().st_size for _ in range(2000)}
        return hashlib.sha256(path.read_bytes()).hexdigest() if sizes == {total} else f"saw sizes {sizes}"

    results = at_once(multiprocessing.get_context("fork"), 10, work)
    assert set(results) == {hashlib.sha256(text_of(library)).hexdigest()}
    assert [left.name for left in cache.iterdir()] == [path.name]


def test_a_second_run_reads_the_cache_and_writes_nothing(library, tmp_path, monkeypatch):
    first = read_all(open_standard_library(tmp_path, root=library))

    def refuse(*args):
        raise AssertionError("the cache was written again")

    monkeypatch.setattr(corpus, "_write", refuse)
    assert read_all(open_standard_library(tmp_path, root=library)) == first


def test_a_cache_file_of_the_wrong_size_is_written_anew(library, tmp_path):
    path = tmp_path / "cache" / list_sources(library).cache_name
    path.parent.mkdir()
    path.write_bytes(b"half")
    assert read_all(open_standard_library(path.parent, root=library)) == text_of(library)


def test_a_changed_interpreter_gets_a_file_of_its_own(library, tmp_path, monkeypatch):
    names = {list_sources(library).cache_name}
    (library / "package0" / "module0.py").write_text("shorter")
    names.add(list_sources(library).cache_name)
    (library / "package0" / "module5.py").rename(library / "package0" / "renamed.py")
    names.add(list_sources(library).cache_name)
    monkeypatch.setattr(corpus.platform, "python_version", lambda: "3.99.0")
    names.add(list_sources(library).cache_name)
    assert len(names) == 4 and any("3.99.0" in name for name in names)


def refusal(call) -> str:
    with pytest.raises(DataError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_stripped_python_is_refused_with_both_numbers_and_the_way_out(tmp_path):
    (tmp_path / "only.py").write_text("x" * 500)
    for root, size in [(tmp_path, "500"), (tmp_path / "missing", "0")]:
        message = refusal(lambda root=root: open_standard_library(tmp_path / "cache", root=root))
        for word in [str(root), f"holds {size} bytes", "1000000", "data.paths=[my.txt]"]:
            assert word in message
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_refused_by_its_path(library, tmp_path):
    (tmp_path / "file").touch()
    message = refusal(lambda: open_standard_library(tmp_path / "file" / "cache", root=library))
    for word in [str(tmp_path / "file" / "cache"), "XDG_CACHE_HOME", "data.paths=[my.txt]"]:
        assert word in message


def test_a_write_that_fails_leaves_nothing_behind(library, tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus.os, "replace", fail)
    assert "No space left" in refusal(lambda: open_standard_library(tmp_path / "cache", root=library))
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_cache_directory_follows_the_xdg_rules():
    home = Path("/home/me")
    assert default_cache_dir({}, home) == Path("/home/me/.cache/megalite")
    assert default_cache_dir({"XDG_CACHE_HOME": ""}, home) == Path("/home/me/.cache/megalite")
    assert default_cache_dir({"XDG_CACHE_HOME": "relative"}, home) == Path("/home/me/.cache/megalite")
    assert default_cache_dir({"XDG_CACHE_HOME": "/scratch"}, home) == Path("/scratch/megalite")


def test_this_pythons_own_source_is_the_default_and_its_bigrams_say_what_to_beat(tmp_path):
    """The floor that the default run must end below: 2.40 nats on 3.11's source, about that on any version's."""
    (source,) = open_sources(None, cache_dir=tmp_path)
    assert len(source) == list_sources(Path(corpus.sysconfig.get_path("stdlib"))).total_bytes > 1_000_000
    floor = baselines_of(*([source.windows(128, part)] for part in Part))
    assert floor.bigram_nats is not None and 2.0 < floor.bigram_nats < 2.8 < floor.unigram_nats < 3.8
    assert len(source.windows(128, Part.VALIDATION)) > 100
