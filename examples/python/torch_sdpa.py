"""torch's scaled_dot_product_attention in a model replaced by qattn's: the same arguments, and
torch.compile takes it.

Run it with qattn and torch installed: python torch_sdpa.py
"""

import torch
import torch.nn.functional as F

import qattn.torch


class Block(torch.nn.Module):
    """A transformer block whose attention is a function, so that it can be exchanged."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attend = heads, F.scaled_dot_product_attention
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
        )  # fmt: skip
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        o = self.attend(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(256, 4) for _ in range(4))).eval()
    x = torch.randn(2, 300, 256)
    with torch.no_grad():
        want = model(x)
        for recipe in ("f32", "int8_full"):
            for block in model:
                # Bound by name: what the model calls stays a plain function of torch's arguments.
                block.attend = lambda q, k, v, is_causal, r=recipe: qattn.torch.sdpa(
                    q, k, v, is_causal=is_causal, recipe=r
                )
            got = model(x)
            error = (got - want).norm() / want.norm()
            print(f"recipe {recipe}: the model's output changes by {error:.1e}")
            assert error < {"f32": 1e-5, "int8_full": 1e-2}[recipe]


if __name__ == "__main__":
    main()
