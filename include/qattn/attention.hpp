// Scaled dot-product attention: plan once, run many times, or do both in one call.
//
// What is computed, in this order (docs/NUMERICS.md):
//   s = softmax_scale * q.k;  softcap;  + bias, + ALiBi;  masks;  sink;
//   O = sum p v / sum p,  LSE = log sum exp s  (natural logarithm).
// A row that sees no key gives O = 0 and LSE = -inf (with a sink: the sink's logit).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "qattn/recipe.hpp"
#include "qattn/score_function.hpp"
#include "qattn/status.hpp"
#include "qattn/tensor_view.hpp"

namespace qattn {

/// Order of the dimensions of q, k, v and out.
///   bshd  (B, S, H, D); packed variable length (T, H, D); paged K, V (pages, page_size, Hkv, D)
///   bhsd  (B, H, S, D); packed variable length (H, T, D); paged K, V (pages, Hkv, page_size, D)
enum class Layout : std::int32_t { bshd, bhsd };

/// A stream of the device (cudaStream_t, hipStream_t); ignored by nothing: CPU plans require null.
/// On CUDA null is the legacy default stream. Work is only enqueued: results are there when the
/// stream has reached this point.
using Stream = void*;

/// The tensors of one call, all on q's device. Required: q, k, v, out. Everything else is optional
/// (leave it default-constructed). Shapes are in elements; "f" means f32, f16 or bf16.
struct AttentionTensors {
  TensorView q;  ///< (B, Sq, Hq, D), f, or codes in the recipe's Q/K format with q_scale
  TensorView k;  ///< (B, Sk, Hkv, D), f, or codes with k_scale; Hq is a multiple of Hkv
  TensorView v;  ///< (B, Sk, Hkv, Dv), f, or codes with v_scale
  /// (B, Sq, Hq, Dv), f; must not overlap any other tensor. With `projection`: (B, Sq, E), packed
  /// (T, E), in both layouts.
  TensorView out;
  TensorView lse;  ///< (B, Hq, Sq) f32; packed variable length: (Hq, T)

  /// Scales of the operands: with codes, the scales that quantize() gave; with f inputs in a recipe
  /// whose format has free granularity, static scales (codes that saturate are counted below; what
  /// they were made for: AttentionOptions::scales_for).
  /// Shape and meaning: Granularity. Dequantised value = code * scale (* global).
  TensorView q_scale, k_scale, v_scale;
  TensorView q_global, k_global, v_global;  ///< (B, H) f32, the second level of nvfp4 codes
  /// (B, Hkv, D) f32. With codes: what was subtracted from k before it was quantised, rotated where
  /// the codes of q and k are. With numbers: what smooth_k is to subtract instead of its own mean,
  /// any vector, for the result is the same; K is then read once. Recipes without smooth_k refuse.
  TensorView k_mean;
  TensorView v_mean;     ///< (B, Hkv, Dv) f32 that was subtracted from v before it was quantised
  TensorView saturated;  ///< (3) s64: codes of q, k, v that a static scale clipped (overwritten)

  TensorView sinks;  ///< (Hq) f: one logit per query head that only joins the denominator
  /// b8 or b1 (true = may look) or f (added); broadcasts to (B, Hq, Sq, Sk). b1: bits, key 8 n + i
  /// the i-th lowest of a row's byte n; its last extent is Sk rounded up to a multiple of 8, with
  /// stride 1, and what is behind Sk is not looked at.
  TensorView mask;
  /// (Hq) or (B, Hq) f32: s -= slope * |i + Sk - Sq - j|, the distance of query i and key j aligned
  /// to the bottom right as causal is; Sq and Sk are the sequence's own lengths (seqused).
  TensorView alibi_slopes;

  // Index tensors are s32, or s64 in host memory.
  TensorView cu_seqlens_q;  ///< (B + 1): q, out are packed, sequence b is [cu[b], cu[b+1])
  TensorView cu_seqlens_k;  ///< (B + 1): k, v are packed
  TensorView seqused_q;     ///< (B): only the first seqused_q[b] queries exist; others give 0
  TensorView seqused_k;     ///< (B): only the first seqused_k[b] keys exist
  TensorView page_table;    ///< (B, pages per sequence): k, v are paged; needs seqused_k

  /// b8, one for every block of `block_mask_q` queries and `block_mask_k` keys of a sequence: true
  /// = may look; false = these queries see none of these keys, which are skipped where a kernel
  /// can. Broadcasts to (B, Hq, ceil(Sq / block_mask_q), ceil(Sk / block_mask_k)); one more mask.
  /// Packed sequences: Sq and Sk are the longest one's, on a GPU all tokens in memory.
  TensorView block_mask;

