/* The warden: starts one run of untrusted code behind walls, watches it, and ends it with all its descendants.

   It is a program of its own, which rollflow carries with it and executes from memory. So nothing at all happens between fork and exec in the
   large, many-threaded process that trains; and since that process is not copied, starting a run costs the same however large it is.

   Three processes: the outermost stands outside all walls, moves output, and holds the clock; the init of the new namespaces (or a plain
   child, where there are none) prepares the walls and reaps; the third becomes the program. Standard input of the first is a socket: the
   configuration comes in, frames of a tag, a length and bytes go out, and when the other side closes it, all is over.

   Frames out: 'L' a layer that stands, 'O' and 'E' output, 'X' why nothing was run, 'S' how it ended: "exited 0" or "signaled 9", then one of
   - time memory output, then microseconds of CPU, then kilobytes at the peak. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int notes = -1;
static int control = -1;

void tell(int kind, int value, const char *text) {
  struct note note = {.kind = kind, .value = value};
  snprintf(note.text, sizeof note.text, "%s", text);
  if (write(notes, &note, sizeof note) != sizeof note) _exit(70);
}

void fail(const char *what) {
  tell('X', errno, what);
  _exit(70);
}

/* ---- what is asked */

static void whole(int fd, void *into, size_t size) {
  for (size_t got = 0; got < size;) {
    ssize_t n = read(fd, (char *)into + got, size - got);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) _exit(71);
    got += (size_t)n;
  }
}

static void keep(char **list, size_t *count, char *value) {
  if (*count + 1 >= MOST) _exit(72);
  list[(*count)++] = value;
}

/* Records of a tag, a length and bytes, each followed by a zero byte; 'G' is the last. */
static void receive(struct config *config) {
  for (;;) {
    unsigned char head[5];
    uint32_t size;
    whole(control, head, sizeof head);
    memcpy(&size, head + 1, 4);
    char *data = malloc((size_t)size + 1);
    if (!data) _exit(72);
    whole(control, data, (size_t)size + 1);
    switch (head[0]) {
    case 'm': config->mode = (enum mode)data[0]; break;
    case 'w': config->wall_ms = atol(data); break;
    case 'c': config->cpu_s = atol(data); break;
    case 'M': config->memory = atol(data); break;
    case 'p': config->processes = atol(data); break;
    case 'f': config->file_size = atol(data); break;
    case 'd': config->disk = atol(data); break;
    case 'o': config->output = atol(data); break;
    case 'D': config->work = data; break;
    case 'r': keep(config->readable, &config->readables, data); break;
    case 'a': keep(config->argv, &config->args, data); break;
    case 'e': keep(config->env, &config->envs, data); break;
    case 'i': config->input = (struct blob){"stdin", data, size}; break;
    case 's': config->stream = 1; break;
    case 'F': {
      size_t name = strlen(data) + 1;
      if (name > size || config->files >= MOST) _exit(72);
      config->file[config->files++] = (struct blob){data, data + name, size - name};
      break;
    }
    case 'G': return;
    default: _exit(72);
    }
  }
}

