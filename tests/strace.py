"""strace from outside: attach to one thread of a running process and let a chosen call of it fail.

A tracer is attached after the imports, which take seconds under it. `when=` of strace counts per
thread, so a fault names the thread; `--seccomp-bpf` ignores injected signals and is not used.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# Every call by which a run changes what a restart finds; a machine may lack some of the older ones.
DURABLE = (
    "fsync",
    "fdatasync",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "write",
    "pwrite64",
    "ftruncate",
    "fallocate",
    "unlink",
    "unlinkat",
)
_ATTACHED = "attached"
# `tid name(arguments) = result`; of calls that other threads or a kill cut in two, the first half.
_CALL = re.compile(
    r"(?:(?P<tid>\d+) +)?(?P<name>[a-z]\w+)\((?P<arguments>.*?)(?:\) += .*| <unf.*)\Z"
)


@dataclass(frozen=True)
class Call:
    """One call as strace printed it; `tid` is 0 when only one thread was traced."""

    tid: int
    name: str
    arguments: str


def require(skip: Callable[[str], NoReturn]) -> None:
    """Skips where strace is missing, or may not trace; with CI=true that is a failure."""
    if shutil.which("strace") is None:
        skip("strace is not installed (apt-get install strace)")
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        skip(f"strace may not trace here: {tried.stderr.strip()}")


@contextmanager
def attached(
    tid: int,
    output: Path,
    *,
    calls: Sequence[str] = DURABLE,
    inject: str | None = None,
    follow: bool = False,
    paths: Sequence[Path] = (),
    data_bytes: int = 0,
) -> Iterator[None]:
    """Traces a thread (with `follow` its whole process) while the block runs; waits for its end.

    `inject` is what strace does to `calls`, such as `signal=SIGKILL:when=3`. With `paths` only
    calls on these files count. `data_bytes` of every string are told, as hexadecimal.
    """
    selected = ",".join(f"?{name}" for name in calls)
    words = [
        "strace",
        "-p",
        str(tid),
        "-y",
        "-s",
        str(data_bytes),
        "-o",
        str(output),
        "-e",
        f"trace={selected}",
    ]
    words += ["-f"] if follow else []
    words += ["-xx"] if data_bytes else []
    words += ["-e", f"inject={selected}:{inject}"] if inject is not None else []
    for path in paths:
        words += ["-P", str(path)]
    tracer = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    try:
        first = tracer.stderr.readline()
        assert _ATTACHED in first, f"strace did not attach to {tid}: {first}{tracer.stderr.read()}"
        yield
        # What else it says must not fill the pipe; it ends when what it traces has ended.
        tracer.stderr.read()
        tracer.wait()
    finally:
        tracer.kill()
        tracer.wait()
        tracer.stderr.close()


def calls(output: Path) -> list[Call]:
    """The calls of a trace, in the order in which they began."""
    lines = output.read_text().splitlines()
    found = [match for line in lines if (match := _CALL.match(line))]
    return [Call(int(m["tid"] or 0), m["name"], m["arguments"].rstrip(")")) for m in found]


def was_killed(output: Path) -> bool:
    """Whether the traced thread ended by SIGKILL."""
    return output.read_text().rstrip().endswith("+++ killed by SIGKILL +++")


def was_injected(output: Path) -> bool:
    """Whether some call was made to fail."""
    return "(INJECTED)" in output.read_text()
