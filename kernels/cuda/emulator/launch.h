// Running a grid: stacks, shared memory, faults, and the types of a kernel's parameters.
#pragma once
#include <csignal>
#include <cstddef>
#include <sys/mman.h>
#include <type_traits>
#include <unistd.h>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "threads.h"

namespace emu {

// Static shared memory lies in a section of its own: it is poisoned when a block starts.
extern "C" {
extern char __start_emu_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emu_shared[] __attribute__((weak, visibility("hidden")));
}

static size_t page() { return (size_t)sysconf(_SC_PAGESIZE); }

enum : size_t { STACK = 32 << 10 };  // local arrays of a kernel; a GPU keeps them in registers

// Below each stack lies a page nobody may touch. Stacks that begin at the same place in a page share
// cache sets and are slower by up to 40 %, so each begins a few lines further.
static char* top_of_stack(int i) {
  return block.stacks + (size_t)(i + 1) * (STACK + page()) - (i % 37 + 1) * 64;
}

// Modules share one set of stacks, since each page of these is a mapping that a process may have some
// ten thousand of. `given` are those of an earlier module, or null.
static char* use_stacks(char* given) {
  size_t stride = STACK + page();
  if (!given) {
    void* made = mmap(nullptr, MAX_THREADS * stride, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return nullptr;
    given = (char*)made;
    for (int i = 0; i < MAX_THREADS; i++) mprotect(given + i * stride, page(), PROT_NONE);
  }
  return block.stacks = given;
}

// A fault on a full stack is answered on another one, which each thread has to name.
static void use_signal_stack() {
  static char own[64 << 10];
  stack_t alternative{};
  alternative.ss_sp = own;
  alternative.ss_size = sizeof own;
  sigaltstack(&alternative, nullptr);
}

// Dynamic shared memory ends where a page begins that nobody may touch (in steps of 16 bytes).
static void map_dynamic(size_t bytes) {
  if (block.dynamic_base && block.dynamic_bytes == bytes) return;
  if (block.dynamic_base) munmap(block.dynamic_base, block.dynamic_mapped);
  size_t used = (bytes + 15) & ~(size_t)15, whole = (used + page() - 1) / page() * page();
  block.dynamic_mapped = whole + page();
  block.dynamic_base = (char*)mmap(nullptr, block.dynamic_mapped, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(block.dynamic_base + whole, page(), PROT_NONE);
  block.dynamic = block.dynamic_base + whole - used;
  block.dynamic_bytes = bytes;
}

static inline char* dynamic_shared() { return block.dynamic; }

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
enum { N_SIGNALS = 5 };

static void on_fault(int signal_number, siginfo_t* info, void*) {
  if (!block.is_running) {
    signal(signal_number, SIG_DFL);
    raise(signal_number);
    return;
  }
  const char* what = signal_number == SIGSEGV || signal_number == SIGBUS ? "illegal memory access"
                     : signal_number == SIGFPE ? "division by zero"
                     : "undefined behaviour (misaligned access, array bound or shift)";
  uint3 t = block.current->index, b = block.index;
  snprintf(block.message, sizeof block.message,
           "%s at address %p by thread (%u,%u,%u) of block (%u,%u,%u)", what, info->si_addr, t.x, t.y,
           t.z, b.x, b.y, b.z);
  siglongjmp(block.failed, FAULT);
}

// Subnormals are zero, as CuPy compiles for the GPU (-ftz=true).
static uint64_t flush_subnormals() {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
#else
  uint64_t before;
  asm volatile("mrs %0, fpcr" : "=r"(before));
  asm volatile("msr fpcr, %0" ::"r"(before | (1u << 24)));
#endif
  return before;
}
static void restore_floats(uint64_t before) {
#if defined(__x86_64__)
  _mm_setcsr((unsigned)before);
#else
  asm volatile("msr fpcr, %0" ::"r"(before));
#endif
}

static void start_block(uint64_t number, int poison) {
  const uint3& grid = block.grid;
  block.index = {(unsigned)(number % grid.x), (unsigned)(number / grid.x % grid.y),
                 (unsigned)(number / ((uint64_t)grid.x * grid.y))};
  if (poison) {
    if (&__start_emu_shared[0]) memset(__start_emu_shared, 0xFF, __stop_emu_shared - __start_emu_shared);
    if (block.dynamic_bytes) memset(block.dynamic, 0xFF, block.dynamic_bytes);
  }
  int n = block.n_live = block.n_threads;
  block.n_waiting = 0;
  for (int w = 0; w < block.n_warps; w++) {
    Warp& warp = block.warps[w];
    warp.runnable = warp.live = (w + 1) * 32 <= n ? 0xffffffffu : (1u << (n & 31)) - 1;
    warp.at_barrier = 0;
    for (Collective& c : warp.pending) c.mask = 0;
  }
  for (int i = 0; i < n; i++) {
    void** words = (void**)top_of_stack(i) - SAVED_WORDS;
    memset(words, 0, SAVED_WORDS * sizeof(void*));
    words[RETURN_WORD] = (void*)fiber_main;
    block.fibers[i].stack_pointer = words;
    block.fibers[i].state = READY;
  }
}

static int launch(void (*kernel)(void**), void** arguments, const unsigned* grid, const unsigned* size,
                  size_t dynamic_bytes, int order, uint64_t seed, int poison) {
  uint64_t n = (uint64_t)size[0] * size[1] * size[2];
  if (!n || n > MAX_THREADS || size[2] > 64) {
    snprintf(block.message, sizeof block.message, "invalid block size %ux%ux%u", size[0], size[1], size[2]);
    return BAD_LAUNCH;
  }
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535) {
    snprintf(block.message, sizeof block.message, "invalid grid size %ux%ux%u", grid[0], grid[1], grid[2]);
    return BAD_LAUNCH;
  }
  use_signal_stack();
  map_dynamic(dynamic_bytes);
  struct sigaction mine{}, before[N_SIGNALS];
  mine.sa_sigaction = on_fault;
  mine.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < N_SIGNALS; i++) sigaction(SIGNALS[i], &mine, &before[i]);
  volatile uint64_t floats = flush_subnormals();
  block.order = order;
  block.random = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  block.kernel = kernel;
  block.arguments = arguments;
  block.message[0] = 0;
  block.size = {size[0], size[1], size[2]};
  block.grid = {grid[0], grid[1], grid[2]};
  block.n_threads = (int)n;
  block.n_warps = (int)(n + 31) / 32;
  for (unsigned i = 0; i < n; i++) {
    Fiber& fiber = block.fibers[i];
    fiber.lane = i & 31;
    fiber.warp = i >> 5;
    fiber.index = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
  }
  int code = sigsetjmp(block.failed, 1);
  if (!code) {
    block.is_running = 1;
    uint64_t n_blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    for (uint64_t i = 0; i < n_blocks; i++) {
      start_block(order == DESCENDING ? n_blocks - 1 - i : i, poison);
      Fiber* first = next_fiber(order == DESCENDING ? 0 : block.n_warps - 1, order == DESCENDING ? 0 : 31);
      block.current = first;
      emu_switch(&block.scheduler, first->stack_pointer);
    }
  }
  block.is_running = 0;
  restore_floats(floats);
  for (int i = 0; i < N_SIGNALS; i++) sigaction(SIGNALS[i], &before[i], nullptr);
  return code;
}

template <class... A, size_t... I>
static inline void call_with(void (*f)(A...), void** a, std::index_sequence<I...>) {
  f(*(std::remove_cv_t<std::remove_reference_t<A>>*)a[I]...);
}
template <class... A>
static inline void call(void (*f)(A...), void** a) { call_with(f, a, std::index_sequence_for<A...>{}); }

// A parameter's type as numpy writes it ("i4", "f4"), "p" for a pointer.
template <class T>
static void describe(char*& out) {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_pointer_v<U>) *out++ = 'p';
  else out += sprintf(out, "%c%d", std::is_floating_point_v<U> ? 'f' : std::is_signed_v<U> ? 'i' : 'u', (int)sizeof(U));
  *out++ = ' ';
}
template <class... A>
static const char* parameters(void (*)(A...)) {
  static char text[256];
  char* out = text;
  (describe<A>(out), ...);
  *out = 0;
  return text;
}

}  // namespace emu
