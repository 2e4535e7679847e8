/* The C interface from real C: a whole call, a plan run twice, quantise and back, and refusals. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qattn/qattn.h"

static int failures = 0;

#define CHECK(condition)                                                                       \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      printf("%s:%d: %s is false (%s)\n", __FILE__, __LINE__, #condition, qattn_last_error()); \
      ++failures;                                                                              \
    }                                                                                          \
  } while (0)

enum { B = 1, H = 2, S = 70, D = 32, COUNT = B * H * S * D };
static float q[COUNT], k[COUNT], v[COUNT], out[COUNT], again[COUNT], lse[B * H * S];

static float noise(unsigned* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

static qattn_attention_tensors tensors(void) {
  const int64_t shape[4] = {B, H, S, D}, lse_shape[3] = {B, H, S};
  qattn_attention_tensors t;
  qattn_attention_tensors_init(&t);
  t.q = qattn_tensor_dense(q, QATTN_FORMAT_f32, 4, shape);
  t.k = qattn_tensor_dense(k, QATTN_FORMAT_f32, 4, shape);
  t.v = qattn_tensor_dense(v, QATTN_FORMAT_f32, 4, shape);
  t.out = qattn_tensor_dense(out, QATTN_FORMAT_f32, 4, shape);
  t.lse = qattn_tensor_dense(lse, QATTN_FORMAT_f32, 3, lse_shape);
  return t;
}

/* Causal attention by the textbook, in double. */
static double expected(int h, int i, int c) {
  double sum = 0, acc = 0, top = -1e300, s[S];
  int j, x;
  for (j = 0; j <= i; ++j) {
    s[j] = 0;
    for (x = 0; x < D; ++x) s[j] += (double)q[(h * S + i) * D + x] * k[(h * S + j) * D + x];
    s[j] /= sqrt(D);
    if (s[j] > top) top = s[j];
  }
  for (j = 0; j <= i; ++j) {
    const double p = exp(s[j] - top);
    sum += p;
    acc += p * v[(h * S + j) * D + c];
  }
  return acc / sum;
}

static void attention_and_plan(void) {
  qattn_attention_tensors t = tensors();
  qattn_attention_options o;
  qattn_plan* plan = NULL;
  size_t bytes, needed = 0;
  void* workspace;
  double error = 0, norm = 0;
  char text[4096];
  int h, i, c;
  qattn_attention_options_init(&o);
  o.recipe = "int8_full";
  o.layout = QATTN_LAYOUT_BHSD;
  o.causal = 1;
  CHECK(qattn_attention(&t, &o) == QATTN_OK);
  for (h = 0; h < H; ++h)
    for (i = 0; i < S; ++i)
      for (c = 0; c < D; ++c) {
        const double want = expected(h, i, c), got = out[(h * S + i) * D + c];
        error += (got - want) * (got - want);
        norm += want * want;
      }
  CHECK(sqrt(error / norm) > 0 && sqrt(error / norm) < 1.6e-2);
  memcpy(again, out, sizeof out);
  memset(out, 0, sizeof out);

  CHECK(qattn_plan_create(&t, &o, &plan) == QATTN_OK);
  CHECK(plan != NULL && qattn_plan_hash(plan) != 0);
  CHECK(strstr(qattn_plan_text(plan), "int8_full") != NULL);
  bytes = (qattn_plan_workspace_bytes(plan) + 63) / 64 * 64;
  workspace = aligned_alloc(64, bytes);
  for (i = 0; i < 2; ++i) {
    CHECK(qattn_run(plan, &t, &o, workspace, bytes, NULL) == QATTN_OK);
    CHECK(memcmp(out, again, sizeof out) == 0);
  }
  CHECK(qattn_run(plan, &t, &o, workspace, 64, NULL) == QATTN_OUT_OF_MEMORY);
  CHECK(strstr(qattn_last_error(), "workspace") != NULL);
  o.causal = 0;
  CHECK(qattn_run(plan, &t, &o, workspace, bytes, NULL) == QATTN_INVALID_ARGUMENT);
  CHECK(strstr(qattn_last_error(), "plan") != NULL);
  CHECK(qattn_explain(&t, &o, text, sizeof text, &needed) == QATTN_OK);
  CHECK(needed == strlen(text) + 1 && strstr(text, "chosen") != NULL);
  CHECK(qattn_explain(&t, &o, text, 8, &needed) == QATTN_OK && strlen(text) == 7);
  qattn_plan_destroy(plan);
  qattn_plan_destroy(NULL);
  free(workspace);
}

