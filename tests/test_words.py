"""The field's words: what JAX engineers call things, in everything that people read.

Left is what is not to be written, right what to write instead.
"""

import ast
import io
import json
import re
import tokenize
from pathlib import Path

import pytest

import jaxsub

pytestmark = pytest.mark.once
ROOT = Path(jaxsub.__file__).parent.parent

WORDS = {
    r"execut\w+(?: \w+){0,3} (?:again|twice)|\b(?:ma[dk]es?|making|make) (?:\w+ ){0,2}(?:again|anew)": "recompute",
    r"\bwhat (?:is kept|stands|stood|lies)\b": "residual, saved value",
    r"\b(?:stands?|stood|standing|lies|lying) (?:in|until|from(?! jaxsub)|till)\b": "is live, is allocated",
    r"\bways? to cut\b": "partition",
    r"\bask(?:s|ed|ing)?(?: \w+)? (?:of )?the compiler\b|\bcompiler is asked\b": "compile, measure",
    r"\bbe(?:ing)? told\b|\bis told of\b": "measure, report",
    r"\bwhat is said of\b|\bsaid of it\b": "predict, estimate",
    r"\boffers?\b|\boffered\b": "candidate plan",
    r"\bwish(?:es|ed)?\b": "per-name override",
    r"\bshel(?:f|ves)\b": "plan cache, price cache",
    r"\b(?:an?|the|each|every|its|this|that|whose|where) sites?\b": "call site",
    r"\bspent\b|\bgone once\b": "dead after, live until",
    r"\b(?:that|which) (?:are|is) no arrays?\b|\bis no array\b": "static leaves, static arguments",
    r"\bsiblings?\b": "multi-output fusion",
    r"\bmade ahead\b|\bmakes? ahead\b": "hoisted",
    r"\bwhoever\b|\bwho asks\b": "the user, you",
}
"""For each pattern what to write instead."""

CHECKED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "examples", "notebooks", "tests")
"""Files and folders whose text is free of them; of tests and notebooks only what is prose counts."""

SUFFIXES = (".md", ".py", ".svg", ".yml", ".css", ".js", ".ipynb")


def texts(path):
    """A file, or the files of text below a folder, without this one, which lists the words."""
    found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES)
    return [p for p in found if p != Path(__file__)]


def prose(path):
    """The text of a file; of a test its docstrings and comments, of a notebook its markdown and comments."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return "\n".join(source if kind == "markdown" else comments(source) for kind, source in cells)
    return comments(text) if path.suffix == ".py" and path.is_relative_to(ROOT / "tests") else text


def comments(source):
    """Docstrings and comments of Python code, each in its line."""
    lines = [""] * (source.count("\n") + 1)
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    docs = {node.lineno for node in statements if isinstance(node.value, ast.Constant)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.start[0] in docs):
            for i, line in enumerate(token.string.splitlines(), token.start[0] - 1):
                lines[i] += line
    return "\n".join(lines)


def faults(text):
    """The words that are not to be written, each with its line and what to write instead."""
    flat = text.replace("\n", " ")  # a phrase may go over the end of a line
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}; write: {instead}"
        for pattern, instead in WORDS.items()
        for match in re.finditer(pattern, flat, re.IGNORECASE)
    ]


def looked_at():
    """What is checked: the texts for people, and each folder and module of the library."""
    library = sorted(p for p in (ROOT / "jaxsub").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists())
    return [*(ROOT / name for name in CHECKED), *library]


@pytest.mark.parametrize("path", looked_at(), ids=lambda p: str(p.relative_to(ROOT)))
def test_people_read_the_fields_words(path):
    """No text has a word of the list."""
    found = texts(path)
    assert found
    assert [f"{p.relative_to(ROOT)}, {fault}" for p in found for fault in faults(prose(p))] == []


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("each step executed\nagain", "recompute"),
        ("made again", "recompute"),
        ("what stands at the peak", "residual"),
        ("it stands in memory", "live"),
        ("two ways to cut a program", "partition"),
        ("ask the compiler", "compile"),
        ("the best offer", "candidate"),
        ("a wish", "override"),
        ("a site in the step", "call site"),
        ("the input is spent", "dead"),
        ("leaves that are no arrays", "static"),
        ("Whoever calls it", "user"),
    ],
)
def test_the_check_can_fail(text, instead):
    """Each word is found, in any case and over the end of a line, and the answer says what to write."""
    (fault,) = faults(text)
    assert fault.startswith("line 1: ")
    assert instead in fault.partition("write: ")[2]


def test_only_the_prose_of_tests_and_notebooks_counts():
    """Names and strings of code are left out; comments and docstrings keep their lines."""
    assert comments('spent = "a wish"\n"""An offer."""  # a site\n') == '\n"""An offer."""# a site\n'


@pytest.mark.parametrize("text", ["call sites", "the JAX website", "recompute", "a live range", "Run it again."])
def test_the_fields_words_pass(text):
    """What is to be written is not found."""
    assert faults(text) == []
