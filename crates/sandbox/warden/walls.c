/* The walls that need no privileges: resource limits, Landlock, and a filter of system calls. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void at_most(int what, long value, long hard, const char *name) {
  struct rlimit limit = {(rlim_t)value, (rlim_t)hard};
  struct rlimit now;
  if (getrlimit(what, &now) == 0 && now.rlim_max != RLIM_INFINITY && now.rlim_max < limit.rlim_max)
    limit.rlim_cur = limit.rlim_max = now.rlim_max; /* strict enough already */
  if (setrlimit(what, &limit) != 0) fail(name);
}

void limit(const struct config *config, const struct guest *guest) {
  at_most(RLIMIT_AS, config->memory, config->memory, "RLIMIT_AS");
  /* A signal that says why, then one that nobody ignores. */
  at_most(RLIMIT_CPU, config->cpu_s, config->cpu_s + 1, "RLIMIT_CPU");
  at_most(RLIMIT_FSIZE, config->mode == WALLS ? 0 : config->file_size, config->mode == WALLS ? 0 : config->file_size, "RLIMIT_FSIZE");
  at_most(RLIMIT_NOFILE, 64, 64, "RLIMIT_NOFILE"); /* each may be a socket, whose buffer no limit on memory counts */
  at_most(RLIMIT_CORE, 0, 0, "RLIMIT_CORE");
  at_most(RLIMIT_MEMLOCK, 0, 0, "RLIMIT_MEMLOCK");
  at_most(RLIMIT_MSGQUEUE, 0, 0, "RLIMIT_MSGQUEUE");
  /* The count is per uid and user namespace: it includes the two of us, and says nothing where the uid is shared with other work. */
  if (guest->own_uid) at_most(RLIMIT_NPROC, config->processes + 2, config->processes + 2, "RLIMIT_NPROC");
  tell('L', 0, "limits: rlimits");
}

/* ---- Landlock. The structures are declared here, since older kernel headers lack some of their fields. */

#ifndef __NR_landlock_create_ruleset
#define __NR_landlock_create_ruleset 444
#define __NR_landlock_add_rule 445
#define __NR_landlock_restrict_self 446
#endif

struct ruleset { uint64_t fs, net, scoped; };
struct beneath { uint64_t allowed; int32_t fd; } __attribute__((packed));
enum { EXECUTE = 1 << 0, WRITE_FILE = 1 << 1, READ_FILE = 1 << 2, READ_DIR = 1 << 3, TRUNCATE = 1 << 14 };

static void allow(int rules, const char *path, uint64_t access, uint64_t handled) {
  int fd = open(path, O_PATH | O_CLOEXEC);
  struct stat about;
  if (fd < 0) return; /* what isn't there can't be reached either */
  if (fstat(fd, &about) == 0 && !S_ISDIR(about.st_mode)) access &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE;
  struct beneath rule = {access & handled, fd};
  if (syscall(__NR_landlock_add_rule, rules, 1, &rule, 0) != 0) fail("landlock_add_rule");
  close(fd);
}

static int landlock(const struct config *config, int work) {
  long abi = syscall(__NR_landlock_create_ruleset, NULL, 0, 1);
  if (abi < 1) return -1;
  struct ruleset wanted = {(1 << 13) - 1, 0, 0};
  size_t size = sizeof(uint64_t);
  if (abi >= 2) wanted.fs |= 1 << 13;
  if (abi >= 3) wanted.fs |= TRUNCATE;
  if (abi >= 4) wanted.net = 3, size = 2 * sizeof(uint64_t);
  if (abi >= 5) wanted.fs |= 1 << 15;
  if (abi >= 6) wanted.scoped = 3, size = sizeof wanted; /* no signals and no abstract sockets to the outside */
  int rules = (int)syscall(__NR_landlock_create_ruleset, &wanted, size, 0);
  if (rules < 0) return -1;
  const uint64_t read = EXECUTE | READ_FILE | READ_DIR;
  static const char *devices[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"};
  for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) allow(rules, devices[i], READ_FILE | WRITE_FILE, wanted.fs);
  for (size_t i = 0; i < config->readables; i++) allow(rules, config->readable[i], read, wanted.fs);
  if (config->mode == NAMESPACES) { /* everything that the new root shows, and one place to write */
    allow(rules, "/", read, wanted.fs);
    allow(rules, "/work", wanted.fs & ~(uint64_t)(1 << 15), wanted.fs);
  } else {
    char here[32];
    snprintf(here, sizeof here, "/proc/self/fd/%d", work);
    allow(rules, here, read, wanted.fs);
  }
  if (syscall(__NR_landlock_restrict_self, rules, 0) != 0) return -1;
  close(rules);
  char text[96];
  snprintf(text, sizeof text, "landlock: ABI %ld%s", abi, abi >= 6 ? ", signals scoped" : "");
  tell('L', 0, text);
  return 0;
}

/* ---- seccomp */

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#endif

#ifdef ARCH
static struct sock_filter program[512];
static unsigned short length;

