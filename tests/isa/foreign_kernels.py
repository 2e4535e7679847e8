"""Small Triton kernels, and their PTX for sm_120a as Triton's compiler writes it without a GPU."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def scaled_product(a, b, sa, sb, c, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr,
                   form: tl.constexpr, packed: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """c[m][n] = a[m][k] b[n][k], of codes of `form`, `packed` in a byte, a scale for a `block`."""
    row, column = tl.arange(0, m), tl.arange(0, n)
    byte, group = tl.arange(0, k // packed), tl.arange(0, k // block)
    x = tl.load(a + row[:, None] * (k // packed) + byte[None, :])
    y = tl.load(b + column[None, :] * (k // packed) + byte[:, None])
    x_scale = tl.load(sa + row[:, None] * (k // block) + group[None, :])
    y_scale = tl.load(sb + column[:, None] * (k // block) + group[None, :])
    z = tl.dot_scaled(x, x_scale, form, y, y_scale, form)
    tl.store(c + row[:, None] * n + column[None, :], z)


@triton.jit
def product(a, b, c, depth, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr,
            across: tl.constexpr, sums: tl.constexpr):  # fmt: skip
    """c[m][n] = a[m][depth] b, where b is [n][depth], or [depth][n] if `across`."""
    row, column, step = tl.arange(0, m), tl.arange(0, n), tl.arange(0, k)
    z = tl.zeros([m, n], sums)
    for first in range(0, depth, k):
        at = first + step
        x = tl.load(a + row[:, None] * depth + at[None, :])
        if across:
            y = tl.load(b + at[:, None] * n + column[None, :])
        else:
            y = tl.load(b + at[:, None] + column[None, :] * depth)
        z = tl.dot(x, y, z, out_dtype=sums)
    tl.store(c + row[:, None] * n + column[None, :], z)


@triton.jit
def attention(q, k, v, o, scale, keys, rows: tl.constexpr, tile: tl.constexpr,
              width: tl.constexpr):  # fmt: skip
    """softmax2(scale q k') v over tiles of keys; P has v's format."""
    row, channel, key = tl.arange(0, rows), tl.arange(0, width), tl.arange(0, tile)
    queries = tl.load(q + row[:, None] * width + channel[None, :])
    top = tl.full([rows], -1e30, tl.float32)
    mass = tl.zeros([rows], tl.float32)
    out = tl.zeros([rows, width], tl.float32)
    for first in range(0, keys, tile):
        at = first + key
        s = tl.dot(queries, tl.load(k + at[None, :] * width + channel[:, None]))
        s = s.to(tl.float32) * scale
        larger = tl.maximum(top, tl.max(s, 1))
        kept, p = tl.exp2(top - larger), tl.exp2(s - larger[:, None])
        mass = mass * kept + tl.sum(p, 1)
        values = tl.load(v + at[:, None] * width + channel[None, :])
        out = tl.dot(p.to(values.dtype), values, out * kept[:, None])
        top = larger
    tl.store(o + row[:, None] * width + channel[None, :], out / mass[:, None])


def compile_kernel(kernel, types, constants, warps):
    """PTX and bytes of shared memory. `types` are those of the arguments that are no constants."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 120, 32), options=options)
    return made.asm["ptx"], made.metadata.shared