int put(int at, const char *name, const char *data, size_t size) {
  int fd = openat(at, name, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
  if (fd < 0) return -1;
  for (size_t done = 0; done < size;) {
    ssize_t n = write(fd, data + done, size - done);
    if (n <= 0) return -1;
    done += (size_t)n;
  }
  return close(fd);
}

/* ---- the program */

static void become(const struct config *config, struct guest *guest, int input, int out, int err, int work) {
  setsid();
  signal(SIGPIPE, SIG_DFL);
  if (dup2(input, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) fail("dup2");
  if (guest->uid) {
    if (setgroups(0, NULL) != 0 || setresgid(guest->uid, guest->uid, guest->uid) != 0) fail("setresgid");
    if (setresuid(guest->uid, guest->uid, guest->uid) != 0) fail("setresuid");
    tell('L', 0, "user: one of its own");
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  limit(config, guest);
  confine(config, guest, work);
  execve(config->argv[0], config->argv, config->env);
  fail("starting the program");
}

/* The init, or whoever stands in for it: returns never. */
static void serve(const struct config *config, struct guest *guest, int go, int in, int out, int err) {
  char one;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  whole(go, &one, 1); /* or its end, where the outermost is gone */
  int work = AT_FDCWD;
  int input = config->stream ? in : memfd_create("stdin", MFD_CLOEXEC);
  if (!config->stream) {
    if (input < 0 || write(input, config->input.data ? config->input.data : "", config->input.size) != (ssize_t)config->input.size)
      fail("standard input");
    lseek(input, 0, SEEK_SET);
  }
  if (config->mode == NAMESPACES) {
    build_root(config, guest);
  } else {
    work = open(config->work, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (work < 0 || fchdir(work) != 0) fail(config->work);
    for (size_t i = 0; i < config->files; i++)
      if (put(work, config->file[i].name, config->file[i].data, config->file[i].size) != 0) fail(config->file[i].name);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0) fail("subreaper");
  }
  pid_t child = fork();
  if (child < 0) fail("fork");
  if (child == 0) become(config, guest, input, out, err, work);
  close(out);
  close(err);
  close(input);
  if (guest->uid && config->mode == NAMESPACES) { /* nothing here needs root any more */
    if (setgroups(0, NULL) != 0 || setresgid(guest->uid, guest->uid, guest->uid) != 0 || setresuid(guest->uid, guest->uid, guest->uid) != 0)
      fail("setresuid");
    prctl(PR_SET_PDEATHSIG, SIGKILL);
  }
  prctl(PR_SET_DUMPABLE, 0);
  for (;;) {
    int status;
    pid_t ended = waitpid(-1, &status, 0);
    if (ended < 0 && errno == EINTR) continue;
    if (ended < 0) fail("waitpid");
    if (ended != child) continue;
    struct rusage used;
    getrusage(RUSAGE_CHILDREN, &used);
    struct note note = {.kind = 'S', .value = status, .peak_kb = used.ru_maxrss};
    note.cpu_us = (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000L + used.ru_utime.tv_usec + used.ru_stime.tv_usec;
    if (write(notes, &note, sizeof note) != sizeof note) _exit(70);
    _exit(0);
  }
}

/* ---- the watch */

static int frame(char tag, const void *data, size_t size) {
  char head[5] = {tag};
  uint32_t length = (uint32_t)size;
  memcpy(head + 1, &length, 4);
  struct { const char *data; size_t size; } parts[] = {{head, 5}, {data, size}};
  for (int i = 0; i < 2; i++)
    for (size_t done = 0; done < parts[i].size;) {
      ssize_t n = send(control, parts[i].data + done, parts[i].size - done, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return -1;
      done += (size_t)n;
    }
  return 0;
}

static long now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Bytes of anonymous and shared memory of all processes of the new pid namespace; what several share counts for each. Old kernels and
   gVisor report only all resident memory, files included. */
static long memory_held(void) {
  DIR *all = opendir("/proc");
  long held = 0;
  if (!all) return 0;
  for (struct dirent *entry; (entry = readdir(all));) {
    char path[300], line[128];
    long kilobytes, resident = 0, own = -1;
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    snprintf(path, sizeof path, "/proc/%s/status", entry->d_name);
    FILE *file = fopen(path, "re");
    if (!file) continue;
    while (fgets(line, sizeof line, file))
      if (sscanf(line, "RssAnon: %ld", &kilobytes) == 1 || sscanf(line, "RssShmem: %ld", &kilobytes) == 1)
        own = (own < 0 ? 0 : own) + kilobytes;
      else if (sscanf(line, "VmRSS: %ld", &kilobytes) == 1)
        resident = kilobytes;
    held += (own < 0 ? resident : own) * 1024;
    fclose(file);
  }
  closedir(all);
  return held;
}

/* Without a pid namespace: orphans come to us, and are ended until there are none. */
static void end_children(void) {
  char path[64];
  snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
  for (int round = 0; round < 10000; round++) {
    FILE *file = fopen(path, "re");
    int pid, any = 0;
    while (file && fscanf(file, "%d", &pid) == 1) any = 1, kill(pid, SIGKILL);
    if (file) fclose(file);
    while (waitpid(-1, NULL, any ? 0 : WNOHANG) > 0) any = 1;
    if (!any) return;
  }
}

int main(void) {
  static struct config config;
  struct guest guest = {0};
  int pipes[2], in[2], out[2], err[2], go[2];
  syscall(SYS_close_range, 3u, ~0u, 0u);
  control = fcntl(0, F_DUPFD_CLOEXEC, 10);
  if (control < 0) return 73;
  close(0);
  if (open("/dev/null", O_RDONLY | O_CLOEXEC) != 0) return 73;
  setsid();
  umask(022);
  receive(&config);
  if (!config.args || !config.mode) return 72;
  if (pipe2(pipes, O_CLOEXEC) || pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC) || pipe2(go, O_CLOEXEC)) return 73;
  notes = pipes[1];
  prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
  int adjust = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC); /* if memory runs out, then we go first */
  if (adjust >= 0) {
    if (write(adjust, "1000", 4) != 4) {}
    close(adjust);
  }
  pid_t init = -1;
  if (config.mode == NAMESPACES && enter_namespaces(&guest) != 0) {
    tell('X', errno, "namespaces");
  } else {
    if (config.mode == WALLS && geteuid() == 0) guest.own_uid = 1, guest.uid = 1900000000u + (uid_t)getpid();
    init = fork();
    if (init == 0) {
      close(pipes[0]), close(in[1]), close(out[0]), close(err[0]), close(go[1]), close(control);
      serve(&config, &guest, go[0], in[0], out[1], err[1]);
    }
    if (init < 0) tell('X', errno, "fork");
  }
  close(in[0]), close(out[1]), close(err[1]), close(go[0]), close(pipes[1]);
  if (init > 0 && write(go[1], "g", 1) != 1) return 73;

  const long deadline = now_ms() + config.wall_ms;
  long left = config.output, watched_ms = 0;
  const char *reason = "-";
  struct note end = {0};
  int going = init > 0, ended = 0, watched = 0;
  struct pollfd fds[] = {{control, POLLIN | POLLRDHUP, 0}, {pipes[0], POLLIN, 0}, {out[0], POLLIN, 0}, {err[0], POLLIN, 0}, {-1, POLLOUT, 0}};
  static char buffer[65536], given[65536]; /* `given`: what the program has not read yet; nothing more is taken from control before that */
  ssize_t given_size = 0, given_done = 0;
  signal(SIGPIPE, SIG_IGN);
  fcntl(in[1], F_SETFL, O_NONBLOCK);
  while (fds[1].fd >= 0 || fds[2].fd >= 0 || fds[3].fd >= 0) {
    if (config.stream) {
      const int waiting = given_done < given_size;
      fds[0].events = (short)(waiting ? POLLRDHUP : POLLIN | POLLRDHUP);
      fds[4].fd = going && waiting ? in[1] : -1;
    }
    int ready = poll(fds, 5, going ? 10 : 0);
    if (ready < 0 && errno != EINTR) break;
    if (fds[0].revents & (config.stream ? ~POLLIN : ~0)) break; /* nobody listens any more */
    if (fds[0].revents) {
      given_done = 0, given_size = read(control, given, sizeof given);
      if (given_size <= 0) break;
    }
    if (fds[4].fd >= 0 && fds[4].revents) {
      ssize_t n = write(in[1], given + given_done, (size_t)(given_size - given_done));
      if (n > 0) given_done += n;
      else if (errno != EAGAIN && errno != EINTR) given_done = given_size; /* it reads nothing any more */
    }
    if (fds[1].fd >= 0 && fds[1].revents) {
      struct note note;
      ssize_t n = read(fds[1].fd, &note, sizeof note);
      if (n != sizeof note) {
        fds[1].fd = -1;
        going = 0;
      } else if (note.kind == 'S') {
        end = note, ended = 1, going = 0;
      } else if (note.kind == 'W') {
        watched = 1;
      } else {
        char text[200];
        int size = note.kind == 'X' ? snprintf(text, sizeof text, "%s: %s", note.text, strerror(note.value))
                                    : snprintf(text, sizeof text, "%s", note.text);
        if (frame((char)note.kind, text, (size_t)size) != 0) break;
        if (note.kind == 'X') going = 0;
      }
    }
    for (int i = 2; i < 4; i++) {
      if (fds[i].fd < 0 || !fds[i].revents) continue;
      ssize_t n = read(fds[i].fd, buffer, sizeof buffer);
      if (n <= 0) {
        fds[i].fd = -1;
        continue;
      }
      if (n > left) n = left, reason = "output", going = 0;
      left -= n;
      if (n > 0 && frame(i == 2 ? 'O' : 'E', buffer, (size_t)n) != 0) return 74;
    }
    long now = now_ms();
    if (going && now >= deadline) reason = "time", going = 0;
    if (going && watched && now >= watched_ms + 20) {
      watched_ms = now;
      if (memory_held() > config.memory) reason = "memory", going = 0;
    }
    if (!going && init > 0) {
      /* The end of a pid namespace's init is the end of all that is in it, and is waited for. */
      kill(init, SIGKILL);
      waitpid(init, NULL, 0);
      init = 0;
      if (config.mode != NAMESPACES) end_children();
    }
    if (!going && ready == 0) break; /* all is dead, and what it said was read */
  }
  if (init > 0) {
    kill(init, SIGKILL);
    waitpid(init, NULL, 0);
  }
  if (config.mode != NAMESPACES) end_children();
  if (!ended) end.value = SIGKILL;
  char text[128];
  int size = snprintf(text, sizeof text, "%s %d %s %ld %ld", WIFEXITED(end.value) ? "exited" : "signaled",
                      WIFEXITED(end.value) ? WEXITSTATUS(end.value) : WTERMSIG(end.value), reason, end.cpu_us, end.peak_kb);
  return frame('S', text, (size_t)size) == 0 ? 0 : 74;
}
