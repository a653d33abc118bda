"""Runs that are killed, interrupted, repeated or meet each other: the output is the undisturbed one or a refusal."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import megalite
from megalite.data import tokenize as module
from megalite.data.encode import Job
from megalite.data.errors import DataError
from megalite.data.texts import Reading
from megalite.data.tokenize import tokenize
from megalite.data.workers import WorkerError

ROOT = Path(megalite.__file__).parents[1]
PART_BYTES = 20_000


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of some thirty parts, each far from done in the time that it takes to look."""
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {number} of some text\n" * (number % 5) + "\n" for number in range(20_000)))
    return path


def command(text: Path, prefix: Path, *more: str) -> list[str]:
    options = ["--split-on", r"\n\n", "--part-bytes", str(PART_BYTES), "--workers", "2", *more]
    return [sys.executable, "-m", "megalite.data", "tokenize", str(text), "--output", str(prefix), *options]


def run(text: Path, prefix: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(text, prefix, *more), cwd=ROOT, capture_output=True, text=True)


def output(prefix: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prefix.parent.iterdir() if path.name.startswith(prefix.name)}


def done(prefix: Path) -> int:
    return len(list(Path(f"{prefix}.parts").glob("*.done")))


def children(parent: int) -> list[int]:
    """The processes whose parent this is, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def start_and_wait_for_parts(text: Path, prefix: Path, *, parts: int) -> tuple[subprocess.Popen[str], list[int]]:
    """A run that has some parts done and is at work; with its children."""
    process = subprocess.Popen(
        command(text, prefix),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while done(prefix) < parts:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    return process, children(process.pid)


def gone(processes: list[int], *, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(Path(f"/proc/{number}").exists() for number in processes):
            return True
        time.sleep(0.02)
    return False


def test_a_run_that_is_killed_again_and_again_ends_with_the_undisturbed_bytes(tmp_path: Path, text: Path) -> None:
    (tmp_path / "calm").mkdir()
    assert run(text, tmp_path / "calm/out").returncode == 0
    prefix = tmp_path / "killed" / "out"
    for parts in (1, 10, 25):
        process, workers = start_and_wait_for_parts(text, prefix, parts=parts)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert workers and gone(workers)
    before = done(prefix)
    assert before >= 25 and not (tmp_path / "killed/out.json").exists()
    ended = run(text, prefix)
    assert ended.returncode == 0, ended.stderr
    assert output(prefix) == output(tmp_path / "calm/out")


def test_an_interrupt_ends_in_one_line_with_the_workers_gone_and_can_be_gone_on_from(
    tmp_path: Path, text: Path
) -> None:
    """As a terminal sends it: to the whole group."""
    process, workers = start_and_wait_for_parts(text, tmp_path / "out", parts=3)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted; the same command goes on where it stood"
    assert "Traceback" not in errors and gone(workers)
    assert run(text, tmp_path / "out").returncode == 0


def test_a_worker_that_is_killed_ends_the_run_in_one_line(tmp_path: Path, text: Path) -> None:
    process, workers = start_and_wait_for_parts(text, tmp_path / "out", parts=3)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "a worker was killed by signal 9" in errors and "Traceback" not in errors
    assert run(text, tmp_path / "out").returncode == 0


@pytest.mark.parametrize("after", range(11))
def test_a_run_killed_while_it_joins_or_cleans_up_ends_with_the_undisturbed_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Killed before each rename in turn, from that of the plan to that which says that all is done."""
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n\nthree")
    job = Job("bytes", reading=Reading(split_on="\n\n"))
    tokenize([str(tmp_path / "a.txt")], str(tmp_path / "calm"), job, workers=1, part_bytes=5)
    seen = []

    class Killed(BaseException):
        pass

    def replace(source: Path, target: Path) -> None:
        if len(seen) == after:
            raise Killed
        seen.append(target)
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", replace)
        try:
            tokenize([str(tmp_path / "a.txt")], str(tmp_path / "out"), job, workers=1, part_bytes=5)
        except Killed:
            assert (tmp_path / "out.parts").exists()
    if (tmp_path / "out.parts").exists():
        tokenize([str(tmp_path / "a.txt")], str(tmp_path / "out"), job, workers=1, part_bytes=5)
    found = {name.replace("out", "calm"): content for name, content in output(tmp_path / "out").items()}
    assert found == output(tmp_path / "calm") and not (tmp_path / "out.parts").exists()