  /// (E, Hq * Dv) in out's format, rows of stride 1, as torch.nn.Linear has its weight: the result
  /// is the row of all heads of a token times its transpose. Heads are rounded to out's format
  /// first, products are summed in float32. CPUs only.
  TensorView projection;
  TensorView projection_bias;  ///< (E) in out's format, finite: the sums begin with it
  bool operator==(const AttentionTensors&) const = default;
};

/// A tensor of a call, for who handles each of them.
struct AttentionTensor {
  using Place = TensorView AttentionTensors::*;  // what nvcc makes of it in place warns
  const char* name;
  Place view;
  bool output;  ///< run() writes it
};
inline constexpr AttentionTensor all_attention_tensors[] = {
#define QATTN_TENSOR(name, output) {#name, &AttentionTensors::name, output},
#include "qattn/attention_tensors.def"
#undef QATTN_TENSOR
};
static_assert(sizeof(all_attention_tensors) / sizeof(AttentionTensor) * sizeof(TensorView) ==
              sizeof(AttentionTensors));

struct AttentionOptions {
  Recipe recipe;
  Layout layout = Layout::bshd;
  std::optional<float> softmax_scale;  ///< default 1 / sqrt(D); finite
  /// Bottom-right: query i sees keys j <= i + Sk - Sq. Then window_right is 0, -1, window_left (a
  /// distance to both sides, of which the right one is hidden) or at least Sq - 1.
  bool causal = false;
  std::int64_t window_left = -1;   ///< keys j >= i + Sk - Sq - left; -1: unlimited
  std::int64_t window_right = -1;  ///< keys j <= i + Sk - Sq + right; -1: unlimited
  float softcap = 0.0f;            ///< s = c * tanh(s / c); 0: off
  /// Tokens a block of `block_mask`, multiples of 64 up to 2^20 (GPUs: block_mask_q also of the
  /// kernel's tile of queries, 128, or 64 where D > 128); 0 without one.
  std::int64_t block_mask_q = 0, block_mask_k = 0;
  /// CPU threads, at most; 0: the OpenMP default; 0 on a GPU. Results do not depend on it. In a
  /// child of fork() the thread that forked runs its calls alone if it had used qattn with several:
  /// they do not exist there, and GNU's OpenMP runtime would wait for them. Threads that the child
  /// starts have whole teams. Teams that only other code had made on that thread are not seen.
  int threads = 0;
  ScoreFunction score_function;  ///< CPU only; changes scores before masks
  MaskFunction mask_function;    ///< CPU only; one more mask
  /// Look at the contents of index tensors and given scales before the kernel starts, and name the
  /// bad entry. On a GPU this copies them to the host and waits for the stream; without it a bad
  /// index makes its rows NaN and is reported by device_errors(), a bad scale makes the rows that
  /// use it NaN. CPUs always look.
  bool validate = false;
  /// What static scales (AttentionTensors::q_scale, k_scale, v_scale beside numbers) were made for.
  /// Refused by name are scales of another format, whose range differs, and of rows that are not
  /// the call's: less their mean or not, rotated or not. What is automatic in it is as recipes
  /// choose for static scales: K less its mean (smooth_k), and nothing else. Absent: nobody knows,
  /// and scales are taken as they are. Refused where no operand has a scale, static or of codes.
  std::optional<Recipe> scales_for;
  bool operator==(const AttentionOptions&) const = default;
};

namespace detail {
struct PlanData;
}

/// What will run: kernel, configuration, workspace. Immutable, cheap to copy, thread-safe.
class Plan {
 public:
  /// One line a field: kernel, recipe as resolved, tile sizes, splits, workspace.
  std::string to_string() const;
  /// Covers every field that selects code or memory; equal plans run the same code.
  std::uint64_t hash() const;
  /// Bytes that run() needs; alignment 64.
  std::size_t workspace_bytes() const;
  const Recipe& recipe() const;
  const std::string& kernel() const;

  explicit Plan(std::shared_ptr<const detail::PlanData> data) : data_(std::move(data)) {}
  const detail::PlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const detail::PlanData> data_;
};

/// Validates the call and chooses the kernel. Only shapes, strides, formats and options are looked
/// at, never the contents; null data pointers are allowed.
/// Errors: invalid_argument names tensor, value and rule; unsupported lists each kernel's reason.
Result<Plan> plan(const AttentionTensors& tensors, const AttentionOptions& options);

/// Runs a plan on tensors of the same shapes, formats and options. Allocates nothing and writes
/// only `out`, `lse`, `saturated` and the workspace. On CPUs, and with `validate`, the contents of
/// index tensors and of given scales are checked first. On a GPU the work is enqueued on `stream`,
/// a stream of the tensors' device, which also decides when workspace and tensors may be reused.
/// Errors: invalid_argument, out_of_memory (workspace too small), internal (a launch failed).
Status run(const Plan& plan, const AttentionTensors& tensors, const AttentionOptions& options,
           void* workspace, std::size_t workspace_bytes, Stream stream = nullptr);

/// plan() and run() with a workspace of its own (on CUDA of the stream's own memory pool).
Status attention(const AttentionTensors& tensors, const AttentionOptions& options,
                 Stream stream = nullptr);

/// What kernels found wrong on a device since the last call: Ok, or invalid_argument that says what
/// (an index tensor held nonsense and its rows became NaN). Waits for the whole device, reads and
/// clears. CPU calls report everything at once, so there it is always Ok. Errors besides:
/// unsupported (no such device or no library for it), internal (an earlier launch crashed).
Status device_errors(Device device);

/// Which kernel a call would get and why every other kernel was refused; or why the call is wrong.
std::string explain(const AttentionTensors& tensors, const AttentionOptions& options);

/// The CPU instruction set in use ("amx", "avx2", "scalar", ...); QATTN_CPU_ISA forces one.
/// Errors: invalid_argument for an unknown name, unsupported where this CPU lacks it.
Result<std::string> cpu_isa();

std::string_view version();

}  // namespace qattn
