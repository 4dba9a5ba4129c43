"""Write docs/reference/*.md from the signatures and docstrings of the package: `make reference`.

The pages are plain Markdown, so they can be read in the repository as well as on the site. Sources are parsed, not
imported: the result does not depend on which optional packages are installed. tests/test_docs.py checks that the files
are up to date.
"""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "src" / "raytraced"
WIDTH = 100
SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Attributes|Fields|Example|Examples|Note|Shape)\b(.*):$")
ITEM = re.compile(r"^([\w.`*]+(?:(?:, |/)[\w.`*]+)*)(?: \(([^()]*)\))?: +(.*)$")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Page(NamedTuple):
    """A page of the reference: its title, one sentence, and `module:Name,Name` for what it lists (`*`: every public name)."""

    title: str
    summary: str
    contents: tuple[str, ...]


PAGES = {
    "layer": Page(
        "The layer",
        "A grid of experts for your own model, and what a call returns.",
        (
            "routers.raytraced:RaytracedExperts,activation_sequence",
            "routers.raytraced_config:RaytracedConfig",
            "layer:RoutedLayer,routed_layer,LayerOutput",
            "router:Router,Choice,Cost",
            "experts:MLPExperts",
            "integrations.replace:HiddenOnly,replace_feed_forward",
        ),
    ),
    "mathematics": Page(
        "The mathematics",
        "The routing network, activation sequences and random rays.",
        ("routing:RoutingNetwork,Rates", "sequence:Route,stop_losses", "rays:*"),
    ),
    "models": Page(
        "Models",
        "Whole models, what they return and what they cost.",
        (
            "models.registry:build,ModelInfo,complete_options",
            "models.output:Model,Output",
            "models.classifier:Classifier",
            "models.gpt:GPT",
            "cost:*",
        ),
    ),
    "early-exit": Page(
        "Early exit",
        "Confidence thresholds, budgets, deadlines and anytime answers.",
        ("models.anytime:*", "early_exit:ExitPolicy,Exits"),
    ),
    "training": Page(
        "Training and data",
        "The options of a run, the training loop, evaluation, tasks and data sets.",
        (
            "training.config:TrainConfig",
            "training.loop:train",
            "training.evaluation:evaluate",
            "training.calibration:calibrate",
            "training.expert_parallel:make_mesh,parallelise",
            "tasks.task:Task,Batch,Loader,Data",
            "tasks.images.loading:load",
            "tasks.images.dataset:Dataset,Split,Loader",
            "data.sources:PublicSet,ArrayInfo,Entry,Source",
        ),
    ),
    "files": Page(
        "Saving, sharing and exporting",
        "Model files, the Hugging Face Hub, ONNX and torch.export.",
        (
            "io.saving:load,save",
            "files:DamagedFileError",
            "io.hub:save_pretrained,from_pretrained,push_to_hub",
            "io.export:export",
            "io.routes:save_routes,load_routes,SavedRoutes",
        ),
    ),
    "store": Page(
        "Experts on disk",
        "The store that experts are read from, and the memory that they are read into.",
        (
            "store.layout:StoreFile,open_store",
            "store.pool:ExpertPool,ReadPlan,ReadStats,Timeline",
            "store.experts:StoredExperts",
            "store.reader:ExpertReader,parse_size",
        ),
    ),
    "integrations": Page(
        "scikit-learn and transformers",
        "Estimators for scikit-learn, and the language model for transformers.",
        (
            "integrations.sklearn:MREClassifier,MRERegressor",
            "integrations.transformers:RaytracedConfig,RaytracedForCausalLM,RaytracedOutput",
        ),
    ),
    "kernels": Page(
        "Kernels",
        "Which implementation of an operation runs, and how to choose one.",
        ("kernels.operation:use,Operation,Implementation,Explanation", "kernels:available,why_not,instructions"),
    ),
    "plugins": Page(
        "Plugins",
        "Routers, tasks, data sets and kernels from outside the package.",
        ("plugins:load_plugin,register,Plugin",),
    ),
    "page": Page("The page", "A page in which models run in a browser.", ("explore.page:make_page",)),
}


