"""An untrained small decoder and its data, for the study of decoder.toml.

`python -m bench.studies.decoder FOLDER` writes the sources of Python's library as
FOLDER/train.jsonl and FOLDER/eval.jsonl, and into FOLDER/decoder a byte-pair tokenizer and a model
of the size of `fastkd demo --task causal-lm`. The next command is `DECODER=FOLDER fastkd study
bench/studies/decoder.toml --out runs/decoder`.
"""

import argparse
import json
import sysconfig
from pathlib import Path

from fastkd.cli.demo_text import Size, make_teacher, make_tokenizer, write_texts


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    size = Size(train_files=300, eval_files=10)
    paths = write_texts(folder, size, Path(sysconfig.get_path("stdlib")))
    lines = paths["train"].read_text(encoding="utf-8").splitlines()
    tokenizer = make_tokenizer([json.loads(line)["text"] for line in lines], size.vocabulary)
    tokenizer.save_pretrained(folder / "decoder")
    make_teacher(tokenizer, size, seed=0).save_pretrained(folder / "decoder")


if __name__ == "__main__":
    main()
