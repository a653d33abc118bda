"""The command line of `python -m megalite.data`.

    tokenize INPUT... --output PREFIX      text, JSON lines and parquet into a token file
    inspect PATH                           what a token file (or a text) holds

Exit codes: 0 done, 1 a worker was lost, 2 the command line, 3 the data, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from megalite.data.encode import Job
from megalite.data.errors import DataError
from megalite.data.inspect import inspect
from megalite.data.progress import MEGABYTE
from megalite.data.texts import Reading
from megalite.data.tokenize import PART_BYTES, Made, tokenize
from megalite.data.workers import WorkerError

FAILED_CODE, COMMAND_CODE, DATA_CODE, INTERRUPTED_CODE = 1, 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; the exit code. A refusal is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stood", file=sys.stderr)
        return INTERRUPTED_CODE
    except (DataError, ValueError, WorkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return {DataError: DATA_CODE, WorkerError: FAILED_CODE}.get(type(error), COMMAND_CODE)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megalite.data", description="Token files: write them, read them.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_tokenize(commands.add_parser("tokenize", help="text, JSON lines and parquet into a token file"))
    _add_inspect(commands.add_parser("inspect", help="what a token file (or a text) holds"))
    return parser


def _add_tokenize(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="files, folders or patterns; .jsonl and .parquet by name, .gz too")
    add("--output", required=True, metavar="PREFIX", help="PREFIX.bin, PREFIX.idx and PREFIX.json are written")
    add("--tokenizer", default="bytes", metavar="NAME", help="bytes, tiktoken:NAME, or a file (docs/tokenizing.md)")
    add("--end-of-document", metavar="TOKEN", help="its text, or its id in digits; else the tokenizer's own")
    add("--field", default="text", help="of JSON and parquet, where the text is (text)")
    add("--prompt-field", metavar="FIELD", help="text that comes before it and does not count in the loss")
    add("--split-on", metavar="TEXT", help=r"what lies between documents of a text file, as '\n\n'; else it is one")
    add("--special-tokens", action="store_true", help="text that reads like a special token becomes one")
    add("--pattern", metavar="REGEX", help="how words are cut, for a .tiktoken file (GPT-4's)")
    add("--invalid-utf8", choices=("error", "replace"), default="error", help="what is not UTF-8 (error)")
    add("--workers", type=_at_least_one, default=len(os.sched_getaffinity(0)), help="processes (one a core)")
    add("--part-bytes", type=_at_least_one, default=PART_BYTES, help="input that a worker takes at a time")
    add("--overwrite", action="store_true", help="what stands under PREFIX gives way")
    parser.set_defaults(run=_tokenize)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="PATH", help="PREFIX, PREFIX.bin, PREFIX.idx, or a text")
    add("--sample", type=int, default=1, metavar="N", help="show the beginnings of N documents (1)")
    add("--tokenizer", metavar="NAME", help="decode with this one, in place of the one that PREFIX.json names")
    parser.set_defaults(run=lambda options: print(inspect(options.path, sample=options.sample, name=options.tokenizer)))


def _at_least_one(text: str) -> int:
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return int(text)


def _tokenize(options: argparse.Namespace) -> None:
    reading = Reading(
        field=options.field,
        prompt_field=options.prompt_field,
        split_on=None if options.split_on is None else _separator(options.split_on),
        replace_invalid=options.invalid_utf8 == "replace",
    )
    job = Job(options.tokenizer, options.end_of_document, options.special_tokens, options.pattern, reading)
    start = time.monotonic()
    made = tokenize(
        options.inputs,
        options.output,
        job,
        workers=options.workers,
        overwrite=options.overwrite,
        part_bytes=options.part_bytes,
    )
    print(_summary(made, options.output, seconds=time.monotonic() - start))


def _separator(text: str) -> str:
    """The text between documents, with \\n, \\r, \\t and \\\\ read as a shell leaves them."""
    for written, meant in (("\\\\", "\0"), ("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t"), ("\0", "\\")):
        text = text.replace(written, meant)
    if not text:
        raise ValueError(r"--split-on is empty; give what lies between two documents, as '\n\n' for a blank line")
    return text


def _summary(made: Made, prefix: str, *, seconds: float) -> str:
    meta = made.meta
    return (
        f"{prefix}.bin, .idx, .json: {meta.documents:,} documents, {meta.tokens:,} tokens ({meta.dtype}), "
        f"{meta.text_bytes / meta.tokens:.2f} bytes a token, vocabulary {meta.vocab_size}, "
        f"end of document {meta.end_of_document}, {made.skipped:,} empty documents skipped; "
        f"{seconds:.1f} s, {meta.text_bytes / MEGABYTE / seconds:.1f} MB/s\n"
        f"to train: data.paths=[{prefix}] model.vocab_size={meta.vocab_size}"
    )
