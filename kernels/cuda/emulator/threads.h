// The threads of a CUDA block as fibers of one CPU thread, and where they meet.
//
// A fiber runs until it comes to a barrier or a warp operation; who runs next is a matter of the
// order asked for (ascending, descending, random), so that a kernel which depends on it is found
// out. Blocks run one after another. What a GPU would answer with a wrong result or a hang is an
// error with its line, thread and block.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstring>

struct uint3 { unsigned x, y, z; };

namespace emu {

enum { MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / 32, PENDING = 4 };
enum State : uint8_t { READY, IN_WARP_OPERATION, AT_BARRIER, EXITED };
enum Order { ASCENDING, DESCENDING, RANDOM };
enum Code { OK, BAD_LAUNCH, FAULT, MISUSE };

struct Fiber {
  void* stack_pointer;
  uint3 index;
  int lane, warp, line;
  State state;
};

// An operation that all lanes of a mask take part in. Diverged halves of a warp may each wait in one.
struct Collective {
  uint32_t mask, arrived, left;
  int kind, line;
  uint64_t value[32];
};

struct Warp {
  uint32_t runnable, live, at_barrier;
  Collective pending[PENDING];
  alignas(16) char fragment[32][32];  // registers that lanes show each other for a matrix product
};

struct Block {
  Fiber fibers[MAX_THREADS];
  Warp warps[MAX_WARPS];
  Fiber* current;
  void* scheduler;  // the stack that launches
  int n_threads, n_warps, n_live, n_waiting, barrier_line, barrier_site;
  uint3 index, size, grid;
  void (*kernel)(void**);
  void** arguments;
  char *stacks, *dynamic, *dynamic_base;
  size_t dynamic_mapped, dynamic_bytes;
  int order;
  uint64_t random;
  sigjmp_buf failed;
  volatile int is_running;
  char message[512];
};
static Block block;

template <class... A>
[[noreturn]] static void misuse(const char* format, A... values) {
  int n = snprintf(block.message, sizeof block.message, format, values...);
  snprintf(block.message + n, sizeof block.message - n, "; block (%u,%u,%u)", block.index.x,
           block.index.y, block.index.z);
  siglongjmp(block.failed, MISUSE);
}

// ---- switching ----------------------------------------------------------------------------------

// Saves what a call must preserve on the present stack, whose pointer goes to *save, and goes on
// where `load` left off.
extern "C" void emu_switch(void** save, void* load);
#if defined(__x86_64__)
enum { SAVED_WORDS = 8 };  // six registers, the return address, and one word that aligns the stack
asm(R"(
.text
.p2align 4
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
enum { RETURN_WORD = 6 };
#elif defined(__aarch64__)
enum { SAVED_WORDS = 20, RETURN_WORD = 11 };  // x19-x30 and d8-d15; x30 is the eleventh
asm(R"(
.text
.p2align 4
.globl emu_switch
.hidden emu_switch
.type emu_switch,%function
emu_switch:
  sub sp,sp,#160
  stp x19,x20,[sp]; stp x21,x22,[sp,#16]; stp x23,x24,[sp,#32]
  stp x25,x26,[sp,#48]; stp x27,x28,[sp,#64]; stp x29,x30,[sp,#80]
  stp d8,d9,[sp,#96]; stp d10,d11,[sp,#112]; stp d12,d13,[sp,#128]; stp d14,d15,[sp,#144]
  mov x9,sp
  str x9,[x0]
  mov sp,x1
  ldp x19,x20,[sp]; ldp x21,x22,[sp,#16]; ldp x23,x24,[sp,#32]
  ldp x25,x26,[sp,#48]; ldp x27,x28,[sp,#64]; ldp x29,x30,[sp,#80]
  ldp d8,d9,[sp,#96]; ldp d10,d11,[sp,#112]; ldp d12,d13,[sp,#128]; ldp d14,d15,[sp,#144]
  add sp,sp,#160
  ret
.size emu_switch,.-emu_switch
)");
#else
#error "the emulator switches fibers on x86-64 and AArch64 only"
#endif

static inline uint32_t random_bits() {
  uint64_t& s = block.random;
  s ^= s << 13; s ^= s >> 7; s ^= s << 17;
  return (uint32_t)(s >> 16);
}

// One of the lanes in `mask`, which is not empty: the next after `last` in the order asked for.
static inline int pick(uint32_t mask, int last) {
  if (block.order == ASCENDING) {
    uint32_t above = last >= 31 ? 0 : mask & ~((2u << last) - 1);
    return __builtin_ctz(above ? above : mask);
  }
  if (block.order == DESCENDING) {
    uint32_t below = last <= 0 ? 0 : mask & ((1u << last) - 1);
    return 31 - __builtin_clz(below ? below : mask);
  }
  for (int skip = random_bits() % __builtin_popcount(mask); skip; skip--) mask &= mask - 1;
  return __builtin_ctz(mask);
}

[[noreturn]] __attribute__((noinline)) static void deadlock() {
  int n[4] = {0, 0, 0, 0}, line[4] = {0, 0, 0, 0};
  for (int i = 0; i < block.n_threads; i++) {
    n[block.fibers[i].state]++;
    line[block.fibers[i].state] = block.fibers[i].line;
  }
  misuse("deadlock: %d threads in a warp operation (line %d), %d at __syncthreads (line %d), %d exited",
         n[IN_WARP_OPERATION], line[IN_WARP_OPERATION], n[AT_BARRIER], line[AT_BARRIER], n[EXITED]);
}

// Who runs next: of the same warp if possible; null when all have exited.
static Fiber* next_fiber(int warp, int lane) {
  if (uint32_t mask = block.warps[warp].runnable)
    return &block.fibers[warp * 32 + pick(mask, lane)];
  int n = block.n_warps, start = block.order == RANDOM ? (int)(random_bits() % n) : warp;
  for (int k = 1; k <= n; k++) {
    int w = block.order == DESCENDING ? (start - k + 2 * n) % n : (start + k) % n;
    if (uint32_t mask = block.warps[w].runnable)
      return &block.fibers[w * 32 + pick(mask, block.order == DESCENDING ? 0 : 31)];
  }
  if (block.n_live) deadlock();
  return nullptr;
}

static inline void switch_to(Fiber* from, Fiber* to) {
  if (to == from) return;
  block.current = to;
  emu_switch(&from->stack_pointer, to->stack_pointer);
}

static inline void open_barrier() {
  for (int w = 0; w < block.n_warps; w++) {
    block.warps[w].runnable |= block.warps[w].at_barrier;
    block.warps[w].at_barrier = 0;
  }
  block.n_waiting = 0;
}

static void fiber_main() {
  block.kernel(block.arguments);
  Fiber* me = block.current;
  Warp& warp = block.warps[me->warp];
  uint32_t bit = 1u << me->lane;
  me->state = EXITED;
  warp.runnable &= ~bit;
  warp.live &= ~bit;
  if (--block.n_live && block.n_waiting == block.n_live) open_barrier();
  Fiber* next = next_fiber(me->warp, me->lane);
  void* nowhere;
  if (next) block.current = next;
  emu_switch(&nowhere, next ? next->stack_pointer : block.scheduler);
  __builtin_unreachable();
}

// ---- where threads meet -------------------------------------------------------------------------

// `site` tells two barriers of one line apart.
__attribute__((noinline)) static void barrier(int line, int site) {
  Fiber* me = block.current;
  Warp& warp = block.warps[me->warp];
  uint32_t bit = 1u << me->lane;
  if (block.n_waiting && block.barrier_site != site)
    misuse("divergent barrier: thread (%u,%u,%u) is at __syncthreads on line %d while others wait at line %d",
           me->index.x, me->index.y, me->index.z, line, block.barrier_line);
  block.barrier_line = me->line = line;
  block.barrier_site = site;
  if (++block.n_waiting == block.n_live) {
    open_barrier();
    warp.runnable |= bit;
  } else {
    me->state = AT_BARRIER;
    warp.runnable &= ~bit;
    warp.at_barrier |= bit;
  }
  switch_to(me, next_fiber(me->warp, me->lane));
  me->state = READY;
}

// All lanes of `mask` show a value. Returns what every lane showed; it holds until this lane's next
// operation, since nothing else runs in between.
__attribute__((noinline)) static uint64_t* meet(uint32_t mask, uint64_t value, int kind, int line) {
  Fiber* me = block.current;
  Warp& warp = block.warps[me->warp];
  uint32_t bit = 1u << me->lane;
  if (!(mask & bit))
    misuse("lane %d calls a warp operation on line %d with mask %08x that lacks it", me->lane, line, mask);
  if (mask & ~warp.live)
    misuse("warp operation on line %d: mask %08x names exited or absent lanes (live %08x)", line, mask, warp.live);
  Collective *mine = nullptr, *unused = nullptr;
  for (Collective& c : warp.pending) {
    if (!c.mask) unused = unused ? unused : &c;
    else if (c.mask == mask && c.arrived != mask) { mine = &c; break; }
  }
  if (mine) {
    if (mine->kind != kind || mine->line != line)
      misuse("warp divergence: lane %d is at line %d while others of mask %08x wait at line %d", me->lane, line, mask, mine->line);
  } else {
    if (!unused) misuse("too many diverged warp operations (line %d)", line);
    mine = unused;
    mine->mask = mask;
    mine->arrived = mine->left = 0;
    mine->kind = kind;
    mine->line = line;
  }
  me->line = line;
  mine->value[me->lane] = value;
  mine->arrived |= bit;
  if (mine->arrived == mask) {
    warp.runnable |= mask;
  } else {
    me->state = IN_WARP_OPERATION;
    warp.runnable &= ~bit;
  }
  if (mine->arrived != mask || block.order != ASCENDING)
    switch_to(me, next_fiber(me->warp, me->lane));
  me->state = READY;
  mine->left |= bit;
  if (mine->left == mask) mine->mask = 0;
  return mine->value;
}

}  // namespace emu
