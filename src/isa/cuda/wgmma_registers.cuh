// Operand lists of wgmma: placeholders and constraints of the first 4, 8, 16, ... registers of `d`.
// PTX wants them spelled out; here they are spelled once.
#pragma once

#define QATTN_TEXT_OF(x) #x
#define QATTN_TEXT(x) QATTN_TEXT_OF(x)

#define QATTN_D4 "%0, %1, %2, %3"
#define QATTN_D8 QATTN_D4 ", %4, %5, %6, %7"
#define QATTN_D16 QATTN_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define QATTN_D32 \
  QATTN_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QATTN_D36 QATTN_D32 ", %32, %33, %34, %35"
#define QATTN_D48 \
  QATTN_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define QATTN_D52 QATTN_D48 ", %48, %49, %50, %51"
#define QATTN_D64 \
  QATTN_D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define QATTN_D68 QATTN_D64 ", %64, %65, %66, %67"
#define QATTN_D96                                                                    \
  QATTN_D64                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define QATTN_D128                                                                       \
  QATTN_D96                                                                              \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109"     \
  ", %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123" \
  ", %124, %125, %126, %127"

// `c` is the constraint, "+f" or "+r".
#define QATTN_O4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define QATTN_O8(c, i) QATTN_O4(c, i), QATTN_O4(c, i + 4)
#define QATTN_O16(c, i) QATTN_O8(c, i), QATTN_O8(c, i + 8)
#define QATTN_O32(c, i) QATTN_O16(c, i), QATTN_O16(c, i + 16)
#define QATTN_O36(c, i) QATTN_O32(c, i), QATTN_O4(c, i + 32)
#define QATTN_O48(c, i) QATTN_O32(c, i), QATTN_O16(c, i + 32)
#define QATTN_O52(c, i) QATTN_O48(c, i), QATTN_O4(c, i + 48)
#define QATTN_O64(c, i) QATTN_O32(c, i), QATTN_O32(c, i + 32)
#define QATTN_O68(c, i) QATTN_O64(c, i), QATTN_O4(c, i + 64)
#define QATTN_O96(c, i) QATTN_O64(c, i), QATTN_O32(c, i + 64)
#define QATTN_O128(c, i) QATTN_O64(c, i), QATTN_O64(c, i + 64)

// The instruction, with A from shared memory and with A from registers. QATTN_N, QATTN_D, QATTN_OUT
// and QATTN_P0.. (the placeholders that follow d's) come from words_wgmma.cuh; `tail` holds the
// immediates, whose operands are the last arguments.
#define QATTN_WGMMA_SHARED(types, c, tail, ...)                                    \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " QATTN_P2                    \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" QATTN_TEXT(QATTN_N) types \
               " {" QATTN_D "}, " QATTN_P0 ", " QATTN_P1 ", add" tail ";\n}"       \
               : QATTN_OUT(c, 0)                                                   \
               : "l"(a), "l"(b), "r"(add)__VA_OPT__(, ) __VA_ARGS__)
#define QATTN_WGMMA_REGISTERS(types, c, tail, ...)                                    \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " QATTN_P5                       \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" QATTN_TEXT(QATTN_N) types    \
               " {" QATTN_D "}, {" QATTN_P0 ", " QATTN_P1 ", " QATTN_P2 ", " QATTN_P3 \
               "}, " QATTN_P4 ", add" tail ";\n}"                                     \
               : QATTN_OUT(c, 0)                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                  \
                 "r"(add)__VA_OPT__(, ) __VA_ARGS__)
