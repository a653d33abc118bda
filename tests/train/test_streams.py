"""A run speaks to whoever listens, and goes on where nobody does."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.train.streams import Gate, Silence
from tests.train.composing import CONFIGS

JOB = f"""
import sys
from pathlib import Path
from megalite.train import launch

def main(config, world):
    print("first", flush=True)
    sys.stdin.read()
    for word in ("second", "third"):
        print(word, flush=True)
        print(word, file=sys.stderr, flush=True)
    Path("end").touch()

launch.run(main, configs={str(CONFIGS)!r})
"""


def test_what_is_held_is_dropped_and_what_is_said_later_is_heard():
    heard = io.StringIO()
    gate = Gate(heard, silence := Silence(held=True))
    gate.write("held")
    with silence.broken():
        assert gate.write("said") == 4
    gate.write("held again")
    assert heard.getvalue() == "said"


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    """Nor is there any trace of it: the interpreter itself complains at its exit if a buffer cannot be emptied."""
    job = start(tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert job.stdout.readline() == b"first\n"
    job.stdout.close()
    job.stdin.close()
    assert job.stderr.read() == b"second\nthird\n" and job.wait() == 0
    assert (tmp_path / "end").exists()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_were_closed_from_the_beginning_lead_nowhere(tmp_path, closed):
    shell = ["sh", "-c", f'exec "$@" {closed} < /dev/null', "sh"]
    assert start(tmp_path, *shell, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait() == 0
    assert (tmp_path / "end").exists()


def start(folder: Path, *before: str, **streams: int) -> subprocess.Popen[bytes]:
    (folder / "job.py").write_text(JOB)
    command = [*before, sys.executable, str(folder / "job.py"), "out_dir=run"]
    return subprocess.Popen(command, cwd=folder, **streams)
