// One layer's attention: write K and V, attend chunk by chunk on all threads, merge partials.
#include "avx512.h"

#include "attention.h"

#include <algorithm>
#include <vector>

namespace headstart {
namespace {

// Copies a row; returns true if one of its elements is not finite.
bool copy_row(bf16* to, const bf16* from, int dim) {
    __mmask32 found = 0;
    for (int d = 0; d < dim; d += 32) {
        const __m512i numbers = load_pairs(from + d, dim - d);
        store_pairs(to + d, dim - d, numbers);
        found |= nonfinite(numbers);
    }
    return found != 0;
}

// Writes K and V of tokens `from` to `to` - 1 into their slots.
void write_rows(const AttentionStep& step, const AttentionCall& call, int from, int to) {
    for (int64_t token = from; token < to; ++token) {
        bf16* key = call.keys + step.slots[token] * call.kv_heads * call.key_dim;
        bf16* value = call.values + step.slots[token] * call.kv_heads * call.value_dim;
        bool found = false;
        for (int64_t head = 0; head < call.kv_heads; ++head) {
            found |= copy_row(key + head * call.key_dim,
                              call.key + token * call.key_strides[0] + head * call.key_strides[1],
                              call.key_dim);
            found |= copy_row(
                value + head * call.value_dim,
                call.value + token * call.value_strides[0] + head * call.value_strides[1],
                call.value_dim);
        }
        if (found) step.nonfinite[token] = 1;
    }
}

// Cuts the segments into chunks, the last rows of a segment first: they have the most keys. With
// the small chunks last, threads finish at nearly the same time.
void cut(const AttentionStep& step, const AttentionCall& call, std::vector<Chunk>& chunks) {
    chunks.clear();
    for (int i = 0; i < step.num_segments; ++i) {
        const Segment& segment = step.segments[i];
        const int rows = segment.num_rows * (call.heads / call.kv_heads);
        for (int first = (rows - 1) / CHUNK_ROWS * CHUNK_ROWS; first >= 0; first -= CHUNK_ROWS)
            for (int head = 0; head < call.kv_heads; ++head)
                chunks.push_back({&segment, head, first, std::min(CHUNK_ROWS, rows - first)});
    }
}

void attend_some(const AttentionStep& step, const AttentionCall& call, int threads, Stages& stages) {
    static thread_local std::vector<Chunk> chunks;  // the same in every thread
    cut(step, call, chunks);
    const int64_t count = static_cast<int64_t>(chunks.size());
    for (int64_t i = stages.take(1); i < count; i = stages.take(1)) {
        const int rows = chunks[i].segment->num_rows * (call.heads / call.kv_heads);
        if (rows <= FEW_ROWS) {
            attend_few(step, call, chunks[i], i + threads < count ? &chunks[i + threads] : nullptr);
        } else {
            attend_chunk(step, call, chunks[i]);
        }
    }
}

// o = sum of o_i 2^(m_i - m) / sum of l_i 2^(m_i - m), where m is the largest of the maxima m_i.
void merge_head(const AttentionStep& step, const AttentionCall& call, const Merger& merger,
                int head) {
    const int dim = call.value_dim;
    const auto partial = [&](int part) {
        return step.partials +
               (static_cast<int64_t>(step.parts[part]) * call.heads + head) * (2 + dim);
    };
    float maximum = partial(merger.first_part)[0];
    for (int part = merger.first_part + 1; part < merger.last_part; ++part)
        maximum = std::max(maximum, partial(part)[0]);
    __m512 out[MAX_DIM / 16];
    float sum = 0.0f;
    for (int d = 0; d < dim; d += 16) out[d / 16] = _mm512_setzero_ps();
    for (int part = merger.first_part; part < merger.last_part; ++part) {
        const float* from = partial(part);
        const __m512 share = exp2(_mm512_set1_ps(from[0] - maximum));
        sum += from[1] * _mm512_cvtss_f32(share);
        for (int d = 0; d < dim; d += 16) {
            const __m512 row = _mm512_maskz_loadu_ps(first_lanes(dim - d), from + 2 + d);
            out[d / 16] = _mm512_fmadd_ps(row, share, out[d / 16]);
        }
    }
    bf16* to = call.out + (static_cast<int64_t>(merger.token) * call.heads + head) * dim;
    for (int d = 0; d < dim; d += 16) {
        const __m512 row = _mm512_mul_ps(out[d / 16], _mm512_set1_ps(1.0f / sum));
        store(to + d, dim - d, row);
    }
}

}  // namespace

void attend(const AttentionStep& step, const AttentionCall& call, int thread, int threads,
            Stages& stages) {
    const int64_t tokens = step.num_tokens;
    write_rows(step, call, static_cast<int>(tokens * thread / threads),
               static_cast<int>(tokens * (thread + 1) / threads));
    stages.finish(threads);
    attend_some(step, call, threads, stages);
    stages.finish(threads);
    if (step.num_mergers == 0) return;
    for (int i = thread; i < step.num_mergers; i += threads)
        for (int head = 0; head < call.heads; ++head) merge_head(step, call, step.mergers[i], head);
    stages.finish(threads);
}

}  // namespace headstart

extern "C" {

void headstart_attend(const headstart::AttentionStep* step, const headstart::AttentionCall* call) {
    headstart::Stages stages;
    headstart::parallel(step->threads, [&](int thread, int threads) {
        headstart::attend(*step, *call, thread, threads, stages);
    });
}

}  // extern "C"
