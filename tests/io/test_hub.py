"""Models as folders: what is saved comes back, from a disk and from a Hub; no pickle is read, no folder is incomplete."""

import ast
import base64
import hashlib
import json
import pickle
import re
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
import yaml

import forked
import raytraced as rt
from raytraced.io import hub
from raytraced.models.card import ModelCard

TEXT = {"dim": 16, "hidden": 8, "num_experts": 3, "depth": 2, "num_heads": 2, "context": 12}


def classifier():
    return rt.build("mre", image_shape=(1, 4, 4), class_names=["a|b", "c"], dim=8, num_layers=2, num_experts=2).eval()


def language_model():
    return rt.build("gpt-mre", **TEXT).eval()


MODELS = {"classifier": classifier, "language": language_model}
SHARED = {"model.safetensors", "config.json", "README.md"}
FILES = {
    "classifier": SHARED,
    "language": SHARED | {"tokenizer.json", "tokenizer_config.json", "modeling_raytraced.py"},
}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def answers(model):
    torch.manual_seed(5)
    if isinstance(model, rt.GPT):
        return model(torch.randint(256, (2, 9))).logits
    return model(torch.randint(256, (3, 1, 4, 4), dtype=torch.uint8)).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_folder_gives_the_same_model(name, tmp_path):
    model = MODELS[name]()
    model.card = replace(
        model.card,
        task="text",
        data="plays",
        training={"lr": 0.1},
        calibration={"confidence": 0.5, "exit_every": "layer"},
    )
    rt.save_pretrained(model, tmp_path / "new" / "shared")
    again = rt.from_pretrained(tmp_path / "new" / "shared")
    assert torch.equal(answers(again), answers(model))
    assert again.card == rt.load(tmp_path / "new" / "shared").card
    assert json.dumps(hub.config_values(again.card)) == json.dumps(hub.config_values(model.card))
    assert {file.name for file in (tmp_path / "new" / "shared").iterdir()} == FILES[name]


def test_a_language_models_config_holds_its_whole_card(tmp_path):
    model = language_model()
    model.card = replace(model.card, spec=model.card.spec | {"tokenizer": "{}"}, data="plays", training={"lr": 0.1})
    assert hub.card_of(hub.config_values(model.card)) == model.card


def test_local_folders_need_no_huggingface_hub(tmp_path):
    code = (
        "import sys, raytraced as rt; rt.Model, rt.GPT, rt.load; print('huggingface_hub' in sys.modules)\n"
        "sys.modules['huggingface_hub'] = None\n"
        f"rt.save_pretrained(rt.load('mre-digits'), {str(tmp_path / 'd')!r})\n"
        f"model = rt.from_pretrained({str(tmp_path / 'd')!r})\n"
        "try: rt.push_to_hub(model, 'me/digits')\n"
        "except ImportError as error: print(error)"
    )
    done = forked.run(forked.program, code)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == "False\npush_to_hub: needs huggingface_hub for the Hub; pip install '.[hub]' in a clone of raytraced\n"
    )


def head_and_text(folder):
    _, head, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(head), text


def test_the_page_shows_use_data_options_and_calibration(tmp_path):
    rt.save_pretrained(rt.load("mre-mnist"), tmp_path / "mnist")
    head, text = head_and_text(tmp_path / "mnist")
    assert head == {
        "library_name": "raytraced",
        "pipeline_tag": "image-classification",
        "tags": ["raytraced", "mixture-of-experts"],
    }
    assert huggingface_hub.ModelCard.load(tmp_path / "mnist" / "README.md").data.library_name == "raytraced"
    assert text.startswith("\n# mnist\n")
    for line in (
        "trained on mnist; 41,130 parameters",
        'model = rt.from_pretrained(".")  # the folder that holds this page',
        "| with early exit | 0.972 | 0.9499 | 13,777 |",
        "| `lr` | `0.005` |",
        "| `output_logit_offset` | `5.0` |",
    ):
        assert line in text


def test_the_example_of_the_page_works_in_its_folder(tmp_path, monkeypatch):
    rt.save_pretrained(classifier(), tmp_path / "shapes")
    code = (tmp_path / "shapes" / "README.md").read_text(encoding="utf-8").split("```")[1].removeprefix("python")
    monkeypatch.chdir(tmp_path / "shapes")
    names = {}
    exec(code, names)
    assert names["model"].card.model == "mre"


HOSTILE = [
    "<script>alert(1)</script>",
    "a | b ` c",
    "x\n\n# Title\n<img src=x onerror=alert(1)>",
    "`</code><b>",
    "[x](javascript:alert(1))",
    "\\| <i>",
    "\x1b[31mred\u202e",
]


