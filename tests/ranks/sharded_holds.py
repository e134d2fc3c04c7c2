"""`atoll` that stands still inside one step of a sharded run, as the last rank of a launch.

    sharded_holds.py STEP FOLDER join URL …

After the backward pass of step STEP it makes FOLDER/held and waits for FOLDER/release; the others
wait for its gradients. Heartbeats go on. Wraps the production code from outside.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from atoll import cli
from atoll.island.sharded.run import ShardedRun

POLL_SECONDS = 0.02


def install(step: int, folder: Path) -> None:
    made = ShardedRun.step

    def stepped(self: ShardedRun, **options: Any) -> None:
        made(self, **options)
        if self.steps == step - 1:
            (folder / "held").touch()
            while not (folder / "release").exists():
                time.sleep(POLL_SECONDS)

    ShardedRun.step = stepped  # type: ignore[method-assign] # the point of this program


def main() -> None:
    step, folder = int(sys.argv[1]), Path(sys.argv[2])
    sys.argv = ["atoll", *sys.argv[3:]]
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        install(step, folder)
    cli.main()


if __name__ == "__main__":
    main()
