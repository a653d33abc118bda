"""Small tokenizers of every kind, made here from a few lines of text: no test fetches one."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path

# The suite forks, and a fork has no threads: the library must not start any here.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megalite.data.tokenizers import END_OF_TEXT

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.\n",
    "def main(argv: list[str]) -> int:\n    return len(argv)\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 数据 数据 🙂\n",
] * 20

GPT2_LIKE = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_level(path: Path, *, vocab_size: int = 320, end: bool = True) -> Path:
    """Byte-level BPE whose template puts <|begin|> first and the end of a document last, as some published ones do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    if end:
        tokenizer.add_special_tokens([END_OF_TEXT, "<|begin|>"])
        begin, last = (tokenizer.token_to_id(token) for token in ("<|begin|>", END_OF_TEXT))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"<|begin|> $A {END_OF_TEXT}", special_tokens=[("<|begin|>", begin), (END_OF_TEXT, last)]
        )
    tokenizer.add_tokens([AddedToken("<tab>", normalized=False)])
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path


def words(path: Path, count: int) -> Path:
    """One token a word, w0 w1 ..., `count` in all; the first is the end of a document."""
    vocabulary = {END_OF_TEXT: 0} | {f"w{number}": number for number in range(1, count)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(path))
    return path


def ranks(path: Path) -> Path:
    """A file of ranks: the bytes, then some pairs."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"qu", b"ow", b"\xc3\xb6"]
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    return path


def pieces(path: Path, *, byte_fallback: bool = True, end: bool = True) -> Path:
    """A sentencepiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=360 if byte_fallback else 70,
        model_type="bpe",
        byte_fallback=byte_fallback,
        character_coverage=0.99,
        num_threads=1,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        eos_id=2 if end else -1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return path
