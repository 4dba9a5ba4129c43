"""Tokenizers of language models as files that transformers' AutoTokenizer reads, without code of our own.

A model of bytes gets a byte-level tokenizer whose token numbers are the bytes.
"""

import json
from typing import Any

from raytraced.models.card import ModelCard

NUM_BYTES = 256
END = "\x00"  # the token of byte 0, which is in no text: ends a text, begins one and fills up shorter ones
# What other tokenizers call the token that ends a text; the first that is there is taken.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<end>")


def byte_characters() -> list[str]:
    """The character for each of 256 bytes in byte-level tokenizers: the same code if it is visible, else one from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def byte_tokenizer() -> dict[str, Any]:
    """A definition for the `tokenizers` library in which every byte of a text is a token, and its number the byte."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False, "fuse_unk": False}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    return {"version": "1.0", **empty, "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}


def with_end(definition: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """A tokenizer that has a token which ends a text, and that token; None where no token can be it.

    Where there is no special token, that of byte 0 becomes one. The number of every token stays as it is.
    """
    special = [one["content"] for one in definition.get("added_tokens") or [] if one.get("special")]
    if special:
        return definition, next((end for end in ENDS if end in special), special[-1])
    model, zero = definition["model"], byte_characters()[0]
    merges = [
        part for merge in model.get("merges") or [] for part in (merge.split() if isinstance(merge, str) else merge)
    ]
    if not isinstance(model.get("vocab"), dict) or zero not in model["vocab"] or any(zero in part for part in merges):
        return definition, None
    # A special token is searched for in the text as it is: the token's own character would be found in texts that hold it.
    vocab = {END if token == zero else token: number for token, number in model["vocab"].items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end = {"id": vocab[END], "content": END, **flags, "special": True}
    added = [*(definition.get("added_tokens") or []), end]
    return {
        **definition,
        "added_tokens": sorted(added, key=lambda one: one["id"]),
        "model": {**model, "vocab": vocab},
    }, END


def tokenizer_files(card: ModelCard) -> dict[str, str]:
    """Write the tokenizer of a language model for transformers.

    Args:
        card: The model's card.

    Returns:
        The text of tokenizer.json and tokenizer_config.json, by name; nothing for a model that has neither a tokenizer nor
        the 256 tokens of bytes.

    Raises:
        ValueError: The card holds a tokenizer that is none.
    """
    stored = card.spec.get("tokenizer")
    if stored is None and card.spec.get("vocab_size") != NUM_BYTES:
        return {}
    try:
        definition, end = with_end(byte_tokenizer() if stored is None else json.loads(stored))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{card.model}: its tokenizer is not a tokenizer.json ({type(error).__name__})") from error
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": card.spec["context"],
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",  # a text is continued at its right end
        "clean_up_tokenization_spaces": False,
    }
    config |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), end) if end is not None else {}
    return {
        "tokenizer.json": json.dumps(definition, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }
