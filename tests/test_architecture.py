"""The rules of the house: sizes, floors' weight, names, duplicates, root documents.

An exception is granted by a line in `docs/decisions/` that names what is excepted, in backquotes:
the file's path for its size, `path::name` for a class or body, the package for an import.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "modulelens"
FILES = sorted(SRC.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ROOT_DOCUMENTS = {
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "LICENSE",
}
ROOT_FILES = {"pyproject.toml", "constraints.txt", ".gitignore", ".gitattributes"}
OPTIONAL_PACKAGES = {"wandb", "anywidget", "IPython", "mcp", "torchrec", "fbgemm_gpu", "triton"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "core", "base", "misc", "manager"}
CORE_LINES = 13_712

Function = ast.FunctionDef | ast.AsyncFunctionDef


def excepted(what: str) -> bool:
    decisions = (ROOT / "docs" / "decisions").glob("*.md")
    return any(f"`{what}`" in page.read_text(encoding="utf-8") for page in decisions)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def body_without_docstring(function: Function) -> list[ast.stmt]:
    documented = ast.get_docstring(function, clean=False) is not None
    return function.body[1:] if documented else function.body


def body_lines(function: Function) -> int:
    body = body_without_docstring(function)
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_classes_and_bodies_are_short(path: Path) -> None:
    where = relative(path)
    length = len(path.read_text(encoding="utf-8").splitlines())
    long = [] if length <= 400 or excepted(where) else [f"{where}: {length} lines, limit 400"]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef):
            size, limit = lines_of(node), 300
        elif isinstance(node, Function):
            size, limit = body_lines(node), 60
        else:
            continue
        if size > limit and not excepted(f"{where}::{node.name}"):
            long.append(f"{where}::{node.name}: {size} lines, limit {limit}")
    assert not long


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=relative)
def test_every_file_says_what_it_knows(path: Path) -> None:
    assert (ast.get_docstring(parsed(path)) or "").split("\n")[0].strip()


def test_no_two_functions_have_the_same_body() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, Function):
                continue
            body = body_without_docstring(node)
            if sum(isinstance(child, ast.stmt) for stmt in body for child in ast.walk(stmt)) >= 4:
                places[normalised(node, body)].append(f"{relative(path)}::{node.name}")
    twins = [names for names in places.values() if len(names) > 1 and not all(map(excepted, names))]
    assert not twins


def normalised(function: Function, body: list[ast.stmt]) -> str:
    """The body with its arguments and local variables renamed by order of appearance."""
    local = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
    nodes = [node for stmt in body for node in ast.walk(stmt)]
    local |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    order: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in local:
            node.id = order.setdefault(node.id, f"v{len(order)}")
    return "\n".join(ast.dump(stmt) for stmt in body)


def test_folders_are_at_most_three_deep() -> None:
    deep = [relative(path) for path in FILES if len(path.relative_to(SRC).parts) > 3]
    assert not deep


def test_file_names_say_something() -> None:
    vague = [
        relative(path)
        for path in [*FILES, *TESTS]
        if VAGUE_NAMES & {path.stem, *path.stem.split("_"), *path.relative_to(ROOT).parts[:-1]}
    ]
    assert not vague


def test_root_holds_only_the_listed_documents() -> None:
    shown = subprocess.run(
        ["git", "ls-files", "--cached"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    tracked = {name for name in shown.stdout.splitlines() if "/" not in name}
    assert tracked <= ROOT_DOCUMENTS | ROOT_FILES


def test_exported_names_are_sorted() -> None:
    for path in FILES:
        exported = next(
            (
                ast.literal_eval(node.value)
                for node in parsed(path).body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            ),
            None,
        )
        if exported is not None and path != SRC / "__init__.py":
            # Constants, then classes, then functions: the order that ruff keeps.
            kinds = [(not n.isupper(), not n[0].isupper(), n) for n in exported]
            assert kinds == sorted(kinds), relative(path)


def code_lines(path: Path) -> int:
    """Lines that hold code: without blanks, comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in skipped | {tokenize.ENDMARKER}
        for line in range(token.start[0], token.end[0] + 1)
    }
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(parsed(path)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_the_core_stays_small() -> None:
    # What is counted, and why: docs/decisions/0001-size-of-the-core.md
    aside = {"apps", "skills", "cli", "report", "widget"}
    core = [path for path in FILES if path.relative_to(SRC).parts[0] not in aside]
    assert sum(map(code_lines, core)) <= CORE_LINES


def test_each_optional_package_is_imported_in_one_file() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for package in {name.split(".")[0] for name in names} & OPTIONAL_PACKAGES:
                homes[package].add(relative(path))
    spread = {p: files for p, files in homes.items() if len(files) > 1 and not excepted(p)}
    assert not spread


@pytest.mark.parametrize(
    "module", ["modulelens", "modulelens.records", "modulelens.report", "modulelens.store"]
)
def test_importing_the_record_side_leaves_torch_alone(module: str) -> None:
    if not any(SRC.joinpath(*module.split(".")[1:]).glob("*.py")):
        pytest.skip(f"{module} does not exist yet")
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_exist() -> None:
    import modulelens

    missing = [name for name in modulelens.__all__ if not hasattr(modulelens, name)]
    assert not missing
    assert set(modulelens.__all__) <= set(dir(modulelens))