# Methods that the package calls on its own objects: they are not private to one file, and not for users either.
INTERNAL = {
    "Classifier": {"answer_of"},
    "ExpertPool": {"slot"},
    "GPT": {"check", "resize_routing_embedding", "routing_vectors", "routing_weight", "train"},
    "MLPExperts": {"stacks", "unstacked"},
    "Model": {"fused_early_exit"},
    "RaytracedConfig": {"register_for_auto_class"},
    "RaytracedExperts": {"fused_early_exit", "kernel_args"},
    "RaytracedForCausalLM": {"register_for_auto_class"},
    "ReadPlan": {"covers", "distance", "is_past"},
    "RoutedLayer": {"as_rows", "check", "output"},
    "RoutingNetwork": {"check_entry", "gates"},
    "StoredExperts": {"acquire", "check", "places", "run_from", "unstacked"},
}


@cache
def source_file(module: str) -> str:
    """The source of a module."""
    path = PACKAGE / module.replace(".", "/")
    return (path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py").read_text("utf-8")


@cache
def comments(module: str) -> dict[int, str]:
    """The comments of a module by line."""
    tokens = tokenize.generate_tokens(io.StringIO(source_file(module)).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


@cache
def definitions(module: str) -> dict[str, Definition]:
    """The public classes and functions of a module by name, in the order of the file."""
    nodes = ast.parse(source_file(module)).body
    return {node.name: node for node in nodes if isinstance(node, Definition) and not node.name.startswith("_")}


def listed(page: Page) -> Iterator[tuple[str, str]]:
    """The (module, name) pairs of a page."""
    for entry in page.contents:
        module, _, names = entry.partition(":")
        known = definitions(module)
        for name in known if names == "*" else names.split(","):
            if name not in known:
                raise LookupError(f"{module}.{name}: not defined there; correct PAGES in docs/reference.py")
            if names != "*" or ast.get_docstring(known[name]):
                yield module, name


def signature(name: str, arguments: ast.arguments, returns: ast.expr | None = None, skip_first: bool = False) -> str:
    """A signature as Python writes it, one argument per line where a single line would be too long."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [written(one, default) for one, default in list(zip(plain, defaults, strict=True))[int(skip_first) :]]
    if arguments.vararg:
        parts.append("*" + written(arguments.vararg, None))
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [written(*one) for one in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        parts.append("**" + written(arguments.kwarg, None))
    end = f" -> {ast.unparse(returns).strip(chr(39))}" if returns is not None else ""
    line = f"{name}({', '.join(parts)}){end}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def written(argument: ast.arg, default: ast.expr | None) -> str:
    """`name: type = default`."""
    note = "" if argument.annotation is None else f": {ast.unparse(argument.annotation)}"
    equals = " = " if note else "="
    return argument.arg + note + ("" if default is None else equals + ast.unparse(default))


def fields_of(node: ast.ClassDef) -> list[str]:
    """The annotated public fields of a NamedTuple or a dataclass, as they stand in the class."""
    found = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return [ast.unparse(each) for each in found if not each.target.id.startswith("_")]  # type: ignore[union-attr]


def described_fields(module: str, node: ast.ClassDef) -> dict[str, str]:
    """What is said about the public fields of a class: the string below a field, or else the comment beside it."""
    texts = {}
    for field, text in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        is_text = (
            isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        )
        beside = comments(module).get(field.end_lineno or 0)
        said = text.value.value if is_text else beside  # type: ignore[union-attr]
        if said and not field.target.id.startswith("_"):
            texts[field.target.id] = one_line(said)
    return texts


def field_docs(module: str, node: ast.ClassDef) -> list[str]:
    """The fields that are described, as `- name: text` items."""
    items = [line for name, text in described_fields(module, node).items() for line in wrapped(f"**`{name}`**: {text}")]
    return [*items, ""] if items else []


def one_line(text: str) -> str:
    return " ".join(text.split())


def wrapped(item: str) -> list[str]:
    """A list item of lines that are short enough."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(item, WIDTH, initial_indent="- ", subsequent_indent="  ", **options)  # type: ignore[arg-type]


def prose(docstring: str) -> list[str]:
    """A docstring in Google's style as Markdown: sections in bold, their entries as a list."""
    lines, in_section = [], False
    text = inspect.cleandoc(docstring).replace("``", "`").splitlines()
    position = 0
    while position < len(text):
        line = text[position]
        position += 1
        if match := SECTION.match(line):
            in_section = True
            lines += ["", f"**{match[1]}{match[2]}**", ""]
        elif in_section and line.startswith("    "):
            block = [line]
            while position < len(text) and (not text[position].strip() or text[position].startswith("    ")):
                block.append(text[position])
                position += 1
            lines += entries(textwrap.dedent("\n".join(block)).strip("\n").splitlines())
        else:
            in_section = in_section and not line.strip()
            lines.append(line)
    return lines


def entries(block: list[str]) -> list[str]:
    """The entries of a section: each begins at the margin and goes on in indented lines."""
    items: list[str] = []
    for line in block:
        if line.startswith(" ") and items:
            items[-1] += " " + line.strip()
        elif line.strip():
            items.append(line.strip())
    lines = []
    for item in items:
        match = ITEM.match(item)
        kind = f" ({match[2]})" if match and match[2] else ""
        lines += wrapped(f"**`{match[1].strip('`')}`**{kind}: {match[3]}" if match else item)
    return [*lines, ""]


def describe(module: str, name: str) -> Iterator[str]:
    """The part of a page about a class or a function."""
    node = definitions(module)[name]
    yield from ("", f"## `raytraced.{module}.{name}`", "")
    if isinstance(node, ast.ClassDef):
        yield from describe_class(module, node)
    else:
        yield from described(node, node.name, skip_first=False)


def public_methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The methods of a class that have a docstring and are not internal."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    hidden = INTERNAL.get(node.name, set())
    return [
        each
        for each in methods
        if not each.name.startswith("_") and each.name not in hidden and ast.get_docstring(each)
    ]


def describe_class(module: str, node: ast.ClassDef) -> Iterator[str]:
    """A class: constructor or fields, docstring, public methods."""
    made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    head = signature(node.name, made[0].args, skip_first=True) if made else f"class {node.name}"
    fields = [] if made else fields_of(node)
    yield from ("```python", head, *(f"    {field}" for field in fields), "```", "")
    yield from prose(ast.get_docstring(node) or "")
    yield from ("", *field_docs(module, node))
    for method in public_methods(node):
        yield from ("", f"### `{node.name}.{method.name}`", "")
        is_static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in method.decorator_list)
        yield from described(method, method.name, skip_first=not is_static)


def described(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, skip_first: bool) -> Iterator[str]:
    """A function: signature and docstring."""
    yield from ("```python", signature(name, node.args, node.returns, skip_first), "```", "")
    yield from prose(ast.get_docstring(node) or "")


def render(page: Page) -> str:
    """A page as Markdown."""
    lines = [f"# {page.title}", "", page.summary, "", "<!-- written by `make reference` -->"]
    for module, name in listed(page):
        lines += describe(module, name)
    text = "\n".join(line.rstrip() for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def render_index() -> str:
    """The first page: what is where."""
    lines = [
        "# Reference",
        "",
        "Every public class and function with its arguments and shapes, written from the docstrings by",
        "`make reference`. Names carry their axes: `rates_BLN` has the shape (batch, layers, experts). The names",
        "that are used most can be imported from the package itself, for example `raytraced.load`,",
        "`raytraced.build` and `raytraced.RaytracedExperts`. The options of the command line are printed by",
        "`raytraced train --help`, and so on for every command.",
        "",
        "| page | contents |",
        "|---|---|",
        *(f"| [{page.title}]({name}.md) | {page.summary} |" for name, page in PAGES.items()),
        "",
        "| name in the package | page |",
        "|---|---|",
    ]
    return "\n".join([*lines, *short_names()]) + "\n"


def short_names() -> Iterator[str]:
    """A row for every name that the package itself exports."""
    pages = {(module, name): file for file, page in PAGES.items() for module, name in listed(page)}
    for module, names in exported().items():
        for name in names:
            if (module, name) in pages:
                yield f"| `raytraced.{name}` | [{PAGES[pages[module, name]].title}]({pages[module, name]}.md) |"


def exported() -> dict[str, tuple[str, ...]]:
    """The table of public names in raytraced/__init__.py: module to names."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return ast.literal_eval(node.value)
    raise LookupError("raytraced/__init__.py: no table _HOMES")


def rendered() -> dict[Path, str]:
    """Every file of docs/reference with its content."""
    files = {DOCS / "reference" / f"{name}.md": render(page) for name, page in PAGES.items()}
    return {DOCS / "reference" / "index.md": render_index(), **files}


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text, encoding="utf-8")
