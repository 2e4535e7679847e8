"""Makes the pages that `make docs` builds a site of: python3 tools/site/stage.py FOLDER

README.md becomes the first page; the other pages of the repository keep their names, those of docs/
without it. Links follow; a link to what is no page becomes its text. The reference of C and C++ is
made from the public headers' comments (headers.py), that of Python by mkdocstrings.
"""

import os
import pathlib
import re
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(pathlib.Path(__file__).parent)]
import check_pages  # noqa: E402
import headers  # noqa: E402

#: (title, object, members) of the Python reference; () takes the public ones
PYTHON = [
    ("Attention", "qattn", ["attention", "explain", "reference_attention", "device_errors",
                            "cpu_isa", "BitMask"]),
    ("Codes", "qattn", ["quantize", "dequantize", "Quantized", "scheduled_scale"]),
    ("Recipes", "qattn", ["recipe", "recipes", "Recipe", "Granularity", "MadeFor"]),
    ("KV cache", "qattn", ["KvCache", "GpuKvCache", "KvBytes", "KvUsage"]),
    ("Errors", "qattn", ["QattnError", "InvalidArgument", "Unsupported", "OutOfMemory",
                         "InternalError"]),
    ("torch", "qattn.torch", ["sdpa", "quantize"]),
    ("transformers", "qattn.transformers", ["register", "QattnCache"]),
    ("Diffusion", "qattn.diffusion", ["attach", "Attachment", "Schedule", "Rule", "register",
                                      "comfyui.override", "Report", "LayerReport", "Place",
                                      "current_place"]),
    ("Static scales of diffusion models", "qattn.diffusion",
     ["calibrate", "Calibration", "StaticScales", "Clipped", "Maxima"]),
]  # fmt: skip


def place_of(path):
    """Where a file of the repository lies in the site."""
    name = path.relative_to(ROOT)
    if name == pathlib.Path("README.md"):
        return pathlib.Path("index.md")
    return name.relative_to("docs") if name.parts[0] == "docs" else name


def moved_links(text, path, places):
    """The text with links as they are in the site; `places`: {file: its place}."""

    def link(match):
        words, target = match[1], match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        file, _, anchor = target.partition("#")
        other = places.get((path.parent / file).resolve())
        if other is None:
            return words
        there = os.path.relpath(other, places[path].parent).replace(os.sep, "/")
        sign = "!" if match[0].startswith("!") else ""
        return f"{sign}[{words}]({there}{'#' + anchor if anchor else ''})"

    parts, end = [], 0
    for fence in check_pages.FENCE.finditer(text):
        parts += [check_pages.LINK.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join(parts) + check_pages.LINK.sub(link, text[end:])


#: a cell that should stay on one line
SHORT = re.compile(r"(?<=\| )([-+]?[\d.]+(?:e[-+]\d+)?(?: ?(?:%|\w{1,5}))?)(?= \|)")


def unbroken(text):
    """The text with a frame around the numbers in its tables."""
    lines = text.split("\n")
    return "\n".join(
        SHORT.sub(r'<span class="n">\1</span>', line) if line.startswith("|") else line
        for line in lines
    )


def python_page():
    lines = ["# Python", ""]
    for title, module, members in PYTHON:
        lines += [f"## {title}", ""]
        for name in members:
            lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)


def pictures():
    """What pages show: drawn from records, and kept from a tool's run."""
    docs = ROOT / "docs"
    return [*sorted(docs.glob("plots/*.svg")), *sorted(docs.glob("images/*.png"))]


def stage(folder):
    shutil.rmtree(folder, ignore_errors=True)
    files = [*check_pages.pages(ROOT), *pictures()]
    places = {path: place_of(path) for path in files}
    for path, place in places.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = check_pages.COMMENT.sub("", path.read_text())
            target.write_text(unbroken(moved_links(text, path, places)))
        else:
            shutil.copyfile(path, target)
    shutil.copyfile(ROOT / "tools" / "site" / "site.css", folder / "site.css")
    reference = folder / "reference"
    reference.mkdir()
    (reference / "python.md").write_text(python_page())
    (reference / "cpp.md").write_text(headers.cpp_page(ROOT / "include" / "qattn"))
    (reference / "c.md").write_text(headers.c_page(ROOT / "include" / "qattn" / "qattn.h"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.splitlines()[0])
    stage(pathlib.Path(sys.argv[1]))
