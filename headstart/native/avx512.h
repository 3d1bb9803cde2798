// Included by every file whose functions need AVX-512 with bf16 and VNNI.
//
// The compiler gets no -mavx flags, since functions that check the CPU must run on any CPU. Include
// standard headers, and headers for files of other CPUs, before the pragma. If several files define
// an inline function, the linker keeps one copy, which must not contain AVX-512.
#pragma once

#include "weight.h"

#ifndef HEADSTART_EMULATED
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma")
#endif
