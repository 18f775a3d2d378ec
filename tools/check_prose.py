#!/usr/bin/env python3
"""Check the prose of documentation, comments, docstrings and messages.

Reports, as `file:line: finding`:
  - sentences of more than 30 words,
  - sentences that open with `Of`, `What`, `Where`, `That`, `So` or `Beside`,
  - words and passives that the style rejects (table BANNED),
  - subjects of the change's own commits that are longer than 72 characters.

Usage: tools/check_prose.py [file ...]     Without files: everything that git tracks, and the commits.
"""

import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
LONGEST_SENTENCE = 30  # words
LONGEST_SUBJECT = 72  # characters
OPENERS = re.compile(r"^(Of|What|Where|That|So|[B]eside)\b(?![^.!]*\?)")
BANNED = [
    (r"\b(is|are|was|were|be|been|being) (had|told|brought)\b", "name the actor"),
    (r"\b[Ll](ies|ie|ay|ain)\b(?! down| in wait)", "say 'is', 'starts at' or 'is stored'"),
    (r"\b(whoever|somebody|whosoever)\b", "name the actor"),
    (r"\bbut for\b", "say 'except'"),
    (r"\bin vain\b", "say what failed"),
    (r"\bsecond place\b", "say 'shadow copy'"),
    (r"\btaken whole\b", "say 'in one piece'"),
    (r"\b[Bb]eside\b", "say 'next to', 'with' or 'compared with'"),
    (r"\bof which\b", "start a new sentence"),
]
Prose = Iterator[tuple[int, str]]  # first line, text; a blank line ends a paragraph


def markdown(text: str) -> Prose:
    """Paragraphs, list items and table cells; not code, headings' marks, links' targets or HTML."""
    text = re.sub(r"<!--.*?-->", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
    fenced, start, gathered = False, 0, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
            line = ""
        elif fenced or re.match(r"\s*(<|\[[^\]]+\]:)", line):
            line = ""
        line = re.sub(r"\]\([^)]*\)", "]", line)
        cells = line.strip().strip("|").split("|") if line.lstrip().startswith("|") else None
        begins = re.match(r"\s*([-*+]|\d+\.|#+|>|!!!|\?\?\?)\s", line)
        if (not line.strip() or begins or cells) and gathered:
            yield start, " ".join(gathered)
            gathered = []
        if cells:
            yield from ((number, cell) for cell in cells)
        elif line.strip():
            if not gathered:
                start = number
            gathered.append(line.strip().lstrip("-*+#>! ").strip())
            if begins and "#" in begins[1]:
                yield start, gathered.pop()


def blocks(lines: list[tuple[int, str]]) -> Prose:
    """Joins comments on consecutive lines."""
    start, last, gathered = 0, -1, []
    for number, line in lines:
        if gathered and (number != last + 1 or not line.strip()):
            yield start, "\n".join(gathered)
            gathered = []
        if line.strip():
            if not gathered:
                start = number
            gathered.append(line)
        last = number
    if gathered:
        yield start, "\n".join(gathered)


def python(text: str) -> Prose:
    """Comments, docstrings and messages of a module."""
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(type:|noqa|!|ruff:|mypy:|pragma)", token.string):
            comments.append((token.start[0], token.string.lstrip("# ")))
    yield from blocks(comments)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from message(node.lineno, node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "0" for part in node.values]
            yield from message(node.lineno, "".join(str(part) for part in parts))


def message(line: int, text: str) -> Prose:
    """A literal, if it reads as prose: at least five words, paragraph by paragraph."""
    if len(re.findall(r"[A-Za-z]{2,}", text)) < 5 or re.search(
        r"[;{}]\s*\n|^\s*(import|from|def|for|with) ", text, re.M
    ):
        return
    for paragraph in re.split(r"\n\s*\n", text):
        yield line + text[: text.index(paragraph)].count("\n"), paragraph


def cpp(text: str) -> Prose:
    """Comments and messages of a C++ file."""
    comments = []
    code = []
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(r"(?:^|[^:\"'/])//+<?\s?(.*)", line)
        if (
            found
            and line[: found.start()].count('"') % 2 == 0
            and "NOLINT" not in line
            and "clang-format" not in line
        ):
            comments.append((number, found[1]))
            line = line[: found.start() + 1]
        code.append(line)
    yield from blocks(comments)
    for found in re.finditer(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', "\n".join(code)):
        literal = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', found[0]))
        yield from message("\n".join(code)[: found.start()].count("\n") + 1, literal.replace("{}", "0"))


READERS = {".md": markdown, ".py": python, ".cpp": cpp, ".h": cpp, ".cu": cpp}


def sentences(paragraph: str) -> list[str]:
    """A list item or an indented row of a docstring ends a sentence, as a full stop does."""
    paragraph = re.sub(r"``?[^`]*``?", "code", paragraph)
    paragraph = re.sub(r"\n\s*(?=[-*•|]|\S+:\s|\S+ {2,})", ". ", paragraph)
    paragraph = re.sub(r"\n {4,}", ". ", paragraph) if re.search(r"\n {8,}\S", paragraph) else paragraph
    paragraph = re.sub(r"\b(e\.g|i\.e|cf|vs|etc|Fig|No)\.", r"\1", paragraph)
    return [each.strip() for each in re.split(r"(?<=[.!?:])[)\"'*]*\s+|\n\s*\n", paragraph) if each.strip()]


def findings(path: pathlib.Path) -> Iterator[str]:
    """Every finding in a file."""
    name = path.relative_to(ROOT)
    for line, paragraph in READERS[path.suffix](path.read_text()):
        for sentence in sentences(paragraph):
            words = len(re.findall(r"[A-Za-z][\w'-]*", sentence))
            shown = " ".join(sentence.split())[:70]
            if words > LONGEST_SENTENCE:
                yield f"{name}:{line}: {words} words in one sentence: {shown}"
            if words > 3 and (found := OPENERS.match(sentence.lstrip("([*\"'"))):
                yield f"{name}:{line}: opens with '{found[1]}': {shown}"
            for pattern, advice in BANNED:
                if found := re.search(pattern, sentence):
                    yield f"{name}:{line}: '{found[0]}', {advice}: {shown}"


def commits() -> Iterator[str]:
    """Subjects of commits that the upstream branch does not have; without an upstream, the last one's."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    upstream = git("rev-parse", "--verify", "-q", "@{upstream}") or git("rev-parse", "--verify", "-q", "HEAD~1")
    for subject in git("log", "--no-merges", "--format=%s", f"{upstream}..HEAD").splitlines() if upstream else ():
        if len(subject) > LONGEST_SUBJECT:
            yield f"commit: {len(subject)} characters (at most {LONGEST_SUBJECT}): {subject}"


def main(arguments: list[str]) -> int:
    """Print the findings of the given files, or of all that git tracks."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found: list[str] = [] if arguments else list(commits())
    for name in arguments or tracked:
        path = (ROOT / name).resolve()
        if path.suffix in READERS and path.exists():
            found += findings(path)
    print("\n".join(found) or "prose: nothing found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
