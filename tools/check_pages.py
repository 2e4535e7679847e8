"""Holds the pages to what a reader can take: python3 tools/check_pages.py [FOLDER]

Lines a page, the share of numbers in its prose, columns, commit hashes, and every relative link
with its anchor. Prints one line a fault and exits with 1 where there is any. `--table` prints what
every page has. The pages of docs/tables are generated: only their links count.
"""

import argparse
import fnmatch
import pathlib
import re
import sys

#: The most lines of a page, the first pattern that fits.
LIMITS = {
    "README.md": 150,
    "ARCHITECTURE.md": 200,
    "CONTRIBUTING.md": 150,
    "CHANGELOG.md": 100,
    "docs/NUMERICS.md": 200,
    "docs/PERFORMANCE.md": 150,
    "docs/ROADMAP.md": 80,
    "docs/ISA_CONFORMANCE.md": 150,
    "docs/guide/*.md": 150,
    "docs/internals/*.md": 150,
    "docs/experiments/README.md": 100,
    "docs/experiments/*.md": 60,
    "examples/*.md": 150,
}
GENERATED = "docs/tables/*.md"
COLUMNS = 100
SHARE = 0.04  #: numbers among the words of the prose

FENCE = re.compile(r"^(```|~~~).*?^\1[^\S\n]*$", re.S | re.M)
COMMENT = re.compile(r"<!--.*?-->", re.S)
INLINE = re.compile(r"`[^`]+`")
LINK = re.compile(r"!?\[((?:[^][]|\[[^][]*\])*)\]\(([^()\s]+)\)")
NUMBER = re.compile(r"[-+~<>=]*\d[\d.,:/^+-]*(?:e[-+]?\d+)?(?:%|[a-zA-Z]{1,2})?")
HASH = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
HEADING = re.compile(r"^#{1,6} +(.*?)\s*#*$", re.M)


def blank(match):
    """As many line ends as there were, so that lines keep their numbers."""
    return "\n" * match[0].count("\n")


def prose(text):
    """The page without code, comments, tables and numbers of lists; inline code is a word."""
    text = COMMENT.sub(blank, FENCE.sub(blank, text))
    text = re.sub(r"^\s*\d+\. ", "", text, flags=re.M)
    lines = ("" if line.lstrip().startswith("|") else line for line in text.split("\n"))
    return INLINE.sub("code", LINK.sub(r"\1", "\n".join(lines)))


def words(text):
    """Words and how many of them are numbers."""
    found = [w.strip("()[]{}*_\"'.,;:!?#-") for w in prose(text).split()]
    found = [w for w in found if w and w not in "+-=%"]
    return len(found), sum(bool(NUMBER.fullmatch(w)) for w in found)


def anchors(text):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    found = set()
    for heading in HEADING.findall(FENCE.sub(blank, text)):
        plain = LINK.sub(r"\1", heading).replace("`", "").lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


def limit_of(name):
    return next((n for pattern, n in LIMITS.items() if fnmatch.fnmatch(name, pattern)), None)


def link_faults(path, text, root):
    text = COMMENT.sub(blank, FENCE.sub(blank, text))
    for _, target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        other = (path.parent / place).resolve() if place else path
        if not other.exists():
            yield f"link to {target}: there is no such file"
        elif not other.is_relative_to(root):
            yield f"link to {target}: it leaves the repository"
        elif anchor and other.suffix == ".md" and anchor not in anchors(other.read_text()):
            yield f"link to {target}: the page has no such heading"
    for name in re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.md)`", text):
        if not (root / name).exists() and not (path.parent / name).exists():
            yield f"`{name}`: there is no such page"


def faults(path, root):
    """What is wrong with a page, one text each."""
    text, name = path.read_text(), str(path.relative_to(root))
    yield from link_faults(path, text, root)
    if fnmatch.fnmatch(name, GENERATED):
        return
    lines, limit = text.count("\n"), limit_of(name)
    if limit is None:
        yield "no limit of lines is known for this page: give it one in tools/check_pages.py"
    elif lines > limit:
        yield f"{lines} lines, at most {limit}"
    total, numbers = words(text)
    if total and numbers / total > SHARE:
        yield f"{numbers} of {total} words are numbers, at most {SHARE:.0%}"
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > COLUMNS and not line.lstrip().startswith("|"):
            yield f"line {number}: {len(line)} columns, at most {COLUMNS}"
        for found in HASH.findall(line):
            yield f"line {number}: {found} looks like a commit's hash"


def pages(root):
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/**/*.md")]
    return sorted(found)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    home = pathlib.Path(__file__).resolve().parents[1]
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=home)
    parser.add_argument("--table", action="store_true", help="print what every page has")
    args = parser.parse_args(arguments)
    root, count = args.folder.resolve(), 0
    for path in pages(root):
        name = path.relative_to(root)
        if args.table:
            total, numbers = words(path.read_text())
            share = numbers / total if total else 0
            print(f"{path.read_text().count(chr(10)):5} lines {share:6.1%} numbers  {name}")
        for fault in faults(path, root):
            print(f"{name}: {fault}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
