/* qattn's C interface: the calls of qattn/attention.hpp, quantize.hpp, kv_cache.hpp and
 * kv_cache_gpu.hpp.
 *
 * Every struct begins with its own size, set by the *_init function of that struct, which is
 * compiled into the caller and so knows the caller's size; a library that is newer fills the rest
 * with defaults, and one that is older refuses what it does not know. Every function returns a
 * qattn_status; the message of the last failure in this thread is qattn_last_error(). Nothing
 * throws, prints or aborts; a refused call leaves outputs as they were. Meanings, shapes and
 * formulas: see the C++ headers named at each struct. */
#ifndef QATTN_QATTN_H
#define QATTN_QATTN_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define QATTN_API __declspec(dllexport)
#else
#define QATTN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* T_init(given) gives a struct its size and defaults. T_defaults() writes `size` bytes and no more,
 * whatever the library's struct has. */
#define QATTN_STRUCT(T)                               \
  QATTN_API void T##_defaults(T* given, size_t size); \
  static inline void T##_init(T* given) { T##_defaults(given, sizeof *given); }

#define QATTN_MAX_RANK 5

typedef int32_t qattn_status; /* 0 is success */
enum {
  QATTN_OK = 0,
  QATTN_INVALID_ARGUMENT = 1,
  QATTN_UNSUPPORTED = 2,
  QATTN_OUT_OF_MEMORY = 3,
  QATTN_INTERNAL = 4
};

/* Formats, numbered from 1 in the order of formats.def; 0 means "no tensor". */
enum {
  QATTN_FORMAT_NONE = 0,
#define QATTN_FORMAT(id, name, bits, group, scale) QATTN_FORMAT_##id,
#include "qattn/formats.def"
#undef QATTN_FORMAT
  QATTN_FORMAT_COUNT
};

enum { QATTN_LAYOUT_BSHD = 0, QATTN_LAYOUT_BHSD = 1 };
enum { QATTN_ROLE_Q = 0, QATTN_ROLE_K = 1, QATTN_ROLE_V = 2 };
enum { QATTN_TOGGLE_AUTO = 0, QATTN_TOGGLE_OFF = 1, QATTN_TOGGLE_ON = 2 };
enum { QATTN_DEVICE_CPU = 1, QATTN_DEVICE_CUDA = 2, QATTN_DEVICE_HIP = 10 };
enum {
  QATTN_GRANULARITY_AUTO = 0,
  QATTN_PER_TENSOR,
  QATTN_PER_HEAD,
  QATTN_PER_BLOCK,
  QATTN_PER_WARP,
  QATTN_PER_THREAD,
  QATTN_PER_TOKEN,
  QATTN_PER_CHANNEL,
  QATTN_PER_BLOCK_CHANNEL,
  QATTN_GROUP
};

/* qattn::TensorView. Shape and strides in elements; format 0: absent. */
typedef struct qattn_tensor {
  void* data;
  int32_t format;
  int32_t rank;
  int64_t shape[QATTN_MAX_RANK];
  int64_t stride[QATTN_MAX_RANK];
  int32_t device_type;
  int32_t device_index;
} qattn_tensor;

/* qattn::Scaling. */
typedef struct qattn_scaling {
  int32_t granularity;
  int32_t block;
  int32_t warp;
} qattn_scaling;

/* qattn::AttentionTensors. */
typedef struct qattn_attention_tensors {
  size_t struct_size;
  qattn_tensor q, k, v, out, lse;
  qattn_tensor q_scale, k_scale, v_scale;
  qattn_tensor q_global, k_global, v_global;
  qattn_tensor k_mean, v_mean, saturated;
  qattn_tensor sinks, mask, alibi_slopes; /* score -= slope * |i + Sk - Sq - j| */
  qattn_tensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table;
  qattn_tensor block_mask;                  /* sizes of its blocks: qattn_attention_options */
  qattn_tensor projection, projection_bias; /* CPUs: out is (B, Sq, E), packed (T, E) */
} qattn_attention_tensors;

/* qattn::ScoreRun: a run of keys of one query row. */
typedef struct qattn_score_run {
  int64_t batch, head, query, key, count, queries, keys;
} qattn_score_run;
/* Changes run->count scores in place / writes 0 where a key is hidden. Pure, callable from several
 * threads. */
typedef void (*qattn_score_function)(const void* context, const qattn_score_run* run,
                                     float* scores);
typedef void (*qattn_mask_function)(const void* context, const qattn_score_run* run,
                                    uint8_t* visible);