static void relative_bias(const void* context, const qattn_score_run* run, float* scores) {
  int64_t j;
  for (j = 0; j < run->count; ++j) {
    scores[j] += *(const float*)context * (float)(run->key + j - run->query);
  }
}

static void causal_mask(const void* context, const qattn_score_run* run, uint8_t* visible) {
  int64_t j;
  (void)context;
  for (j = 0; j < run->count; ++j) visible[j] = run->key + j <= run->query;
}

/* The caller's functions against the features they spell out: ALiBi and causal. */
static void functions(void) {
  static const float slope[H] = {0.25f, 0.25f};
  const int64_t heads[1] = {H};
  qattn_attention_tensors t = tensors();
  qattn_attention_options o;
  int i;
  qattn_attention_options_init(&o);
  o.recipe = "f32";
  o.layout = QATTN_LAYOUT_BHSD;
  o.score_function = relative_bias;
  o.score_context = slope;
  o.mask_function = causal_mask;
  CHECK(qattn_attention(&t, &o) == QATTN_OK);
  memcpy(again, out, sizeof out);
  o.score_function = NULL;
  o.mask_function = NULL;
  o.causal = 1;
  t.alibi_slopes = qattn_tensor_dense((void*)slope, QATTN_FORMAT_f32, 1, heads);
  CHECK(qattn_attention(&t, &o) == QATTN_OK);
  for (i = 0; i < COUNT; ++i) CHECK(fabsf(out[i] - again[i]) < 1e-5f);
}

/* The word that once was `reserved`. */
static void balance(void) {
  static char text[16384];
  qattn_attention_tensors t = tensors();
  qattn_attention_options o;
  qattn_attention_options_init(&o);
  o.recipe = "int8";
  o.layout = QATTN_LAYOUT_BHSD;
  CHECK(qattn_explain(&t, &o, text, sizeof text, NULL) == QATTN_OK);
  CHECK(strstr(text, "balance_k=on") != NULL);
  o.balance_k = QATTN_TOGGLE_OFF;
  CHECK(qattn_explain(&t, &o, text, sizeof text, NULL) == QATTN_OK);
  CHECK(strstr(text, "balance_k=off") != NULL);
  o.balance_k = 7;
  CHECK(qattn_attention(&t, &o) == QATTN_INVALID_ARGUMENT);
  CHECK(strstr(qattn_last_error(), "toggle") != NULL);
}

static void quantize_and_back(void) {
  static int8_t codes[COUNT];
  static float scale[B * H * S], back[COUNT];
  const int64_t shape[4] = {B, H, S, D};
  qattn_quantize_tensors t;
  qattn_quantize_options o;
  int64_t saturated = -1;
  int i;
  qattn_quantize_tensors_init(&t);
  qattn_quantize_options_init(&o);
  t.x = qattn_tensor_dense(k, QATTN_FORMAT_f32, 4, shape);
  o.layout = QATTN_LAYOUT_BHSD;
  CHECK(qattn_quantize_shapes(&t, &o) == QATTN_OK);
  CHECK(t.scale.rank == 3 && t.scale.shape[2] == S && t.codes.shape[3] == D);
  t.codes.data = codes;
  t.scale.data = scale;
  CHECK(qattn_quantize(&t, &o, &saturated) == QATTN_OK);
  CHECK(saturated == 0);
  t.x.data = back;
  CHECK(qattn_dequantize(&t, &o) == QATTN_OK);
  for (i = 0; i < COUNT; ++i) CHECK(fabsf(back[i] - k[i]) <= 0.5001f * scale[i / D]);
}

