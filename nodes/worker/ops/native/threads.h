// The threads that compute: the caller's, helped by threads of this library's own.
//
// Threads never wait for a thread, only for work: a phase of a job is a number of items, and it is over when all are
// done, by whichever threads. So a helper that the system does not run costs nothing but its help; a barrier that waits
// for all of them took 80 us instead of 0.1 when another process had the core. Each thread takes its own part of the
// items, for the sake of its cache, and then from the others' parts.
//
// Counters carry the job's number in their upper half, so a helper that comes late takes nothing. Until it has taken an
// item of a job, a helper may read nothing but the job's own copy of its arguments: what those point to may be gone.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

constexpr int MAX_THREADS = 64;
constexpr int MAX_PHASES = 2048;
constexpr int SPINS = 3000;        // of a helper before it sleeps: about the time until a small model's next step
constexpr int SPINS_BEFORE_YIELD = 200;

struct alignas(64) Counter {
  uint64_t value;
};

struct Phase {
  Counter done;
  int num_items;                     // valid if the job publishes it beforehand
  Counter taken[MAX_THREADS];
};

typedef bool (*Run)(const void* arguments, const struct Turn& turn);

struct Job {
  Run run;
  int threads;
  alignas(16) char arguments[256];
};

static struct Pool {
  alignas(64) uint32_t number;     // of the job; odd while the next one is being written
  alignas(64) uint32_t sleepers;
  alignas(64) int is_taken;        // by a caller
  int threads = 1;                 // how many compute, the caller included
  int started;
  pid_t pid;
  Job job;
  Phase phases[MAX_PHASES];
} pool;

// One thread's part in one job. Without phases it computes everything alone.
struct Turn {
  uint32_t number;
  int thread, threads;
  Phase* phases;

  // Calls `work(item)` for items that no other thread has taken. False: this thread came too late, the job is over.
  template <class Work>
  bool each(int phase, int num_items, Work work) const {
    if (!phases) {
      for (int item = 0; item < num_items; item++) work(item);
      return true;
    }
    Phase& shared = phases[phase];
    for (int i = 0; i < threads; i++) {
      int part = thread + i < threads ? thread + i : thread + i - threads;
      int begin = (int)((int64_t)num_items * part / threads), end = (int)((int64_t)num_items * (part + 1) / threads);
      for (int item; (item = take(shared.taken[part], begin, end)) >= 0;) {
        work(item);
        __atomic_fetch_add(&shared.done.value, 1, __ATOMIC_RELEASE);
      }
    }
    return wait(shared, num_items);
  }

  // The same for the number of items that was published with the job: a late helper may not compute that number itself.
  template <class Work>
  bool each_published(int phase, const int* counts, Work work) const {
    // A thread that reads a later job's number here finds that job's counters, too: they were written before it.
    return each(phase, phases ? __atomic_load_n(&phases[phase].num_items, __ATOMIC_ACQUIRE) : counts[phase], work);
  }

 private:
  int take(Counter& counter, int begin, int end) const {
    uint64_t seen = __atomic_load_n(&counter.value, __ATOMIC_RELAXED);
    while ((uint32_t)(seen >> 32) == number && begin + (int)(uint32_t)seen < end)
      if (__atomic_compare_exchange_n(&counter.value, &seen, seen + 1, true, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return begin + (int)(uint32_t)seen;
    return -1;
  }

  bool wait(const Phase& shared, int num_items) const {
    for (int spins = 1;; spins++) {
      uint64_t done = __atomic_load_n(&shared.done.value, __ATOMIC_ACQUIRE);
      if ((uint32_t)(done >> 32) != number) return false;
      if ((uint32_t)done == (uint32_t)num_items) return true;
      if (spins % SPINS_BEFORE_YIELD) _mm_pause();
      else sched_yield();
    }
  }
};

static void* help(void* argument) {
  const int thread = (int)(intptr_t)argument;
  uint32_t seen = 0;
  for (int spins = 0;;) {
    uint32_t number = __atomic_load_n(&pool.number, __ATOMIC_ACQUIRE);
    if (number == seen || number & 1) {
      if (++spins < SPINS || number & 1) {
        _mm_pause();
        continue;
      }
      __atomic_fetch_add(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
      syscall(SYS_futex, &pool.number, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, seen, nullptr, nullptr, 0);
      __atomic_fetch_sub(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
      spins = 0;
      continue;
    }
    spins = 0;
    seen = number;
    Job job = pool.job;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    // Otherwise the job was overwritten while it was read, and is over.
    if (__atomic_load_n(&pool.number, __ATOMIC_RELAXED) == number && thread < job.threads)
      job.run(job.arguments, Turn{number, thread, job.threads, pool.phases});
  }
  return nullptr;
}

// Helpers are started when first needed, after any fork; a process that was forked from one with helpers has none.
static void start_helpers(int threads) {
  pid_t pid = getpid();
  if (pool.pid != pid) {
    pool.pid = pid;
    pool.started = 0;
    pool.sleepers = 0;
  }
  if (pool.started >= threads - 1) return;
  // Helpers block all signals: the interpreter's own threads must get them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (pool.started < threads - 1) {
    pthread_t helper;
    if (pthread_create(&helper, nullptr, help, (void*)(intptr_t)(pool.started + 1))) break;
    pthread_detach(helper);
    pool.started++;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

static void publish(Run run, const void* arguments, size_t size, int threads, int phases, const int* counts) {
  uint32_t number = pool.number + 2;
  __atomic_store_n(&pool.number, number - 1, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  uint64_t zero = (uint64_t)number << 32;
  for (int phase = 0; phase < phases; phase++) {
    for (int part = 0; part < threads; part++)
      __atomic_store_n(&pool.phases[phase].taken[part].value, zero, __ATOMIC_RELAXED);
    __atomic_store_n(&pool.phases[phase].done.value, zero, __ATOMIC_RELAXED);
    if (counts) __atomic_store_n(&pool.phases[phase].num_items, counts[phase], __ATOMIC_RELEASE);
  }
  pool.job.run = run;
  pool.job.threads = threads;
  memcpy(pool.job.arguments, arguments, size);
  __atomic_store_n(&pool.number, number, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &pool.number, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, MAX_THREADS, nullptr, nullptr, 0);
}

// Run a job of so many phases with all threads; returns when it is done. Any number of threads may call at once: one
// caller at a time has the pool, and the others compute alone meanwhile. `counts`, for jobs that need them, are the
// phases' numbers of items.
template <class Arguments>
static void run_job(
    bool (*run)(const Arguments&, const Turn&), const Arguments& arguments, int phases, const int* counts = nullptr) {
  static_assert(sizeof(Arguments) <= sizeof(Job::arguments), "a job's arguments are copied");
  int threads = __atomic_load_n(&pool.threads, __ATOMIC_RELAXED);
  if (threads == 1 || __atomic_exchange_n(&pool.is_taken, 1, __ATOMIC_ACQUIRE)) {
    run(arguments, Turn{0, 0, 1, nullptr});
    return;
  }
  start_helpers(threads);
  publish((Run)run, &arguments, sizeof arguments, threads, phases, counts);
  run(arguments, Turn{pool.number, 0, threads, pool.phases});
  __atomic_store_n(&pool.is_taken, 0, __ATOMIC_RELEASE);
}
