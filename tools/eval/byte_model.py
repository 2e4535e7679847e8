"""A small causal language model of bytes: its text, its training. Needs torch and nothing else.

Weights and config.json are what transformers.LlamaForCausalLM.from_pretrained() reads, so that the
evaluation runs the product's own cache class; test_kv_language_model.py holds the two models'
logits against each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import weights
from torch import nn
from torch.nn import functional

#: what a folder of text is searched for
SUFFIXES = (".py", ".txt", ".rst", ".md")
_SKIPPED = {"site-packages", "dist-packages", "__pycache__"}
_SEPARATOR = b"\0"  # between files
_HELD_OUT = 20  # one file in so many


# ---- Text ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Text:
    """train and held_out: bytes of files, a zero byte between them; facts: what they are."""

    train: bytes
    held_out: bytes
    facts: dict


def collect(roots: list[Path] | None = None, most_train: int = 0, most_held_out: int = 0) -> Text:
    """All .py, .txt, .rst and .md files below `roots` (default: Python's standard library),
    installed packages left out. One file in twenty is held out, by the SHA-256 of its path below
    its root, so that a file stays on its side whatever else is there. A side's files come in the
    order of those hashes, which mixes what they are about. most_*: bytes after which a side is cut,
    0: none. Raises ValueError where a side is empty."""
    named = roots is not None
    found: dict[bool, list[tuple[bytes, Path]]] = {False: [], True: []}
    for root in roots or [Path(sysconfig.get_path("stdlib"))]:
        for path in root.rglob("*"):
            name = path.relative_to(root).as_posix()
            if path.suffix not in SUFFIXES or _SKIPPED & set(name.split("/")):
                continue
            if path.is_file():
                digest = hashlib.sha256(name.encode()).digest()
                found[digest[0] % _HELD_OUT == 0].append((digest, path))
    (train, train_files), (held_out, held_out_files) = (
        _joined(sorted(found[side]), most)
        for side, most in ((False, most_train), (True, most_held_out))
    )
    if not train or not held_out:
        raise ValueError(f"text: {len(train)} bytes to train on, {len(held_out)} held out")
    facts = {
        "source": [p.name for p in roots or []]
        if named
        else f"standard library of {platform.python_implementation()} {platform.python_version()}",
        "train_files": train_files,
        "held_out_files": held_out_files,
        "train_bytes": len(train),
        "train_sha256": hashlib.sha256(train).hexdigest(),
        "held_out_bytes": len(held_out),
        "held_out_sha256": hashlib.sha256(held_out).hexdigest(),
    }
    return Text(train, held_out, facts)


def _joined(files: list[tuple[bytes, Path]], most: int) -> tuple[bytes, int]:
    """The files' bytes up to `most` (0: all), and how many files they come from."""
    parts, size = [], 0
    for _, path in files:
        if most and size > most:  # with the separator behind the last
            break
        parts.append(path.read_bytes())
        size += len(parts[-1]) + len(_SEPARATOR)
    return _SEPARATOR.join(parts)[: most or None], len(parts)


# ---- Model ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of the model and of its training; `context` and `batch` count bytes and sequences."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    batch: int
    steps: int
    rate: float
    most_train: int = 0
    most_held_out: int = 1 << 19

    def config(self) -> dict:
        """config.json of transformers' LlamaForCausalLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": "float16",
        }


PRESETS = {
    # 7.0 million parameters: 14 MB in float16.
    "small": Shape(layers=4, hidden=512, heads=4, kv_heads=2, head_dim=128, intermediate=608,
                   context=4096, batch=16, steps=3000, rate=1e-3),
    # Seconds on a CPU: for tests.
    "tiny": Shape(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=64, intermediate=128,
                  context=512, batch=4, steps=40, rate=3e-3, most_train=1 << 18,
                  most_held_out=1 << 13),
}  # fmt: skip


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x: (B, H, S, D) with rotary position embedding, as Llama has it."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    return x * cos.to(x.dtype) + torch.cat((-x[..., half:], x[..., :half]), -1) * sin.to(x.dtype)


#: (query, key, value, is_causal=, enable_gqa=) as torch's scaled_dot_product_attention has them
Attention = Callable[..., torch.Tensor]


class Block(nn.Module):
    """One layer. Modules have Llama's names, which become the names of the weights."""

    def __init__(self, shape: Shape, attention: Attention | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.attention = attention or functional.scaled_dot_product_attention
        wide, narrow = (n * shape.head_dim for n in (shape.heads, shape.kv_heads))
        self.input_layernorm = nn.RMSNorm(shape.hidden, 1e-5)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, 1e-5)
        self.self_attn = nn.ModuleDict({
            "q_proj": nn.Linear(shape.hidden, wide, bias=False),
            "k_proj": nn.Linear(shape.hidden, narrow, bias=False),
            "v_proj": nn.Linear(shape.hidden, narrow, bias=False),
            "o_proj": nn.Linear(wide, shape.hidden, bias=False),
        })  # fmt: skip
        self.mlp = nn.ModuleDict({
            "gate_proj": nn.Linear(shape.hidden, shape.intermediate, bias=False),
            "up_proj": nn.Linear(shape.hidden, shape.intermediate, bias=False),
            "down_proj": nn.Linear(shape.intermediate, shape.hidden, bias=False),
        })  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.input_layernorm(x)
        q, k, v = (
            self.self_attn[name](normal).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        seen = self.attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.self_attn["o_proj"](seen.transpose(1, 2).flatten(2))
        normal = self.post_attention_layernorm(x)
        gate = functional.silu(self.mlp["gate_proj"](normal))
        return x + self.mlp["down_proj"](gate * self.mlp["up_proj"](normal))


class ByteModel(nn.Module):
    """Llama over bytes: (B, S) int64 to logits (B, S, 256); embedding and output share weights.
    attention: instead of torch's own."""

    def __init__(self, shape: Shape, attention: Attention | None = None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(256, shape.hidden)
        self.layers = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, 1e-5)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * shape.layers) if deep else 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.embed_tokens.weight)


