"""The size of the wheel and the time of its import: what tests/packaging writes with --write."""

import json

from .record import RESULTS

NAME = "wheel.json"


def line_of(record):
    """One line of the page."""
    cuda = "with" if record["cuda"] else "without"
    return (
        f"{record['date']}, commit {record['commit']}, `{NAME}` (`make wheel WHEEL=--write`): the "
        f"wheel for Python {record['python']}, {record['platform']}, {cuda} libqattn_cuda, has "
        f"{record['bytes'] / 1e6:.2f} MB; `import qattn` takes {record['import_s']:.3f} s, "
        f"{record['import_after_numpy_s']:.3f} s where numpy is there already ({record['runs']} "
        f"interpreters, medians; {record['cpu']})."
    )


def section():
    """Lines of docs/PERFORMANCE.md; none without the record."""
    path = RESULTS / NAME
    if not path.exists():
        return []
    return ["", "## The wheel", "", line_of(json.loads(path.read_text()))]
