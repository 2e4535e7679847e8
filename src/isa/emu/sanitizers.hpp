// Which sanitizers this is compiled with: GCC defines macros, clang has features.
#pragma once

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define QATTN_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#define QATTN_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define QATTN_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
#define QATTN_TSAN 1
#endif
