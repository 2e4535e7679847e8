"""The size of wheels and the time of their import: what tests/packaging writes with --write."""

import json

from .record import RESULTS

#: the record, and what made it
COMMANDS = {
    "wheel.json": "make wheel WHEEL=--write",
    "wheel-cuda.json": "QATTN_CUDA=ON make wheel WHEEL=--write",
}


def line_of(name, record):
    """One line of the page."""
    cuda = "with" if record["cuda"] else "without"
    return (
        f"{record['date']}, commit {record['commit']}, `{name}` (`{COMMANDS[name]}`): the "
        f"wheel for Python {record['python']}, {record['platform']}, {cuda} libqattn_cuda, has "
        f"{record['bytes'] / 1e6:.2f} MB; `import qattn` takes {record['import_s']:.3f} s, "
        f"{record['import_after_numpy_s']:.3f} s where numpy is there already ({record['runs']} "
        f"interpreters, medians; {record['cpu']})."
    )


def section():
    """Lines of docs/tables; none without a record."""
    paths = [RESULTS / name for name in COMMANDS if (RESULTS / name).exists()]
    lines = ["", "## The wheel"] if paths else []
    for path in paths:
        lines += ["", line_of(path.name, json.loads(path.read_text()))]
    return lines
