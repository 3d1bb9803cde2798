// Advice to the operating system about pages of memory.
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

extern "C" {

// Maps all pages of a file that was read before in one call; a fault for every page takes four
// times as long. Does nothing on systems without this advice.
void headstart_map_pages(const void* memory, int64_t bytes) {
#ifdef MADV_POPULATE_READ
    const uintptr_t page = 4096, start = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t from = start / page * page;
    const uintptr_t to = (start + static_cast<uintptr_t>(bytes) + page - 1) / page * page;
    madvise(reinterpret_cast<void*>(from), to - from, MADV_POPULATE_READ);
#else
    (void)memory, (void)bytes;
#endif
}

// Asks for pages of 2 MiB: fewer TLB misses.
void headstart_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = 1 << 21, start = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t from = (start + page - 1) / page * page;
    const uintptr_t to = (start + static_cast<uintptr_t>(bytes)) / page * page;
    if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

}  // extern "C"
