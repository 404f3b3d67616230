"""An untrained small decoder and its data, for the studies of decoder.toml.

`python -m bench.studies.decoder FOLDER` writes the sources of Python's library as
FOLDER/train.jsonl and FOLDER/eval.jsonl, and into FOLDER/decoder a byte-pair tokenizer and a
6-layer GPT-2. The next command is `DECODER=FOLDER fastkd study bench/studies/decoder.toml --out
runs/decoder`.
"""

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

from fastkd.study.docstrings import SKIPPED

TRAIN_FILES, EVAL_FILES = 300, 10
HELD_OUT = 10  # one file in ten
CHARACTERS = 8000  # of a file
VOCABULARY, LENGTH, LAYERS, WIDTH = 2000, 128, 6, 128
END = "<end>"


def sources(root: Path) -> Iterator[str]:
    """Python files below ``root`` except tests, ordered by the hashes of their names."""

    def name_hash(path: Path) -> bytes:
        name = path.relative_to(root).as_posix()
        return hashlib.md5(name.encode(), usedforsecurity=False).digest()

    for path in sorted(root.rglob("*.py"), key=name_hash):
        if not SKIPPED & set(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield text


def make_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding of these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def make_model(vocabulary: int) -> GPT2LMHeadModel:
    """The untrained decoder."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS,
        n_head=WIDTH // 32, bos_token_id=0, eos_token_id=0, pad_token_id=0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = [], []
    for i, text in enumerate(sources(Path(sysconfig.get_path("stdlib")))):
        (train if i % HELD_OUT else held_out).append(text[:CHARACTERS])
    for name, texts in (("train", train[:TRAIN_FILES]), ("eval", held_out[:EVAL_FILES])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = make_tokenizer(train[:TRAIN_FILES], VOCABULARY)
    tokenizer.save_pretrained(folder / "decoder")
    make_model(len(tokenizer)).save_pretrained(folder / "decoder")


if __name__ == "__main__":
    main()