static void step(unsigned short code, uint32_t k, uint8_t yes, uint8_t no) {
  program[length++] = (struct sock_filter){code, yes, no, k};
}
static void load(size_t offset) { step(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0); }
static void load_argument(int i) { load(offsetof(struct seccomp_data, args) + 8 * (size_t)i); } /* the low half */
static void give(uint32_t verdict) { step(BPF_RET | BPF_K, verdict, 0, 0); }
#define REFUSE(error) (SECCOMP_RET_ERRNO | (error))

/* Each block loads the number again where it read an argument, so that blocks do not depend on their order. */
static void refuse(int number, int error) {
  step(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number, 0, 1);
  give(REFUSE(error));
}
/* `number` unless (argument & mask) == value */
static void only(int number, int argument, uint32_t mask, uint32_t value, int error) {
  step(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number, 0, 5);
  load_argument(argument);
  step(BPF_ALU | BPF_AND | BPF_K, mask, 0, 0);
  step(BPF_JMP | BPF_JEQ | BPF_K, value, 1, 0);
  give(REFUSE(error));
  give(SECCOMP_RET_ALLOW);
}
/* `number` where (argument & mask) == value */
static void except(int number, int argument, uint32_t mask, uint32_t value, int error) {
  step(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number, 0, 5);
  load_argument(argument);
  step(BPF_ALU | BPF_AND | BPF_K, mask, 0, 0);
  step(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1);
  give(REFUSE(error));
  load(offsetof(struct seccomp_data, nr));
}

/* `number` where argument != value */
static void unless(int number, int argument, uint32_t value, int error) {
  step(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number, 0, 4);
  load_argument(argument);
  step(BPF_JMP | BPF_JEQ | BPF_K, value, 1, 0);
  give(REFUSE(error));
  load(offsetof(struct seccomp_data, nr));
}

/* Others change the flags of a file, set the owner of SIGIO, or belong to a terminal, of which there is none. */
static const uint32_t ioctls[] = {FIONREAD, FIONBIO, FIOCLEX, FIONCLEX};
static void only_ioctls(void) {
  const uint8_t count = sizeof ioctls / sizeof *ioctls;
  step(BPF_JMP | BPF_JEQ | BPF_K, __NR_ioctl, 0, count + 3);
  load_argument(1);
  for (uint8_t i = 0; i < count; i++) step(BPF_JMP | BPF_JEQ | BPF_K, ioctls[i], (uint8_t)(count - i), 0);
  give(REFUSE(ENOTTY));
  load(offsetof(struct seccomp_data, nr));
}

/* Signals to other processes, leases that make them wait, and memory that no limit counts. */
static const uint32_t refused_fcntl[] = {F_SETOWN, F_SETOWN_EX, F_SETSIG, F_SETLEASE, F_SETPIPE_SZ};

static const int refused[] = {
    /* the network, and what can make a socket in another way */
    __NR_socket, __NR_connect, __NR_bind, __NR_listen, __NR_accept, __NR_accept4, 425, 426, 427 /* io_uring */,
    /* other processes */
    __NR_ptrace, __NR_process_vm_readv, __NR_process_vm_writev, __NR_kcmp, 434 /* pidfd_open */, 438 /* pidfd_getfd */,
    440 /* process_madvise */, 448 /* process_mrelease */,
    /* mounts, namespaces, the kernel */
    __NR_mount, __NR_umount2, __NR_pivot_root, __NR_chroot, 428, 429, 430, 431, 432, 433, 442 /* the newer mount calls */, __NR_unshare,
    __NR_setns, __NR_bpf, __NR_perf_event_open, __NR_userfaultfd, __NR_keyctl, __NR_add_key, __NR_request_key, __NR_kexec_load,
    __NR_init_module, __NR_finit_module, __NR_delete_module, __NR_reboot, __NR_swapon, __NR_swapoff, __NR_sethostname, __NR_setdomainname,
    __NR_settimeofday, __NR_clock_settime, __NR_adjtimex, __NR_clock_adjtime, __NR_acct, __NR_syslog, __NR_quotactl, __NR_personality,
    __NR_name_to_handle_at, __NR_open_by_handle_at, __NR_fanotify_init, __NR_vhangup, __NR_nfsservctl,
    /* memory that no limit counts, and what would stay behind */
    __NR_memfd_create, 447 /* memfd_secret */, __NR_setsockopt /* SO_SNDBUF */, __NR_vmsplice /* pipes that keep huge pages */,
    __NR_inotify_init1 /* queues of events */,
#ifdef __x86_64__
    __NR_inotify_init,
#endif
    /* the user's semaphores, queues and shared memory, by whose numbers others could be used and removed */
    __NR_shmget, __NR_shmat, __NR_shmctl, __NR_msgget, __NR_msgsnd, __NR_msgrcv, __NR_msgctl, __NR_semget, __NR_semop, __NR_semtimedop,
    __NR_semctl, __NR_mq_open, __NR_mq_unlink};

