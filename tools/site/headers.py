"""Pages of the public headers: each declaration under its name, its comment as text.

No parser of C++: a declaration begins at the first column, ends where its braces do, and has the
comment right above it. That is how the headers are written; tests/docs/test_site.py notices a name
that is missing.
"""

import re

#: the order of the C++ page
HEADERS = (
    "status.hpp",
    "format.hpp",
    "tensor_view.hpp",
    "recipe.hpp",
    "attention.hpp",
    "quantize.hpp",
    "score_function.hpp",
    "reference.hpp",
    "kv_cache.hpp",
    "kv_cache_gpu.hpp",
)
NAME = re.compile(
    r"(?:enum class|enum|struct|class|concept|using|typedef struct)\s+(\w+)(?=\s*[;{:=]|\s+final)"
    r"|typedef [^(]*\(\*(\w+)\)|^typedef .*?(\w+);|([\w~]+)\s*\(|(\w+)\s*=[^=]|(\w+);$"
)


def name_of(code):
    """The name that a declaration declares; of an enumeration without one, its first constant's."""
    code = re.sub(r"^template <[^\n]*>\n?\s*", "", code)
    if re.match(r"enum\s*\{", code):
        return re.search(r"\{\s*(\w+)", code)[1] + ", ..."
    if macro := re.match(r"QATTN_STRUCT\((\w+)\)", code):
        return f"{macro[1]}_init"
    found = NAME.search(code)
    return next(x for x in found.groups() if x) if found else code.split("\n")[0]


def escaped(text):
    """Text as Markdown that shows the same characters; what is in backticks stays code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts = [text]
    parts[::2] = [re.sub(r"([\\*_{}\[\]#])", r"\\\1", x).replace("<", "&lt;") for x in parts[::2]]
    text = "`".join(parts)
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", text)


def prose(lines):
    """A comment's lines as Markdown: indented lines are code."""
    out, code = [], False
    for line in lines:
        indented = line.startswith("  ")
        if indented != code:
            out += ["```cpp"] if indented else ["```", ""]
            if indented:
                out.insert(-1, "")
            code = indented
        out.append(line if code else escaped(line))
    return out + (["```"] if code else [])


def strip_comment(line):
    return re.sub(r"^\s*(?:///?<?|/\*|\*/| \*(?!/)) ?", "", line).removesuffix("*/").rstrip()


def declarations(lines):
    """(comment lines, code lines) of a header's body, in order; code may be empty."""
    comment, at = [], 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(("//", "/*")):
            first = at
            if line.startswith("/*"):
                while "*/" not in lines[at]:
                    at += 1
            comment += [strip_comment(x) for x in lines[first : at + 1]]
        elif not line.strip():
            if comment:
                yield comment, []
            comment = []
        elif line.startswith("#"):
            comment = []
            while lines[at].endswith("\\"):
                at += 1
        elif line.startswith(("namespace detail", "inline namespace")):
            at = end_of(lines, at)
            comment = []
        elif line.startswith(("namespace", "}", 'extern "C"')):
            comment = []
        else:
            last = end_of(lines, at)
            yield comment, lines[at : last + 1]
            comment, at = [], last
        at += 1


def end_of(lines, at):
    """The last line of the declaration or block that begins at line `at`."""
    depth = 0
    while at < len(lines):
        text = re.sub(r"//.*|/\*.*?\*/", "", lines[at])
        depth += text.count("{") + text.count("(") - text.count("}") - text.count(")")
        ended = text.rstrip().endswith((";", "}")) or text.startswith("QATTN_STRUCT")
        if depth == 0 and ended:
            return at
        at += 1
    return at - 1


def dropped(name, code):
    """Forward declarations, includes of macros, and what only compilers need."""
    text = "\n".join(code)
    return (
        re.fullmatch(r"(?:struct|class|enum class) \w+;", text)
        or "= delete" in text
        or name in ("", "QATTN_HOST_DEVICE")
    )


def public(code):
    """A class without what is private, and without empty lines at its end."""
    if " private:" in code:
        code = [*code[: code.index(" private:")], code[-1]]
    while len(code) > 1 and not code[-2].strip():
        del code[-2]
    return code


def body(lines, level):
    """Markdown of declarations."""
    out = []
    for comment, code in declarations(lines):
        if not code:
            out += ["", *prose(comment)]
            continue
        name = name_of("\n".join(code))
        if dropped(name, code):
            continue
        out += ["", f"{'#' * level} `{name}`", "", *prose(comment)]
        out += ["", "```cpp", *public(code), "```"]
    return out


def split_head(lines):
    """(the comment at the head of a header, the rest)."""
    end = next(i for i, line in enumerate(lines) if line.startswith("#"))
    return [strip_comment(x) for x in lines[:end] if x.strip()], lines[end:]


def cpp_page(folder):
    """Every header of C++ in one page."""
    out = ["# C++", "", "`#include <qattn/qattn.hpp>` brings everything, namespace `qattn`."]
    for name in HEADERS:
        lines = (folder / name).read_text().split("\n")
        head, rest = split_head(lines)
        out += ["", f"## {name}", "", *prose(head), *body(rest, 3)]
    return "\n".join(out) + "\n"


def c_page(path):
    """The C header; its sections are the comments that begin with dashes."""
    head, rest = split_head(path.read_text().split("\n"))
    text = "\n".join(body(rest, 3))
    text = re.sub(r"^\\?-+ ?(?:-+ )?(.*?):? ?(\S*) -+$", r"## \1: \2", text, flags=re.M)
    intro = "`#include <qattn/qattn.h>`. Meanings are described at the C++ names that are given."
    return "\n".join(["# C", "", intro, "", *prose(head)]) + "\n" + text + "\n"
