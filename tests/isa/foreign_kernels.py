"""Small kernels of Triton, and of Gluon where layouts matter, and a program that gives their PTX.

It is what Triton's compiler writes for sm_120a, without a GPU. The program reads a request a line,
the arguments of compile_kernel() in JSON, and answers each with a line. It is a process of its own,
so that what Triton loads stays out of the tests' process.
"""

import json
import os
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


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
            across: tl.constexpr, whole: tl.constexpr):  # fmt: skip
    """c[m][n] = a[m][depth] b, where b is [n][depth], or [depth][n] if `across`."""
    row, column, step = tl.arange(0, m), tl.arange(0, n), tl.arange(0, k)
    sums: tl.constexpr = tl.int32 if whole else tl.float32
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


@gluon.jit
def bytes_across(a, b, c, m: gl.constexpr, n: gl.constexpr, k: gl.constexpr):
    """c[m][n] = a[m][k] b[k][n] of FP8. From this layout of shared memory Triton loads b by the
    transposing load of bytes."""
    rows: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    down: gl.constexpr = gl.SliceLayout(1, rows)
    along: gl.constexpr = gl.SliceLayout(0, rows)
    x = gl.load(a + gl.arange(0, m, down)[:, None] * k + gl.arange(0, k, along)[None, :])
    y = gl.load(b + gl.arange(0, k, down)[:, None] * n + gl.arange(0, n, along)[None, :])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 4, [1, 0])
    x_shared = gl.allocate_shared_memory(x.dtype, [m, k], swizzled, x)
    y_shared = gl.allocate_shared_memory(y.dtype, [k, n], swizzled, y)
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    z = mma_v2(
        x_shared.load(gl.DotOperandLayout(0, sums, 4)),
        y_shared.load(gl.DotOperandLayout(1, sums, 4)),
        gl.zeros([m, n], gl.float32, sums),
    )
    row = gl.arange(0, m, gl.SliceLayout(1, sums))
    column = gl.arange(0, n, gl.SliceLayout(0, sums))
    gl.store(c + row[:, None] * n + column[None, :], z)


def compile_kernel(kernel, types, constants, warps):
    """PTX and bytes of shared memory. `types` are those of the arguments that are no constants."""
    names = kernel.arg_names
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = language(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 120, 32), options=options)
    return {"ptx": made.asm["ptx"], "shared": made.metadata.shared}


def answer(request):
    try:
        return compile_kernel(globals()[request.pop("kernel")], **request)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
    os._exit(0)  # without Triton's report of what it did not free
