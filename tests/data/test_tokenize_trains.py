"""From text to a trained step, and from a large file in little memory: what a user does, as a user does it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.data.command import main
from tests.data import small_tokenizers as small

ROOT = Path(__file__).parents[2]
MEGABYTE = 1 << 20


@pytest.mark.parametrize("kind", ["bytes", "byte_level"])
def test_what_was_tokenized_can_be_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """With the very settings that the command prints."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in small.LINES * 40))
    name = "bytes" if kind == "bytes" else str(small.byte_level(tmp_path / "tokenizer.json"))
    arguments = ["tokenize", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out"), "--tokenizer", name]
    assert main([*arguments, "--workers", "1"]) == 0
    settings = capsys.readouterr().out.splitlines()[-1].removeprefix("to train: ").split()
    assert settings[0] == f"data.paths=[{tmp_path / 'out'}]" and settings[1].startswith("model.vocab_size=")
    small_run = ["steps=2", "seq_len=32", "global_batch_size=2", f"out_dir={tmp_path / 'run'}", "model=gpt-tiny"]
    ended = subprocess.run(
        [sys.executable, "train.py", *settings, *small_run], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)


PEAK = """
import re, sys
from megalite.data.encode import Job, encode_part
from megalite.data.inputs import cut, find_inputs
from megalite.data.texts import Reading

job = Job("bytes", reading=Reading(split_on=None if sys.argv[3] == "whole" else "\\n\\n"))
for part in cut(find_inputs([sys.argv[1]]), part_bytes=1 << 40, split_text=True):
    encode_part(part, job, job.open(), prefix=sys.argv[2], progress=lambda counts, read_bytes: None)
print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read()).group(1))
"""


@pytest.mark.parametrize("lies", ["whole.txt", "split.txt", "lines.jsonl"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, lies: str) -> None:
    """Sixteen times the text, also as one document. A few batches come and go: 16 MB of the 60 that are more."""
    peaks = []
    for size in (4 * MEGABYTE, 64 * MEGABYTE):
        path = tmp_path / lies
        block = json.dumps({"text": "x" * 1000}) + "\n" if lies.endswith("jsonl") else "x" * 1000 + "\n\n"
        path.write_text(block * (size // len(block)))
        command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / "part"), lies.split(".")[0]]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(ended.stdout))
    assert peaks[1] - peaks[0] < 16 * 1024  # kilobytes