/* Where other processes are in reach: nothing may be done to them. */
static const int refused_beside_others[] = {
    __NR_tkill, __NR_rt_sigqueueinfo, __NR_rt_tgsigqueueinfo, 424 /* pidfd_send_signal */, __NR_setpriority, __NR_ioprio_set,
    __NR_sched_setaffinity, __NR_sched_setparam, __NR_sched_setscheduler, __NR_sched_setattr, __NR_migrate_pages, __NR_move_pages};

/* Where other files are in reach: most of these Landlock does not know, and others only in newer kernels. Nothing may be written
   there, nor locked. */
static const int refused_beside_files[] = {
#ifdef __x86_64__
    __NR_chmod, __NR_chown, __NR_lchown, __NR_utime, __NR_utimes, __NR_futimesat,
#endif
    __NR_flock,
    __NR_fchmod, __NR_fchmodat, 452 /* fchmodat2 */, __NR_fchown, __NR_fchownat, __NR_utimensat, __NR_truncate, __NR_ftruncate, __NR_setxattr,
    __NR_lsetxattr, __NR_fsetxattr, 463 /* setxattrat */, __NR_removexattr, __NR_lremovexattr, __NR_fremovexattr, 466 /* removexattrat */,
    469 /* file_setattr */};

static int filter(const struct config *config, const struct guest *guest) {
  const uint32_t new_namespaces = CLONE_NEWNS | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;
  load(offsetof(struct seccomp_data, arch));
  step(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0);
  give(SECCOMP_RET_KILL_PROCESS); /* another architecture's numbers */
  load(offsetof(struct seccomp_data, nr));
#ifdef __x86_64__
  step(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1); /* the x32 numbers */
  give(SECCOMP_RET_KILL_PROCESS);
#endif
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) refuse(refused[i], EPERM);
  refuse(435 /* clone3, whose flags can't be read here */, ENOSYS);
  only_ioctls();
  for (size_t i = 0; i < sizeof refused_fcntl / sizeof *refused_fcntl; i++) except(__NR_fcntl, 1, ~0u, refused_fcntl[i], EPERM);
  /* A pair of Unix stream sockets is connected with itself for good; asyncio needs one. A pair of datagram sockets could send to any address, and
     other families reach a network. */
  unless(__NR_socketpair, 0, AF_UNIX, EPERM);
  only(__NR_socketpair, 1, 0xf, SOCK_STREAM, EPERM);
  const int alone = config->mode == WALLS || !guest->watched;
  if (alone) {
#ifdef __x86_64__
    refuse(__NR_fork, EAGAIN);
    refuse(__NR_vfork, EAGAIN);
#endif
    if (guest->own_uid) only(__NR_clone, 0, CLONE_THREAD | new_namespaces, CLONE_THREAD, EAGAIN);
    else refuse(__NR_clone, EAGAIN); /* uncounted, even threads are a bomb */
  }
  only(__NR_clone, 0, new_namespaces, 0, EPERM);
  if (config->mode == WALLS) {
    for (size_t i = 0; i < sizeof refused_beside_others / sizeof *refused_beside_others; i++) refuse(refused_beside_others[i], EPERM);
    only(__NR_kill, 0, ~0u, (uint32_t)getpid(), EPERM);
    only(__NR_tgkill, 0, ~0u, (uint32_t)getpid(), EPERM);
    only(__NR_prlimit64, 0, ~0u, 0, EPERM);
    for (size_t i = 0; i < sizeof refused_beside_files / sizeof *refused_beside_files; i++) refuse(refused_beside_files[i], EPERM);
    refuse(437 /* openat2, whose flags can't be read here */, ENOSYS);
    /* Opened for reading (0) or for neither (3) and emptied by that: Landlock before ABI 3 lets it be. */
    for (uint32_t access = 0; access <= 3; access += 3) {
      except(__NR_openat, 2, 3 | O_TRUNC, access | O_TRUNC, EPERM);
#ifdef __x86_64__
      except(__NR_open, 1, 3 | O_TRUNC, access | O_TRUNC, EPERM);
#endif
    }
  }
  give(SECCOMP_RET_ALLOW);
  struct sock_fprog whole = {length, program};
  return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &whole);
}
#endif

void confine(const struct config *config, const struct guest *guest, int work) {
  const int alone = config->mode == WALLS;
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) fail("no_new_privs");
  tell('L', 0, "no_new_privs");
  if (config->mode == OPEN) return;
  if (landlock(config, work) != 0 && alone) fail("landlock");
#ifdef ARCH
  /* The last words: afterwards this process may do little. */
  tell('L', 0, alone ? (guest->own_uid ? "seccomp: no sockets, no processes" : "seccomp: no sockets, no processes, no threads")
                     : (guest->watched ? "seccomp: no sockets" : "seccomp: no sockets, no processes"));
  if (filter(config, guest) != 0) fail("seccomp");
#else
  if (alone || !guest->watched) { errno = ENOSYS; fail("seccomp on this architecture"); }
#endif
}
