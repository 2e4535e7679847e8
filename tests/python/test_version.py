"""The version is one number in one place, CMakeLists.txt, and everything says it."""

import os
import re
import subprocess
from pathlib import Path

import pytest

import qattn

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.search(r"project\(qattn VERSION ([0-9.]+) ", (ROOT / "CMakeLists.txt").read_text())[1]


def test_the_package_says_it():
    assert qattn.__version__ == VERSION


@pytest.mark.skipif(not os.environ.get("QATTN_CLI"), reason="QATTN_CLI is not set")
def test_the_program_says_it():
    said = subprocess.check_output([os.environ["QATTN_CLI"], "--version"], text=True)
    assert said == VERSION + "\n"


def test_the_wheel_takes_it_from_there():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in pyproject
    pattern = re.search(r"regex = '(.*)'", pyproject)[1]
    assert re.search(pattern, (ROOT / "CMakeLists.txt").read_text())["value"] == VERSION


def test_nothing_else_says_it():
    """But pages, which tell history, and records of what was measured with which."""
    said = []
    for folder in ("cmake", "include", "src", "python", "tools", "examples", "tests", "."):
        paths = (ROOT / folder).glob("*" if folder == "." else "**/*")
        for path in paths:
            if path.suffix not in (".txt", ".cmake", ".in", ".toml", ".py", ".hpp", ".h", ".cpp",
                                   ".sh"):  # fmt: skip
                continue
            if re.search(rf"(?<![\d.]){re.escape(VERSION)}(?![\d.])", path.read_text()):
                said.append(str(path.relative_to(ROOT)))
    assert said == ["CMakeLists.txt"]


def test_the_changelog_has_it():
    heads = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert VERSION in heads
