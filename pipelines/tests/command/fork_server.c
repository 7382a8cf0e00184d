/* Fork server, preloaded into the command: it is loaded once, and each request is a fork of it before its `main`.
 * Loading libtorch and unloading it costs a quarter of a second of computing; a fork costs milliseconds.
 *
 * FORK_SERVER is the path of its socket. A request is a list of strings, each with its NUL: the files for standard output and standard
 * error, the folder, the number of arguments, the arguments, and the variables of the environment. The client then shuts down its writing
 * end. The answers have 4 bytes each: the process id, once the files are open, and the status of wait(2). A byte on standard output says
 * that the socket is there. The server ends when its standard input does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int (*main_function)(int, char **, char **);

static main_function real_main;

static char *next(char **at) {
    char *text = *at;
    *at += strlen(text) + 1;
    return text;
}

/* Runs `main` in this folder, with these arguments and variables. Each list ends with NULL. */
static int run(char *at, char *end) {
    if (chdir(next(&at)) != 0) _exit(125);
    int count = atoi(next(&at)), variables = 0;
    char **arguments = calloc(count + 1, sizeof *arguments);
    for (int i = 0; i < count; i++) arguments[i] = next(&at);
    for (char *rest = at; rest < end; next(&rest)) variables++;
    environ = calloc(variables + 1, sizeof *environ);
    for (int i = 0; i < variables; i++) environ[i] = next(&at);
    return real_main(count, arguments, environ);
}

static void answer(int client) {
    size_t length = 0, room = 1 << 16;
    char *request = malloc(room);
    for (ssize_t got; (got = read(client, request + length, room - length)) > 0;) {
        length += got;
        if (length == room) request = realloc(request, room *= 2);
    }
    char *at = request, *end = request + length;
    int in = open("/dev/null", O_RDONLY), out = open(next(&at), O_WRONLY), error = open(next(&at), O_WRONLY);
    if (in < 0 || out < 0 || error < 0) _exit(1);
    int answers[2] = {fork()};
    if (answers[0] == 0) {
        dup2(in, 0), dup2(out, 1), dup2(error, 2);
        close(in), close(out), close(error), close(client);
        int code = run(at, end);
        fflush(NULL);
        _exit(code); /* libtorch's destructors take a tenth of a second. */
    }
    if (answers[0] < 0) _exit(1); /* The client gets no id; and kill(-1) would end every process of the user. */
    /* Of the test program's standard error nothing is kept open: who reads it until its end would wait for the command. */
    close(0), close(1), close(2), close(out), close(error);
    signal(SIGPIPE, SIG_IGN); /* A client that is gone is an error of write. */
    if (write(client, &answers[0], 4) != 4) kill(answers[0], SIGKILL);
    waitpid(answers[0], &answers[1], 0);
    _exit(write(client, &answers[1], 4) != 4);
}

static int serve(int argc, char **argv, char **envp) {
    const char *path = getenv("FORK_SERVER");
    if (!path) return real_main(argc, argv, envp);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unlink(path); /* Of a process with the same id that was killed together with its server. */
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 64) != 0) return 1;
    if (write(1, "\n", 1) != 1) return 1;
    struct pollfd ends[] = {{.fd = 0, .events = POLLIN}, {.fd = listener, .events = POLLIN}};
    while (poll(ends, 2, -1) > 0 && !ends[0].revents) {
        int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (client >= 0 && fork() == 0) {
            close(listener);
            answer(client);
        }
        close(client);
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
    }
    unlink(path);
    _exit(0);
}

int __libc_start_main(main_function main, int argc, char **argv, main_function init, void (*fini)(void), void (*rtld_fini)(void), void *stack) {
    real_main = main;
    __typeof__(&__libc_start_main) start = dlsym(RTLD_NEXT, "__libc_start_main");
    return start(serve, argc, argv, init, fini, rtld_fini, stack);
}
