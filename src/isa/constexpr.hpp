// A constant expression of host and device code.
#pragma once

#if defined(__CUDACC__)
#define QATTN_CONSTEXPR __host__ __device__ constexpr
#else
#define QATTN_CONSTEXPR constexpr
#endif
