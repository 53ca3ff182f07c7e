"""The process in which a response's code runs, contained. It uses the standard library only, and is
started by its path with ``python -I -S``.

Arguments: FD_IN FD_OUT LINK. FD_IN holds one JSON object: {"code", "limits": {name of a resource
limit: value}, "parent": id of the parent process, "path": directories of packages, "mode"}, and
further keys that depend on the mode:
    "program"  none: the code runs as __main__, with the test's standard input and output
    "call"     "function" and "arguments": the function's value is written to FD_OUT as JSON
    "serve"    none: the code is a module, used by the process at the other end of the socket LINK
    "asserts"  none: the code is the test of a module that serves at the other end of LINK
Exit status: 0 done, 3 the code raised or exited early, 4 out of memory, 5 the value is not JSON.
"""

import builtins
import ctypes
import itertools
import json
import os
import platform
import resource
import signal
import stat
import struct
import sys
from typing import Any

RAISED, NO_MEMORY, NO_JSON = 3, 4, 5
NOT_CONTAINED = b"\0"  # first byte of FD_OUT; CONTAINED if the filter of system calls is in force
CONTAINED = b"\1"
PRELUDE = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")

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
    # memory, queues and semaphores of the user's other processes
    "shmat 30 196, shmctl 31 195, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, "
    "semop 65 193, semtimedop 220 192, semctl 66 191, "
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
    "userfaultfd 323 282, "
)
REFUSED = {
    name: (int(x86), None if arm == "-" else int(arm))
    for name, x86, arm in (call.split() for call in _REFUSED.split(", ")[:-1])
}
CLONE = (56, 220)
CAPSET = (126, 91)
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same everywhere
READ_FILE, READ_DIR = 4, 8  # LANDLOCK_ACCESS_FS_*
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


def limit(limits: dict[str, int]) -> None:
    """Set resource limits. The soft limit of processor time sends SIGXCPU; the hard one, a second
    later, sends SIGKILL, which does not tell the reason."""
    for name, value in limits.items():
        kind = getattr(resource, name)
        highest = resource.getrlimit(kind)[1]
        wanted = (value, value + 1 if name == "RLIMIT_CPU" else value)
        soft, hard = (
            wanted if highest == resource.RLIM_INFINITY else (min(w, highest) for w in wanted)
        )
        resource.setrlimit(kind, (soft, hard))


