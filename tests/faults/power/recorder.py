"""Runs the program under strace, attached once everything is imported."""

import os
import subprocess
import sys
from pathlib import Path

from tests import strace
from tests.faults.power import machines, program

REPOSITORY = Path(__file__).parents[3]
LIMIT_SECONDS = 120
MAX_BYTES = 1 << 22  # of one write; a longer one is cut by strace and refused by the parser
# What changes a disk, or would change it in a way that the model does not know and must refuse.
CALLS = (
    "open,openat,openat2,creat,close,dup,dup2,dup3,fcntl,lseek,mmap,msync,"
    "write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,splice,"
    "truncate,ftruncate,fallocate,fsync,fdatasync,sync,syncfs,sync_file_range,"
    "rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,"
    "mkdir,mkdirat,rmdir"
)


def record(directory: Path, *, synchronous: str) -> Path:
    """The trace of one run whose files are in `directory / "root"`."""
    root, marks, trace = directory / "root", directory / "marks", directory / "trace"
    (root / machines.OPERATOR).mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-m", program.__name__, str(root), str(marks), synchronous]
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as traced:
        try:
            assert traced.stdin is not None
            assert traced.stdout is not None
            assert traced.stdout.readline() == "ready\n", "the program ended before its run"
            with strace.attached(
                traced.pid, trace, calls=CALLS.split(","), follow=True, data_bytes=MAX_BYTES
            ):
                traced.communicate("go\n", timeout=LIMIT_SECONDS)
        finally:
            traced.kill()
    assert traced.returncode == 0, f"the recorded program ended with {traced.returncode}"
    return trace
