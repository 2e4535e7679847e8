"""The README's examples, compiled and run; their printed output is compared with the README's."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(language):
    return re.search(rf"```{language}\n(.*?)```", README, re.S).group(1)


EXPECTED = [float(x) for x in block("output").split()]


def numbers(text):
    return [float(x) for x in re.findall(r"-?\d+\.?\d*", text)]


def test_cpp_quickstart(tmp_path):
    library = os.environ.get("QATTN_LIBRARY")
    if not library:
        pytest.fail("QATTN_LIBRARY should name libqattn.a")
    source = tmp_path / "quickstart.cpp"
    source.write_text(block("cpp"))
    program = tmp_path / "quickstart"
    subprocess.run(["g++", "-std=c++20", f"-I{ROOT / 'include'}", source, library, "-fopenmp",
                    "-o", program], check=True)
    run = subprocess.run([program], check=True, capture_output=True, text=True)
    assert numbers(run.stdout) == EXPECTED


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.slow
def test_transformers_example(tmp_path):
    """With a small model of random weights as `name` and a batch of tokens as `ids`."""
    prelude = (
        "import torch, transformers\n"
        f"name = {str(tmp_path)!r}\n"
        "config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2,\n"
        "    num_attention_heads=2, num_key_value_heads=1, head_dim=64, intermediate_size=64,\n"
        "    bos_token_id=None, eos_token_id=None, dtype='bfloat16')\n"
        "transformers.LlamaForCausalLM(config).save_pretrained(name)\n"
        "ids = torch.arange(20).reshape(2, 10)\n"
    )
    script = prelude + python_blocks()[2] + "print(text.shape[1], cache.get_seq_length())\n"
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert numbers(run.stdout) == [110, 109]


def test_python_quickstart():
    run = subprocess.run([sys.executable, "-c", block("python")], check=True, capture_output=True,
                         text=True)
    assert numbers(run.stdout) == pytest.approx(EXPECTED)


def test_kv_cache_example():
    first, second = python_blocks()[:2]
    run = subprocess.run([sys.executable, "-c", first + second], check=True, capture_output=True,
                         text=True)
    said = re.search(r"prints (\d+\.\d+) again", README).group(1)
    assert numbers(run.stdout)[-1] == pytest.approx(float(said))


def test_named_files_exist():
    for name in re.findall(r"`((?:docs/)?[A-Z]+\.md)`", README):
        assert (ROOT / name).is_file(), name


def test_performance_page_is_what_the_records_say():
    subprocess.run([sys.executable, ROOT / "bench" / "bench.py", "render", "--check"], check=True)


@pytest.mark.slow
def test_plots_are_what_the_records_say():
    subprocess.run([sys.executable, ROOT / "bench" / "bench.py", "plot", "--check"], check=True)
