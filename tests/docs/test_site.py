"""What `make docs` makes of pages and headers; the build itself is a phase of its own."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "site"))
import headers  # noqa: E402
import stage  # noqa: E402

HEADERS = ROOT / "include" / "qattn"


def test_every_function_of_the_c_header_is_in_the_page():
    text = (HEADERS / "qattn.h").read_text()
    named = re.findall(r"^QATTN_API[^(;]*?(\w+)\(", text, re.M)
    named += [f"{name}_init" for name in re.findall(r"^QATTN_STRUCT\((\w+)\)", text, re.M)]
    named += re.findall(r"^\} (\w+);", text, re.M)
    page = headers.c_page(HEADERS / "qattn.h")
    assert len(named) > 80
    for name in named:
        assert f"### `{name}`\n" in page, name


def test_every_declaration_of_the_cpp_headers_is_in_the_page():
    page = headers.cpp_page(HEADERS)
    public = {path.name for path in HEADERS.glob("*.hpp")}
    assert set(headers.HEADERS) == public - {"qattn.hpp"}
    for name in headers.HEADERS:
        text = (HEADERS / name).read_text()
        text = re.sub(r"^namespace detail \{.*?^\}", "", text, flags=re.S | re.M)
        kinds = r"^(?:struct|class|enum class|concept) (?:\[\[\w+\]\] )?(\w+)[^;\n]*\{"
        named = re.findall(kinds, text, re.M)
        for thing in named:
            assert f"### `{thing}`\n" in page, f"{name}: {thing}"
    for name in ("attention", "plan", "run", "quantize", "decode", "recipe_named"):
        assert f"### `{name}`\n" in page, name


def test_fences_are_closed_and_nothing_private_is_shown():
    for page in (headers.cpp_page(HEADERS), headers.c_page(HEADERS / "qattn.h")):
        assert page.count("```") % 2 == 0
        assert " private:" not in page and "namespace detail" not in page


def test_a_header_by_hand(tmp_path):
    header = tmp_path / "x.h"
    header.write_text(
        "/* The x of it.\n * Twice <b> and a_b. */\n#ifndef X\n#define X\n\n"
        "/* Adds.\n *   one + one */\nQATTN_API int add(int a,\n                  int b);\n"
        "enum { FIRST = 0, SECOND };\nstruct forward;\n#endif\n"
    )
    page = headers.c_page(header)
    assert "The x of it.\nTwice &lt;b> and a\\_b." in page
    assert "### `add`\n\nAdds.\n\n```cpp\n  one + one\n```\n" in page
    assert "\n```cpp\nQATTN_API int add(int a," in page
    assert "### `FIRST, ...`" in page and "forward" not in page


@pytest.mark.parametrize(
    "page, link, staged",
    [
        ("README.md", "[a](docs/NUMERICS.md#metrics)", "[a](NUMERICS.md#metrics)"),
        ("README.md", "![a](docs/plots/speed-and-error.svg)", "![a](plots/speed-and-error.svg)"),
        ("README.md", "![a](docs/images/fashion-dit.png)", "![a](images/fashion-dit.png)"),
        ("README.md", "[licence](LICENSE)", "licence"),
        ("docs/guide/torch.md", "[a](../../README.md)", "[a](../index.md)"),
        ("docs/ROADMAP.md", "[a](../CHANGELOG.md)", "[a](CHANGELOG.md)"),
        ("docs/ROADMAP.md", "[a](https://x.y/z.md)", "[a](https://x.y/z.md)"),
        ("docs/ROADMAP.md", "```\n[a](../CHANGELOG.md)\n```", "```\n[a](../CHANGELOG.md)\n```"),
    ],
)
def test_links_follow_their_pages(page, link, staged):
    files = [*stage.check_pages.pages(ROOT), *stage.pictures()]
    places = {path: stage.place_of(path) for path in files}
    assert stage.moved_links(f"x\n{link}\ny", ROOT / page, places) == f"x\n{staged}\ny"


def test_numbers_in_tables_stay_on_a_line():
    row = stage.unbroken("| a | 1.2e-03 | 5.4 % | a word | 1.32x |\n1.2e-03")
    assert row.count('<span class="n">') == 3 and row.endswith("\n1.2e-03")


def test_every_page_is_in_the_navigation_or_behind_a_list():
    text = (ROOT / "mkdocs.yml").read_text()
    for path in stage.check_pages.pages(ROOT):
        place = stage.place_of(path)
        listed = place.parts[0] in ("experiments", "examples") and path.name != "README.md"
        assert listed or f": {place}\n" in text, place


def test_every_image_is_small_and_shown():
    """docs/plots is held by tests/bench, which knows what is drawn there."""
    text = "".join(path.read_text() for path in stage.check_pages.pages(ROOT))
    images = sorted((ROOT / "docs" / "images").iterdir())
    assert images and {*images} <= {*stage.pictures()}
    for path in images:
        assert f"images/{path.name})" in text, path
        assert path.stat().st_size < 150_000, path


def test_pictures_are_staged(tmp_path):
    stage.stage(tmp_path / "site")
    for path in stage.pictures():
        assert (tmp_path / "site" / stage.place_of(path)).read_bytes() == path.read_bytes()
