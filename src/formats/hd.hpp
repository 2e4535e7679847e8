// QATTN_HD marks a function that host code and GPU kernels both call, so that a format has one
// implementation and the codes agree bit for bit on every backend.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define QATTN_HD __host__ __device__ inline
#else
#define QATTN_HD inline
#endif
