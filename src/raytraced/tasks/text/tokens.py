"""Tokens of more bytes than one: a byte-level tokenizer of the `tokenizers` library, and texts encoded by it.

Legend: V vocabulary. The library is the extra `bpe`; without a tokenizer nothing here is needed.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raytraced.data.cache import working_folder
from raytraced.data.sources import say
from raytraced.tasks.text.dataset import Text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from raytraced.models.gpt import GPT

CHUNK = 1 << 20  # bytes that are encoded at a time, cut behind the last line


def read_tokenizer(given: str) -> str:
    """The JSON of a tokenizer, from its path or as it is; refuses one that cannot stand for every text."""
    definition = given
    if not given.lstrip().startswith("{"):
        path = Path(given).expanduser()
        if not path.is_file():
            raise ValueError(
                f"tokenizer={given}: there is no such file; give a tokenizer.json, or leave it out for bytes"
            )
        definition = path.read_text(encoding="utf-8", errors="replace")
    token_bytes(open_tokenizer(definition))
    return definition


def open_tokenizer(definition: str) -> "Tokenizer":
    """The tokenizer itself."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            "tokenizer: needs the library tokenizers; install it with pip install 'raytraced[bpe]'"
        ) from None
    try:
        return Tokenizer.from_str(definition)
    except Exception as error:
        raise ValueError(f"tokenizer: is not one that the library tokenizers can read ({error})") from None


def token_bytes(tokenizer: "Tokenizer") -> list[bytes]:
    """The bytes that each token stands for; refuses a tokenizer that cannot give a text back byte by byte."""
    kind = json.loads(tokenizer.to_str())
    levels = json.dumps([kind.get("pre_tokenizer"), kind.get("decoder")])
    num = tokenizer.get_vocab_size()
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    if "ByteLevel" not in levels or kind.get("normalizer") or set(vocabulary) != set(range(num)):
        raise ValueError(
            "tokenizer: does not fit: must be byte-level, without normalizer and with tokens numbered 0, 1, …"
        )
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    special = {one["id"]: one["content"].encode() for one in kind.get("added_tokens", [])}
    missing = [byte for character, byte in byte_of.items() if character not in tokenizer.get_vocab()]
    if missing:
        raise ValueError(
            f"tokenizer: does not fit: has no token for byte {missing[0]}; train it with the whole alphabet"
        )
    return [
        special[number] if number in special else bytes(byte_of[character] for character in vocabulary[number])
        for number in range(num)
    ]


def byte_characters() -> list[str]:
    """The character by which byte-level tokenizers write each byte (256,): itself where it is visible, else one from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def encode_domains(
    definition: str, domains: dict[str, dict[str, Text]], root: Path
) -> tuple[dict[str, dict[str, Text]], NDArray[np.int64]]:
    """The same texts in tokens, and the bytes of each token (V,)."""
    tokenizer = open_tokenizer(definition)
    lengths_V = np.array([len(one) for one in token_bytes(tokenizer)])
    encoded = {
        domain: {split: encode(tokenizer, definition, text, root) for split, text in splits.items()}
        for domain, splits in domains.items()
    }
    return encoded, lengths_V


def encode(tokenizer: "Tokenizer", definition: str, text: Text, root: Path) -> Text:
    """A text in tokens, memory-mapped from the cache, where it is found again by the hash of both."""
    digest = hashlib.sha256(definition.encode())
    for piece in text.pieces:
        digest.update(np.ascontiguousarray(piece).data)
    path = root / f"tokens-{digest.hexdigest()[:24]}.npy"
    if not path.is_file():
        if len(text) > 4 * CHUNK:
            say(f"encoding {len(text) / 1e6:.0f} MB of text, once; kept in {path}")
        root.mkdir(parents=True, exist_ok=True)
        kind: Any = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32
        parts = [np.array(tokenizer.encode(chunk, add_special_tokens=False).ids, kind) for chunk in chunks(text)]
        with working_folder(root, "tokens") as folder:
            np.save(folder / "tokens.npy", np.concatenate([np.zeros(0, kind), *parts]))
            (folder / "tokens.npy").replace(path)
    return Text((np.load(path, mmap_mode="r"),))


def chunks(text: Text) -> list[str]:
    """A text in strings; bytes that are no UTF-8 become the sign of a character that is missing."""
    found, start = [], 0
    while start < len(text):
        stop = min(start + CHUNK, len(text))
        content = text.read(start, stop).tobytes()
        if stop < len(text) and (cut := content.rfind(b"\n") + 1):
            content = content[:cut]
        found.append(content.decode("utf-8", errors="replace"))
        start += len(content)
    return found


class Codec:
    """Bytes to the tokens of a language model and back."""

    def __init__(self, model: "GPT") -> None:
        self.tokenizer = None if model.tokenizer is None else open_tokenizer(model.tokenizer)
        self.bytes_of = (
            [bytes((byte,)) for byte in range(256)] if self.tokenizer is None else token_bytes(self.tokenizer)
        )
        self.model = model
        if len(self.bytes_of) != model.vocabulary:
            known = len(self.bytes_of)
            raise ValueError(f"tokenizer: does not fit: has {known} tokens, {model.name} knows {model.vocabulary}")

    def encode(self, content: bytes) -> list[int]:
        """The tokens of a text."""
        if self.tokenizer is None:
            return list(content)
        ids: list[int] = self.tokenizer.encode(content.decode(errors="replace"), add_special_tokens=False).ids
        return ids

    def encode_prompt(self, name: str, content: bytes) -> list[int]:
        """The tokens of a text to go on with, by default a new line; refuses more than the model looks at."""
        tokens = self.encode(content or b"\n")
        context, unit = self.model.context, "bytes" if self.tokenizer is None else "tokens"
        if len(tokens) > context:
            raise ValueError(f"{name}: has {len(tokens):,} {unit}; {self.model.name} looks at {context:,}: give fewer")
        return tokens