def test_names_cannot_become_markup(tmp_path):
    model = rt.build("mre", image_shape=(1, 4, 4), class_names=HOSTILE, dim=4)
    calibration = {"confidence": 0.5, "exit_every": "layer", "test": {"<b>": {"a|b": 1.0, "<i>": "<u>"}, "x": "<s>"}}
    calibration["interval"] = {"test": ["<b>", 1]}
    model.card = replace(model.card, data="<b>data", training={"`<b>`": "<script>"}, calibration=calibration)
    rt.save_pretrained(model, tmp_path / "a<b>`c")
    _, text = head_and_text(tmp_path / "a<b>`c")
    assert not re.search(r"<(?!/?code>)", text)  # no tag but our own
    assert "# Title" not in text.splitlines()
    assert "\x1b" not in text
    assert "\u202e" not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    (names,) = [line for line in tables if "class_names" in line]
    assert names.count("|") == 3  # two cells, whatever the names hold
    assert not re.search(r"[`<\[]", names.replace("`class_names`", "").replace("<code>", "").replace("</code>", ""))
    assert "javascript:alert&#40;1&#41;" in names


def test_a_name_with_quotes_stays_one_string_of_the_example(tmp_path):
    rt.save_pretrained(classifier(), tmp_path / "out", name='me/a"); import os; ("')
    _, text = head_and_text(tmp_path / "out")
    (line,) = [line for line in text.splitlines() if line.startswith("model = rt.from_pretrained(")]
    (call,) = ast.parse(line).body
    assert [argument.value for argument in call.value.args] == ['me/a"); import os; ("']


def test_the_page_of_a_run_shows_its_figures(tmp_path):
    model = classifier()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    splits = {
        split: {"accuracy": value, "macs": {"total": 1234.0}, "expert_load": [[1]]}
        for split, value in (("validation", 0.5), ("test", 0.25))
    }
    summary = {"model": "mre", "parameters": num_parameters, **splits}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    rt.save_pretrained(model, tmp_path / "out", run=tmp_path)
    _, text = head_and_text(tmp_path / "out")
    assert (
        "|  | validation | test |\n| --- | --- | --- |\n| accuracy | 0.5 | 0.25 |\n| macs | 1,234 | 1,234 |\n\n" in text
    )
    assert "<code>&#91;&#39;a&#124;b&#39;, &#39;c&#39;&#93;</code>" in text  # the name of a class does not end a cell
    with pytest.raises(ValueError, match=rf"is a run of mre with {num_parameters} parameters, not of this gpt-mre$"):
        rt.save_pretrained(language_model(), tmp_path / "no", run=tmp_path)
    with pytest.raises(ValueError, match=r"is not a complete run, its summary.json cannot be read"):
        rt.save_pretrained(model, tmp_path / "no", run=tmp_path / "out")
    assert not (tmp_path / "no").exists()


def test_a_pickle_is_never_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    torch.save({}, tmp_path / "model.pt")
    for source in (tmp_path, tmp_path / "pytorch_model.bin", tmp_path / "model.pt"):
        with pytest.raises(
            ValueError, match=r"is a pickle, which may run code when it is read; needs model.safetensors$"
        ):
            rt.from_pretrained(source)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")  # by another name
    with pytest.raises(ValueError, match=r"foreign: is not a safetensors file$"):
        rt.from_pretrained(tmp_path)
    assert not (tmp_path / "exploded").exists()


def nameless():
    model = classifier()
    model.card = ModelCard("", model.card.spec, model.card.options)
    return model


def handmade():
    model = classifier()
    model.card = None
    return model


def with_own_expert():
    return rt.build("mre", image_shape=(1, 4, 4), num_classes=2, dim=8, expert=lambda: torch.nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nameless, "Classifier: its card has no model name; only a model made by raytraced.build or load can be shared"),
        (handmade, "Classifier: has no card; only a model made by raytraced.build or load can be shared"),
        (with_own_expert, "mre: its card holds more than plain values, a file cannot: Object of type function is not JSON serializable"),
    ],
)  # fmt: skip
def test_a_model_without_a_card_is_refused_before_anything_is_written(make, message, tmp_path):
    for save in (lambda: rt.save_pretrained(make(), tmp_path / "out"), lambda: rt.push_to_hub(make(), "me/model")):
        with pytest.raises(ValueError) as raised:
            save()
        assert str(raised.value) == message
    assert not (tmp_path / "out").exists()


