"""Tokens of more than one byte: a byte-level tokenizer of the `tokenizers` library, and texts encoded by it.

Axes: V vocabulary size. The library is the extra `bpe`; nothing here is needed without a tokenizer.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raytraced.data.cache import working_folder
from raytraced.data.sources import say
from raytraced.errors import install_extra, printable
from raytraced.io.tokenizer import byte_characters
from raytraced.tasks.text.dataset import Text
from raytraced.tasks.text.file_array import npy_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from raytraced.models.gpt import GPT

ENCODED = 1 << 20  # bytes that are encoded at once, cut behind the last line


def read_tokenizer(source: str) -> str:
    """Read a tokenizer and refuse one that cannot encode every text.

    Args:
        source: Path of a tokenizer.json, or the JSON itself.

    Returns:
        The JSON.
    """
    definition, name = source, "tokenizer"
    if not source.lstrip().startswith("{"):
        path = Path(source).expanduser()
        if not path.is_file():
            raise ValueError(
                f"tokenizer={source}: there is no such file; give a tokenizer.json, or leave it out for bytes"
            )
        definition, name = path.read_text(encoding="utf-8", errors="replace"), f"tokenizer={source}"
    token_bytes(open_tokenizer(definition, name), name)
    return definition


def open_tokenizer(definition: str, name: str = "tokenizer") -> "Tokenizer":
    """The tokenizer of a JSON definition; an error begins with `name`."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(f"{name}: needs the library tokenizers; install it with {install_extra('bpe')}") from None
    try:
        return Tokenizer.from_str(definition)
    except Exception as error:
        raise ValueError(f"{name}: the library tokenizers cannot read it ({error})") from None


def token_bytes(tokenizer: "Tokenizer", name: str = "tokenizer") -> list[bytes]:
    """The bytes of each token (V entries); refuses a tokenizer that cannot give a text back byte by byte."""
    kind = json.loads(tokenizer.to_str())
    levels = json.dumps([kind.get("pre_tokenizer"), kind.get("decoder")])
    num = tokenizer.get_vocab_size()
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    if "ByteLevel" not in levels or kind.get("normalizer") or set(vocabulary) != set(range(num)):
        raise ValueError(
            f"{name}: does not fit: must be byte-level, without normalizer and with tokens numbered 0, 1, …"
        )
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    special = {one["id"]: one["content"].encode() for one in kind.get("added_tokens", [])}
    single = {one[0] for one in special.values() if len(one) == 1}  # a special token may stand for a byte
    known = tokenizer.get_vocab()
    missing = [byte for character, byte in byte_of.items() if character not in known and byte not in single]
    if missing:
        raise ValueError(f"{name}: does not fit: has no token for byte {missing[0]}; train it with the whole alphabet")
    for number, token in vocabulary.items():
        if number not in special and (foreign := next((one for one in token if one not in byte_of), None)):
            raise ValueError(
                f"{name}: does not fit: token {number} ({printable(token)}) holds the character "
                f"{printable(foreign)!r}, which stands for no byte; train it as byte-level tokenizer"
            )
    return [
        special[number] if number in special else bytes(byte_of[character] for character in vocabulary[number])
        for number in range(num)
    ]


def encode_domains(
    definition: str, domains: dict[str, dict[str, Text]], root: Path
) -> tuple[dict[str, dict[str, Text]], NDArray[np.int64]]:
    """Encode the texts of all domains; returns them in tokens, and the number of bytes per token (V,)."""
    tokenizer = open_tokenizer(definition)
    lengths_V = np.array([len(one) for one in token_bytes(tokenizer)])
    encoded = {
        domain: {split: encode(tokenizer, definition, text, root) for split, text in splits.items()}
        for domain, splits in domains.items()
    }
    return encoded, lengths_V


def encode(tokenizer: "Tokenizer", definition: str, text: Text, root: Path) -> Text:
    """A text in tokens, from the cache, whose file is named by the hash of the tokenizer and the text.

    A file that is not what was written there is made again: its SHA-256 stands beside it.
    """
    digest = hashlib.sha256(definition.encode())
    for part in text.chunks():
        digest.update(np.ascontiguousarray(part).data)
    path = root / f"tokens-{digest.hexdigest()[:24]}.npy"
    checksum = path.with_suffix(".sha256")
    if path.is_file() and checksum.is_file():
        if checksum.read_text(encoding="ascii", errors="replace") == sha256_line(path):
            return Text((npy_file(path),))
        say(f"{path}: is damaged; the text is encoded again")
    if len(text) > 4 * ENCODED:
        say(f"encoding {len(text) / 1e6:.0f} MB of text, once; kept in {path}")
    root.mkdir(parents=True, exist_ok=True)
    kind: Any = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32
    parts = [np.array(tokenizer.encode(string, add_special_tokens=False).ids, kind) for string in strings(text)]
    with working_folder(root, "tokens") as folder:
        np.save(folder / path.name, np.concatenate([np.zeros(0, kind), *parts]))
        (folder / checksum.name).write_text(sha256_line(folder / path.name), encoding="ascii")
        for file in (path, checksum):
            (folder / file.name).replace(file)
    return Text((npy_file(path),))


def sha256_line(path: Path) -> str:
    """What `sha256sum` prints of a file."""
    with path.open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n"


def strings(text: Text) -> list[str]:
    """A text in strings; bytes that are not UTF-8 become the replacement character."""
    found, start = [], 0
    while start < len(text):
        stop = min(start + ENCODED, len(text))
        content = text.read(start, stop).tobytes()
        if stop < len(text) and (cut := content.rfind(b"\n") + 1):
            content = content[:cut]
        found.append(content.decode("utf-8", errors="replace"))
        start += len(content)
    return found


class Codec:
    """Encodes bytes into the tokens of a language model, and back.

    Args:
        model: The language model, whose card holds its tokenizer.
    """

    def __init__(self, model: "GPT") -> None:
        self.tokenizer = None if model.tokenizer is None else open_tokenizer(model.tokenizer)
        self.bytes_of = (
            [bytes((byte,)) for byte in range(256)] if self.tokenizer is None else token_bytes(self.tokenizer)
        )
        self.model = model
        if len(self.bytes_of) != model.vocab_size:
            num = len(self.bytes_of)
            raise ValueError(f"tokenizer: does not fit: has {num} tokens, {model.name} has {model.vocab_size}")

    def encode(self, content: bytes) -> list[int]:
        """The tokens of a text."""
        if self.tokenizer is None:
            return list(content)
        ids: list[int] = self.tokenizer.encode(content.decode(errors="replace"), add_special_tokens=False).ids
        return ids

    def encode_prompt(self, name: str, content: bytes) -> list[int]:
        """Encode a prompt; refuses more tokens than the model's context.

        Args:
            name: What the prompt is called in an error.
            content: The bytes; an empty prompt stands for a line break.

        Returns:
            The tokens.
        """
        tokens = self.encode(content or b"\n")
        context, unit = self.model.context, "bytes" if self.tokenizer is None else "tokens"
        if len(tokens) > context:
            limit = f"the context of {self.model.name} is {context:,}"
            raise ValueError(f"{name}: has {len(tokens):,} {unit}; {limit}: give fewer")
        return tokens
