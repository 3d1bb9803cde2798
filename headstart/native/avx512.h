// Comes first in every file whose functions need AVX-512 with bf16 and VNNI.
//
// The compiler gets no -mavx flags: they would put such instructions into the functions that ask
// what the CPU has. Headers that files for other CPUs include too come before the pragma for the same
// reason: of an inline function that several files define, the linker keeps one. So native.h includes
// the standard ones for all.
#pragma once

#include "weight.h"

#ifndef HEADSTART_EMULATED
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma")
#endif