def test_a_run_killed_between_its_last_rename_and_cleaning_up_says_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    job = Job("bytes")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_clear", lambda place: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tokenize([str(tmp_path / "a.txt")], str(tmp_path / "out"), job, workers=1)
    assert (tmp_path / "out.parts" / "finished.json").exists()
    monkeypatch.setattr(module, "encode_parts", None)  # nothing is encoded again
    made = tokenize([str(tmp_path / "a.txt")], str(tmp_path / "out"), job, workers=1)
    assert made.meta.documents == 1 and not (tmp_path / "out.parts").exists()


def _stop_half_way(monkeypatch: pytest.MonkeyPatch, text: Path, prefix: Path, job: Job) -> None:
    """Leaves an unfinished run."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tokenize([str(text)], str(prefix), job, workers=1, part_bytes=5)


@pytest.mark.parametrize("change", ["content", "time", "field", "tokenizer", "part_bytes", "files"])
def test_a_run_with_other_input_or_options_is_refused_or_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path, prefix = tmp_path / "a.txt", tmp_path / "out"
    path.write_text("one\n\ntwo\n\nthree")
    (tmp_path / "b.txt").write_text("more")
    _stop_half_way(monkeypatch, path, prefix, Job("bytes", reading=Reading(split_on="\n\n")))
    names, reading, end, part_bytes = [str(path)], Reading(split_on="\n\n"), None, 5
    if change == "content":
        path.write_text("one\n\ntwo\n\nthree and four")
    elif change == "time":
        os.utime(path, ns=(0, 0))
    elif change == "field":
        reading = Reading(split_on="\n")
    elif change == "tokenizer":
        end = "10"
    elif change == "part_bytes":
        part_bytes = 6
    else:
        names.append(str(tmp_path / "b.txt"))
    word = {"content": "has changed", "time": "has changed", "field": "split on", "tokenizer": "end of document",
            "part_bytes": "part bytes", "files": "was not among its files"}[change]  # fmt: skip
    job = Job("bytes", end_of_document=end, reading=reading)
    with pytest.raises(DataError, match=rf"is of an unfinished run: .*{word}.*--overwrite starts over"):
        tokenize(names, str(prefix), job, workers=1, part_bytes=part_bytes)
    tokenize(names, str(prefix), job, workers=1, part_bytes=part_bytes, overwrite=True)
    tokenize(names, str(tmp_path / "new"), job, workers=1)
    found = {name.replace("out", "new"): content for name, content in output(prefix).items()}
    assert found == output(tmp_path / "new")


def test_a_finished_set_is_not_written_over_unless_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "p": "q"}')
    prefix = str(tmp_path / "out")
    tokenize([str(tmp_path / "a.jsonl")], prefix, Job("bytes", reading=Reading(prompt_field="p")), workers=1)
    assert Path(f"{prefix}.mask").exists()
    with pytest.raises(DataError, match=r"out\.bin exists; give another --output, or --overwrite"):
        tokenize([str(tmp_path / "a.jsonl")], prefix, Job("bytes"), workers=1)
    assert not Path(f"{prefix}.parts").exists()
    tokenize([str(tmp_path / "a.jsonl")], prefix, Job("bytes"), workers=1, overwrite=True)
    assert not Path(f"{prefix}.mask").exists()  # of the old set, and it would not fit


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "out.parts").mkdir()
    with open(tmp_path / "out.parts" / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is writing it"):
            tokenize([str(tmp_path / "a.txt")], str(tmp_path / "out"), Job("bytes"), workers=1)


def test_an_error_in_a_worker_keeps_what_is_done_and_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = '{"text": "a"}\n' * 50
    path.write_text(good + "{broken\n" + good)
    with pytest.raises(DataError, match=r"a\.jsonl:51: this is no JSON"):
        tokenize([str(path)], str(tmp_path / "out"), Job("bytes"), workers=2, part_bytes=100)
    assert done(tmp_path / "out") >= 1


def test_an_exception_that_is_not_of_the_data_comes_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that the parent could open and a worker cannot."""
    from tests.data import small_tokenizers as small

    path = small.byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("one")
    real = module.encode_parts

    def remove_first(*arguments: object, **options: object) -> object:
        path.unlink()
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "encode_parts", remove_first)
    with pytest.raises(WorkerError, match="Traceback"):
        tokenize([str(tmp_path / "a.txt")], str(tmp_path / "out"), Job(str(path)), workers=1)