def test_a_path_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        rt.save_pretrained(classifier(), tmp_path / "file" / "out")

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(hub, "write_file", full)  # the weights fit, what comes after does not
    with pytest.raises(OSError, match="No space left"):
        rt.save_pretrained(classifier(), tmp_path / "new" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_source_without_a_model_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    rt.save_pretrained(classifier(), tmp_path / "pictures")
    cases = {
        tmp_path / "empty": "empty: holds no model.safetensors$",
        tmp_path / "none": "none: is neither a run folder, a file, nor a shipped model ",
        "owner/none": "^owner/none: is not a folder here and not in the cache, and the Hub cannot be reached$",
    }
    for source, message in cases.items():
        with pytest.raises(ValueError, match=message) as raised:
            rt.from_pretrained(source)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"^repo_id='digits': must be \"owner/name\"$"):
        rt.push_to_hub(classifier(), "digits")
    with pytest.raises(ValueError, match=r"^me/model: could not be uploaded: ") as raised:
        rt.push_to_hub(classifier(), "me/model")
    assert "\n" not in str(raised.value)


class TinyHub(BaseHTTPRequestHandler):
    """As much of the Hub as one commit and one download need."""

    files: dict

    def log_message(self, *_):
        pass

    def answer(self, content, status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            answer = {"url": f"{self.server.address}/me/model", "name": "me/model"}
        elif self.path.startswith("/api/models/me/model/preupload/"):
            answer = {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
            }
        elif self.path.startswith("/api/models/me/model/commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {
                "commitUrl": f"{self.server.address}/me/model/commit/abc",
                "commitOid": "a" * 40,
                "hookOutput": "",
                "success": True,
            }
        else:
            answer = {}
        self.answer(json.dumps(answer).encode(), Content_Type="application/json")

    def do_GET(self):
        repo, _, name = self.path.partition("/resolve/main/")
        if repo == "/me/model" and name in self.files:
            content = self.files[name]
            self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit="a" * 40)
        elif repo == "/me/model":
            self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit="a" * 40)
        else:
            self.answer(b"", 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def tiny_hub(monkeypatch):
    TinyHub.files = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), TinyHub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield TinyHub.files
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", MODELS)
def test_a_pushed_model_comes_back_from_a_hub(name, tiny_hub, tmp_path):
    model = MODELS[name]()
    address = rt.push_to_hub(model, "me/model", token="hf_test")
    assert address.endswith("/me/model/commit/abc")
    assert set(tiny_hub) == FILES[name]
    assert 'from_pretrained("me/model")' in tiny_hub["README.md"].decode()
    where = {"cache_dir": tmp_path, "token": False}
    assert torch.equal(answers(rt.from_pretrained("me/model", **where)), answers(model))
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # the fixture puts it back
    assert torch.equal(answers(rt.from_pretrained("me/model", **where)), answers(model))


def test_a_store_in_several_files_comes_from_a_hub(tiny_hub, tmp_path):
    model = rt.build("gpt-mre", dim=16, hidden=24, depth=2, num_heads=2, context=16, num_experts=4).eval()
    rt.save_pretrained(model, tmp_path / "folder", store=True, max_shard_size="20 KB")
    tiny_hub.update({file.name: file.read_bytes() for file in (tmp_path / "folder").iterdir()})
    where, tokens = {"cache_dir": tmp_path / "cache", "token": False, "memory": "10 KB"}, torch.randint(0, 256, (1, 9))
    for offline in (False, True):
        huggingface_hub.constants.HF_HUB_OFFLINE = offline  # the fixture puts it back
        loaded = rt.from_pretrained("me/model", **where)
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits.detach())
        loaded.layer.experts.pool.close()
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    gone = sorted(name for name in tiny_hub if "-of-" in name)[1]
    del tiny_hub[gone]
    with pytest.raises(ValueError, match=f"cut: {gone}, one of its files, is missing$"):
        rt.from_pretrained("me/model", **where | {"cache_dir": tmp_path / "another"})


def test_a_repository_without_weights_and_one_that_is_missing_are_refused_in_one_line(tiny_hub, tmp_path):
    tiny_hub["pytorch_model.bin"] = b"never read"
    where = {"cache_dir": tmp_path, "token": False}
    with pytest.raises(
        ValueError, match=r"^me/model: holds no model.safetensors; nothing else is read: a pickle could run code$"
    ):
        rt.from_pretrained("me/model", **where)
    with pytest.raises(
        ValueError, match=r"^me/none: is not a folder here, and not a repository that can be read: "
    ) as raised:
        rt.from_pretrained("me/none", **where)
    assert "\n" not in str(raised.value)