/* What static scales were made for: qattn::AttentionOptions::scales_for. Refused without scales. */
typedef struct qattn_scales_for {
  const char* recipe;                           /* name; NULL: nobody knows, scales are taken */
  int32_t smooth_k, smooth_q, smooth_v, rotate; /* QATTN_TOGGLE_*; AUTO: K less its mean alone */
} qattn_scales_for;

/* qattn::AttentionOptions with its Recipe. */
typedef struct qattn_attention_options {
  size_t struct_size;
  const char* recipe; /* name; NULL: "auto" */
  int32_t layout;
  int32_t causal;            /* 0 or 1 */
  int32_t has_softmax_scale; /* 0: 1 / sqrt(D) */
  float softmax_scale;
  int64_t window_left, window_right; /* -1: unlimited */
  float softcap;                     /* 0: off */
  int32_t threads;                   /* at most (qattn/attention.hpp); 0: the OpenMP default */
  qattn_scaling q_scaling, k_scaling, v_scaling;
  int32_t smooth_k, smooth_q, smooth_v, rotate; /* QATTN_TOGGLE_* */
  qattn_score_function score_function;          /* NULL: none */
  const void* score_context;
  qattn_mask_function mask_function; /* NULL: none */
  const void* mask_context;
  int32_t validate;  /* 0 or 1: look at contents on a GPU too, which waits for the stream */
  int32_t balance_k; /* QATTN_TOGGLE_*; once `reserved`, and 0 */
  int64_t block_mask_q, block_mask_k; /* tokens a block of block_mask; 0 without one */
  qattn_scales_for scales_for;        /* of static scales */
} qattn_attention_options;

/* qattn::QuantizeOptions. */
typedef struct qattn_quantize_options {
  size_t struct_size;
  int32_t format;
  int32_t role;
  int32_t layout;
  qattn_scaling scaling;
  int32_t smooth; /* 0 or 1 */
  int32_t rotate; /* 0 or 1 */
  int32_t threads;
  qattn_scales_for scales_for; /* of static_scale; `role` says what of it counts */
} qattn_quantize_options;

/* qattn::QuantizeTensors. */
typedef struct qattn_quantize_tensors {
  size_t struct_size;
  qattn_tensor x, codes, scale, global, mean, static_scale, cu_seqlens;
} qattn_quantize_tensors;

typedef struct qattn_plan qattn_plan; /* opaque */

QATTN_API const char* qattn_version(void);
/* Message of the last failed call in this thread; "" before any. Valid until the next failure. */
QATTN_API const char* qattn_last_error(void);

/* A dense row-major tensor on the CPU; rank above QATTN_MAX_RANK gives an absent tensor. */
QATTN_API qattn_tensor qattn_tensor_dense(void* data, int32_t format, int32_t rank,
                                          const int64_t* shape);

QATTN_STRUCT(qattn_attention_tensors)
QATTN_STRUCT(qattn_attention_options)
QATTN_STRUCT(qattn_quantize_tensors)
QATTN_STRUCT(qattn_quantize_options)

/* qattn::attention() without a stream. */
QATTN_API qattn_status qattn_attention(const qattn_attention_tensors* tensors,
                                       const qattn_attention_options* options);
/* qattn::attention(). `stream` is a cudaStream_t of the tensors' device, NULL on CPUs. */
QATTN_API qattn_status qattn_attention_on(const qattn_attention_tensors* tensors,
                                          const qattn_attention_options* options, void* stream);
/* qattn::device_errors(). */
QATTN_API qattn_status qattn_device_errors(int32_t device_type, int32_t device_index);

/* qattn::plan(); release the plan with qattn_plan_destroy(). */
QATTN_API qattn_status qattn_plan_create(const qattn_attention_tensors* tensors,
                                         const qattn_attention_options* options, qattn_plan** plan);
QATTN_API void qattn_plan_destroy(qattn_plan* plan); /* NULL is allowed */
QATTN_API size_t qattn_plan_workspace_bytes(const qattn_plan* plan);
QATTN_API uint64_t qattn_plan_hash(const qattn_plan* plan);
/* Valid as long as the plan. */
QATTN_API const char* qattn_plan_text(const qattn_plan* plan);

/* qattn::run(). `workspace` is aligned to 64 bytes; `stream` is NULL on CPUs. */
QATTN_API qattn_status qattn_run(const qattn_plan* plan, const qattn_attention_tensors* tensors,
                                 const qattn_attention_options* options, void* workspace,
                                 size_t workspace_bytes, void* stream);

