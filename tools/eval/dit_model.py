"""A small diffusion transformer of Fashion-MNIST: its data, its network, its training, and the
classifier whose features judge images. Needs torch and nothing else.

The network is a DiT: tokens are patches of images of 32 x 32 pixels (28 x 28 and a frame), blocks
are modulated by time and class, heads have 64 channels. It learns the velocity of a straight flow:
x_t = (1 - t) * image + t * noise, and v = noise - image.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import struct
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

SIDE = 32  # pixels a side of what the network sees
CLASSES = 10
#: (query, key, value) of (B, H, S, D), as torch's scaled_dot_product_attention takes them
Attention = Callable[..., torch.Tensor]


# ---- Data ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Images:
    """pixels: (N, 1, 32, 32) float32 from -1 (background) to 1; labels: (N) int64."""

    pixels: torch.Tensor
    labels: torch.Tensor
    facts: dict

    def to(self, device: str) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device), self.facts)


def read_images(folder: Path, part: str, most: int | None = None) -> Images:
    """The first `most` images of a part, "train" or "t10k", of the data set Fashion-MNIST.

    folder: holds its files as Debian's package dataset-fashion-mnist brings them
    (usr/share/datasets/fashion-mnist). Raises OSError, and ValueError for other files.
    """
    arrays, digest = [], hashlib.sha256()
    for kind, magic in (("images-idx3", 0x803), ("labels-idx1", 0x801)):
        path = folder / f"{part}-{kind}-ubyte.gz"
        data = gzip.decompress(path.read_bytes())
        digest.update(data)
        found, count = struct.unpack_from(">II", data)
        head = 16 if kind == "images-idx3" else 8
        each = 28 * 28 if kind == "images-idx3" else 1
        if found != magic or len(data) != head + count * each:
            raise ValueError(f"{path}: is no file of Fashion-MNIST")
        count = min(count, most or count)
        whole = torch.frombuffer(bytearray(data[head : head + count * each]), dtype=torch.uint8)
        arrays.append(whole.view(count, each))
    pixels = arrays[0].view(-1, 1, 28, 28).float() / 127.5 - 1
    frame = (SIDE - 28) // 2
    facts = {"part": part, "images": len(pixels), "sha256": digest.hexdigest()}
    return Images(
        functional.pad(pixels, (frame,) * 4, value=-1.0), arrays[1].view(-1).long(), facts
    )


# ---- Network -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    patch: int  #: pixels a side of a token
    hidden: int
    layers: int
    head_dim: int = 64

    @property
    def tokens(self) -> int:
        return (SIDE // self.patch) ** 2

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim


PRESETS = {
    "small": Shape(patch=1, hidden=192, layers=6),  # 1024 tokens, 3 heads, 4.1 million parameters
    "tiny": Shape(patch=8, hidden=64, layers=2),  # for tests: 16 tokens, a head
}


def waves(values: torch.Tensor, channels: int, longest: float = 1e4) -> torch.Tensor:
    """(N, channels) sines and cosines of (N) numbers."""
    half = channels // 2
    frequency = longest ** (-torch.arange(half, device=values.device) / half)
    angle = values[:, None].float() * frequency
    return torch.cat([angle.cos(), angle.sin()], -1)


class Block(nn.Module):
    """One layer, in three parts, of which the middle one is attention and can be replaced."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.attention: Attention | None = None
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden)
        self.modulation = nn.Linear(shape.hidden, 6 * shape.hidden)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def before(self, x: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Q, K and V, and how the block is modulated."""
        mods = self.modulation(functional.silu(c))[:, None]
        shift, scale = mods.chunk(6, -1)[:2]
        qkv = self.qkv(normalised(x) * (1 + scale) + shift)
        q, k, v = qkv.unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        return q, k, v, mods

    def after(self, x: torch.Tensor, seen: torch.Tensor, mods: torch.Tensor) -> torch.Tensor:
        gate, shift, scale, gate_mlp = mods.chunk(6, -1)[2:]
        x = x + gate * self.proj(seen.transpose(1, 2).flatten(2))
        inner = self.up(normalised(x) * (1 + scale) + shift)
        return x + gate_mlp * self.down(functional.gelu(inner, approximate="tanh"))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        q, k, v, mods = self.before(x, c)
        attention = self.attention or functional.scaled_dot_product_attention
        return self.after(x, attention(q, k, v), mods)


def normalised(x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:])


class DiT(nn.Module):
    """(B, 1, 32, 32) noisy images, (B) times, 0 (image) to 1 (noise), (B) labels to velocity."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, hidden = shape, shape.hidden
        self.inlet = nn.Linear(shape.patch**2, hidden)
        self.time_in = nn.Linear(hidden, hidden)
        self.time_out = nn.Linear(hidden, hidden)
        self.label = nn.Embedding(CLASSES, hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.modulation = nn.Linear(hidden, 2 * hidden)
        self.outlet = nn.Linear(hidden, shape.patch**2)
        for layer in (self.modulation, self.outlet):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        place = torch.arange(SIDE // shape.patch)
        row, column = (waves(x.flatten(), hidden // 2, 100.0)
                       for x in torch.meshgrid(place, place, indexing="ij"))  # fmt: skip
        self.register_buffer("position", torch.cat([row, column], -1), persistent=False)

    def attend_with(self, attention: Attention | None) -> None:
        """What the layers call; None: torch's own function, looked up at each call."""
        for block in self.blocks:
            block.attention = attention

    def enter(
        self, x: torch.Tensor, t: torch.Tensor, label: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        patch, each = self.shape.patch, SIDE // self.shape.patch
        x = x.reshape(-1, each, patch, each, patch).transpose(2, 3).reshape(len(x), each**2, -1)
        time_in = self.time_in(waves(1000 * t, self.shape.hidden))
        c = self.time_out(functional.silu(time_in)) + self.label(label)
        return self.inlet(x) + self.position, c

    def leave(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        patch, each = self.shape.patch, SIDE // self.shape.patch
        shift, scale = self.modulation(functional.silu(c))[:, None].chunk(2, -1)
        x = self.outlet(normalised(x) * (1 + scale) + shift)
        x = x.reshape(-1, each, each, patch, patch).transpose(2, 3)
        return x.reshape(-1, 1, SIDE, SIDE).float()

    def forward(self, x: torch.Tensor, t: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x, c = self.enter(x, t, label)
        for block in self.blocks:
            x = block(x, c)
        return self.leave(x, c)


def make(shape: Shape, device: str, path: Path | None = None) -> DiT:
    """A network, with the weights of a file."""
    import weights

    model = DiT(shape).to(device)
    if path is not None:
        weights.load(dict(model.named_parameters()), path)
    return model


def compile_parts(model: DiT, *example: torch.Tensor) -> bool:
    """Compiles what lies between the attentions, which stay calls of any function. False, and the
    reason printed, where torch cannot here: then all stays as it was. example: (x, t, label)."""
    begun = time.monotonic()
    owners = [(model, "enter"), (model, "leave")]
    owners += [(block, part) for block in model.blocks for part in ("before", "after")]
    try:
        for owner, part in owners:
            setattr(owner, part, torch.compile(getattr(owner, part), dynamic=False))
        with autocast(example[0].device.type):
            made = model(*example)
        if torch.is_grad_enabled():
            made.square().sum().backward()
            model.zero_grad()
    except Exception as error:  # of the compiler, of many kinds
        for owner, part in owners:
            vars(owner).pop(part, None)
        print(f"torch.compile: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return False
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    return True


def autocast(device: str, enabled: bool = True) -> torch.autocast:
    """bfloat16 on GPUs; CPUs stay in float32."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=enabled and kind == "cuda")


def flow_loss(
    model: DiT, images: torch.Tensor, labels: torch.Tensor, t: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """Mean square of the velocity's error."""
    at = t[:, None, None, None]
    with autocast(images.device.type):
        velocity = model((1 - at) * images + at * noise, t, labels)
    return functional.mse_loss(velocity, noise - images)


@torch.no_grad()
def held_out_loss(model: DiT, images: Images, batch: int, seed: int = 12345) -> float:
    """flow_loss() over whole batches, of noise and times that a seed gives, the same each time."""
    device, total, count = images.pixels.device, 0.0, 0
    draw = torch.Generator().manual_seed(seed)
    for at in range(0, len(images.labels) - batch + 1, batch):
        pixels, labels = (x[at : at + batch] for x in (images.pixels, images.labels))
        t = torch.rand(batch, generator=draw).to(device)
        noise = torch.randn(pixels.shape, generator=draw).to(device)
        total, count = total + flow_loss(model, pixels, labels, t, noise), count + 1
    if not count:
        raise ValueError(f"images: {len(images.labels)} held out are less than a batch, {batch}")
    return float(total) / count


# ---- Training ------------------------------------------------------------------------------------


def rate_at(share: float, step: int) -> float:
    """Of the largest rate: a warm-up of 100 steps, constant, then down in a line from a half."""
    return min(1.0, (step + 1) / 100) * min(1.0, 2.02 - 2 * share)


@dataclasses.dataclass
class Training:
    """Trains `model` for a time, or so many steps, and keeps the mean of its weights."""

    model: DiT
    images: Images
    batch: int
    rate: float
    seed: int
    seconds: float
    steps: int | None = None
    keep: Callable[[], None] = lambda: None  # called at each report

    def __post_init__(self) -> None:
        self.weights = list(self.model.parameters())
        self.mean = [x.detach().clone() for x in self.weights]
        self.done, self.curve = 0, []

    def mean_weights(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        return dict(zip(names, self.mean))

    def run(self, reports: int = 20) -> None:
        device = self.images.pixels.device
        torch.manual_seed(self.seed)
        optimiser = torch.optim.AdamW(
            self.weights, betas=(0.9, 0.99), weight_decay=0.0, fused=device.type == "cuda"
        )
        begun, recent, share, reported = time.monotonic(), [], 0.0, 0
        while share < 1:
            which = torch.randint(len(self.images.labels), (self.batch,), device=device)
            t = torch.sigmoid(torch.randn(self.batch, device=device))
            pixels = self.images.pixels[which]
            noise = torch.randn_like(pixels)
            loss = flow_loss(self.model, pixels, self.images.labels[which], t, noise)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.weights, 1.0)
            for group in optimiser.param_groups:
                group["lr"] = self.rate * rate_at(share, self.done)
            optimiser.step()
            self.done += 1
            recent.append(loss.detach())
            with torch.no_grad():
                slow = max(1 - 0.999, 9 / (self.done + 9))
                torch._foreach_lerp_(self.mean, self.weights, slow)
            if self.done == 3 and self.steps is None:  # what is compiled is compiled now
                loss.item()
                begun = time.monotonic()
            if self.done % 50 == 0:
                loss.item()  # waits, so that the clock is the GPU's
            passed = time.monotonic() - begun
            share = passed / self.seconds if self.steps is None else self.done / self.steps
            if share >= (reported + 1) / reports or share >= 1:
                reported = int(share * reports)
                self.curve.append([self.done, float(torch.stack(recent).mean())])
                print(f"step {self.done}: {passed:.0f} s, loss {self.curve[-1][1]:.4f}", flush=True)
                recent.clear()
                self.keep()
        self.passed = time.monotonic() - begun


# ---- Features ------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Convolutions whose 128 last features Fréchet distances are of."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1, 32, 64, 128, 128]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, 1 if i == 0 else 2, 1)
            for i, (a, b) in enumerate(zip(widths, widths[1:]))
        )
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for width in widths[1:])
        self.inner = nn.Linear(128 * 16, 128)
        self.outer = nn.Linear(128, CLASSES)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms):
            x = functional.relu(norm(convolution(x)))
        return self.inner(x.flatten(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(functional.relu(self.features(x)))


def train_classifier(images: Images, steps: int, seed: int, batch: int = 256) -> Classifier:
    device = images.pixels.device
    torch.manual_seed(seed)
    model = Classifier().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    for step in range(steps):
        which = torch.randint(len(images.labels), (batch,), device=device)
        loss = functional.cross_entropy(model(images.pixels[which]), images.labels[which])
        optimiser.zero_grad()
        loss.backward()
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * (1 - step / steps)
        optimiser.step()
    return model


@torch.no_grad()
def accuracy(model: Classifier, images: Images) -> float:
    right = sum(
        int((model(x).argmax(-1) == y).sum())
        for x, y in zip(images.pixels.split(1000), images.labels.split(1000))
    )
    return right / len(images.labels)


@torch.no_grad()
def statistics(model: Classifier, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (128) and covariance (128, 128) of the features, float64 on the host."""
    device = next(model.parameters()).device
    found = torch.cat([model.features(x.to(device)).double() for x in pixels.split(1000)])
    return found.mean(0).cpu(), torch.cov(found.T).cpu()


def frechet(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Fréchet distance of two normal distributions, squared, as FID has it."""
    values, vectors = torch.linalg.eigh(a[1])
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ b[1] @ root).clamp(min=0).sqrt().sum()
    return float((a[0] - b[0]).square().sum() + a[1].trace() + b[1].trace() - 2 * mixed)
