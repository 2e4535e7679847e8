"""One tier of tests: its phases one after the other, their times, and a record.

    python3 tools/tier.py check|test|test-all [--record FILE] [--resume]

A phase is a target of the Makefile, which alone knows the commands. The first phase that fails
ends the tier. At its end, however it ends, each phase's minutes are printed, and written as JSON to
build/tier-TIER.json (or FILE: bench/results/ keeps the last one of each tier). --resume goes on
after the phases that passed in the last run of this tier, if that was of this very commit.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]

TIERS = {
    # A developer's loop: what a change of a CPU file can break.
    "check": ["setup", "configure", "build", "ctest-check", "pytest-check"],
    # What CI runs.
    "test": ["setup", "configure", "build", "ctest", "pytest", "docs", "sanitize", "cuda"],
    # Everything there is.
    "test-all": ["setup-all", "configure", "build", "ctest-all", "pytest", "docs", "sanitize-all",
                 "tsan", "fuzz", "arm", "wheels", "cuda-all"],
}

# The closing lines of the runners, and what they count.
CTEST = re.compile(r"^\d+% tests passed, (\d+) tests failed out of (\d+)", re.M)
PYTEST = re.compile(r"^(?=\d+ (?:passed|failed)).* in [\d.]+s\b.*$", re.M)


def counts(text):
    """(passed, failed, skipped) of every runner that closed in `text`."""
    passed = failed = skipped = 0
    for match in CTEST.finditer(text):
        failed += int(match[1])
        passed += int(match[2]) - int(match[1])
    for line in PYTEST.findall(text):
        found = dict((word, int(number)) for number, word in re.findall(r"(\d+) (\w+)", line))
        passed += found.get("passed", 0)
        failed += found.get("failed", 0)
        skipped += found.get("skipped", 0)
    return passed, failed, skipped


def run_phase(name):
    """The phase's exit status and output; the output also goes to the terminal as it comes."""
    kept = []
    with subprocess.Popen(["make", "--no-print-directory", name], cwd=ROOT, text=True,
                          errors="replace", stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.append(line)
    return process.returncode, "".join(kept)


def processor():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    fields = dict(re.findall(r"^(vendor_id|cpu family|model|model name)\s*: (.*)$", text, re.M))
    return (f"{fields.get('model name', platform.machine())} "
            f"(family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})")


def commit():
    git = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=10"],
                         capture_output=True, text=True, check=False)
    return git.stdout.strip() or "no repository"


def passed_before(tier):
    """Phases of the last run, in order up to the first that failed; none if the tree is another."""
    try:
        last = json.loads((ROOT / "build" / f"tier-{tier}.json").read_text())
    except (OSError, ValueError):
        return []
    if last["commit"] != commit() or "dirty" in last["commit"]:
        return []
    return last["phases"] if last["ok"] else last["phases"][:-1]


def clock(seconds):
    return f"{int(seconds) // 60:3} min {int(seconds) % 60:2} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--record", type=pathlib.Path, help="also write the record to this file")
    parser.add_argument("--resume", action="store_true", help="leave out what has passed")
    args = parser.parse_args()
    phases, status = passed_before(args.tier) if args.resume else [], 0
    for name in TIERS[args.tier][len(phases):]:
        print(f"==== make {args.tier}: {name}", flush=True)
        start = time.monotonic()
        status, text = run_phase(name)
        found = counts(text)
        phases.append({"phase": name, "seconds": round(time.monotonic() - start, 1),
                       "passed": found[0], "failed": found[1], "skipped": found[2]})
        if status != 0:
            break
    seconds = sum(phase["seconds"] for phase in phases)
    total = [sum(phase[key] for phase in phases) for key in ("passed", "failed", "skipped")]

    print(f"\nmake {args.tier}, {os.cpu_count()} cores, {processor()}")
    for phase in phases:
        ran = phase["passed"] + phase["failed"]
        print(f"  {phase['phase']:<14}{clock(phase['seconds'])}"
              + (f"  {ran} tests" if ran else ""))
    failed = f"; make {phases[-1]['phase']} failed" if status else ""
    print(f"  {'together':<14}{clock(seconds)}{failed}")
    record = {"tier": args.tier, "commit": commit(),
              "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
              "processor": processor(), "cores": os.cpu_count(), "ok": status == 0,
              "seconds": round(seconds, 1), "phases": phases}
    for path in filter(None, [ROOT / "build" / f"tier-{args.tier}.json", args.record]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
