// Attention in bf16 for CPUs with AVX-512.
#include "rows.h"  // before avx512.h: float32.cpp includes it too

#include "../avx512.h"

#include "bf16_rows.h"
#include "stages.h"

namespace headstart {
namespace {

struct Bf16 {
    static constexpr int CHUNK_ROWS = headstart::CHUNK_ROWS;

    static bool write_row(bf16* to, float*, const bf16* from, int dim) {
        std::memcpy(to, from, dim * sizeof(bf16));
        return has_nonfinite(from, dim);
    }

    static void attend(const Rows<bf16>& rows, const Chunk* next) {
        const int all = rows.chunk.segment->num_rows * (rows.call.heads / rows.call.kv_heads);
        if (all <= FEW_ROWS) {
            attend_few(rows, next);
        } else {
            attend_chunk(rows);
        }
    }

    static float power(float x) { return _mm512_cvtss_f32(headstart::power(_mm512_set1_ps(x))); }

    static void store_row(bf16* to, const float* from, int dim, float factor) {
        for (int d = 0; d < dim; d += 16)
            store(to + d, dim - d, _mm512_maskz_loadu_ps(first_lanes(dim - d), from + d) * factor);
    }
};

}  // namespace

void attend(const AttentionStep& step, const AttentionCall& call, int thread, int threads,
            Stages& stages) {
    attend_layer<Bf16>(step, call, thread, threads, stages);
}

}  // namespace headstart

extern "C" void headstart_attend(const headstart::AttentionStep* step,
                                 const headstart::AttentionCall* call) {
    headstart::run<headstart::Bf16>(*step, *call);
}
