"""Recipes beside themselves: in another build (RECIPE@NAME) or with another choice (RECIPE+word).

Records are of `bench.py run` with such recipes, variants-*.json; all of a shape took turns.
"""

import re

from .record import RESULTS, Record, markdown
from .shapes import column_name, table_name


def plain_name(candidate):
    """The recipe as it is: RECIPE of RECIPE+word@NAME."""
    return re.split("[+@]", candidate, maxsplit=1)[0]


def table(cells):
    """Milliseconds of each variant, and how many times as fast the recipe as it is was."""
    shapes = list(dict.fromkeys(c.shape for c in cells))
    times = {(c["candidate"], c["step"], c.shape): c["median_ms"] for c in cells if c.measured}

    def text(candidate, step, shape):
        own = times.get((candidate, step, shape))
        plain = times.get((plain_name(candidate), step, shape))
        if own is None:
            return ""
        gain = f" ({own / plain:.3f})" if plain and candidate != plain_name(candidate) else ""
        return f"{own:.3f}{gain}"

    static = any("+static" in c["candidate"] for c in cells)
    rows = [
        [f"{candidate} {step}", *(text(candidate, step, s) for s in shapes)]
        for candidate, step in dict.fromkeys(key[:2] for key in times)
        if not candidate.startswith("torch") and (step != "quantise" or static)
    ]
    return markdown(["", *map(column_name, shapes)], rows)


def record_section(record):
    p = record.provenance
    turns = f" Turns of {p['seconds_a_turn']:g} s." if "seconds_a_turn" in p else ""
    lines = ["", f"{p['date']}, commit {p['commit']}, {record.machine}, `{record.name}`.{turns}"]
    tables = {}
    for cell in record.cells:
        tables.setdefault(table_name(cell.shape), []).append(cell)
    for name, cells in tables.items():
        lines += ["", f"{name}:", "", *table(cells)]
    return lines


def section():
    """Lines of docs/tables."""
    lines = []
    for path in sorted(RESULTS.glob("variants-*.json")):
        lines += record_section(Record.load(path))
    head = (
        "Milliseconds, medians. RECIPE@COMMIT: of another build, RECIPE+word: with another choice "
        "than the plan's; in brackets how many times as fast the recipe as it is was there."
    )
    return ["", "## Builds and choices beside one another", "", head, *lines] if lines else []