/* qattn::explain(): writes at most `capacity` bytes with the closing 0; *needed (may be NULL) is
 * what the whole text takes. */
QATTN_API qattn_status qattn_explain(const qattn_attention_tensors* tensors,
                                     const qattn_attention_options* options, char* text,
                                     size_t capacity, size_t* needed);

/* qattn::quantize_shapes(): fills codes, scale, global and mean of `tensors` (no data pointers). */
QATTN_API qattn_status qattn_quantize_shapes(qattn_quantize_tensors* tensors,
                                             const qattn_quantize_options* options);
/* The same on a stream of x's device, which cu_seqlens is read on. */
QATTN_API qattn_status qattn_quantize_shapes_on(qattn_quantize_tensors* tensors,
                                                const qattn_quantize_options* options,
                                                void* stream);
/* qattn::quantize(); *saturated (may be NULL) counts codes that a static scale, which is positive
 * and finite, clipped. */
QATTN_API qattn_status qattn_quantize(const qattn_quantize_tensors* tensors,
                                      const qattn_quantize_options* options, int64_t* saturated);
/* The same on a stream of x's device. */
QATTN_API qattn_status qattn_quantize_on(const qattn_quantize_tensors* tensors,
                                         const qattn_quantize_options* options, void* stream,
                                         int64_t* saturated);
QATTN_API qattn_status qattn_dequantize(const qattn_quantize_tensors* tensors,
                                        const qattn_quantize_options* options);

/* --- The KV cache: qattn/kv_cache.hpp ----------------------------------------------------------
 */

#define QATTN_KV_MAX_TIERS 7

enum { QATTN_KV_IMPORTANCE_UNIFORM = 0, QATTN_KV_IMPORTANCE_KEY_NORM = 1 };

typedef struct qattn_kv_cache qattn_kv_cache; /* opaque */

/* qattn::KvTier. */
typedef struct qattn_kv_tier {
  int32_t k_bits, v_bits;
} qattn_kv_tier;

/* qattn::KvCacheOptions. */
typedef struct qattn_kv_options {
  size_t struct_size;
  int64_t layers, heads_kv, d, dv, page_size, window, sinks;
  int32_t window_format; /* QATTN_FORMAT_f16 or QATTN_FORMAT_bf16 */
  int32_t tier_count;
  qattn_kv_tier tiers[QATTN_KV_MAX_TIERS]; /* best first */
  double average_bits;                     /* 0: no budget */
  int64_t budget_from;                     /* 0: twice the shortest length */
  int32_t smooth_k, rotate;                /* 0 or 1 */
  int32_t importance;                      /* QATTN_KV_IMPORTANCE_* */
  int32_t threads;
  float importance_decay, hysteresis;
  int32_t k_granularity; /* QATTN_PER_TOKEN or QATTN_PER_CHANNEL */
  int32_t reserved;      /* 0 */
  int32_t balance_k;     /* 0 or 1 */
  int32_t smooth_v;      /* 0 or 1 */
} qattn_kv_options;

/* qattn::KvAppendTensors. */
typedef struct qattn_kv_append_tensors {
  size_t struct_size;
  qattn_tensor k, v, cu_seqlens, importance;
} qattn_kv_append_tensors;

/* qattn::KvDecodeTensors. */
typedef struct qattn_kv_decode_tensors {
  size_t struct_size;
  qattn_tensor q, out, lse, sinks, tree_mask, mass;
} qattn_kv_decode_tensors;

/* qattn::KvDecodeOptions. */
typedef struct qattn_kv_decode_options {
  size_t struct_size;
  int32_t layout;
  int32_t causal;            /* 0 or 1 */
  int32_t has_softmax_scale; /* 0: 1 / sqrt(D) */
  float softmax_scale;
  int64_t window_left; /* -1: unlimited */
  float softcap;       /* 0: off */
  int32_t threads;
  int32_t debias;   /* 0 or 1; 0 on a GPU where K has a scale a channel */
  int32_t reserved; /* 0 */
} qattn_kv_decode_options;

/* qattn::KvBytes. */
typedef struct qattn_kv_bytes {
  size_t struct_size;
  int64_t codes, scales, window, tables, means, spare, total;
} qattn_kv_bytes;

/* qattn::KvUsage. */
typedef struct qattn_kv_usage {
  size_t struct_size;
  int64_t length, bytes, allowed_bytes;
  double average_bits;
  int64_t window_tokens;
  int64_t tier_tokens[QATTN_KV_MAX_TIERS];
  int64_t balanced_channels, shifted_heads;
} qattn_kv_usage;

