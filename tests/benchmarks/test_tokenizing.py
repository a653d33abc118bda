"""The sides of the tokenizing benchmark do the same job."""

from __future__ import annotations

from pathlib import Path

from benchmarks import tokenizing
from megalite.data.tokenizers import open_tokenizer


def test_the_documents_are_the_text_in_order(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "a.txt").write_text(text)
    found = tokenizing.documents_of(tmp_path / "a.txt", megabytes=1, document_bytes=50)
    assert "".join(found) == text and all(50 <= len(one) < 60 for one in found[:-1])


def test_the_two_libraries_of_byte_level_bpe_get_the_same_merges(tmp_path: Path) -> None:
    documents = ["the quick brown fox jumps over the dog, and the dog does not mind\n"] * 50
    ours, theirs = (
        open_tokenizer(tokenizing.train(kind, documents, tmp_path, vocab_size=300))
        for kind in ("tokenizers", "tiktoken")
    )
    assert ours.vocab_size == theirs.vocab_size > 257
    assert ours.token_bytes is not None and theirs.token_bytes is not None
    assert sorted(ours.token_bytes) == sorted(theirs.token_bytes)
    lengths = [
        [tokenizer.token_bytes[tokens].tolist() for tokens in tokenizer.encode(documents)]
        for tokenizer in (ours, theirs)
        if tokenizer.token_bytes is not None
    ]
    assert lengths[0] == lengths[1] and max(lengths[0][0]) > 1


def test_ours_over_the_library_is_a_ratio_of_paired_times() -> None:
    library = [tokenizing.Spent(2.0, 1.0)] * 3
    row = tokenizing._row("ours", 4_000_000, [tokenizing.Spent(1.0, 2.0)] * 3, library)
    assert row == ("ours", "1.00", "4.0", "2.00 (2.00 to 2.00)", "2.00", "0.50 (0.50 to 0.50)")
