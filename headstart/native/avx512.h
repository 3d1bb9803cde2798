// Must be included first in every file whose functions need AVX-512 with bf16 and VNNI.
//
// The compiler gets no -mavx flags, since functions that check the CPU must run on any CPU. Headers
// that are also used by files for other CPUs must be included before the pragma: if several files
// define an inline function, the linker keeps only one copy. So native.h includes all standard
// headers.
#pragma once

#include "weight.h"

#ifndef HEADSTART_EMULATED
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma")
#endif