QATTN_STRUCT(qattn_kv_options)
QATTN_STRUCT(qattn_kv_append_tensors)
QATTN_STRUCT(qattn_kv_decode_tensors)
QATTN_STRUCT(qattn_kv_decode_options)
QATTN_STRUCT(qattn_kv_bytes)
QATTN_STRUCT(qattn_kv_usage)

/* qattn::KvCache::create(); release the cache with qattn_kv_destroy(). */
QATTN_API qattn_status qattn_kv_create(const qattn_kv_options* options, qattn_kv_cache** cache);
QATTN_API void qattn_kv_destroy(qattn_kv_cache* cache); /* NULL is allowed */
/* Each of these is the method of that name of qattn::KvCache. */
QATTN_API qattn_status qattn_kv_shortest_length(const qattn_kv_options* options, int64_t* length);
QATTN_API qattn_status qattn_kv_add_sequence(qattn_kv_cache* cache, int64_t* sequence);
QATTN_API qattn_status qattn_kv_fork(qattn_kv_cache* cache, int64_t sequence, int64_t* copy);
QATTN_API qattn_status qattn_kv_release(qattn_kv_cache* cache, int64_t sequence);
QATTN_API qattn_status qattn_kv_length(const qattn_kv_cache* cache, int64_t sequence, int64_t layer,
                                       int64_t* length);
QATTN_API qattn_status qattn_kv_append(qattn_kv_cache* cache, int64_t layer,
                                       const int64_t* sequences, int64_t count,
                                       const qattn_kv_append_tensors* tensors, int32_t layout);
QATTN_API qattn_status qattn_kv_truncate(qattn_kv_cache* cache, int64_t sequence, int64_t length);
QATTN_API qattn_status qattn_kv_evict(qattn_kv_cache* cache, int64_t sequence, int64_t layer,
                                      int64_t head, int64_t begin, int64_t end);
QATTN_API qattn_status qattn_kv_observe(qattn_kv_cache* cache, int64_t layer,
                                        const int64_t* sequences, int64_t count,
                                        const qattn_tensor* mass);
QATTN_API qattn_status qattn_kv_set_importance(qattn_kv_cache* cache, int64_t sequence,
                                               int64_t layer, const qattn_tensor* importance);
/* k, v and tiers: NULL where they are not asked for. */
QATTN_API qattn_status qattn_kv_read(const qattn_kv_cache* cache, int64_t sequence, int64_t layer,
                                     const qattn_tensor* k, const qattn_tensor* v,
                                     const qattn_tensor* tiers);
QATTN_API qattn_status qattn_kv_get_bytes(const qattn_kv_cache* cache, qattn_kv_bytes* bytes);
QATTN_API qattn_status qattn_kv_get_usage(const qattn_kv_cache* cache, int64_t sequence,
                                          int64_t layer, qattn_kv_usage* usage);
QATTN_API qattn_status qattn_kv_save(const qattn_kv_cache* cache, const char* path);
QATTN_API qattn_status qattn_kv_load(const char* path, int32_t threads, qattn_kv_cache** cache);
/* qattn::decode(). */
QATTN_API qattn_status qattn_kv_decode(const qattn_kv_cache* cache, int64_t layer,
                                       const int64_t* sequences, int64_t count,
                                       const qattn_kv_decode_tensors* tensors,
                                       const qattn_kv_decode_options* options);

/* --- The KV cache in a GPU's memory: qattn/kv_cache_gpu.hpp ------------------------------------
 * `stream` is a cudaStream_t of the cache's device. Calls enqueue kernels and do not wait, but for
 * the last group. */

typedef struct qattn_kv_gpu_cache qattn_kv_gpu_cache; /* opaque */

/* qattn::KvGpuCapacity. */
typedef struct qattn_kv_gpu_capacity {
  size_t struct_size;
  int64_t sequences, tokens;
  int32_t pool_count; /* entries of pages: 0 (as many as are ever needed) or 1 + tiers */
  int32_t reserved;   /* 0 */
  int64_t pages[QATTN_KV_MAX_TIERS + 1];
} qattn_kv_gpu_capacity;

/* qattn::KvGpuAppendTensors. */
typedef struct qattn_kv_gpu_append_tensors {
  size_t struct_size;
  qattn_tensor slots, k, v, counts, importance;
} qattn_kv_gpu_append_tensors;

QATTN_STRUCT(qattn_kv_gpu_capacity)
QATTN_STRUCT(qattn_kv_gpu_append_tensors)

