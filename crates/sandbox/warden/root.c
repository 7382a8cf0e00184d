/* The walls that namespaces make: a file system of its own, in which little can be seen and one small place written to, no network, and
   processes that see and reach none but each other. */
#define _GNU_SOURCE
#include "warden.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef __NR_mount_setattr
#define __NR_mount_setattr 442
#endif
struct attributes { uint64_t set, clear, propagation, userns; };
enum { RDONLY = 1, NOSUID = 2, NODEV = 4 };

static int write_file(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  ssize_t written = write(fd, text, strlen(text));
  close(fd);
  return written == (ssize_t)strlen(text) ? 0 : -1;
}

int enter_namespaces(struct guest *guest) {
  const int all = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;
  guest->own_uid = guest->watched = 1;
  if (geteuid() == 0 && unshare(all) == 0) {
    /* A uid that no other process has, so that its processes can be counted. The pid is ours alone while we live. */
    guest->uid = 1900000000u + (uid_t)getpid();
    tell('L', 0, "namespaces: mount, pid, network, ipc, uts, cgroup");
    return 0;
  }
  uid_t uid = geteuid();
  gid_t gid = getegid();
  if (uid == 0) return -1; /* a root without privileges: mapping it would leave its processes uncounted */
  if (unshare(all | CLONE_NEWUSER) != 0) return -1;
  char map[64];
  if (write_file("/proc/self/setgroups", "deny") != 0) return -1;
  snprintf(map, sizeof map, "65534 %u 1", uid);
  if (write_file("/proc/self/uid_map", map) != 0) return -1;
  snprintf(map, sizeof map, "65534 %u 1", gid);
  if (write_file("/proc/self/gid_map", map) != 0) return -1;
  /* What an administrator allows may still be nothing: unshare succeeds, and then no mount does. */
  if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) return -1;
  guest->uid = 0;
  tell('L', 0, "namespaces: user, mount, pid, network, ipc, uts, cgroup");
  return 0;
}

static void parents(const char *path) {
  char part[4096];
  for (const char *at = strchr(path + 1, '/'); at; at = strchr(at + 1, '/')) {
    snprintf(part, sizeof part, "%.*s", (int)(at - path), path);
    if (mkdir(part, 0755) != 0 && errno != EEXIST) fail(part);
  }
}

/* Shows what was at `path` before, and nothing of it can be changed. */
static void show(const char *path, uint64_t attributes) {
  char old[4096], link[4096];
  struct stat about;
  if (lstat(path, &about) == 0) return; /* within something that is shown */
  snprintf(old, sizeof old, "/old%s", path);
  if (lstat(old, &about) != 0) return;
  parents(path);
  if (S_ISLNK(about.st_mode)) {
    ssize_t size = readlink(old, link, sizeof link - 1);
    if (size < 0) fail(path);
    link[size] = 0;
    if (symlink(link, path) != 0) fail(path);
    return;
  }
  if (S_ISDIR(about.st_mode)) {
    if (mkdir(path, 0755) != 0) fail(path);
  } else {
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
    if (fd < 0) fail(path);
    close(fd);
  }
  if (mount(old, path, NULL, MS_BIND | MS_REC, NULL) != 0) fail(path);
  struct attributes wanted = {attributes, 0, 0, 0};
  if (syscall(__NR_mount_setattr, -1, path, 0x8000 /* AT_RECURSIVE */, &wanted, sizeof wanted) != 0) fail("mount_setattr");
}

void build_root(const struct config *config, struct guest *guest) {
  static const char *devices[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"};
  char options[160];
  if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) fail("making mounts private");
  if (mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=4096,mode=755") != 0) fail("a tmpfs on /tmp");
  if (mkdir("/tmp/old", 0700) != 0) fail("/tmp/old");
  if (syscall(SYS_pivot_root, "/tmp", "/tmp/old") != 0) fail("pivot_root");
  if (chdir("/") != 0) fail("/");
  for (size_t i = 0; i < config->readables; i++) show(config->readable[i], RDONLY | NOSUID | NODEV);
  for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) show(devices[i], RDONLY | NOSUID);
  /* Only where the old one is whole may a new one be mounted: before that goes. Without it nobody can add up what processes use. */
  if (mkdir("/proc", 0555) != 0) fail("/proc");
  if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid") != 0 &&
      mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) != 0)
    guest->watched = 0;
  else
    tell('W', 0, "");
  if (mkdir("/work", 0755) != 0) fail("/work");
  if (guest->uid) snprintf(options, sizeof options, "size=%ld,nr_inodes=4096,mode=755,uid=%u,gid=%u", config->disk, guest->uid, guest->uid);
  else snprintf(options, sizeof options, "size=%ld,nr_inodes=4096,mode=755", config->disk);
  if (mount("tmpfs", "/work", "tmpfs", MS_NOSUID | MS_NODEV, options) != 0) fail("a tmpfs on /work");
  if (symlink("/work", "/tmp") != 0 || symlink("/work", "/dev/shm") != 0) fail("/tmp");
  if (umount2("/old", MNT_DETACH) != 0) fail("leaving the old root");
  if (rmdir("/old") != 0) fail("/old");
  struct attributes sealed = {RDONLY, 0, 0, 0};
  if (syscall(__NR_mount_setattr, -1, "/", 0, &sealed, sizeof sealed) != 0) fail("sealing the root");
  if (sethostname("sandbox", 7) != 0) fail("sethostname");
  if (chdir("/work") != 0) fail("/work");
  for (size_t i = 0; i < config->files; i++)
    if (put(AT_FDCWD, config->file[i].name, config->file[i].data, config->file[i].size) != 0) fail(config->file[i].name);
  tell('L', 0, "file system: own root, read-only but for a tmpfs");
  if (guest->watched) tell('L', 0, "memory of all processes: watched");
}
