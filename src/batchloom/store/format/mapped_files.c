/* Names a mapped file that became shorter while it was read.

The kernel answers a read beyond its end by SIGBUS, which ends the process without a word. Signals allow few calls: no
memory is allocated, and the mapping is found in /proc/self/maps. */

#define _XOPEN_SOURCE 700
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

static struct sigaction previous;

int64_t batchloom_kernel_version(void) { return KERNEL_VERSION; }

static void say(const char *text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0)
        return;
}

/* Copies the path of the mapping that holds an address; a line is "start-end permissions offset device inode path". */
static void find_path(uintptr_t address, char *path, size_t room) {
    int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    uintptr_t bounds[2] = {0, 0};
    size_t field = 0, length = 0;
    char buffer[1024];
    ssize_t count;
    path[0] = 0;
    if (maps < 0)
        return;
    while ((count = read(maps, buffer, sizeof buffer)) > 0) {
        for (ssize_t i = 0; i < count; i++) {
            char c = buffer[i];
            if (c == '\n') {
                path[length] = 0;
                if (bounds[0] <= address && address < bounds[1]) {
                    close(maps);
                    return;
                }
                bounds[0] = bounds[1] = field = length = 0;
            } else if (field < 2 && (c == '-' || c == ' ')) {
                field++;
            } else if (field < 2) {
                bounds[field] = bounds[field] << 4 | (uintptr_t)(c <= '9' ? c - '0' : c - 'a' + 10);
            } else if ((c == '/' || length) && length + 1 < room) {
                path[length++] = c;
            }
        }
    }
    close(maps);
    path[0] = 0;
}

static void name_file(int number, siginfo_t *info, void *context) {
    char path[2048];
    (void)context;
    find_path((uintptr_t)info->si_addr, path, sizeof path);
    if (path[0]) {
        say("batchloom: ");
        say(path);
        say(" became shorter while it was read, or its disk failed: this process ends (SIGBUS).\n");
    }
    /* A read is repeated, and ends the process as it would have; a signal of another process is sent again. */
    sigaction(number, &previous, NULL);
    if (info->si_code <= 0)
        raise(number);
}

/* Installs the handler before the present one, which keeps its effect, unless it is that already. */
int64_t batchloom_name_short_files(void) {
    struct sigaction action, present;
    if (sigaction(SIGBUS, NULL, &present) || present.sa_sigaction == name_file)
        return 0;
    previous = present;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = name_file;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, NULL);
}
