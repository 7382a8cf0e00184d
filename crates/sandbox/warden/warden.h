/* What the three files of the warden share: the program that starts, walls in, watches and ends one run of untrusted code. */
#ifndef ROLLFLOW_WARDEN_H
#define ROLLFLOW_WARDEN_H
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MOST 256

enum mode { NAMESPACES = 'n', WALLS = 'w', OPEN = 'u' };

struct blob { const char *name; const char *data; size_t size; };

/* All limits are for one run; sizes are in bytes. */
struct config {
  enum mode mode;
  long wall_ms, cpu_s, memory, processes, file_size, disk, output;
  char *argv[MOST], *env[MOST], *readable[MOST];
  size_t args, envs, readables, files;
  struct blob file[MOST], input;
  char *work;
  int stream; /* standard input is what comes after the configuration, not `input` */
};

/* What the inner processes say to the outermost: 'L' a layer that stands, 'X' what failed (value: errno), 'W' that the new /proc is there, 'S' the program's
   end (value: its wait status). One write each, short enough to be whole. */
struct note { int kind, value; long cpu_us, peak_kb; char text[96]; };

/* Who the program is: the uid it gets, 0 where it keeps the caller's; whether that uid is nobody else's; whether processes can be watched. */
struct guest { uid_t uid; int own_uid, watched; };

extern int notes; /* the pipe they go through */
void tell(int kind, int value, const char *text);
void fail(const char *what) __attribute__((noreturn)); /* says errno and leaves */
int put(int at, const char *name, const char *data, size_t size);

int enter_namespaces(struct guest *guest);              /* 0, or -1 with errno; before the fork */
void build_root(const struct config *, struct guest *); /* inside, by the new init */
void limit(const struct config *, const struct guest *);
void confine(const struct config *, const struct guest *, int work); /* Landlock and seccomp: the last steps before exec */
#endif