/* Index tensors of 64 bits are read as they are. */
static void wide_indices(void) {
  const int64_t shape[1] = {B};
  int64_t used[B];
  qattn_attention_tensors t = tensors();
  qattn_attention_options o;
  float before;
  int i;
  qattn_attention_options_init(&o);
  o.layout = QATTN_LAYOUT_BHSD;
  for (i = 0; i < B; ++i) used[i] = S;
  CHECK(qattn_attention(&t, &o) == QATTN_OK);
  before = out[COUNT - 1];
  t.seqused_k = qattn_tensor_dense(used, QATTN_FORMAT_s64, 1, shape);
  CHECK(qattn_attention(&t, &o) == QATTN_OK);
  CHECK(out[COUNT - 1] == before);
  used[B - 1] += (int64_t)1 << 32;
  CHECK(qattn_attention(&t, &o) == QATTN_INVALID_ARGUMENT);
  CHECK(strstr(qattn_last_error(), "seqused_k: entry") != NULL);
  CHECK(out[COUNT - 1] == before);
}

static void refusals(void) {
  qattn_attention_tensors t = tensors();
  qattn_attention_options o;
  float before;
  qattn_attention_options_init(&o);
  o.layout = QATTN_LAYOUT_BHSD;
  before = out[0];
  CHECK(qattn_attention(NULL, &o) == QATTN_INVALID_ARGUMENT);
  CHECK(qattn_attention(&t, NULL) == QATTN_INVALID_ARGUMENT);
  t.struct_size = 3;
  CHECK(qattn_attention(&t, &o) == QATTN_INVALID_ARGUMENT);
  CHECK(strstr(qattn_last_error(), "struct_size") != NULL);
  t = tensors();
  o.recipe = "int9";
  CHECK(qattn_attention(&t, &o) == QATTN_INVALID_ARGUMENT);
  CHECK(strstr(qattn_last_error(), "int9") != NULL);
  o.recipe = NULL;
  o.causal = 7;
  CHECK(qattn_attention(&t, &o) == QATTN_INVALID_ARGUMENT);
  o.causal = 0;
  t.k.shape[3] = 24;
  CHECK(qattn_attention(&t, &o) == QATTN_INVALID_ARGUMENT);
  CHECK(strcmp(qattn_last_error(), "k: head_dim 24 differs from q's 32") == 0);
  t = tensors();
  t.q.format = 9999;
  CHECK(qattn_attention(&t, &o) == QATTN_INVALID_ARGUMENT);
  t = tensors();
  t.q.device_type = t.k.device_type = t.v.device_type = QATTN_DEVICE_CUDA;
  t.out.device_type = t.lse.device_type = QATTN_DEVICE_CUDA;
  CHECK(qattn_attention(&t, &o) == QATTN_UNSUPPORTED);
  CHECK(qattn_plan_create(&t, &o, NULL) == QATTN_INVALID_ARGUMENT);
  CHECK(qattn_run(NULL, &t, &o, NULL, 0, NULL) == QATTN_INVALID_ARGUMENT);
  CHECK(qattn_quantize(NULL, NULL, NULL) == QATTN_INVALID_ARGUMENT);
  CHECK(out[0] == before);
  CHECK(qattn_tensor_dense(q, QATTN_FORMAT_f32, 9, NULL).format == QATTN_FORMAT_NONE);
}

int main(void) {
  unsigned state = 1;
  int i;
  for (i = 0; i < COUNT; ++i) {
    q[i] = 2 * noise(&state);
    k[i] = 2 * noise(&state);
    v[i] = noise(&state);
  }
  CHECK(strlen(qattn_version()) >= 5);
  attention_and_plan();
  functions();
  balance();
  quantize_and_back();
  wide_indices();
  refusals();
  printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
  return failures != 0;
}
