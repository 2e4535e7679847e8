"""tools/check_pages.py on the pages, and on samples of each fault."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_pages  # noqa: E402

GOOD = """# A page

Words, `code 1 2 3 4` and a [link](docs/guide/b.md#one-two-three), about 16-bit numbers on an H100.

| a | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |
|---|---|---|---|---|---|---|---|---|
| LONG |

```text
1 2 3 4 5 6 7 8 9 [no link](nowhere.md)
```
""".replace("LONG", "a row as long as it has to be " * 4)


def made(folder, **pages):
    """A repository with those pages; GOOD where nothing is said."""
    texts = {"README.md": GOOD, "docs/guide/b.md": "# b\n\n## One, `two` three\n"} | pages
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def told(capsys, folder):
    status = check_pages.main([str(folder)])
    return status, capsys.readouterr().out


def test_the_pages(capsys):
    status, text = told(capsys, ROOT)
    assert status == 0, text


def test_a_good_page(capsys, tmp_path):
    assert told(capsys, made(tmp_path)) == (0, "")


FAULTS = {
    "line\n" * 151: "151 lines, at most 150",
    "Two of 30 words: 3.5% and 1e-3.\n": "of 7 words are numbers",
    "word " * 21 + "\n": "line 1: 105 columns, at most 100",
    "Since a5becc6 it is so.\n": "a5becc6 looks like a commit's hash",
    "`a5becc6d` as code.\n": "a5becc6d looks like a commit's hash",
    "A [link](docs/guide/c.md).\n": "docs/guide/c.md: there is no such file",
    "A ![picture](docs/c.svg).\n": "docs/c.svg: there is no such file",
    "A [link](docs/guide/b.md#two).\n": "b.md#two: the page has no such heading",
    "A [link](#nowhere).\n": "#nowhere: the page has no such heading",
    "A [link](../README.md).\n": "../README.md: there is no such file",
    "See `docs/gone.md`.\n": "`docs/gone.md`: there is no such page",
}


@pytest.mark.parametrize("text", FAULTS, ids=range(len(FAULTS)))
def test_a_fault_is_found(capsys, tmp_path, text):
    status, said = told(capsys, made(tmp_path / "repository", **{"README.md": text}))
    assert status == 1 and FAULTS[text] in said


def test_a_page_needs_a_limit(capsys, tmp_path):
    status, said = told(capsys, made(tmp_path, **{"docs/NEW.md": "# New\n"}))
    assert status == 1 and "docs/NEW.md: no limit of lines is known" in said


def test_generated_tables_are_held_to_their_links(capsys, tmp_path):
    table = {"docs/tables/x.md": "1 2 3 a5becc6\n" * 300}
    assert told(capsys, made(tmp_path, **table))[0] == 0
    table = {"docs/tables/x.md": "[x](y.md)\n"}
    assert told(capsys, made(tmp_path, **table))[0] == 1


def test_what_counts_as_a_number():
    assert check_pages.words("`1` 2 3.5% 4K 1e-3 8-bit H100 sm_90 x2 (7) 2.")[1] == 6
    assert check_pages.words("a\n\n| 1 | 2 |\n\n```\n3 4\n```\n<!-- 5 -->\n[6 b](7.md)") == (3, 1)
    assert check_pages.words("1. one\n2. two 3\n") == (3, 1)
