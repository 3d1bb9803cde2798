// One layer's attention in stages: write K and V, attend chunk by chunk on all threads, merge.
//
// A Kernel computes with numbers of one type on one kind of CPU:
//
//     CHUNK_ROWS                          the most rows of a chunk
//     write_row(to, scale, from, dim)     writes a head of K or V, and its scale unless `scale` is
//                                         null; true if one of its elements is not finite
//     attend(rows, next)                  attends with a chunk's rows; may prefetch the first keys
//                                         of `next`, this thread's likely next chunk (or nullptr)
//     power(x)                            2^x
//     store_row(to, from, dim, factor)    writes floats times a factor
#pragma once

#include "rows.h"

namespace headstart {

// Writes K and V of tokens `from` to `to` - 1 into their slots.
template <class Kernel, class Number, class Stored>
void write_rows(const AttentionStep& step, const Call<Number, Stored>& call, int from, int to) {
    const auto scale = [](float* scales, int64_t at) { return scales ? scales + at : nullptr; };
    for (int64_t token = from; token < to; ++token) {
        bool has_nonfinite = false;
        for (int64_t head = 0; head < call.kv_heads; ++head) {
            const int64_t at = step.slots[token] * call.kv_heads + head;
            has_nonfinite |= Kernel::write_row(
                call.keys + at * call.key_dim, scale(call.key_scales, at),
                call.key + token * call.key_strides[0] + head * call.key_strides[1], call.key_dim);
            has_nonfinite |= Kernel::write_row(
                call.values + at * call.value_dim, scale(call.value_scales, at),
                call.value + token * call.value_strides[0] + head * call.value_strides[1],
                call.value_dim);
        }
        if (has_nonfinite) step.nonfinite[token] = 1;
    }
}

// Cuts the segments into chunks, the last rows of a segment first, since they have the most keys.
// With the small chunks last, threads finish at nearly the same time.
template <class Kernel, class Number, class Stored>
void cut(const AttentionStep& step, const Call<Number, Stored>& call, std::vector<Chunk>& chunks) {
    constexpr int most = Kernel::CHUNK_ROWS;
    chunks.clear();
    for (int i = 0; i < step.num_segments; ++i) {
        const Segment& segment = step.segments[i];
        const int rows = segment.num_rows * (call.heads / call.kv_heads);
        for (int first = (rows - 1) / most * most; first >= 0; first -= most)
            for (int head = 0; head < call.kv_heads; ++head)
                chunks.push_back({&segment, head, first, std::min(most, rows - first)});
    }
}

template <class Kernel, class Number, class Stored>
void attend_some(const AttentionStep& step, const Call<Number, Stored>& call, int threads,
                 Stages& stages) {
    static thread_local std::vector<Chunk> chunks;  // with the same content in every thread
    cut<Kernel>(step, call, chunks);
    const int64_t count = static_cast<int64_t>(chunks.size());
    for (int64_t i = stages.take(1); i < count; i = stages.take(1))
        Kernel::attend(Rows<Number, Stored>{step, call, chunks[i]},
                       i + threads < count ? &chunks[i + threads] : nullptr);
}

// o = sum of o_i 2^(m_i - m) / sum of l_i 2^(m_i - m), where m is the largest of the maxima m_i.
template <class Kernel, class Number, class Stored>
void merge_head(const AttentionStep& step, const Call<Number, Stored>& call, const Merger& merger,
                int head) {
    const int dim = call.value_dim;
    const auto partial = [&](int part) {
        return step.partials +
               (static_cast<int64_t>(step.parts[part]) * call.heads + head) * (2 + dim);
    };
    float maximum = partial(merger.first_part)[0];
    for (int part = merger.first_part + 1; part < merger.last_part; ++part)
        maximum = std::max(maximum, partial(part)[0]);
    float out[MAX_DIM] = {}, sum = 0.0f;
    for (int part = merger.first_part; part < merger.last_part; ++part) {
        const float* from = partial(part);
        const float share = Kernel::power(from[0] - maximum);
        sum += from[1] * share;
        for (int d = 0; d < dim; ++d) out[d] += from[2 + d] * share;
    }
    Kernel::store_row(call.out + (static_cast<int64_t>(merger.token) * call.heads + head) * dim,
                      out, dim, 1.0f / sum);
}

// A thread's share of one layer's attention. Ends with a barrier of all threads.
template <class Kernel, class Number, class Stored>
void attend_layer(const AttentionStep& step, const Call<Number, Stored>& call, int thread,
                  int threads, Stages& stages) {
    const int64_t tokens = step.num_tokens;
    write_rows<Kernel>(step, call, static_cast<int>(tokens * thread / threads),
                       static_cast<int>(tokens * (thread + 1) / threads));
    stages.finish(threads);
    attend_some<Kernel>(step, call, threads, stages);
    stages.finish(threads);
    if (step.num_mergers == 0) return;
    for (int i = thread; i < step.num_mergers; i += threads)
        for (int head = 0; head < call.heads; ++head)
            merge_head<Kernel>(step, call, step.mergers[i], head);
    stages.finish(threads);
}

// One layer's attention on all of the step's threads.
template <class Kernel, class Number, class Stored>
void run(const AttentionStep& step, const Call<Number, Stored>& call) {
    Stages stages;
    parallel(step.threads, [&](int thread, int threads) {
        attend_layer<Kernel>(step, call, thread, threads, stages);
    });
}

}  // namespace headstart
