"""What the recorded program says in its trace."""

import json
import os
from pathlib import Path


class Marks:
    """Lines of the marks file, each in one write."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **fields: object) -> None:
        os.write(self._fd, json.dumps(fields).encode() + b"\n")
