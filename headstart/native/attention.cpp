// One layer's attention: write K and V, attend chunk by chunk on all threads, merge partials.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "native.h"

namespace headstart {
namespace {

// Below so many tokens a write, or a merger, takes less time than waking a thread.
constexpr int WRITE_ALONE = 128;
constexpr int MERGE_ALONE = 8;

// Tokens `from` to `to` - 1 of K and V into their slots.
void write_rows(const AttentionStep& step, const AttentionCall& call, int from, int to) {
    const size_t key_bytes = call.key_dim * sizeof(bf16);
    const size_t value_bytes = call.value_dim * sizeof(bf16);
    for (int64_t token = from; token < to; ++token) {
        bf16* key = call.keys + step.slots[token] * call.kv_heads * call.key_dim;
        bf16* value = call.values + step.slots[token] * call.kv_heads * call.value_dim;
        for (int64_t head = 0; head < call.kv_heads; ++head) {
            std::memcpy(key + head * call.key_dim,
                        call.key + token * call.key_strides[0] + head * call.key_strides[1],
                        key_bytes);
            std::memcpy(value + head * call.value_dim,
                        call.value + token * call.value_strides[0] + head * call.value_strides[1],
                        value_bytes);
        }
    }
}

void write_all(const AttentionStep& step, const AttentionCall& call) {
    const int threads = step.num_tokens < WRITE_ALONE ? 1 : step.threads;
    parallel(threads, [&](int thread, int all) {
        const int64_t tokens = step.num_tokens;
        write_rows(step, call, static_cast<int>(tokens * thread / all),
                   static_cast<int>(tokens * (thread + 1) / all));
    });
}

// The segments in chunks, the last rows of a segment first: they have the most keys, and threads
// that are left with the small pieces end together.
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

void attend_all(const AttentionStep& step, const AttentionCall& call) {
    static thread_local std::vector<Chunk> chunks;
    cut(step, call, chunks);
    const int count = static_cast<int>(chunks.size());
    const Chunk* list = chunks.data();
    std::atomic<int> next{0};
    parallel(std::min(step.threads, count), [&](int, int all) {
        for (int i = next++; i < count; i = next++) {
            const int rows = list[i].segment->num_rows * (call.heads / call.kv_heads);
            if (rows <= FEW_ROWS) {
                attend_few(step, call, list[i], i + all < count ? &list[i + all] : nullptr);
            } else {
                attend_chunk(step, call, list[i]);
            }
        }
    });
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
        _mm256_mask_storeu_epi16(to + d, first_lanes(dim - d),
                                 reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(row)));
    }
}

void merge_all(const AttentionStep& step, const AttentionCall& call) {
    const int threads = step.num_mergers < MERGE_ALONE ? 1 : step.threads;
    parallel(threads, [&](int thread, int all) {
        for (int i = thread; i < step.num_mergers; i += all)
            for (int head = 0; head < call.heads; ++head)
                merge_head(step, call, step.mergers[i], head);
    });
}

}  // namespace
}  // namespace headstart

extern "C" {

void headstart_attend(const headstart::AttentionStep* step, const headstart::AttentionCall* call) {
    headstart::write_all(*step, *call);
    headstart::attend_all(*step, *call);
    headstart::merge_all(*step, *call);
}

}  // extern "C"
