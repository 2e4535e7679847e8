/* The C interface of an installed library: one query that sees one key returns its value. */
#include <qattn/qattn.h>
#include <stdio.h>

int main(void) {
  float q[8] = {1}, k[8] = {1}, v[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8] = {0};
  const int64_t shape[4] = {1, 1, 1, 8};
  qattn_attention_tensors tensors;
  qattn_attention_options options;
  qattn_attention_tensors_init(&tensors);
  qattn_attention_options_init(&options);
  options.recipe = "f32";
  tensors.q = qattn_tensor_dense(q, QATTN_FORMAT_f32, 4, shape);
  tensors.k = qattn_tensor_dense(k, QATTN_FORMAT_f32, 4, shape);
  tensors.v = qattn_tensor_dense(v, QATTN_FORMAT_f32, 4, shape);
  tensors.out = qattn_tensor_dense(out, QATTN_FORMAT_f32, 4, shape);
  if (qattn_attention(&tensors, &options) != QATTN_OK) {
    fprintf(stderr, "%s\n", qattn_last_error());
    return 1;
  }
  for (int i = 0; i < 8; ++i)
    if (out[i] != v[i]) return 2;
  printf("C, qattn %s: out[7] = %g\n", qattn_version(), out[7]);
  return 0;
}
