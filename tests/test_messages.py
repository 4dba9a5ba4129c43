"""docs/troubleshooting.md holds the messages of the code, and each one that a user can meet in the first hour."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).parent.parent
SCANNED = ("cli", "io", "tasks", "data", "training", "integrations")
# Messages that no user meets in the first hour, by a part of each.
NOT_MET = {
    "a reason that stands inside another message": (
        "its tensors do not fit each other", "its nodes do not fit its grid", "its nodes are not its active experts",
        "its experts do not fit model", "it is not an archive of arrays", "it has no ", " is not installed",
        ": not found", ": there is no such folder",
        " gave no result within ", " ended with code ",
    ),
    "progress, not a problem": (
        ": taken from ", ": trying ", ": waiting for another process", " MB of text, once; kept in ", ": failed: ",
    ),
    "an original file with another checksum is refused before": (
        "refused to load", "not an IDX file", "its header asks for", "expected a multiple of",
        "not a batch of CIFAR-10", "unreadable PNG sheet", "cut or damaged", "not a list of labels", "its array is ",
        "expected uint8", "expected sha256", "arrays, some are missing",
    ),
    "a mistake of a program": (
        "split: has no samples", "start_batch=", ": cannot predict files", "its answers are not classes",
        "input_ids, inputs_embeds:", "position_ids=",
    ),
    "its rule is a text of another function": ("max_experts=\0: \0", "ranges.\0: \0", "options: \0"),
}  # fmt: skip


def message_parts(message: str) -> list[str]:
    """The fixed parts of a quoted message: what stands between the placeholders in angle brackets."""
    parts = [part.strip(" .,:;=") for part in re.split(r"<[^<>]+>", message)]
    return [part for part in parts if len(part) > 2]


@cache
def source_strings() -> str:
    """All string constants of the package, those of an f-string and of adjoining lines joined."""
    found = []
    for path in (ROOT / "src/raytraced").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    return "\n".join(found)


MESSAGES = re.findall(r"^### `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_troubleshooting_page_is_one_of_the_code(message):
    missing = [part for part in message_parts(message) if part not in source_strings()]
    assert not missing


def user_messages() -> list[str]:
    """What the package says of a user's mistake, with a null character for each value."""
    paths = [path for folder in SCANNED for path in sorted((ROOT / "src/raytraced" / folder).rglob("*.py"))]
    found = {text for path in paths for text in messages_of(ast.parse(path.read_text(encoding="utf-8")), {})}
    return sorted(text for text in found if len(text.replace("\0", "").strip(" :;=")) > 2)


Texts = Mapping[str, Mapping[int, str]]


def messages_of(node: ast.AST, texts: Texts) -> Iterator[str]:
    """The messages of errors and warnings below a node; `texts` are the texts of local names, each by its line."""
    if isinstance(node, ast.FunctionDef):
        assigned = [each for each in ast.walk(node) if isinstance(each, ast.Assign)]
        texts = {}
        for each in assigned:
            if isinstance(each.targets[0], ast.Name):
                texts.setdefault(each.targets[0].id, {})[each.lineno] = text_of(each.value)
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        made = node.exc.args[0] if called(node.exc) == "with_notes" else node.exc
        yield text_of(made.args[0] if isinstance(made, ast.Call) and made.args else made, texts)
    elif isinstance(node, ast.Call) and called(node) == "require":
        yield f"{text_of(node.args[1], texts)}=\0: {text_of(node.args[3], texts)}"
    elif isinstance(node, ast.Call) and called(node) in ("warn", "say"):
        yield text_of(node.args[0], texts)
    for child in ast.iter_child_nodes(node):
        yield from messages_of(child, texts)


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def text_of(node: ast.expr, texts: Texts = MappingProxyType({})) -> str:
    """A text in the code, with a null character for each value that is not a text of the same function."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, texts) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, texts)
    if isinstance(node, ast.IfExp):  # either
        return f"{text_of(node.body, texts)}\0{text_of(node.orelse, texts)}"
    if isinstance(node, ast.Name):
        before = [line for line in texts.get(node.id, ()) if line < node.lineno]
        return texts[node.id][max(before)] if before else "\0"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"


@pytest.mark.parametrize("text", user_messages())
def test_a_mistake_of_a_user_is_on_the_troubleshooting_page(text):
    listed = any(all(part in text for part in message_parts(message)) for message in MESSAGES if message_parts(message))
    assert listed or any(part in text for parts in NOT_MET.values() for part in parts)


def test_each_exception_is_a_message_that_would_be_missing():
    listed = [message_parts(message) for message in MESSAGES if message_parts(message)]
    missing = [text for text in user_messages() if not any(all(part in text for part in parts) for parts in listed)]
    exceptions = [part for parts in NOT_MET.values() for part in parts]
    assert not [part for part in exceptions if not any(part in text for text in missing)]


def test_no_message_names_an_extra_of_a_package_index():
    assert "raytraced[" not in source_strings()  # pip would look for it on an index, which has no raytraced