def contain(parent: int, packages: list[str]) -> bool:
    """Install the filter of system calls for this process and its threads, for good, and have the
    process killed when ``parent`` ends. Without capabilities, and readable by nobody, it cannot
    read other processes of a privileged user. Where the kernel has Landlock, it can read no other
    process at all, and no file besides Python's.

    Return False where there is no filter.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return False
    column, arch = MACHINES[platform.machine()]
    program = b"".join(struct.pack("HBBI", *line) for line in rules(column, arch))
    memory = ctypes.create_string_buffer(program)
    # struct sock_fprog
    described = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None)
    prctl = libc.prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
    set_death_signal, set_dumpable, set_seccomp, mode_filter = 1, 4, 22, 2
    prctl(set_death_signal, signal.SIGKILL, None, 0, 0)  # the waiting parent may be killed
    if os.getppid() != parent:
        os._exit(RAISED)
    prctl(set_dumpable, 0, None, 0, 0)
    libc.syscall(CAPSET[column], struct.pack("Ii", 0x20080522, 0), bytes(24))
    set_no_new_privileges = 38
    if prctl(set_no_new_privileges, 1, None, 0, 0) != 0:
        return False
    hide_files(libc, [*READABLE, sys.prefix, sys.base_prefix, *packages])
    return prctl(set_seccomp, mode_filter, described, 0, 0) == 0


def hide_files(libc: ctypes.CDLL, readable: list[str]) -> None:
    """Refuse to open anything that is not below these paths (Landlock, Linux 5.13)."""
    handled = struct.pack("Q", READ_FILE | READ_DIR)
    rules = libc.syscall(LANDLOCK_CREATE, handled, len(handled), 0)
    if rules < 0:
        return
    for path in filter(os.path.exists, readable):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = READ_FILE | (READ_DIR if stat.S_ISDIR(os.fstat(opened).st_mode) else 0)
        path_beneath = 1
        libc.syscall(LANDLOCK_ADD, rules, path_beneath, struct.pack("=Qi", rights, opened), 0)
        os.close(opened)
    libc.syscall(LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def rules(column: int, arch: int) -> list[tuple[int, int, int, int]]:
    """Return the packet filter, as (opcode, lines to skip if true, if false, constant)."""
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
            lines += [
                (EQUAL, 0, 4, number),
                (LOAD, 0, 0, ARGUMENT[argument]),
                (ANY_BIT, 0, 1, WRITING),
                (RETURN, 0, 0, REFUSE),
                (LOAD, 0, 0, NUMBER),
            ]
    for numbers, allowed in COMMANDS:
        lines += [
            (EQUAL, 0, len(allowed) + 3, numbers[column]),
            (LOAD, 0, 0, ARGUMENT[1]),
            *(
                (EQUAL, left, 0, command)
                for left, command in zip(range(len(allowed), 0, -1), allowed, strict=True)
            ),
            (RETURN, 0, 0, REFUSE),
            (LOAD, 0, 0, NUMBER),
        ]
    lines += [
        (EQUAL, 0, 3, CLONE[column]),
        (LOAD, 0, 0, ARGUMENT[0]),
        (ANY_BIT, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    return lines


def prelude() -> dict[str, object]:
    """Return what programs of competitions expect to be imported: the modules of PRELUDE and their
    public names."""
    names: dict[str, object] = {}
    modules = {name: __import__(name) for name in PRELUDE}
    for module in modules.values():
        public = getattr(module, "__all__", None) or [
            name for name in vars(module) if not name.startswith("_")
        ]
        names.update({name: getattr(module, name) for name in public})
    return {name: value for name, value in names.items() if not hasattr(builtins, name)} | modules


def run_program(code: str) -> None:
    main = type(sys)("__main__")
    vars(main).update(prelude())
    sys.modules["__main__"] = main
    try:
        exec(compile(code, "<response>", "exec"), vars(main))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    sys.stdout.flush()


def integer_keys(argument: object) -> object:
    """Turn the keys of a dict back into the whole numbers that JSON made text of."""
    if (
        isinstance(argument, dict)
        and argument
        and all(key.lstrip("-").isdecimal() for key in argument)
    ):
        return {int(key): value for key, value in argument.items()}
    return argument


def run_call(code: str, function: str, arguments: list[object], out: int) -> None:
    given = prelude()
    names = dict(given)
    exec(compile(code, "<response>", "exec"), names)
    own = function in names and names[function] is not given.get(function)
    solution: Any = names if own else names["Solution"]
    found = solution[function] if own else getattr(solution(), function)
    value = found(*map(integer_keys, arguments))
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        os._exit(NO_JSON)
    os.write(out, text.encode())


# -- a module runs in one process and its test in another: only data passes between them, so that no
# object of the module takes part in a comparison


def send(link: int, message: object) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(link, data) :]


def encode(value: object, refs: list[object]) -> object:
    """Return data as JSON, and any other object as its index in ``refs``."""
    if isinstance(value, Remote):
        return {"mine": object.__getattribute__(value, "ref")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    for kind in (list, tuple, set, frozenset, dict):
        if isinstance(value, kind):
            items = value.items() if isinstance(value, dict) else value
            return {kind.__name__: [encode(item, refs) for item in items]}
    if hasattr(value, "tolist"):  # a number or an array of numpy
        return encode(value.tolist(), refs)
    refs.append(value)
    return {"theirs": len(refs) - 1}


def decode(data: object, refs: list[object], link: int) -> object:
    """Return what ``encode`` was given at the other end."""
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "mine":
        return refs[content]
    if kind == "theirs":
        return Remote(content, link, refs)
    if kind == "bytes":
        return bytes.fromhex(content)
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}
    return kinds[kind](decode(item, refs, link) for item in content)


class Remote:
    """An object of the module, as its test sees it. It can be called, has its attributes, and
    supports OPERATIONS. It equals only itself, and no operator works on it."""

    def __init__(self, ref: int, link: int, refs: list[object]) -> None:
        self.ref, self.link, self.refs = ref, link, refs

    def __call__(self, *arguments: object, **named: object) -> object:
        return self._ask("call", arguments, named)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("getattr", name)

    def _ask(self, operation: str, *operands: object) -> object:
        refs: list[object] = []
        request = [encode(operand, refs) for operand in (self, *operands)]
        if refs:
            raise TypeError("functions and objects of a test cannot be handed to the code")
        send(self.link, [operation, *request])
        line = b""
        while not line.endswith(b"\n"):
            if not (part := os.read(self.link, 1 << 16)):
                raise RuntimeError("the code ended early")
            line += part
        raised, *content = json.loads(line)
        if raised:
            found = getattr(builtins, str(content[0]), None)
            known = isinstance(found, type) and issubclass(found, Exception)
            # in a call it would end a map over the code's function, and with it the test's asserts
            known = known and (found is not StopIteration or operation == "next")
            raise (found if known else RuntimeError)(content[1])  # type: ignore[misc]
        return decode(content[0], self.refs, self.link)


OPERATIONS: dict[str, Any] = {
    "all": dict,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "getitem": lambda container, key: container[key],
}
for operation in OPERATIONS:
    setattr(Remote, f"__{operation}__", lambda self, *args, name=operation: self._ask(name, *args))


def run_server(code: str, link: int) -> None:
    """Load the module, and answer the requests of its test until that ends. The module is not
    loaded before the first request: by then the process of the test is contained, and cannot be
    read."""
    solution = type(sys)("solution")
    sys.modules["solution"] = solution
    operations = OPERATIONS | {"getattr": getattr, "call": lambda f, args, named: f(*args, **named)}
    with open(link, "rb", closefd=False) as requests:
        first = requests.readline()
        exec(compile(code, "<response>", "exec"), vars(solution))
        refs: list[object] = [
            {n: v for n, v in vars(solution).items() if type(v) is not type(sys) and n[:2] != "__"}
        ]
        for line in itertools.chain([first], requests):
            operation, *operands = json.loads(line)
            try:
                value = operations[operation](*(decode(o, refs, link) for o in operands))
                reply = [False, encode(value, refs)]
            except Exception as error:
                reply = [True, type(error).__name__, str(error)[:500]]
            send(link, reply)


def run_asserts(code: str, link: int) -> None:
    """Run the test with the names of the module, none of which replaces a builtin or a module of
    PRELUDE."""
    answered: Any = Remote(0, link, [])._ask("all")
    # not even from a process that answers for itself, __builtins__ is taken
    offered = {name: value for name, value in answered.items() if name[:2] != "__"}
    names: dict[str, object] = {name: __import__(name) for name in PRELUDE}
    solution: Any = type(sys)("solution")  # tests may import it
    sys.modules["solution"] = solution
    vars(solution).update(offered)
    solution.__all__ = sorted(offered.keys() - names.keys() - vars(builtins).keys())
    names |= {name: offered[name] for name in solution.__all__}
    before = dict(names)
    exec(compile(code, "<test>", "exec"), names)
    for name, value in list(names.items()):
        if name.startswith("test") and callable(value) and before.get(name) is not value:
            value()


def main() -> None:
    source, out, link = map(int, sys.argv[1:])
    with open(source, "rb") as file:
        task = json.load(file)
    packages = task.pop("path")
    sys.path += packages
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    limit(task.pop("limits"))
    mode, parent = task.pop("mode"), task.pop("parent")
    if contain(parent, packages):
        os.write(out, CONTAINED)
    else:
        limit({"RLIMIT_NPROC": 64})  # counts all of the user's threads; does not limit root
        os.write(out, NOT_CONTAINED)
    try:
        if mode == "program":
            run_program(**task)
            return  # the interpreter then waits for the code's threads
        if mode == "call":
            run_call(**task, out=out)
        else:
            (run_server if mode == "serve" else run_asserts)(**task, link=link)
    except MemoryError:
        os._exit(NO_MEMORY)
    except BaseException as error:  # including an early SystemExit
        try:
            sys.stderr.write(f"{type(error).__name__}: {error}"[:500])
            sys.stderr.flush()
        finally:
            os._exit(RAISED)
    os._exit(0)


if __name__ == "__main__":
    main()
