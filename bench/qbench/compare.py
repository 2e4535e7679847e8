"""Two records: time for time and error for error, the worst first."""

import dataclasses
import math

from .record import Record, baselines


def add_arguments(parser):
    parser.add_argument("a", help="the record before")
    parser.add_argument("b", help="the record after")
    parser.add_argument(
        "--noise", type=float, default=0.03, help="relative changes up to this are none"
    )
    parser.add_argument(
        "--fail", type=float, default=0.10, help="exit with 1 if anything is worse by more"
    )
    parser.add_argument(
        "--relative-to",
        metavar="CANDIDATE",
        help="divide times by this one's (torch cudnn) in the same run first: clocks drift",
    )
    parser.add_argument("--all", action="store_true", help="print what did not change, too")


@dataclasses.dataclass
class Change:
    what: str
    before: str
    after: str
    ratio: float  #: after / before: larger is worse; infinite: it no longer works

    def __str__(self):
        factor = "no longer" if math.isinf(self.ratio) else f"{self.ratio:9.3f}"
        return f"{factor}  {self.what}: {self.before} -> {self.after}"


def outcome(x):
    return next((f"{w}: {x[w]}" for w in ("refused", "failed") if w in x), "")


def error_key(x):
    return (x["family"], x["dim"], x["candidate"], x["io"])


def times_of(record, relative_to):
    """(times by key, their unit, what has no time by key)."""
    if relative_to is None:
        times = {c.key: c["median_ms"] for c in record.cells if c.measured}
        unit = "ms"
    else:
        base = baselines(record.cells, (relative_to, "bf16"))
        if not base:
            raise ValueError(f"relative-to: {record.name} has no times of {relative_to!r}")
        times = {
            c.key: c["median_ms"] / base[c.shape.name]
            for c in record.cells
            if c.measured and c.shape.name in base
        }
        unit = f"x {relative_to}"
    return times, unit, {c.key: outcome(c) for c in record.cells if not c.measured}


def changes_of(before, after, gone, unit, describe):
    """Changes of numbers where smaller is better; `gone`: why `after` has none, by key."""
    found = []
    for key, old in before.items():
        text = f"{old:.4g} {unit}"
        if key in after:
            ratio = after[key] / old
            found.append(Change(describe(key), text, f"{after[key]:.4g} {unit}", ratio))
        elif key in gone:
            found.append(Change(describe(key), text, gone[key], math.inf))
    return found


def only_in(a, b, describe):
    return [describe(key) for key in a if key not in b]


def describe_cell(key):
    return " | ".join(key)


def describe_error(key):
    return f"error on {key[0]}, D {key[1]} | {key[2]} | {key[3]}"


def compare(a, b, relative_to=None):
    """(changes, the worst first; what only one of them has)."""
    times_a, unit, gone_a = times_of(a, relative_to)
    times_b, _, gone_b = times_of(b, relative_to)
    changes = changes_of(times_a, times_b, gone_b, unit, describe_cell)
    errors_a, errors_b = (
        {error_key(x): x["nrmse"] for x in r.errors if "nrmse" in x} for r in (a, b)
    )
    lost = {error_key(x): outcome(x) for x in b.errors if "nrmse" not in x}
    changes += changes_of(errors_a, errors_b, lost, "NRMSE", describe_error)
    missing = [
        f"only in {one.name}: {text}"
        for one, x, y in (
            (a, times_a | gone_a, times_b | gone_b),
            (b, times_b | gone_b, times_a | gone_a),
        )
        for text in only_in(x, y, describe_cell)
    ]
    return sorted(changes, key=lambda c: -c.ratio), missing


def run(args):
    """Exit status: 1 if anything is worse by more than --fail."""
    if not 0 <= args.noise <= args.fail:
        raise ValueError(f"noise: {args.noise} is not between 0 and --fail ({args.fail})")
    a, b = Record.load(args.a), Record.load(args.b)
    changes, missing = compare(a, b, args.relative_to)
    if not changes:
        raise ValueError("the records have nothing in common")
    for record in (a, b):
        p = record.provenance
        print(f"{record.name}: {record.machine}, {p['date']}, commit {p['commit']}")
    if a.machine != b.machine:
        print("The machines differ: ratios compare them, too.")
    within = [c for c in changes if abs(c.ratio - 1) <= args.noise]
    for change in changes:
        if args.all or change not in within:
            print(change)
    print(f"{len(within)} of {len(changes)} within {args.noise:.1%}")
    for text in missing:
        print(text)
    worse = [c for c in changes if c.ratio > 1 + args.fail]
    if worse:
        print(f"{len(worse)} worse by more than {args.fail:.1%}")
    return 1 if worse else 0
