"""The process in which a response's code runs, contained. It uses the standard library only, and is
started by its path with ``python -I -S``.

Arguments: FD_IN FD_OUT LINK. FD_IN holds one JSON object: {"code", "limits": {name of a resource
limit: value}, "parent": id of the parent process, "path": directories of packages, "filter": the
filter of system calls, in hexadecimal digits, "mode"}, and further keys that depend on the mode:
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
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same everywhere
READ_FILE, READ_DIR = 4, 8  # LANDLOCK_ACCESS_FS_*


def limit(limits: dict[str, int]) -> None:
    """Set resource limits. The soft limit of processor time sends SIGXCPU; the hard one, a second
    later, sends SIGKILL, which does not tell the reason."""
    for name, value in limits.items():
        kind = getattr(resource, name)
        highest = resource.getrlimit(kind)[1]
        wanted = (value, value + 1 if name == "RLIMIT_CPU" else value)
        if highest != resource.RLIM_INFINITY:
            wanted = (min(wanted[0], highest), min(wanted[1], highest))
        resource.setrlimit(kind, wanted)


def contain(parent: int, packages: list[str], program: bytes) -> bool:
    """Install the filter ``program`` for this process and its threads, for good, and have the
    process killed when ``parent`` ends. Without capabilities, and readable by nobody, it cannot
    read other processes of a privileged user. Where the kernel has Landlock, it can read no other
    process at all, and no file besides Python's.

    Return False where there is no filter.
    """
    if not program:
        return False
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
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
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
    if contain(parent, packages, bytes.fromhex(task.pop("filter"))):
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
