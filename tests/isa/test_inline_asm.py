"""PTX lives in src/isa/cuda alone (ARCHITECTURE.md): nothing else contains inline assembly, but for
the emulator's switch of lanes."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("include", "src", "tools", "bench", "tests", "python", "cmake")
# Sources of every kind, templates of sources among them.
ENDINGS = (".c", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".in", ".inc", ".inl", ".def")
PLACE = pathlib.Path("src/isa/cuda")
SWITCH = pathlib.Path("src/isa/emu/block/fiber.cpp")

COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"', re.S)
STATEMENT = re.compile(
    r"\b(?:asm|__asm|__asm__)\b\s*(?:(?:volatile|__volatile__|__volatile|goto|inline)\b\s*)*[({]")


def statements(text):
    """Where inline assembly begins, with what its first string says."""
    quiet = COMMENT_OR_STRING.sub(
        lambda m: re.sub(r"[^\n]", " ", m[0]) if m[0][0] == "/" else m[0][0]
        + " " * (len(m[0]) - 2) + m[0][-1], text)
    for found in STATEMENT.finditer(quiet):
        first = re.match(r'\s*"((?:\\.|[^"\\])*)"', text[found.end():])
        yield text.count("\n", 0, found.start()) + 1, first[1] if first else None


def sources():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in ENDINGS and path.is_file():
                yield path.relative_to(ROOT)


def test_only_the_cuda_vocabulary_contains_assembly():
    found = 0
    for path in sources():
        for line, instructions in statements((ROOT / path).read_text(errors="replace")):
            inside = path.is_relative_to(PLACE)
            found += inside
            # An empty text holds no instruction: it keeps a compiler from moving a value.
            empty = path == pathlib.Path("bench/cpu/roofline.cpp") and instructions == ""
            allowed = inside or empty or path == SWITCH
            assert allowed, f"{path}:{line}: inline assembly outside of {PLACE}"
    assert found > 30, "the search finds too little of what there is"


@pytest.mark.parametrize("text", [
    'asm("mov");', 'asm volatile("mov");', '__asm__ __volatile__ ("mov");', "__asm { mov }",
    'x = 1; asm\n  volatile goto\n("mov");', 'f("a // b"); asm("mov");'])
def test_finds_assembly(text):
    assert len(list(statements(text))) == 1


@pytest.mark.parametrize("text", [
    "#include <asm/hwcap.h>", "// asm(\"mov\")", "/* asm volatile( */", "int asm_ = f(asmx(1));",
    'const char* t = "asm(1)";', 'R"x(asm("mov"))x"'])
def test_passes_over_what_is_none(text):
    assert not list(statements(text))
