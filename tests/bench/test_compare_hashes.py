"""tools/compare_hashes.py: which calls of two builds' tests differ."""

import pathlib
import subprocess
import sys

import pytest

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "compare_hashes.py"
sys.path.insert(0, str(TOOL.parent))

import compare_hashes

OLD = "Cover/X.Run/a 0 00ff\nCover/X.Run/a 1 0001\nCover/X.Run/b 0 0002\n"


def test_calls_are_told_apart():
    new = OLD.replace("0001", "0003").replace("Run/b", "Run/c")
    differ, equal, alone = compare_hashes.compare(
        compare_hashes.hashes_of(OLD), compare_hashes.hashes_of(new)
    )
    assert differ == [("Cover/X.Run/a", 1)]
    assert (equal, alone) == (1, 2)


def test_a_file_that_contradicts_itself_is_refused():
    assert compare_hashes.hashes_of(OLD + OLD) == compare_hashes.hashes_of(OLD)
    with pytest.raises(ValueError, match="Run/b, call 0: 0009 and 0002 in one file"):
        compare_hashes.hashes_of(OLD + "Cover/X.Run/b 0 0009\n")


@pytest.mark.parametrize(
    ("new", "code"), [(OLD, 0), (OLD.replace("0002", "0004"), 1), (OLD.replace("X", "Y"), 1)]
)
def test_the_exit_status_says_whether_all_are_equal(tmp_path, new, code):
    files = [tmp_path / "old.txt", tmp_path / "new.txt"]
    for file, text in zip(files, (OLD, new), strict=True):
        file.write_text(text)
    done = subprocess.run([sys.executable, TOOL, *files], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stdout.endswith("in one file only\n")
