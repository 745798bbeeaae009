"""Programs that try to break out. Each prints the actions that succeeded, so a safe end has an
empty output."""

from typing import NamedTuple

PRELUDE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def got(what, call):
    try:
        result = call()
    except BaseException:
        return
    if result is not False:
        print("got", what, repr(result)[:200])
def raw(number, *arguments):
    if libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return "done"
"""  # noqa: E501


class Attack(NamedTuple):
    """code: behind the prelude. statuses: with which it may end."""

    name: str
    code: str
    statuses: tuple[str, ...] = ("ok",)


PROCESSES = [
    Attack(
        "fork bomb", "while True:\n    got('fork', lambda: os.fork() and os._exit(9))\n    break"
    ),
    Attack(
        "every way to start one",
        """
got("fork", os.fork)
got("forkpty", os.forkpty)
got("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
got("exec", lambda: os.execv("/bin/sh", ["sh", "-c", "echo got sh"]))
got("exec of a script", lambda: os.execv(sys.executable, ["python", "-c", "print('got')"]))
import subprocess, multiprocessing
got("subprocess", lambda: subprocess.run(["/bin/true"]))
got("multiprocessing", lambda: multiprocessing.get_context("fork").Process(target=print).start())
got("system", lambda: os.system("true") == 0)
got("popen", lambda: os.popen("echo hello").read())
for flags in (0, 17, 0x100 | 17, 0x4100 | 17, 0x10000000, 0x20000000, 0x40000000, 0x50f00, 0x3d0f00):
    got(f"clone {flags:#x}", lambda: raw(56, flags, 0, 0, 0, 0))
got("vfork", lambda: raw(58))
block = (ctypes.c_uint64 * 11)()
got("clone3", lambda: raw(435, ctypes.byref(block), 88))
got("execveat", lambda: raw(322, -100, b"/bin/true", 0, 0, 0))
""",  # noqa: E501
    ),
    Attack(
        "survivors",
        """
import threading, signal, atexit
def stay():
    while True: signal.pause()
got("double fork", lambda: os.fork() or (os.setsid(), os.fork(), stay()))
got("daemon", lambda: libc.daemon(0, 0) == 0)
got("thread", lambda: threading.Thread(target=stay).start())
got("setsid", os.setsid)
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
atexit.register(lambda: os.write(1, b""))
""",
    ),
    Attack(
        "ends in atexit",
        "import atexit\natexit.register(lambda: stay())\ndef stay():\n    while True: pass",
        ("time",),
    ),
    Attack(
        "threads", "import threading\ngot('thread', lambda: threading.Thread(target=print).start())"
    ),
    Attack(
        "signals to others",
        """
import signal
for pid in (-1, 0, 1, 2):
    got(f"kill {pid}", lambda: os.kill(pid, 0))
for pid in (os.getppid(), -os.getppid(), VICTIM):
    for number in (0, 9, 15, 19):
        got(f"kill {pid}", lambda: os.kill(pid, number))
    got(f"killpg {pid}", lambda: os.killpg(pid, 9))
    got(f"pidfd {pid}", lambda: os.pidfd_open(pid))
    got(f"tgkill {pid}", lambda: raw(234, pid, pid, 9))
    got(f"tkill {pid}", lambda: raw(200, pid, 9))
    got(f"sigqueue {pid}", lambda: raw(129, pid, 9, ctypes.create_string_buffer(128)))
    got(f"tgsigqueue {pid}", lambda: raw(297, pid, pid, 9, ctypes.create_string_buffer(128)))
    got(f"setpgid {pid}", lambda: os.setpgid(0, pid))
""",
    ),
    Attack(
        "signals by the owner of a descriptor",
        """
import fcntl
reading, writing = os.pipe()
for pid in (os.getppid(), VICTIM, 1):
    got("F_SETOWN", lambda: fcntl.fcntl(reading, fcntl.F_SETOWN, pid))
    got("F_SETOWN_EX", lambda: fcntl.fcntl(reading, 15, (1).to_bytes(4, "little") + pid.to_bytes(4, "little")))
    got("FIOSETOWN", lambda: fcntl.ioctl(reading, 0x8901, pid.to_bytes(4, "little")))
got("F_SETSIG", lambda: fcntl.fcntl(reading, 10, 9))
got("FIOASYNC", lambda: fcntl.ioctl(reading, 0x5452, (1).to_bytes(4, "little")))
got("F_NOTIFY", lambda: fcntl.fcntl(os.open("/usr/lib", 0), 1026, 0xf))
got("lease", lambda: fcntl.fcntl(0, 1024, 0))
got("pipe size", lambda: fcntl.fcntl(writing, 1031, 2**20))
got("flock", lambda: fcntl.flock(0, 2))
got("the upper half", lambda: raw(72, reading, 8 | 1 << 32, os.getppid()))
got("ioctl, the upper half", lambda: raw(16, 0, 0x8901 | 1 << 32, ctypes.create_string_buffer(4)))
""",  # noqa: E501
    ),
    Attack(
        "memory of others",
        """
buffer = ctypes.create_string_buffer(64)
for pid in (os.getppid(), VICTIM, 1):
    got("ptrace attach", lambda: raw(101, 16, pid, 0, 0))
    got("ptrace seize", lambda: raw(101, 0x4206, pid, 0, 0))
    got("process_vm_readv", lambda: raw(310, pid, buffer, 1, buffer, 1, 0))
    got("process_vm_writev", lambda: raw(311, pid, buffer, 1, buffer, 1, 0))
    got("pidfd_open", lambda: raw(434, pid, 0))
    got("kcmp", lambda: raw(312, os.getpid(), pid, 0, 0, 0))
    got("prlimit", lambda: raw(302, pid, 0, 0, buffer))
    got("prlimit raise", lambda: raw(302, pid, 7, buffer, 0))
    got("process_madvise", lambda: raw(440, 3, buffer, 1, 21, 0))
    got("move_pages", lambda: raw(279, pid, 0, 0, 0, 0, 0))
    got("sched_setaffinity", lambda: os.sched_setaffinity(pid, {0}))
    got("setpriority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 5))
    got("ioprio", lambda: raw(251, 1, pid, 0))
got("traceme", lambda: raw(101, 0, 0, 0, 0))
""",
    ),
    Attack(
        "kernel's machinery",
        """
buffer = ctypes.create_string_buffer(256)
for name, number, *arguments in (
    ("unshare", 272, 0x10000000), ("setns", 308, 0, 0), ("chroot", 161, b"/tmp"), ("pivot_root", 155, b"/", b"/"),
    ("mount", 165, b"none", b"/tmp", b"tmpfs", 0, 0), ("umount", 166, b"/", 2), ("keyctl", 250, 0, 0, 0, 0, 0),
    ("add_key", 248, b"user", b"name", b"value", 5, -3), ("request_key", 249, b"user", b"name", 0, 0),
    ("bpf", 321, 0, buffer, 64), ("perf_event_open", 298, buffer, 0, -1, -1, 0), ("io_uring", 425, 4, buffer),
    ("userfaultfd", 323, 1), ("memfd", 319, b"name", 0), ("memfd_secret", 447, 0), ("inotify", 294, 0),
    ("fanotify", 300, 0, 0), ("personality", 135, 0x40000), ("prctl dumpable", 157, 4, 1, 0, 0, 0),
    ("prctl death signal", 157, 1, 0, 0, 0, 0), ("prctl subreaper", 157, 36, 1, 0, 0, 0),
    ("seccomp", 317, 1, 0, buffer), ("landlock", 444, buffer, 8, 0), ("setuid", 105, 0), ("setgid", 106, 0),
    ("setresuid", 117, 0, 0, 0), ("capset", 126, buffer, buffer), ("timer_create", 222, 1, buffer, buffer),
    ("timerfd", 283, 1, 0), ("eventfd", 290, 0, 0), ("epoll", 291, 0), ("signalfd", 289, -1, buffer, 8, 0),
    ("syslog", 103, 10, 0, 0), ("reboot", 169, 0xfee1dead, 672274793, 0, 0), ("swapon", 167, b"/dev/zero", 0),
    ("init_module", 175, buffer, 1, b""), ("kexec", 246, 0, 0, 0, 0), ("iopl", 172, 3), ("ioperm", 173, 0, 8, 1),
    ("modify_ldt", 154, 0, buffer, 16), ("sethostname", 170, b"x", 1), ("acct", 163, 0), ("quotactl", 179, 0, 0, 0, 0),
    ("settimeofday", 164, buffer, 0), ("adjtimex", 159, buffer), ("clock_settime", 227, 0, buffer),
    ("open_by_handle_at", 304, -100, buffer, 0), ("name_to_handle_at", 303, -100, b"/", buffer, buffer, 0),
    ("mlock", 149, buffer, 64), ("mbind", 237, 0, 0, 0, 0, 0, 0), ("splice", 275, 0, 0, 1, 0, 1, 0),
    ("vmsplice", 278, 1, buffer, 0, 0), ("sendfile", 40, 1, 0, 0, 1), ("copy_file_range", 326, 0, 0, 1, 0, 1, 0),
    ("sync", 162), ("vhangup", 153), ("mincore", 27, 0, 1, buffer), ("remap_file_pages", 216, 0, 0, 0, 0, 0),
    ("set_mempolicy", 238, 0, 0, 0), ("fsopen", 430, b"tmpfs", 0), ("open_tree", 428, -100, b"/", 1),
    ("mount_setattr", 442, -100, b"/", 0, buffer, 32), ("pidfd_getfd", 438, 0, 0, 0),
    ("openat2", 437, -100, b"/", buffer, 24),
    ("set_robust_list", 273, buffer, 24), ("arch_prctl", 158, 0x1001, 0), ("sched_setscheduler", 144, 0, 3, buffer),
    ("nice", 141, 0, 0, 5), ("membarrier", 324, 0, 0, 0), ("lookup_dcookie", 212, 0, buffer, 8),
    ("ustat", 136, 0, buffer),
    ("uselib", 134, b"/lib"), ("sysfs", 139, 1), ("getpriority", 140, 0, 1), ("statfs", 137, b"/", buffer),
):
    got(name, lambda: raw(number, *arguments))
for number in range(425, 512):
    if number not in (435, 436, 439):
        got(f"call {number}", lambda: raw(number, 0, 0, 0, 0, 0, 0))
""",  # noqa: E501
    ),
    Attack(
        "another architecture's calls",
        """
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # eax = 20, getpid of 32 bits; int 0x80
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("got", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
""",
        ("signal",),
    ),
    Attack("the third interface's calls", "raw(39 | 0x40000000)\nprint('got x32')", ("signal",)),
]

FILES = [
    Attack(
        "reading",
        """
import glob, pathlib
own, parent = os.getpid(), os.getppid()
for path in (
    "/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/self/environ", "/proc/self/maps", "/proc/self/mem",
    "/proc/self/fd/3", "/proc/self/cmdline", "/proc/self/status", "/proc/1/environ", "/proc/1/cmdline", "/proc/1/mem",
    "/proc/1/maps", f"/proc/{parent}/environ", f"/proc/{parent}/mem", f"/proc/{parent}/maps", f"/proc/{parent}/cmdline",
    f"/proc/{parent}/fd/3", f"/proc/{own}/environ", f"/proc/{VICTIM}/environ", f"/proc/{VICTIM}/mem",
    f"/proc/{VICTIM}/cwd", f"/proc/{VICTIM}/fd/0", f"/proc/{VICTIM}/root/etc/passwd", "/proc/version", "/proc/net/tcp",
    "/proc/sysvipc/shm", "/proc/kcore", "/sys/kernel/notes", "/dev/mem", "/dev/tty", "/dev/vda", "/dev/ptmx",
    "/dev/kmsg",
    "/dev/shm/secret", "/proc/self/root/etc/passwd", "/proc/thread-self/environ", SECRET, "/../" + SECRET,
    os.path.expanduser("~/.ssh/id_rsa"), "/root/.bashrc", PACKAGE + "/__init__.py",
    PACKAGE + "/sandbox/local_sandbox.py", PACKAGE + "/../../pyproject.toml",
    SITE_PACKAGES + "/torch/__init__.py", "/distflow-source/distflow/__init__.py",
):
    got(path, lambda: open(path, "rb").read(64))
    got("mapped " + path, lambda: __import__("mmap").mmap(os.open(path, os.O_RDONLY), 10, prot=1))
for folder in ("/", "/etc", "/proc", "/proc/self/fd", "/proc/self/task", "/root", "/home", "/tmp", "/run", "/var",
               "/dev", "/sys", "/dev/shm", "/mnt", "/work", "/opt", "/boot", ".", "..", os.path.dirname(SECRET)):
    got(folder, lambda: os.listdir(folder))
    got("glob " + folder, lambda: next(pathlib.Path(folder).iterdir()))
got("link", lambda: os.readlink(f"/proc/{VICTIM}/exe"))
got("own link", lambda: os.readlink("/proc/self/exe"))
got("attributes", lambda: os.listxattr("/"))
got("change of folder", lambda: os.chdir("/tmp"))
got("O_PATH", lambda: open("/proc/self/fd/%d" % os.open("/etc/passwd", os.O_PATH)).read())
got("by a folder", lambda: os.open("passwd", os.O_RDONLY, dir_fd=os.open("/etc", os.O_PATH)))
print(len(os.environ) or "", end="")
""",  # noqa: E501
    ),
    Attack(
        "writing",
        """
import tempfile
for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/root", ".", "/", "/usr/lib", os.path.dirname(SECRET)):
    path = os.path.join(folder, "made-by-a-program")
    got("file " + path, lambda: open(path, "w"))
    got("append " + path, lambda: open(path, "a"))
    got("nameless " + path, lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))
    got("folder " + path, lambda: os.mkdir(path))
    got("fifo " + path, lambda: os.mkfifo(path))
    got("device " + path, lambda: os.mknod(path))
    got("symlink " + path, lambda: os.symlink(SECRET, path))
    got("hard link " + path, lambda: os.link(SECRET, path))
    got("rename " + path, lambda: os.rename(SECRET, path))
for path in (os.__file__, PACKAGE + "/__init__.py", "/dev/vda", "/etc/passwd", SECRET):
    got("open to write " + path, lambda: open(path, "r+b"))
    got("times " + path, lambda: os.utime(path, ns=(os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns)))
    got("mode " + path, lambda: os.chmod(path, os.stat(path).st_mode & 0o7777))
    got("owner " + path, lambda: os.chown(path, os.stat(path).st_uid, os.stat(path).st_gid))
for path in (SECRET, os.path.dirname(SECRET)):
    got("truncate " + path, lambda: open(path, "w"))
    got("truncate by name " + path, lambda: os.truncate(path, 0))
    got("remove " + path, lambda: os.remove(path))
    got("mode " + path, lambda: os.chmod(path, 0o777))
    got("mode by descriptor " + path, lambda: os.chmod(os.open(path, os.O_RDONLY), 0o777))
    got("owner " + path, lambda: os.chown(path, 1, 1))
    got("times " + path, lambda: os.utime(path))
    got("attribute " + path, lambda: os.setxattr(path, "user.x", b"1"))
got("tempfile", lambda: tempfile.mkstemp())
got("sqlite", lambda: __import__("sqlite3").connect("/tmp/made-by-a-program").execute("create table t (x)"))
got("sticky bytecode", lambda: __import__("py_compile").compile(os.__file__, "/tmp/made-by-a-program"))
got("write to standard input", lambda: os.write(0, b"x"))
got("shrink standard input", lambda: os.ftruncate(0, 0))
""",  # noqa: E501
    ),
    Attack(
        "fill the disk",
        "got('disk', lambda: open('/tmp/made-by-a-program', 'wb').write(bytes(2**26)))",
    ),
    Attack(
        "shared memory",
        """
from multiprocessing import shared_memory, Lock, Queue
buffer = ctypes.create_string_buffer(256)
got("POSIX", lambda: shared_memory.SharedMemory(create=True, size=64))
got("semaphore", Lock)
got("queue", Queue)
got("shm_open", lambda: libc.shm_open(b"/made-by-a-program", 0o102, 0o600) >= 0)
got("sem_open", lambda: ctypes.CDLL(None).sem_open(b"/made-by-a-program", 0o100, 0o600, 1) not in (0, -1))
got("shmget", lambda: raw(29, 77, 4096, 0o1600))
got("semget", lambda: raw(64, 77, 1, 0o1600))
got("msgget", lambda: raw(68, 77, 0o1600))
got("mq_open", lambda: raw(240, b"made-by-a-program", 0o102, 0o600, 0))
got("memfd", lambda: os.memfd_create("x"))
""",  # noqa: E501
    ),
    Attack(
        "sockets",
        """
import socket
for family in range(0, 46):
    for kind in (1, 2, 3, 5, 10):
        got(f"socket {family} {kind}", lambda: socket.socket(family, kind))
got("pair", socket.socketpair)
got("connect", lambda: socket.create_connection(("127.0.0.1", 22), timeout=1))
got("abstract", lambda: socket.socket(socket.AF_UNIX).bind("\\0name"))
for descriptor in range(0, 64):
    got(f"a socket at {descriptor}", lambda: socket.socket(fileno=descriptor))
    got(f"send {descriptor}", lambda: raw(44, descriptor, b"x", 1, 0, 0, 0))
    got(f"accept {descriptor}", lambda: raw(43, descriptor, 0, 0))
got("resolve", lambda: socket.getaddrinfo("example.org", 80))
got("asyncio", lambda: __import__("asyncio").new_event_loop())
""",
    ),
    Attack(
        "descriptors",
        """
for descriptor in range(3, 4096):
    try:
        os.fstat(descriptor)
    except OSError:
        continue
    print("got", descriptor)
""",
    ),
]

USE = [
    Attack("memory bomb", "held = []\nwhile True: held.append(bytearray(2**24))", ("memory",)),
    Attack("one large block", "x = bytearray(2**40)", ("memory",)),
    Attack(
        "by mapping",
        "import mmap\nheld = [mmap.mmap(-1, 2**26) for _ in range(100)]\nprint('got')",
        ("exit", "memory"),
    ),
    Attack("memory that is caught", "try: bytearray(2**40)\nexcept MemoryError: pass"),
    Attack("processor", "while True: pass", ("time",)),
    Attack("in C", "sum(range(10**15))", ("time",)),
    Attack("huge integer", "x = 7 ** 10**9", ("time", "memory")),
    Attack("huge text", "x = 'ab' * 10**9\ny = x.replace('a', 'ccc')", ("memory",)),
    Attack("pattern", "import re\nre.match('(a+)+b', 'a' * 60)", ("time",)),
    Attack("sleep", "import time\ntime.sleep(100)", ("time",)),
    Attack(
        "signals of time",
        """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, lambda *_: None)
    except (OSError, ValueError): pass
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while True: pass
""",
        ("time",),
    ),
    Attack(
        "deadlock",
        "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
        ("time",),
    ),
    Attack(
        "raise of limits",
        "import resource as r\nfor n in range(16): got(n, lambda: r.setrlimit(n, (-1, -1)))",
    ),
    Attack(
        "raise of one",
        "import resource as r\nfor n in range(16): got(n, lambda: r.prlimit(0, n, r.getrlimit(n)))",
    ),
    Attack("recursion", "def f(n): return f(n + 1)\nf(0)", ("exit",)),
    Attack(
        "deep recursion",
        "sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
        ("memory", "signal", "time"),
    ),
    Attack(
        "recursion in C",
        (
            "sys.setrecursionlimit(10**9)\nx, y = [], []\nfor _ in range(10**6): x, y = [x], [y]\n"
            "x == y"
        ),
        ("signal", "exit"),  # Python 3.12 and newer notice it
    ),
    Attack("wild pointer", "ctypes.string_at(1)", ("signal",)),
    Attack("abort", "libc.abort()", ("signal",)),
    Attack("1 GB on standard output", "while True: os.write(1, bytes(2**20))", ("output",)),
    Attack("1 GB on standard error", "while True: sys.stderr.write('x' * 2**20)", ("output",)),
    Attack("1 GB through print", "while True: print('got nothing' * 10**5)", ("output",)),
    Attack("descriptors", "held = []\nwhile True: held.append(os.open('/dev/null', 0))", ("exit",)),
    Attack("pipes", "held = []\nwhile True: held.append(os.pipe())", ("exit",)),
    Attack("exit", "os._exit(3)", ("exit",)),
    Attack("all closed", "os.closerange(0, 100)\nos._exit(0)"),
    Attack("streams closed", "sys.stdout.close()\nsys.stderr.close()\nos.close(1)"),
    Attack("streams replaced", "sys.stdout = sys.stderr = None"),
    Attack("modules gone", "sys.modules.clear()"),
    Attack(
        "builtins gone",
        "import builtins\nfor n in list(vars(builtins)): delattr(builtins, n)",
        ("exit", "ok"),
    ),
    Attack(
        "a class that lies",
        "class E(BaseException):\n  def __str__(self): raise self\nraise E",
        ("exit",),
    ),
    Attack("hook", "sys.excepthook = lambda *_: os._exit(0)\nraise ValueError", ("exit",)),
    Attack("exit status that wraps", "sys.exit(256)"),
    Attack("no code at all", "", ("ok",)),
    Attack("no Python", "def", ("exit",)),
    Attack("null", "x = '\0'", ("exit", "ok")),
    Attack("surrogate", "x = '\ud800'", ("exit", "ok")),
    Attack("long line", "x = " + "(" * 10000 + ")" * 10000, ("exit", "memory", "signal")),
    Attack("nested code", "-" * 100000 + "1", ("exit", "memory", "signal")),
]
