"""Examples run, are short, and say what they show; their tables are what there is.

Those in C and C++ that use an installed library are built and run by tests/packaging, the course's
programs are tests of their own (examples/course/CMakeLists.txt).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(
    path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".c", ".cpp", ".hpp")
)
SCRIPTS = sorted((EXAMPLES / "python").glob("*.py"))
CLI = os.environ.get("QATTN_CLI")  # the course's programs lie beside it


def in_course(path):
    return path.parent.name == "course"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs(script):
    if script.stem == "transformers_cache":
        pytest.importorskip("transformers")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("\n") >= 2


def test_every_example_is_in_the_table():
    table = (EXAMPLES / "README.md").read_text()
    named = set(re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", table, re.M))
    there = {str(path.relative_to(EXAMPLES)) for path in PROGRAMS if not in_course(path)}
    assert named == there | {"course/README.md"}
    steps = re.findall(r"\((step\w+\.cpp)\)", (EXAMPLES / "course" / "README.md").read_text())
    assert steps == sorted(path.name for path in (EXAMPLES / "course").glob("step*.cpp"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_it_is_short_and_says_what_it_shows(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith(('"""', "//", "/*")), "a comment at its head"
    assert in_course(path) or len(lines) <= 80, len(lines)
    assert max(map(len, lines)) <= 100
    head = "\n".join(lines[:12])
    if not in_course(path):
        assert "Run it" in head or "Build it" in head or "pkg-config" in head, "how to run it"


@pytest.mark.skipif(not CLI, reason="QATTN_CLI is not set")
def test_the_table_of_the_course_is_what_its_programs_print():
    programs = sorted(Path(CLI).parent.glob("course_step*"))
    if not programs:
        pytest.skip("the course is not built")
    printed = [subprocess.check_output([program], text=True) for program in programs]
    rows = re.findall(r"^\| \d .*\n", (EXAMPLES / "course" / "README.md").read_text(), re.M)
    assert printed == rows
