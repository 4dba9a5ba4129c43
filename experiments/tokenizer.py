"""Make the tokenizer of the comparison on words: a byte-level BPE of 2,048 tokens, learned from enwik8's training bytes.

python -m experiments.tokenizer         # writes experiments/reproduce/enwik8-2048.json; the file in git is what it wrote
"""

import argparse
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.reproduce.plan import TOKENIZER
from raytraced.tasks.text.loading import read_domains

NUM_TOKENS = 2048
CHUNK = 1 << 20  # bytes of text that are given to the trainer at once


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text = read_domains("enwik8", None)["enwik8"]["train"]
    chunks = (text.read(start, min(start + CHUNK, len(text))) for start in range(0, len(text), CHUNK))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_TOKENS, initial_alphabet=alphabet, show_progress=True)
    bpe.train_from_iterator((np.asarray(one).tobytes().decode("utf-8", errors="replace") for one in chunks), trainer)
    bpe.save(str(Path(TOKENIZER)), pretty=False)


if __name__ == "__main__":
    main()
