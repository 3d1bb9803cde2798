// The check of the CPU, the layout of shared structs, and the threads of the kernels.
#include "native.h"

#include <cstddef>

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "layer.h"
#include "recurrent.h"
#include "screen.h"

using namespace headstart;

bool headstart::use_amx = false;
int headstart::vnni = 0;

namespace {

using GompParallel = void (*)(void (*function)(void*), void* data, unsigned threads,
                              unsigned flags);
using GompNumber = int (*)();

GompParallel gomp_parallel = nullptr;
GompNumber gomp_thread = nullptr;
GompNumber gomp_threads = nullptr;

// Moves each thread of a parallel region to a separate core at its start. Linux often wakes a
// thread on the core of the thread that wakes it. The woken thread then waits while the other
// thread does the work of both, and both may stay on this core for seconds.
class Spread {
  public:
    Spread() : taken_(bit(sched_getcpu())) {}

    // Moves this thread to a free core if another thread of the region runs on its core.
    void settle() {
        const int core = sched_getcpu();
        if (core < 0 || core >= 64 || (taken_.fetch_or(bit(core)) & bit(core)) == 0) return;
        cpu_set_t allowed;
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
        for (int other = 0; other < 64; other++) {
            if (!CPU_ISSET(other, &allowed) || (taken_.fetch_or(bit(other)) & bit(other)) != 0)
                continue;
            cpu_set_t only;
            CPU_ZERO(&only);
            CPU_SET(other, &only);
            // The thread is not bound to the core: the scheduler may move it again later.
            if (sched_setaffinity(0, sizeof only, &only) == 0)
                sched_setaffinity(0, sizeof allowed, &allowed);
            return;
        }
    }

  private:
    static uint64_t bit(int core) { return core >= 0 && core < 64 ? uint64_t{1} << core : 0; }

    std::atomic<uint64_t> taken_;
};

// True if the CPU has AMX and the system allows this process to use it. On Linux, a process must
// request AMX. Called only once, since a later request may have another result.
bool request_amx() {
#if defined(HEADSTART_EMULATED)
    return true;
#else
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#endif
}

struct Region {
    headstart::Body body;
    void* data;
    Spread spread;
};

void enter(void* region) {
    Region& r = *static_cast<Region*>(region);
    const int thread = gomp_thread();
    if (thread > 0) r.spread.settle();
    r.body(r.data, thread, gomp_threads());
}

}  // namespace

void headstart::run_parallel(Body body, void* data, int threads) {
    if (threads <= 1 || gomp_parallel == nullptr) {
        body(data, 0, 1);
        return;
    }
    Region region{body, data, {}};
    gomp_parallel(enter, &region, static_cast<unsigned>(threads), 0);
}

// The size of a struct, or the offset of a field, in bytes.
struct LayoutEntry {
    const char* name;
    int64_t bytes;
};

#define SIZE(type) {#type, sizeof(type)}
#define FIELD(type, field) {#type "." #field, offsetof(type, field)}
#define TWO(type, first, second) FIELD(type, first), FIELD(type, second)
#define FOUR(type, first, second, third, last) TWO(type, first, second), TWO(type, third, last)

extern "C" {

// The structs that bindings.py mirrors; the last entry has no name.
extern const LayoutEntry headstart_layout[];
const LayoutEntry headstart_layout[] = {
    SIZE(Segment),
    FOUR(Segment, first_row, num_rows, first_position, table),
    TWO(Segment, first_key, last_key),
    FIELD(Segment, partial),
    SIZE(Merger),
    TWO(Merger, token, first_part),
    FIELD(Merger, last_part),
    SIZE(AttentionStep),
    FOUR(AttentionStep, slots, tables, rows, segments),
    FOUR(AttentionStep, mergers, parts, partials, nonfinite),
    FIELD(AttentionStep, threads),
    FOUR(AttentionStep, num_tokens, num_segments, num_mergers, block_shift),
    SIZE(AttentionCall),
    FOUR(AttentionCall, query, key, value, out),
    FOUR(AttentionCall, keys, values, key_scales, value_scales),
    FOUR(AttentionCall, sinks, query_strides, key_strides, value_strides),
    FOUR(AttentionCall, heads, kv_heads, key_dim, value_dim),
    TWO(AttentionCall, window, scaling),
    FIELD(AttentionCall, softcap),
    SIZE(Weight),
    FOUR(Weight, panels, bias, scales, columns),
    TWO(Weight, inputs, outputs),
    FIELD(Weight, kind),
    SIZE(Norm),
    TWO(Norm, weight, epsilon),
    FIELD(Norm, gemma),
    SIZE(Layer),
    FOUR(Layer, q, k, v, o),
    FOUR(Layer, gate, up, down, before),
    FOUR(Layer, after, attention_update, mlp_update, q_heads),
    TWO(Layer, k_heads, head_dim),
    FIELD(Layer, activation),
    SIZE(LayerRun),
    TWO(LayerRun, layer, step),
    FIELD(LayerRun, call),
    TWO(LayerRun, cos, sin),
    SIZE(Screen),
    TWO(Screen, panels, inputs),
    FIELD(Screen, outputs),
    SIZE(Sequences),
    FOUR(Sequences, starts, sources, targets, saves),
    TWO(Sequences, count, num_saves),
    SIZE(States),
    TWO(States, first, stride),
    SIZE(Strided),
    TWO(Strided, first, stride),
    SIZE(ConvCall),
    FOUR(ConvCall, rows, out, weight, bias),
    TWO(ConvCall, states, channels),
    FIELD(ConvCall, width),
    TWO(ConvCall, silu, bf16),
    SIZE(DeltaCall),
    FOUR(DeltaCall, query, key, value, a),
    FOUR(DeltaCall, b, out, a_log, dt_bias),
    FIELD(DeltaCall, states),
    FOUR(DeltaCall, key_heads, heads, key_dim, value_dim),
    FIELD(DeltaCall, bf16),
    SIZE(ScanCall),
    FOUR(ScanCall, x, b, c, dt),
    FOUR(ScanCall, out, a_log, d, dt_bias),
    FIELD(ScanCall, states),
    FOUR(ScanCall, groups, heads, head_dim, state),
    FIELD(ScanCall, bf16),
    TWO(ScanCall, shortest, longest),
    {nullptr, 0},
};

int headstart_native_interface() { return HEADSTART_NATIVE_INTERFACE; }

// The source files that this CPU can run: 3 all, 2 those that need AVX-512 with bf16, 1 those that
// need AVX2, FMA and F16C, 0 none.
int headstart_native_level() {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return 0;
    const bool all = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                     __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (!all) return 1;
    static const bool has_amx = request_amx();
    return has_amx ? 3 : 2;
}

// Switches the use of AMX on or off.
void headstart_native_use_amx(int use) { headstart::use_amx = use != 0; }

// The VNNI instructions of this CPU: 0 none, 1 AVX-VNNI, 2 AVX-512 VNNI, 3 both.
int headstart_native_vnni() {
    const bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    return (wide ? 2 : 0) + (__builtin_cpu_supports("avxvnni") ? 1 : 0);
}

void headstart_native_use_vnni(int value) { headstart::vnni = value; }

// Sets the addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads.
void headstart_native_threads(void* parallel, void* thread, void* threads) {
    gomp_parallel = reinterpret_cast<GompParallel>(parallel);
    gomp_thread = reinterpret_cast<GompNumber>(thread);
    gomp_threads = reinterpret_cast<GompNumber>(threads);
}

}  // extern "C"
