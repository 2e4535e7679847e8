"""qattn on numpy arrays: one call, its error, what other recipes would do, and a KV cache.

Run it with qattn installed (pip install qattn): python numpy_attention.py
"""

import numpy as np

import qattn

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 512, 8, 64), dtype=np.float32)  # (batch, tokens, heads, head_dim)
k, v = (rng.standard_normal((1, 512, 2, 64), dtype=np.float32) for _ in range(2))

# Integers in both products; out has q's shape and dtype. Grouped-query attention is in the shapes.
out = qattn.attention(q, k, v, causal=True, recipe="int8_full")
exact = qattn.reference_attention(q, k, v, causal=True)
print(f"int8_full on {qattn.cpu_isa()}: error {np.abs(out - exact).max():.3f} at most")

# NRMSE of every recipe on your own data: the error decides which one will do.
for recipe in qattn.recipes():
    o = qattn.attention(q, k, v, causal=True, recipe=recipe)
    print(f"  {recipe.name:10} {np.linalg.norm(o - exact) / np.linalg.norm(exact):.1e}")

# A wrong call is refused by name, value and rule, and writes nothing.
try:
    qattn.attention(q, k, v, mask=np.ones((512, 512), np.uint8))
except qattn.InvalidArgument as error:
    print("refused:", error)

# Decode: keys and values in 4 bits but for the newest and first tokens; q is the newest token.
cache = qattn.KvCache(kv_heads=2, head_dim=64, tiers=[4], window=64)
sequence = cache.add_sequence()
cache.append(0, sequence, k, v)
step = cache.decode(q[:, -1:], 0, sequence)
off = np.linalg.norm(step - exact[:, -1:]) / np.linalg.norm(exact[:, -1:])
bits = cache.usage(sequence).average_bits
print(f"decode over 4 bits: NRMSE {off:.2f}, {bits:.1f} bits an element with its window")
