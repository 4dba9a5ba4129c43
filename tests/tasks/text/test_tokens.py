"""A tokenizer as an option: bytes in, the same bytes out, and one that cannot do that is refused."""

import json

import numpy as np
import pytest

from raytraced.cli.main import main
from raytraced.tasks.text.dataset import Text
from raytraced.tasks.text.loading import load
from raytraced.tasks.text.tokens import ENCODED, byte_characters, open_tokenizer, read_tokenizer, strings, token_bytes

tokenizers = pytest.importorskip("tokenizers")
WORDS = "".join(f"{number}. To be, or not to be, that is the question: é\n" for number in range(60))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [WORDS], tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def test_bytes_of_tokens_are_those_of_the_text(file):
    assert sorted(byte_characters()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = open_tokenizer(read_tokenizer(str(file)))
    known = token_bytes(tokenizer)
    assert len(known) == 280
    assert sorted(one for one in known if len(one) == 1) == [bytes((byte,)) for byte in range(256)]
    text = "be the question? Ünicode — 日本 \x00\n\t"
    assert b"".join(known[number] for number in tokenizer.encode(text).ids) == text.encode()


def test_an_encoded_text_is_kept_and_has_the_bytes_of_the_text(file, tmp_path):
    (tmp_path / "own.txt").write_text(WORDS)
    path, root = str(tmp_path / "own.txt"), tmp_path / "cache"
    data = load(path, root, context=8, tokenizer=str(file))
    assert (data.vocab_size, data.train.domains[0].pieces[0].dtype) == (280, np.uint16)
    plain, known = load(path, root, context=8), token_bytes(open_tokenizer(data.tokenizer))
    for split in ("train", "validation", "test"):
        tokens = getattr(data, split).domains[0].read(0, 10**9)
        text = getattr(plain, split).domains[0].read(0, 10**9).tobytes()
        assert b"".join(known[token] for token in tokens).decode() == text.decode(errors="replace")
        assert len(tokens) < 0.8 * len(text)
    kept = sorted(root.iterdir())
    assert sorted(path.suffix for path in kept) == [".npy"] * 3 + [".sha256"] * 3
    again = load(path, root, context=8, tokenizer=data.tokenizer)  # by its JSON, as a card has it
    assert sorted(root.iterdir()) == kept
    assert again.train.domains[0].read(0, 50).tolist() == data.train.domains[0].read(0, 50).tolist()


@pytest.mark.parametrize("damage", ["altered within range", "altered out of range", "cut short", "empty"])
def test_a_damaged_cache_of_tokens_is_made_again(file, tmp_path, capsys, damage):
    (tmp_path / "own.txt").write_text(WORDS)
    path, root = str(tmp_path / "own.txt"), tmp_path / "cache"
    whole = load(path, root, context=8, tokenizer=str(file)).train.domains[0].read(0, 10**9)
    cached = {one: one.read_bytes() for one in root.glob("*.npy")}
    for one, content in cached.items():
        changed = {
            "altered within range": content[:-2] + bytes((content[-2] ^ 1, content[-1])),
            "altered out of range": content[:-2] + b"\xff\xff",
            "cut short": content[:-10],
            "empty": b"",
        }
        one.write_bytes(changed[damage])
    again = load(path, root, context=8, tokenizer=str(file)).train.domains[0].read(0, 10**9)
    assert again.tolist() == whole.tolist()
    assert {one: one.read_bytes() for one in root.glob("*.npy")} == cached
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all("is damaged; the text is encoded again" in line for line in lines)


def test_a_cache_without_its_checksum_is_made_again(file, tmp_path):
    (tmp_path / "own.txt").write_text(WORDS)
    path, root = str(tmp_path / "own.txt"), tmp_path / "cache"
    load(path, root, context=8, tokenizer=str(file))
    for one in root.glob("*.sha256"):  # as earlier versions left it
        one.unlink()
        one.with_suffix(".npy").write_bytes(b"no array")
    load(path, root, context=8, tokenizer=str(file)).train.domains[0].read(0, 10**9)
    assert len(list(root.glob("*.sha256"))) == 3


def test_a_long_text_is_cut_behind_its_lines():
    text = b"a line of text\n" * (ENCODED // 10)
    parts = strings(Text((np.frombuffer(text, np.uint8),)))
    assert len(parts) > 1
    assert "".join(parts).encode() == text
    assert all(part.endswith("\n") for part in parts)


def test_one_that_does_not_fit_is_refused_in_one_line(file, tmp_path):
    whole = json.loads(file.read_text())
    without_bytes = whole | {"model": whole["model"] | {"vocab": {"a": 0, "b": 1}, "merges": []}}
    foreign = whole | {"model": whole["model"] | {"vocab": whole["model"]["vocab"] | {"日": 280}}}
    cases = {
        r"does not fit: token 280 \(日\) holds the character '日', which stands for no byte": foreign,
        "does not fit: must be byte-level": whole | {"pre_tokenizer": None, "decoder": None},
        "does not fit: has no token for byte 0": without_bytes,
        "the library tokenizers cannot read it": {"no": "tokenizer"},
    }
    for text, definition in cases.items():
        (tmp_path / "bad.json").write_text(json.dumps(definition))
        with pytest.raises(ValueError, match=f"^tokenizer=.*/bad.json: {text}"):
            read_tokenizer(str(tmp_path / "bad.json"))


def test_a_model_of_tokens_is_trained_evaluated_in_bytes_and_continues_a_text(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("raytraced.training.callbacks.draw_pictures", lambda *_: None)
    monkeypatch.setattr("raytraced.training.trackers.tensorboard.write_event", lambda *_: None)
    (tmp_path / "own.txt").write_text(WORDS)
    options = {
        "data": tmp_path / "own.txt", "model": "gpt-mre", "epochs": 1, "batch-size": 4, "runs-dir": tmp_path, "name": "run", "quiet": "true",
        "data-root": tmp_path / "cache", "data-options.tokenizer": file, "data-options.context": 8, "data-options.steps": 3,
        "model-options.dim": 8, "model-options.num-heads": 2, "model-options.num-experts": 2,
    }  # fmt: skip
    assert main(["train", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]) == 0
    file_of_run = tmp_path / "run" / "summary.json"
    test = json.loads(file_of_run.read_text())["test"]
    assert 0 < test["bits_per_byte"] < test["loss"] / np.log(2)  # a token is more than a byte
    capsys.readouterr()
    assert main(["evaluate", "run", "--runs-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == test
    assert main(["generate", "run", "To be", "--runs-dir", str(tmp_path), "--length", "5", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["experts"]) == 5
    assert main(["generate", "run", "one two three four five six", "--runs-dir", str(tmp_path)]) == 2
    assert "tokens; the context of gpt-mre is 8: give fewer" in capsys.readouterr().err