/* qattn::GpuKvCache::create(); release the cache with qattn_kv_gpu_destroy(). */
QATTN_API qattn_status qattn_kv_gpu_create(const qattn_kv_options* options,
                                           const qattn_kv_gpu_capacity* capacity,
                                           int32_t device_type, int32_t device_index, void* stream,
                                           qattn_kv_gpu_cache** cache);
QATTN_API void qattn_kv_gpu_destroy(qattn_kv_gpu_cache* cache); /* NULL is allowed */

QATTN_API qattn_status qattn_kv_gpu_add_sequence(qattn_kv_gpu_cache* cache, void* stream,
                                                 int64_t* slot);
QATTN_API qattn_status qattn_kv_gpu_fork(qattn_kv_gpu_cache* cache, int64_t slot, void* stream,
                                         int64_t* copy);
QATTN_API qattn_status qattn_kv_gpu_release(qattn_kv_gpu_cache* cache, int64_t slot, void* stream);
QATTN_API qattn_status qattn_kv_gpu_append(qattn_kv_gpu_cache* cache, int64_t layer,
                                           const qattn_kv_gpu_append_tensors* tensors,
                                           int32_t layout, void* stream);
QATTN_API qattn_status qattn_kv_gpu_truncate(qattn_kv_gpu_cache* cache, int64_t slot,
                                             int64_t length, void* stream);
QATTN_API qattn_status qattn_kv_gpu_evict(qattn_kv_gpu_cache* cache, int64_t slot, int64_t layer,
                                          int64_t head, int64_t begin, int64_t end, void* stream);
QATTN_API qattn_status qattn_kv_gpu_observe(qattn_kv_gpu_cache* cache, int64_t layer,
                                            const qattn_tensor* slots, const qattn_tensor* mass,
                                            void* stream);
QATTN_API qattn_status qattn_kv_gpu_set_importance(qattn_kv_gpu_cache* cache, int64_t slot,
                                                   int64_t layer, const qattn_tensor* importance,
                                                   void* stream);
/* qattn::decode_workspace() and qattn::decode() of a GpuKvCache. */
QATTN_API qattn_status qattn_kv_gpu_decode_workspace(const qattn_kv_gpu_cache* cache, int64_t layer,
                                                     const qattn_tensor* slots,
                                                     const qattn_kv_decode_tensors* tensors,
                                                     const qattn_kv_decode_options* options,
                                                     size_t* bytes);
QATTN_API qattn_status qattn_kv_gpu_decode(const qattn_kv_gpu_cache* cache, int64_t layer,
                                           const qattn_tensor* slots,
                                           const qattn_kv_decode_tensors* tensors,
                                           const qattn_kv_decode_options* options, void* workspace,
                                           size_t workspace_bytes, void* stream);
QATTN_API qattn_status qattn_kv_gpu_get_bytes(const qattn_kv_gpu_cache* cache,
                                              qattn_kv_bytes* bytes);
/* Waits for nothing. *holds becomes 1 or 0. */
QATTN_API qattn_status qattn_kv_gpu_holds(const qattn_kv_gpu_cache* cache, int64_t slot,
                                          int32_t* holds);

/* These wait for the stream. qattn_kv_gpu_slot_status(): qattn::GpuKvCache::status(). */
QATTN_API qattn_status qattn_kv_gpu_slot_status(const qattn_kv_gpu_cache* cache, int64_t slot,
                                                void* stream);
QATTN_API qattn_status qattn_kv_gpu_length(const qattn_kv_gpu_cache* cache, int64_t slot,
                                           int64_t layer, void* stream, int64_t* length);
QATTN_API qattn_status qattn_kv_gpu_get_usage(const qattn_kv_gpu_cache* cache, int64_t slot,
                                              int64_t layer, void* stream, qattn_kv_usage* usage);
QATTN_API qattn_status qattn_kv_gpu_save(const qattn_kv_gpu_cache* cache, const char* path,
                                         void* stream);
/* The options are the file's; release the cache with qattn_kv_gpu_destroy(). */
QATTN_API qattn_status qattn_kv_gpu_load(const char* path, const qattn_kv_gpu_capacity* capacity,
                                         int32_t device_type, int32_t device_index, void* stream,
                                         qattn_kv_gpu_cache** cache);
QATTN_API qattn_status qattn_kv_gpu_read(const qattn_kv_gpu_cache* cache, int64_t slot,
                                         int64_t layer, const qattn_tensor* k,
                                         const qattn_tensor* v, const qattn_tensor* tiers,
                                         void* stream);

#ifdef __cplusplus
}
#endif

#endif /* QATTN_QATTN_H */
