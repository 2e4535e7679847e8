"""Every code block of README.md and docs/guide: run, and its output compared with the page's.

A page's Python blocks are one script, and so are its shell blocks, which run in a folder of their
own. A block of ```output right behind a block is what it prints: words must be the same, numbers
within a tenth. A comment <!-- setup: python ... --> holds Python lines that readers need not see,
<!-- setup: files ... --> Python that makes the files of the shell blocks. C and C++ blocks are
whole programs. A ```cmake block is part of the project that tests/packaging builds. ```text is no
code.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|^<!-- setup: (\w+)\n(.*?)^-->$", re.S | re.M)
TESTED = {"python", "sh", "files", "cpp", "c", "cmake", "output", "text", "mermaid"}
MARK = "=== end of block ==="
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path):
    """[(language, code, hidden)] of a page."""
    found = []
    for language, code, setup, hidden in BLOCK.findall(path.read_text()):
        found.append((setup or language, hidden or code, bool(setup)))
    return found


def expected(page, language):
    """(code, output or None) of each visible block of a language; hidden ones have None."""
    found = blocks(page)
    following = [*found[1:], ("", "", False)]
    return [
        (code, after[1] if after[0] == "output" and not hidden else None)
        for (kind, code, hidden), after in zip(found, following)
        if kind == language
    ]


def same(printed, said):
    """Are the words the same, and the numbers within a tenth?"""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", said).split():
        return False
    numbers = [[float(x) for x in NUMBER.findall(text)] for text in (printed, said)]
    return numbers[0] == pytest.approx(numbers[1], rel=0.1, abs=2e-3)


def check_outputs(printed, parts):
    sections = printed.split(MARK + "\n")
    for (code, said), section in zip(parts, sections):
        if said is not None:
            assert same(section, said), f"{code}prints\n{section}and not\n{said}"


def run(command, env=None, **options):
    """What a command prints; it may run in another folder than this."""
    env = dict(env or os.environ)
    if "PYTHONPATH" in env:
        env["PYTHONPATH"] = os.path.abspath(env["PYTHONPATH"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_slow(path):
    return any(language == "python" and "torch" in code for language, code, _ in blocks(path))


def pages_with(language, slow=lambda path: False):
    found = [p for p in PAGES if any(kind == language for kind, _, _ in blocks(p))]
    return [
        pytest.param(p, id=name_of(p), marks=[pytest.mark.slow] if slow(p) else [])
        for p in found
    ]


def test_pages_have_no_block_that_nobody_runs():
    for page in PAGES:
        for language, code, _ in blocks(page):
            assert language in TESTED, f"{name_of(page)}: nobody runs {language!r}:\n{code}"
        text = page.read_text()
        assert text.count("\n```") == 2 * sum(not hidden for *_, hidden in blocks(page))


@pytest.mark.parametrize("page", pages_with("python", is_slow))
def test_python(page, tmp_path):
    parts = expected(page, "python")
    script = "".join(f"{code}print({MARK!r}, flush=True)\n" for code, _ in parts)
    check_outputs(run([sys.executable, "-c", script], cwd=tmp_path), parts)


def static_command(words):
    """Checks a line that is too large to run here."""
    if words[0] == "make":
        run(["make", "-n", *words[1:]], cwd=ROOT)
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"\[([\w,]+)\]", words[2]):
            assert set(extra.split(",")) <= set(project["optional-dependencies"])
        assert re.match(r"\.(\[[\w,]+\])?$", words[2])
    elif words[0] == "cmake":  # tests/packaging runs these
        assert words[1] in ("-B", "--build", "--install")
    else:
        return False
    return True


@pytest.mark.parametrize("page", pages_with("sh"))
def test_shell(page, tmp_path):
    program = os.environ.get("QATTN_CLI") or pytest.fail("QATTN_CLI should name the program")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "qattn").symlink_to(program)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    for kind, code, hidden in blocks(page):
        if kind == "files" and hidden:
            run([sys.executable, "-c", code], cwd=tmp_path)
    parts = []
    for code, said in expected(page, "sh"):
        lines = [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]
        kept = [x for x in lines if not static_command(shlex.split(x, comments=True))]
        for line in kept:
            assert shlex.split(line)[0] in ("qattn", "export"), f"who tests {line!r}?"
        parts.append(("\n".join(kept) + "\n", said))
    script = "set -e\n" + "".join(f"{code}echo '{MARK}'\n" for code, _ in parts)
    printed = run(["sh", "-c", script], cwd=tmp_path, env=os.environ | {"PATH": path})
    check_outputs(printed, parts)


@pytest.mark.parametrize("language", ["cpp", "c"])
@pytest.mark.parametrize("page", pages_with("cpp"))
def test_programs(page, language, tmp_path):
    library = os.environ.get("QATTN_LIBRARY") or pytest.fail("QATTN_LIBRARY should name libqattn.a")
    compiler = ["g++", "-std=c++20"] if language == "cpp" else ["gcc", "-std=c11"]
    for number, (code, said) in enumerate(expected(page, language)):
        source = tmp_path / f"{number}.{language}"
        source.write_text(code)
        warnings = ["-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}"]
        run([*compiler, *warnings, "-c", source, "-o", f"{source}.o"])
        run(["g++", f"{source}.o", library, "-fopenmp", "-o", f"{source}.program"])
        printed = run([f"{source}.program"])
        assert said is None or same(printed, said), f"prints\n{printed}and not\n{said}"


@pytest.mark.parametrize("page", pages_with("cmake"))
def test_cmake(page):
    """The lines of a block are lines of the project that tests/packaging builds outside."""
    project = (ROOT / "tests/packaging/consumer/CMakeLists.txt").read_text()
    known = project.replace("${program}", "program").split()
    for code, _ in expected(page, "cmake"):
        assert set(code.split()) <= set(known), code


def test_expectations_can_fail():
    assert same("error 0.0131", "error 0.013") and same("1 2", "1  2\n")
    assert not same("error 0.02", "error 0.013") and not same("a 1", "b 1")
    assert not same("1 2", "1") and not same("nan", "0.013")


def test_pages_are_what_the_records_say():
    run([sys.executable, ROOT / "bench" / "bench.py", "render", "--check"])


@pytest.mark.slow
def test_plots_are_what_the_records_say():
    run([sys.executable, ROOT / "bench" / "bench.py", "plot", "--check"])


def test_the_simulation_s_table_has_its_rows_and_families():
    """Its numbers depend on the BLAS; tests/python/test_error_rule.py holds recipes to them."""
    sys.path.insert(0, str(ROOT / "tools" / "sim"))
    import recipe_sim

    lines = (ROOT / "docs" / "tables" / "recipe-errors.md").read_text().splitlines()
    cells = [[x.strip() for x in line.strip("|").split("|")] for line in lines if "|" in line]
    assert cells[0][1:] == recipe_sim.FAMILIES
    rows = [row[0] for row in cells[2:] if len(row) == len(cells[0])]
    assert rows == [f"{qk} / {pv}" for qk, pv in recipe_sim.ROWS]
