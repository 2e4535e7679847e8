// The steps of a GPU attention call as C functions: for bench/bench.py, which times them beside
// torch in one process, and for tools/model, which counts what they do in the emulator. Not part of
// the library.
#pragma once

#include <cstdint>

struct BenchHandle;  ///< opaque

extern "C" {

struct BenchShape {
  std::int64_t batch, heads_q, heads_kv, tokens_q, tokens_k, d, dv;
  std::int32_t causal, f16;
};

/// Static scales for "+static": float32, (B, Hq) of Q, (B, Hkv) of K and V; and (B, Hkv, D): what
/// is subtracted from K.
struct BenchStatic {
  void *q_scale, *k_scale, *v_scale, *k_mean;
};

/// Why the last call failed.
const char* bench_error();
/// Q, K, V, out: dense (B, S, H, D) in 16 bits. Behind the recipe's name may stand, instead of the
/// plan's choice, "+q", "+beside" or "+no_q": step 0 leaves Q's codes to the attention kernel, all
/// codes to one beside it, or none; "+splits=N", "+pack=N": so many blocks share the keys, so many
/// heads a tile; "+consumers=N": of Hopper's kernel; "+shared_p=1", "+shared_p=0": P in shared
/// memory or not; "+last_splits=N": so many blocks share the keys of works behind the last full
/// turn, of 1 each has its own; "+no_smooth_k": K keeps its mean; "+smooth_q": blocks of Q lose
/// theirs; "+static": the scales of bench_static(); "+static_mean": its mean of K, too. Null on
/// failure: no kernel takes it, or not so.
BenchHandle* bench_create(const char* recipe, const BenchShape* s, void* q, void* k, void* v,
                          void* out);
/// What calls of bench_create() behind this one take. The tensors stay until the handle goes.
void bench_static(const BenchStatic* scales);
const char* bench_kernel(const BenchHandle* h);
/// The plan's text.
const char* bench_plan(const BenchHandle* h);
/// Bytes of device memory that bench_run() needs, at a multiple of 64.
std::int64_t bench_workspace(const BenchHandle* h);
/// Is there a step of quantisation?
int bench_quantises(const BenchHandle* h);
/// Bytes of K and V as the attention step reads them, each once and without scales.
std::int64_t bench_kv_bytes(const BenchHandle* h);
/// Of Q likewise.
std::int64_t bench_q_bytes(const BenchHandle* h);
/// step 0: quantise and attend, 1: quantise, 2: attend. 0 on success.
int bench_run(BenchHandle* h, int step, void* workspace, void* stream);
void bench_destroy(BenchHandle* h);
}
