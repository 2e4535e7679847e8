/* One call from C: a decode step of one query over 256 keys. With qattn installed:
 *   cc attention.c $(pkg-config --cflags --libs qattn) -lm -o attention && ./attention */
#include <math.h>
#include <qattn/qattn.h>
#include <stdio.h>
#include <stdlib.h>

enum { keys = 256, heads = 4, dim = 64 };

static void fill(float* x, size_t count) {
  for (size_t i = 0; i < count; ++i) x[i] = (float)rand() / (float)RAND_MAX * 4 - 2;
}

int main(void) {
  static float q[heads * dim], k[keys * heads * dim], v[keys * heads * dim], out[heads * dim];
  fill(q, heads * dim);
  fill(k, keys * heads * dim);
  fill(v, keys * heads * dim);

  /* init functions fill structs: fields of later versions get their defaults. */
  qattn_attention_tensors tensors;
  qattn_attention_options options;
  qattn_attention_tensors_init(&tensors);
  qattn_attention_options_init(&options);
  const int64_t one[4] = {1, 1, heads, dim}, all[4] = {1, keys, heads, dim}; /* (B, S, H, D) */
  tensors.q = qattn_tensor_dense(q, QATTN_FORMAT_f32, 4, one);
  tensors.k = qattn_tensor_dense(k, QATTN_FORMAT_f32, 4, all);
  tensors.v = qattn_tensor_dense(v, QATTN_FORMAT_f32, 4, all);
  tensors.out = qattn_tensor_dense(out, QATTN_FORMAT_f32, 4, one);
  options.recipe = "int8_full";
  if (qattn_attention(&tensors, &options) != QATTN_OK) {
    fprintf(stderr, "%s\n", qattn_last_error()); /* names the tensor, the value and the rule */
    return 1;
  }

  /* Head 1 by hand. */
  double want[dim] = {0}, sum = 0, error = 0, norm = 0;
  for (int j = 0; j < keys; ++j) {
    double s = 0;
    for (int c = 0; c < dim; ++c) s += (double)q[dim + c] * k[(j * heads + 1) * dim + c];
    const double p = exp(s / 8);
    sum += p;
    for (int c = 0; c < dim; ++c) want[c] += p * v[(j * heads + 1) * dim + c];
  }
  for (int c = 0; c < dim; ++c) {
    const double truth = want[c] / sum, off = out[dim + c] - truth;
    error += off * off;
    norm += truth * truth;
  }
  printf("C, qattn %s: error %.1e\n", qattn_version(), sqrt(error / norm));
  return sqrt(error / norm) < 0.05 ? 0 : 1;
}
