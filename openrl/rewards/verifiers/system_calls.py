"""The system calls that a response's code is refused, as a filter for the kernel (seccomp)."""

import os
import platform
import struct
import sys
from functools import cache

# refused system calls, with their numbers on x86-64 and on arm64 (-: there is no such call)
_REFUSED = (
    # processes: no children, no other programs, no signals to others, no way around the limits
    "fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, kill 62 129, tkill 200 130, "
    "tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_open 434 434, "
    "pidfd_getfd 438 438, pidfd_send_signal 424 424, ptrace 101 117, process_vm_readv 310 270, "
    "process_vm_writev 311 271, setrlimit 160 164, prlimit64 302 261, setsid 112 157, "
    "setpgid 109 154, prctl 157 167, unshare 272 97, setns 308 268, clone3 435 435, "
    "sched_setscheduler 144 119, sched_setattr 314 274, setpriority 141 140, "
    # network, and memory that no limit counts
    "socket 41 198, socketpair 53 199, memfd_create 319 279, shmget 29 194, msgget 68 186, "
    "semget 64 190, mq_open 240 180, memfd_secret 447 447, io_uring_setup 425 425, "
    # memory, queues and semaphores of the user's other processes, and what all of them share
    "shmat 30 196, shmctl 31 195, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_unlink 241 181, "
    "semop 65 193, semtimedop 220 192, semctl 66 191, migrate_pages 256 238, move_pages 279 239, "
    "inotify_init 253 -, inotify_init1 294 26, timer_create 222 107, "
    # files: nothing is made, changed or removed
    "creat 85 -, openat2 437 437, open_by_handle_at 304 265, truncate 76 45, rename 82 -, "
    "renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, link 86 -, "
    "linkat 265 37, unlink 87 -, unlinkat 263 35, symlink 88 -, symlinkat 266 36, chmod 90 -, "
    "fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, "
    "fchownat 260 54, mknod 133 -, mknodat 259 33, utime 132 -, utimes 235 -, "
    "utimensat 280 88, futimesat 261 -, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, "
    "removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, setxattrat 463 463, "
    "removexattrat 466 466, file_setattr 469 469, "
    # the machine
    "mount 165 40, umount2 166 39, move_mount 429 429, chroot 161 51, pivot_root 155 41, "
    "reboot 169 142, swapon 167 224, swapoff 168 225, sethostname 170 161, "
    "settimeofday 164 170, clock_settime 227 112, init_module 175 105, finit_module 313 273, "
    "delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294, acct 163 89, "
    "adjtimex 159 171, sched_setaffinity 203 122, sched_setparam 142 118, ioprio_set 251 30, "
    "setdomainname 171 162, syslog 103 116, quotactl 179 60, fanotify_init 300 262, "
    "flock 73 32, fsopen 430 430, fsconfig 431 431, fsmount 432 432, open_tree 428 428, "
    "mount_setattr 442 442, clock_adjtime 305 266, iopl 172 -, ioperm 173 -, bpf 321 280, "
    "keyctl 250 219, add_key 248 217, request_key 249 218, perf_event_open 298 241, "
    "userfaultfd 323 282, fspick 433 433, sync 162 81, syncfs 306 267, "
)
REFUSED = {
    name: (int(x86), None if arm == "-" else int(arm))
    for name, x86, arm in (call.split() for call in _REFUSED.split(", ")[:-1])
}
CLONE = (56, 220)
# open and openat: their numbers, and which argument holds the flags
OPENING = (((2, None), 1), ((257, 56), 2))
# calls of which only some commands are allowed: their numbers, and the commands, which stand in the
# second argument. The others signal any process, lock files or change their flags.
COMMANDS = (
    ((72, 25), (0, 1, 2, 3, 4, 1030)),  # fcntl: F_DUPFD, F_{GET,SET}{FD,FL}, F_DUPFD_CLOEXEC
    # ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    ((16, 29), (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
)
# for each machine: its column of the tables above, and its AUDIT_ARCH_*
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
CLONE_THREAD = 0x10000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM
# ENOSYS: the C library falls back from clone3 to clone, whose flags can be read
ABSENT = 0x00050026
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # opcodes of the filter
NUMBER, ARCH, ARGUMENT = 0, 4, (16, 24, 32)  # offsets in struct seccomp_data
Instruction = tuple[int, int, int, int]  # opcode, lines to skip if true, if false, constant


@cache
def filter_program() -> bytes:
    """Return the filter as the kernel reads it; empty on machines for which there is none."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return b""
    lines = instructions(*MACHINES[platform.machine()])
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def instructions(column: int, arch: int) -> list[Instruction]:
    lines = [
        (LOAD, 0, 0, ARCH),
        (EQUAL, 1, 0, arch),
        (RETURN, 0, 0, REFUSE),  # calls of another architecture
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, 0x40000000),
        (RETURN, 0, 0, REFUSE),  # the x32 numbers of x86-64
    ]
    for name, numbers in REFUSED.items():
        if (number := numbers[column]) is not None:
            lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ABSENT if name == "clone3" else REFUSE)]
    for numbers, argument in OPENING:
        if (number := numbers[column]) is not None:
            lines += refused_unless(number, argument, (ANY_BIT, 0, 1, WRITING))
    for numbers, allowed in COMMANDS:
        passes = [(EQUAL, len(allowed) - n, 0, command) for n, command in enumerate(allowed)]
        lines += refused_unless(numbers[column], 1, *passes)
    lines += refused_unless(CLONE[column], 0, (ANY_BIT, 1, 0, CLONE_THREAD))
    return [*lines, (RETURN, 0, 0, ALLOW)]


def refused_unless(number: int, argument: int, *tests: Instruction) -> list[Instruction]:
    """Return the lines that refuse system call ``number`` unless one of ``tests``, of one of its
    arguments, skips the refusal."""
    return [
        (EQUAL, 0, len(tests) + 3, number),
        (LOAD, 0, 0, ARGUMENT[argument]),
        *tests,
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, NUMBER),
    ]