def _named(model: ByteModel) -> dict[str, torch.Tensor]:
    """Weights under the names that Llama gives them."""
    return {f"model.{name}": x for name, x in model.named_parameters()}


def save_weights(model: ByteModel, path: Path) -> str:
    """Writes float16 weights under Llama's names to a .safetensors file; returns its SHA-256."""
    return weights.save(_named(model), path)


def load_weights(model: ByteModel, path: Path) -> None:
    """The other way. Raises ValueError for a file that holds other weights."""
    weights.load(_named(model), path)


# ---- Training ------------------------------------------------------------------------------------


def loss_of(model: ByteModel, ids: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats a byte; ids: (B, S + 1)."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits = model(ids[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: ByteModel, text: torch.Tensor, shape: Shape) -> float:
    """Nats a byte over up to 64 evenly spaced sequences of the held-out text."""
    length = shape.context + 1
    count = min(64, len(text) // length)
    starts = [i * (len(text) - length) // max(1, count - 1) for i in range(count)]
    parts = [
        loss_of(model, torch.stack([text[s : s + length] for s in starts[i : i + 8]]).long()).item()
        * len(starts[i : i + 8])
        for i in range(0, count, 8)
    ]
    return sum(parts) / count


def rate_at(step: int, shape: Shape) -> float:
    """Linear warm-up over a thirtieth of the steps, then a cosine down to a tenth."""
    warm = max(1, shape.steps // 30)
    if step < warm:
        return shape.rate * (step + 1) / warm
    part = (step - warm) / max(1, shape.steps - warm)
    return shape.rate * (0.55 + 0.45 * math.cos(math.pi * part))


def train(
    preset: str,
    out: Path,
    *,
    seed: int,
    steps: int | None,
    device: str,
    roots: list[Path] | None,
    commit: str,
    attention: Attention | None = None,
    start: Path | None = None,
    reports: int = 10,
) -> dict:
    """Trains a preset and writes config.json, held_out.bin, and at every report model.safetensors
    and training.json to `out`. Returns what training.json says. Raises ValueError for text that is
    shorter than the context. commit: of this program, for training.json. attention: of the model,
    instead of torch's. start: a file of weights to go on from."""
    shape = PRESETS[preset]
    if steps is not None:
        shape = dataclasses.replace(shape, steps=steps)
    text = collect(roots, shape.most_train, shape.most_held_out)
    print("text:", json.dumps(text.facts), flush=True)
    train_bytes, held_out = (
        torch.frombuffer(bytearray(x), dtype=torch.uint8).to(device)
        for x in (text.train, text.held_out)
    )
    if min(len(train_bytes), len(held_out)) <= shape.context + 1:
        raise ValueError(f"text: too short for a context of {shape.context} bytes")
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")
    (out / "held_out.bin").write_bytes(text.held_out)

    torch.manual_seed(seed)
    model = ByteModel(shape, attention).to(device)
    if start is not None:
        load_weights(model, start)
    matrices = [x for x in model.parameters() if x.dim() == 2]
    vectors = [x for x in model.parameters() if x.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    choose = torch.Generator().manual_seed(seed)
    span = torch.arange(shape.context + 1, device=device)
    facts = {
        "preset": preset,
        "shape": dataclasses.asdict(shape),
        "parameters": sum(x.numel() for x in model.parameters()),
        "seed": seed,
        "commit": commit,
        "text": text.facts,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "curve": [],  # (step, nats a byte in training, nats a byte held out)
    }
    begun, recent = time.monotonic(), []
    report = max(1, shape.steps // reports)
    for step in range(shape.steps):
        starts = torch.randint(len(train_bytes) - shape.context, (shape.batch,), generator=choose)
        ids = train_bytes[starts.to(device)[:, None] + span].long()
        loss = loss_of(model, ids)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate_at(step, shape)
        optimiser.step()
        recent.append(loss.detach())
        if (step + 1) % report == 0 or step + 1 == shape.steps:
            now = held_out_loss(model, held_out, shape)
            facts["curve"].append((step + 1, torch.stack(recent).mean().item(), now))
            facts["seconds"] = round(time.monotonic() - begun, 1)
            facts["weights_sha256"] = save_weights(model, out / "model.safetensors")
            (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
            print("step %d: training %.4f, held out %.4f nats a byte" % facts["curve"][-1],
                  f"({facts['seconds']} s)", flush=True)  # fmt: skip
            recent.clear()
    return facts
