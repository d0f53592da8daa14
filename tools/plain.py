#!/usr/bin/env python3
"""Measures how plainly the code reads, and holds each file to a ceiling.

    plain.py [--ref REF] [PATH ...]   the figures of Python files, by default the package and the launchers
    plain.py --show [PATH ...]        each line that counts, with its rule
    plain.py --docs [PATH ...]        the figures of Markdown pages
    plain.py --check                  the gate of ``make check``
    plain.py --lower                  store lower ceilings for files that have improved

Every figure is per statement or per word, so line length does not matter. The gate has two rules:

- A new file has no vague name, no mannered phrase, one semicolon (or 3 in 1,000 words of prose), one dense
  expression of each kind, and no function with a body above 220 tokens.
- A file that ``plain_ceilings.json`` lists may not exceed its counts in that list. It lists tests only.

If a file moves or is split, ``origins`` in that JSON maps each new path to the path that has the ceilings.
The files of one origin share its ceilings.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import io
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = ROOT / "tools" / "plain_ceilings.json"
SOURCE = ("speechtrain/", "launchers/")
GATED = (*SOURCE, "tools/", "benchmarks/", "examples/", "tests/", "conf/", "setup.py")

PARTICIPLES = (
    "added begun chosen done drawn found given heard held kept known looked lost made named placed reached"
    " said taken told typed wanted written"
)
PRONOUNS_AND_ADVERBS = (
    "again at each here last least more most now one other others ours own place plain raw rest theirs"
    " there what whole"
)
VAGUE_NAMES = frozenset(f"{PARTICIPLES} {PRONOUNS_AND_ADVERBS}".split())
MANNERED_PHRASES = re.compile(
    r"""
    \bwhat\ (?:a|an|another|differs|follows|has|is|it|its|killed|runs|that|the|they|was|are)\b
    | (?:^|[.;:,(]\ )where\ (?:a|all|an|both|each|it|no|one|several|there|they)\b
    | \b(?:those|that)\ of\b
    | \bso\ (?:many|much|long)\b(?!\ as|\ that)
    | \b(?:is|are)\ no\ (?!longer|more|less|one|need|way)\w+
    | \b(?:told|tells)\b
    """,
    re.IGNORECASE | re.VERBOSE,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STATEMENTS_WITH_ONE_CONDITIONAL = (ast.Assign, ast.AnnAssign, ast.Return)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NESTING = (ast.Call, ast.Subscript, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, *COMPREHENSIONS)
DEEPEST_STATEMENT = 5
LONGEST_COMPREHENSION = 30  # tokens
LARGEST_FUNCTION = 220  # tokens
HELP_ARGUMENTS = ("help", "description", "epilog")
"""Arguments of argparse whose texts are prose."""

STORED_NAMES = {
    "launchers/auto.py": ("one", "more"),
    "speechtrain/data/corpora/recipes.py": ("place",),
    "speechtrain/nn/masking.py": ("other",),
    "speechtrain/optim/schedules.py": ("last",),
    "speechtrain/run_directory.py": ("written",),
    "speechtrain/runs/named_corpus.py": ("place",),
}
"""Config keys and keys of stored files by source file. They stay, because the runs of users hold them."""
FSTRING_START = getattr(tokenize, "FSTRING_START", None)  # Python 3.12 and later
FSTRING_END = getattr(tokenize, "FSTRING_END", None)

NAMES = "vague name"
PHRASES = "mannered phrase"
SEMICOLONS = "semicolon"
TWO_LOOPS = "comprehension with two loops"
LONG_COMPREHENSIONS = f"comprehension of more than {LONGEST_COMPREHENSION} tokens"
CONDITIONALS = "conditional inside an expression"
DEEP_STATEMENTS = f"statement nested {DEEPEST_STATEMENT} deep"
LARGE_FUNCTIONS = f"tokens of functions beyond {LARGEST_FUNCTION}"
DENSE = (TWO_LOOPS, LONG_COMPREHENSIONS, CONDITIONALS, DEEP_STATEMENTS)
RULES = (NAMES, PHRASES, SEMICOLONS, *DENSE, LARGE_FUNCTIONS)

TARGETS = {
    NAMES: "<= 0.5 % of bindings",
    PHRASES: "<= 0.8 in 1,000 words",
    SEMICOLONS: "<= 3 in 1,000 words",
    TWO_LOOPS: "<= 0.5 in 1,000 statements",
    LONG_COMPREHENSIONS: "<= 0.8 in 1,000 statements",
    CONDITIONALS: "<= 4 in 1,000 statements",
    DEEP_STATEMENTS: "<= 3 in 1,000 statements",
}


@dataclass(frozen=True)
class Finding:
    """A line that counts for a rule. ``text`` is the name, phrase or function on that line."""

    line: int
    rule: str
    text: str
    count: int = 1


@dataclass
class FileFigures:
    """The sizes of one file, and its findings."""

    statements: int = 0
    bindings: int = 0
    words: int = 0
    tokens: int = 0
    function_sizes: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the count of each rule. A rule without a finding is absent."""
        totals: Counter[str] = Counter()
        for finding in self.findings:
            totals[finding.rule] += finding.count
        return dict(totals)


class Tokens:
    """The positions of a source's names, operators and numbers. Strings and comments do not count."""

    def __init__(self, source: str) -> None:
        self.positions: list[tuple[int, int]] = []
        fstring_depth = 0
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == FSTRING_START:
                fstring_depth += 1
            elif token.type == FSTRING_END:
                fstring_depth -= 1
            elif not fstring_depth and token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
                self.positions.append(token.start)

    def size(self, node: ast.AST) -> int:
        """The number of tokens between the start and the end of a node."""
        start = bisect.bisect_left(self.positions, (node.lineno, node.col_offset))  # type: ignore[attr-defined]
        end = bisect.bisect_left(self.positions, (node.end_lineno, node.end_col_offset))  # type: ignore[attr-defined]
        return end - start


def nesting(node: ast.AST) -> int:
    """Return the depth of calls, subscripts, operators and comprehensions below a node."""
    depths = [0]
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            depths.append(nesting(child))
    deepest = max(depths)
    if isinstance(node, NESTING):
        deepest += 1
    return deepest


def bound_name(node: ast.AST) -> str:
    """Return the name that a node binds: a variable, attribute, parameter or function."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, FUNCTIONS):
        return node.name
    return ""


def string_constant(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def prose_of_source(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, error message, help text and block of comment lines."""
    for node in ast.walk(tree):
        if is_help_text(node):
            text = string_constant(node.value)  # type: ignore[attr-defined]
            if text is not None:
                yield node.lineno, text  # type: ignore[attr-defined]
        elif isinstance(node, ast.Expr):
            docstring = string_constant(node.value)
            if docstring is not None:
                yield node.lineno, docstring
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                message = string_constant(part)
                if message is not None:
                    yield part.lineno, message  # type: ignore[attr-defined]
    yield from comment_blocks(source)


def is_help_text(node: ast.AST) -> bool:
    """Return whether a node gives a text to argparse, or is the constant with the text of ``--help``."""
    if isinstance(node, ast.keyword):
        return node.arg in HELP_ARGUMENTS
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HELP"


def comment_blocks(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of the end and the text of each run of neighbouring comment lines."""
    block: list[str] = []
    end = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != end + 1:
            yield end, " ".join(block)
            block = []
        block.append(token.string.lstrip("#: ").strip())
        end = line
    if block:
        yield end, " ".join(block)


def comments_of_yaml(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment of a YAML file."""
    for number, line in enumerate(text.split("\n"), 1):
        comment = re.search(r"(?:^|\s)#\s*(.*)", line)
        if comment:
            yield number, re.sub(r"`[^`]*`", "x", comment[1])


def prose_of_page(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each paragraph and table row of a Markdown page, without code."""
    page = re.sub(r"```.*?```", lambda block: "\n" * block.group().count("\n"), page, flags=re.DOTALL)
    paragraph: list[str] = []
    start = 0
    for number, line in enumerate([*page.split("\n"), ""], 1):
        is_table = line.startswith("|")
        is_text = bool(line.strip()) and not line.startswith("    ") and not is_table
        if is_text:
            if not paragraph:
                start = number
            paragraph.append(re.sub(r"`[^`]*`", "x", line.strip()))
            continue
        if paragraph:
            yield start, " ".join(paragraph)
            paragraph = []
        if is_table:
            yield number, re.sub(r"`[^`]*`", "x", line)


def count_prose(figures: FileFigures, texts: Iterable[tuple[int, str]]) -> None:
    """Add the words, mannered phrases and semicolons of texts to the figures of a file."""
    for line, text in texts:
        text = re.sub(r"\s+", " ", text)
        figures.words += len(re.findall(r"[A-Za-z']+", text))
        for match in MANNERED_PHRASES.finditer(text):
            figures.findings.append(Finding(line, PHRASES, match.group()))
        if semicolons := text.count(";"):
            figures.findings.append(Finding(line, SEMICOLONS, ";", semicolons))


def measure_source(source: str) -> FileFigures:
    """Return the figures of a Python file."""
    tree = ast.parse(source)
    tokens = Tokens(source)
    figures = FileFigures(tokens=len(tokens.positions))
    count_prose(figures, prose_of_source(source, tree))
    parents = {}
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            parents[child] = node
        count_name(figures, node)
        if isinstance(node, ast.stmt):
            count_statement(figures, node)
        if isinstance(node, FUNCTIONS):
            figures.function_sizes.append(tokens.size(node))
            count_body(figures, node, sum(tokens.size(statement) for statement in node.body))
        elif isinstance(node, COMPREHENSIONS):
            count_comprehension(figures, node, tokens.size(node))
        elif isinstance(node, ast.IfExp) and not isinstance(parents[node], STATEMENTS_WITH_ONE_CONDITIONAL):
            figures.findings.append(Finding(node.lineno, CONDITIONALS, "if"))
    return figures


def count_name(figures: FileFigures, node: ast.AST) -> None:
    name = bound_name(node)
    if name:
        figures.bindings += 1
    if name.strip("_") in VAGUE_NAMES:
        figures.findings.append(Finding(node.lineno, NAMES, name))  # type: ignore[attr-defined]


def count_body(figures: FileFigures, function: ast.FunctionDef | ast.AsyncFunctionDef, size: int) -> None:
    """Count the tokens of a body beyond the limit. A signature does not count: it may list config keys."""
    excess = size - LARGEST_FUNCTION
    if excess > 0:
        figures.findings.append(Finding(function.lineno, LARGE_FUNCTIONS, function.name, excess))


def count_statement(figures: FileFigures, statement: ast.stmt) -> None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return  # A docstring is prose.
    figures.statements += 1
    if nesting(statement) >= DEEPEST_STATEMENT:
        figures.findings.append(Finding(statement.lineno, DEEP_STATEMENTS, type(statement).__name__))


def count_comprehension(figures: FileFigures, node: ast.expr, size: int) -> None:
    loops = 0
    for part in ast.walk(node):
        loops += isinstance(part, ast.comprehension)
    if loops > 1:
        figures.findings.append(Finding(node.lineno, TWO_LOOPS, "for"))
    if size > LONGEST_COMPREHENSION:
        figures.findings.append(Finding(node.lineno, LONG_COMPREHENSIONS, "for"))


def measure_yaml(text: str) -> FileFigures:
    """Return the figures of a YAML file: words, phrases and semicolons of its comments."""
    figures = FileFigures()
    count_prose(figures, comments_of_yaml(text))
    return figures


def measure_page(page: str) -> FileFigures:
    """Return the figures of a Markdown page: words, phrases and semicolons."""
    figures = FileFigures()
    count_prose(figures, prose_of_page(page))
    return figures


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_files(prefixes: tuple[str, ...], suffix: str, ref: str | None = None) -> dict[str, str]:
    """Return the text of each file below ``prefixes`` with ``suffix``, in the working tree or in a commit.

    An untracked file counts if git does not ignore it.
    """
    if ref:
        listing = git("ls-tree", "-r", "--name-only", ref)
    else:
        listing = git("ls-files", "--cached", "--others", "--exclude-standard")
    texts = {}
    for name in sorted(set(listing.splitlines())):
        if not name.endswith(suffix) or not name.startswith(prefixes):
            continue
        if ref:
            texts[name] = git("show", f"{ref}:{name}")
        elif (ROOT / name).is_file():
            texts[name] = (ROOT / name).read_text(encoding="utf-8")
    return texts


@dataclass
class Ceilings:
    """The counts that existing files may not exceed, and the origins of moved and split files."""

    files: dict[str, dict[str, int]]
    origins: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> Ceilings:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(files=stored["files"], origins=stored["origins"])

    def save(self, path: Path) -> None:
        """Write one line for each file, so that changes to different files do not conflict in git."""
        sections = []
        for title, rows in (("files", self.files), ("origins", self.origins)):
            lines = [f"  {json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows)]
            sections.append(f'"{title}": {{\n' + ",\n".join(lines) + "\n}")
        path.write_text("{\n" + ",\n".join(sections) + "\n}\n", encoding="utf-8")

    def group(self, measures: dict[str, FileFigures]) -> dict[str, dict[str, FileFigures]]:
        """Return the measured files by the path that has their ceilings. A new file has its own path."""
        groups: dict[str, dict[str, FileFigures]] = {}
        for name, figures in measures.items():
            origin = self.origins.get(name, name)
            groups.setdefault(origin, {})[name] = figures
        return groups


def allowance(figures: FileFigures) -> dict[str, int]:
    """Return the counts that a new file may have."""
    limits = dict.fromkeys(DENSE, 1)
    limits[SEMICOLONS] = max(1, 3 * figures.words // 1000)
    return limits


def total_counts(files: dict[str, FileFigures]) -> dict[str, int]:
    """Return the sum of each count over several files."""
    totals: Counter[str] = Counter()
    for figures in files.values():
        totals.update(figures.counts())
    return dict(totals)


def violations(ceilings: Ceilings, measures: dict[str, FileFigures]) -> list[str]:
    """Return the messages of the gate: for each exceeded rule, each finding with its file and line."""
    messages = []
    for origin, files in ceilings.group(measures).items():
        counts = total_counts(files)
        if origin in ceilings.files:
            limits, reason = ceilings.files[origin], f"the ceiling of {origin}"
        else:
            limits, reason = allowance(files[origin]), "the limit of a new file"
        for rule in RULES:
            count, limit = counts.get(rule, 0), limits.get(rule, 0)
            if count > limit:
                messages += rule_messages(files, rule, f"{count}, {reason} is {limit}")
    return messages


def rule_messages(files: dict[str, FileFigures], rule: str, excess: str) -> list[str]:
    """Return one message for each finding of a rule."""
    messages = []
    for name, figures in files.items():
        for finding in figures.findings:
            if finding.rule == rule:
                messages.append(f"{name}:{finding.line}: {rule} {finding.text!r} ({excess})")
    return messages


def lower(ceilings: Ceilings, measures: dict[str, FileFigures]) -> None:
    """Reduce each ceiling to the present count, and drop the ceilings of files that are gone."""
    groups = ceilings.group(measures)
    for origin in list(ceilings.files):
        if origin not in groups:
            del ceilings.files[origin]
            continue
        counts = total_counts(groups[origin])
        lowered = {}
        for rule, limit in ceilings.files[origin].items():
            if counts.get(rule, 0):
                lowered[rule] = min(limit, counts[rule])
        ceilings.files[origin] = lowered
    for name in list(ceilings.origins):
        if name not in measures:
            del ceilings.origins[name]


def gated_measures() -> dict[str, FileFigures]:
    measures = {}
    for name, source in read_files(GATED, ".py").items():
        figures = measure_source(source)
        stored_names = STORED_NAMES.get(name, ())
        figures.findings = [finding for finding in figures.findings if finding.text not in stored_names]
        measures[name] = figures
    for name, text in read_files(("conf/",), ".yaml").items():
        measures[name] = measure_yaml(text)
    return measures


def check() -> int:
    """Print each violation of the gate. Return the exit code."""
    measures = gated_measures()
    ceilings = Ceilings.load(CEILINGS)
    messages = violations(ceilings, measures)
    for message in messages:
        print(message)
    if messages:
        print(f"{len(messages)} findings. CONTRIBUTING.md has the rules.")
        return 1
    improved = Ceilings(files=dict(ceilings.files), origins=dict(ceilings.origins))
    lower(improved, measures)
    if improved != ceilings:
        print("some counts are lower than their ceilings: run tools/plain.py --lower and commit the result")
        return 1
    print(f"plain: {len(measures)} files, {len(ceilings.files)} with ceilings of their own")
    return 0


def per_thousand(count: int, total: int) -> float:
    return 1000 * count / max(1, total)


def print_figures(measures: dict[str, FileFigures]) -> None:
    """Print the figures of Python files next to their targets."""
    files = list(measures.values())
    counts = total_counts(measures)
    statements = sum(figures.statements for figures in files)
    words = sum(figures.words for figures in files)
    bindings = sum(figures.bindings for figures in files)
    tokens = sum(figures.tokens for figures in files)
    print(f"files {len(files)}, statements {statements}, tokens {tokens}")
    for rule, target in TARGETS.items():
        total = statements
        if rule == NAMES:
            total = 10 * bindings  # The target is in per cent.
        elif rule in (PHRASES, SEMICOLONS):
            total = words
        rate = per_thousand(counts.get(rule, 0), total)
        print(f"{rule:45} {rate:7.2f}   target {target}")
    sizes: list[int] = []
    for figures in files:
        sizes.extend(figures.function_sizes)
    sizes.sort()
    if sizes:
        median = statistics.median(sizes)
        percentile = sizes[int(0.95 * len(sizes))]
        print(f"{'tokens of a function, median':45} {median:7.1f}   target <= 50")
        print(f"{'tokens of a function, 95 %':45} {percentile:7d}   target <= 220")
        print(f"{'tokens of a function, largest':45} {sizes[-1]:7d}   target <= 450")


def print_page_figures(measures: dict[str, FileFigures]) -> None:
    """Print the figures of Markdown pages, and the pages with most places."""
    counts = total_counts(measures)
    words = sum(figures.words for figures in measures.values())
    phrases = per_thousand(counts.get(PHRASES, 0), words)
    semicolons = per_thousand(counts.get(SEMICOLONS, 0), words)
    print(f"pages {len(measures)}, words {words}")
    print(f"in 1,000 words: mannered phrases {phrases:.1f}, semicolons {semicolons:.1f}")


def print_findings(measures: dict[str, FileFigures]) -> None:
    for name, figures in measures.items():
        for finding in sorted(figures.findings, key=lambda finding: finding.line):
            print(f"{name}:{finding.line}: {finding.rule} {finding.text!r}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="prefixes of files, relative to the repository")
    parser.add_argument("--ref", help="measure this commit instead of the working tree")
    parser.add_argument("--docs", action="store_true", help="measure Markdown pages")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--show", action="store_true", help="print each line that counts")
    actions.add_argument("--check", action="store_true", help="fail if a file exceeds its ceilings")
    actions.add_argument("--lower", action="store_true", help="store lower ceilings for files that improved")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    if options.check:
        return check()
    if options.lower:
        ceilings = Ceilings.load(CEILINGS)
        lower(ceilings, gated_measures())
        ceilings.save(CEILINGS)
        return 0
    suffix, measure, prefixes = ".py", measure_source, tuple(options.paths) or SOURCE
    if options.docs:
        suffix, measure, prefixes = ".md", measure_page, tuple(options.paths) or ("",)
    measures = {}
    for name, text in read_files(prefixes, suffix, options.ref).items():
        measures[name] = measure(text)
    if options.show:
        print_findings(measures)
    elif options.docs:
        print_page_figures(measures)
    else:
        print_figures(measures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
