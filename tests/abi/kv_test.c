/* The KV cache from C: fill, decode against attention by the textbook, fork, sizes, refusals. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
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

enum { S = 300, D = 45, HQ = 2 }; /* 19 blocks of 16 tokens; D: padded inside */
static float k[S * D], v[S * D], q[HQ * D], out[HQ * D], mass[HQ * 19], read_k[S * D],
    read_v[S * D];

static float noise(unsigned* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

static double expected(int h, int c) {
  double sum = 0, acc = 0;
  int j, x;
  for (j = 0; j < S; ++j) {
    double s = 0;
    for (x = 0; x < D; ++x) s += (double)q[h * D + x] * read_k[j * D + x];
    s = exp(s / sqrt(D));
    sum += s;
    acc += s * read_v[j * D + c];
  }
  return acc / sum;
}

static qattn_kv_append_tensors rows(void) {
  const int64_t shape[4] = {1, S, 1, D};
  qattn_kv_append_tensors t;
  qattn_kv_append_tensors_init(&t);
  t.k = qattn_tensor_dense(k, QATTN_FORMAT_f32, 4, shape);
  t.v = qattn_tensor_dense(v, QATTN_FORMAT_f32, 4, shape);
  return t;
}

static qattn_kv_decode_tensors queries(void) {
  const int64_t shape[4] = {1, 1, HQ, D}, mass_shape[3] = {1, HQ, 19};
  qattn_kv_decode_tensors t;
  qattn_kv_decode_tensors_init(&t);
  t.q = qattn_tensor_dense(q, QATTN_FORMAT_f32, 4, shape);
  t.out = qattn_tensor_dense(out, QATTN_FORMAT_f32, 4, shape);
  t.mass = qattn_tensor_dense(mass, QATTN_FORMAT_f32, 3, mass_shape);
  return t;
}

/* debias changes results; so says a struct that has it, and one that was compiled before it was in
 * decode's options does not, whatever lies behind it. */
static void debias(qattn_kv_cache* cache, int64_t id) {
  qattn_kv_decode_tensors d = queries();
  qattn_kv_decode_options o;
  float plain[HQ * D];
  const size_t older = offsetof(qattn_kv_decode_options, debias);
  memcpy(plain, out, sizeof plain);
  o.debias = o.reserved = 12345;
  qattn_kv_decode_options_defaults(&o, older);
  CHECK(o.struct_size == older && o.debias == 12345 && o.reserved == 12345);
  CHECK(qattn_kv_decode(cache, 0, &id, 1, &d, &o) == QATTN_OK);
  CHECK(memcmp(plain, out, sizeof plain) == 0);
  qattn_kv_decode_options_init(&o);
  CHECK(o.debias == 0 && o.reserved == 0);
  o.debias = 1;
  CHECK(qattn_kv_decode(cache, 0, &id, 1, &d, &o) == QATTN_OK);
  CHECK(memcmp(plain, out, sizeof plain) != 0);
  o.softcap = 2;
  CHECK(qattn_kv_decode(cache, 0, &id, 1, &d, &o) == QATTN_INVALID_ARGUMENT);
  CHECK(strstr(qattn_last_error(), "debias: should be off with a softcap") != NULL);
  qattn_kv_decode_options_init(&o);
  o.reserved = 7;
  CHECK(qattn_kv_decode(cache, 0, &id, 1, &d, &o) == QATTN_INVALID_ARGUMENT);
  CHECK(strcmp(qattn_last_error(), "reserved: 7 is not 0") == 0);
}

static void use(qattn_kv_cache* cache) {
  const int64_t shape[3] = {1, S, D}, mass_shape[3] = {1, HQ, 19};
  qattn_kv_append_tensors a = rows();
  qattn_kv_decode_tensors d = queries();
  qattn_kv_decode_options o;
  qattn_kv_bytes bytes;
  qattn_kv_usage usage;
  qattn_tensor tk = qattn_tensor_dense(read_k, QATTN_FORMAT_f32, 3, shape);
  qattn_tensor tv = qattn_tensor_dense(read_v, QATTN_FORMAT_f32, 3, shape);
  qattn_tensor tm = qattn_tensor_dense(mass, QATTN_FORMAT_f32, 3, mass_shape);
  qattn_kv_cache* loaded = NULL;
  int64_t id = -1, copy = -1, length = 0;
  double total = 0;
  int h, c;
  qattn_kv_decode_options_init(&o);
  qattn_kv_bytes_init(&bytes);
  qattn_kv_usage_init(&usage);
  CHECK(qattn_kv_add_sequence(cache, &id) == QATTN_OK);
  CHECK(qattn_kv_append(cache, 0, &id, 1, &a, QATTN_LAYOUT_BSHD) == QATTN_OK);
  CHECK(qattn_kv_length(cache, id, 0, &length) == QATTN_OK && length == S);
  CHECK(qattn_kv_read(cache, id, 0, &tk, &tv, NULL) == QATTN_OK);
  CHECK(qattn_kv_decode(cache, 0, &id, 1, &d, &o) == QATTN_OK);
  for (h = 0; h < HQ; ++h) {
    for (c = 0; c < D; ++c) CHECK(fabs(out[h * D + c] - expected(h, c)) < 1e-3);
  }
  for (c = 0; c < HQ * 19; ++c) total += mass[c];
  CHECK(fabs(total - HQ) < 1e-4);
  debias(cache, id);
  CHECK(qattn_kv_observe(cache, 0, &id, 1, &tm) == QATTN_OK);
  CHECK(qattn_kv_get_usage(cache, id, 0, &usage) == QATTN_OK);
  CHECK(usage.window_tokens + usage.tier_tokens[0] == S);
  CHECK(qattn_kv_fork(cache, id, &copy) == QATTN_OK && copy != id);
  CHECK(qattn_kv_truncate(cache, copy, 100) == QATTN_OK);
  CHECK(qattn_kv_evict(cache, copy, -1, -1, 0, 16) == QATTN_OK);
  CHECK(qattn_kv_get_bytes(cache, &bytes) == QATTN_OK);
  CHECK(bytes.total ==
        bytes.codes + bytes.scales + bytes.window + bytes.tables + bytes.means + bytes.spare);
  CHECK(qattn_kv_save(cache, "qattn_abi_kv_test.safetensors") == QATTN_OK);
  CHECK(qattn_kv_load("qattn_abi_kv_test.safetensors", 0, &loaded) == QATTN_OK);
  CHECK(qattn_kv_length(loaded, copy, 0, &length) == QATTN_OK && length == 100);
  qattn_kv_destroy(loaded);
  CHECK(remove("qattn_abi_kv_test.safetensors") == 0);
  CHECK(qattn_kv_load("qattn_abi_kv_test.safetensors", 0, &loaded) == QATTN_INVALID_ARGUMENT);
  CHECK(qattn_kv_release(cache, id) == QATTN_OK);
  CHECK(qattn_kv_release(cache, id) == QATTN_INVALID_ARGUMENT);
  CHECK(strcmp(qattn_last_error(), "sequence: 0 is not one of this cache") == 0);
}

static void refusals(qattn_kv_cache* cache) {
  qattn_kv_options o;
  qattn_kv_cache* none = NULL;
  qattn_kv_append_tensors a = rows();
  int64_t id = 77, length;
  qattn_kv_options_init(&o);
  o.average_bits = 3;
  o.budget_from = 100;
  CHECK(qattn_kv_create(&o, &none) == QATTN_INVALID_ARGUMENT && none == NULL);
  CHECK(strstr(qattn_last_error(), "it holds from") != NULL);
  CHECK(qattn_kv_shortest_length(&o, &length) == QATTN_OK && length > 1000);
  o.k_granularity = QATTN_PER_HEAD;
  CHECK(qattn_kv_create(&o, &none) == QATTN_INVALID_ARGUMENT);
  CHECK(strstr(qattn_last_error(), "k_granularity: per_head is neither") != NULL);
  o.k_granularity = QATTN_PER_TOKEN;
  o.reserved = 7;
  CHECK(qattn_kv_create(&o, &none) == QATTN_INVALID_ARGUMENT);
  CHECK(strcmp(qattn_last_error(), "reserved: 7 is not 0") == 0);
  o.reserved = 0;
  o.tier_count = 8;
  CHECK(qattn_kv_create(&o, &none) == QATTN_INVALID_ARGUMENT);
  o.struct_size = 3;
  CHECK(qattn_kv_create(&o, &none) == QATTN_INVALID_ARGUMENT);
  CHECK(qattn_kv_create(NULL, &none) == QATTN_INVALID_ARGUMENT);
  CHECK(qattn_kv_create(&o, NULL) == QATTN_INVALID_ARGUMENT);
  CHECK(qattn_kv_add_sequence(NULL, &id) == QATTN_INVALID_ARGUMENT);
  CHECK(qattn_kv_append(cache, 0, &id, 1, &a, QATTN_LAYOUT_BSHD) == QATTN_INVALID_ARGUMENT);
  CHECK(qattn_kv_append(cache, 0, NULL, 1, &a, QATTN_LAYOUT_BSHD) == QATTN_INVALID_ARGUMENT);
  CHECK(qattn_kv_decode(cache, 0, &id, 1, NULL, NULL) == QATTN_INVALID_ARGUMENT);
  qattn_kv_destroy(NULL);
}

/* The struct of a caller that was compiled before k_granularity was in it: scales per token, and
 * nothing is written behind it. */
static void older_options(void) {
  qattn_kv_options o;
  const size_t older = offsetof(qattn_kv_options, k_granularity);
  qattn_kv_cache* cache = NULL;
  qattn_kv_append_tensors a = rows();
  qattn_kv_bytes bytes;
  int64_t id = -1;
  const int page = (S - 128) / 16 - 1;  /* in tiers */
  o.k_granularity = o.reserved = 12345; /* whatever lies there */
  qattn_kv_options_defaults(&o, older);
  CHECK(o.struct_size == older && o.k_granularity == 12345 && o.reserved == 12345);
  qattn_kv_bytes_init(&bytes);
  o.d = o.dv = D;
  o.tier_count = 1;
  CHECK(qattn_kv_create(&o, &cache) == QATTN_OK);
  if (cache == NULL) return;
  CHECK(qattn_kv_add_sequence(cache, &id) == QATTN_OK);
  CHECK(qattn_kv_append(cache, 0, &id, 1, &a, QATTN_LAYOUT_BSHD) == QATTN_OK);
  CHECK(qattn_kv_get_bytes(cache, &bytes) == QATTN_OK && bytes.scales == page * 64);
  qattn_kv_destroy(cache);
}

int main(void) {
  unsigned state = 1;
  qattn_kv_options o;
  qattn_kv_cache* cache = NULL;
  int i;
  for (i = 0; i < S * D; ++i) {
    k[i] = 2 * noise(&state);
    v[i] = noise(&state);
  }
  for (i = 0; i < HQ * D; ++i) q[i] = 2 * noise(&state);
  older_options();
  for (i = 0; i < 2; ++i) {
    qattn_kv_options_init(&o);
    o.d = o.dv = D;
    o.tier_count = 1;
    o.tiers[0].k_bits = 4;
    o.tiers[0].v_bits = 3;
    CHECK(o.k_granularity == QATTN_PER_TOKEN && o.reserved == 0);
    CHECK(o.balance_k == 1 && o.smooth_v == 1);
    o.smooth_v = 2;
    CHECK(qattn_kv_create(&o, &cache) == QATTN_INVALID_ARGUMENT);
    CHECK(strncmp(qattn_last_error(), "smooth_v: 2", 11) == 0);
    o.smooth_v = i;
    if (i == 1) o.k_granularity = QATTN_PER_CHANNEL;
    cache = NULL;
    CHECK(qattn_kv_create(&o, &cache) == QATTN_OK);
    if (cache != NULL) {
      use(cache);
      refusals(cache);
    }
    qattn_kv_destroy(cache);
  }
  printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
  return failures != 0;
}
