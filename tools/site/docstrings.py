"""Docstrings as the site shows them: each argument's description is an item of a list.

They are plain text, in which a line that begins with `name:` describes an argument. A line that
begins with a capital and one of a few verbs begins a paragraph; what Markdown would take for markup
is escaped, indented examples stay as they are.
"""

import re

import griffe

PARAGRAPH = re.compile(r"^(?:Raises|Returns|Inside|CUDA tensors|On a GPU|On CUDA)\b")
ITEM = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (.*)$")


def as_markdown(text, names):
    """`names`: what may have a description."""
    out, inside = [], False
    for line in text.split("\n"):
        if line.startswith("    ") or not line.strip():
            inside = inside and bool(line.strip())
            out.append(line)
            continue
        item = ITEM.match(line)
        if item and set(item[1].split(", ")) <= names:
            out += ["", f"- **{item[1]}**: {escaped(item[2])}"]
            inside = True
            continue
        if PARAGRAPH.match(line):
            out.append("")
            inside = False
        out.append(("    " if inside else "") + escaped(line))
    return "\n".join(out)


def escaped(line):
    parts = line.split("`")
    if len(parts) % 2 == 0:
        return line
    parts[::2] = [re.sub(r"([*_\[\]])", r"\\\1", x).replace("<", "&lt;") for x in parts[::2]]
    return "`".join(parts)


class Docstrings(griffe.Extension):
    """Rewrites every docstring once its object is whole."""

    def on_function(self, *, func, **_):
        rewrite(func, {p.name for p in func.parameters})

    def on_class(self, *, cls, **_):
        init = cls.members.get("__init__")
        names = {p.name for p in getattr(init, "parameters", ())}
        rewrite(cls, names | set(cls.members))

    def on_attribute(self, *, attr, **_):
        rewrite(attr, set())


def rewrite(thing, names):
    if thing.docstring:
        thing.docstring.value = as_markdown(thing.docstring.value, names)
