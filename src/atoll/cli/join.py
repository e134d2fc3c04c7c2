"""`atoll join`: an island from a URL and a token."""

import logging
import os
import signal
import sys
from pathlib import Path

import torch
import typer

from atoll import open_files, torch_threads
from atoll.cli import factory, output
from atoll.cli.link import required_token
from atoll.cli.options import JoinOptions
from atoll.cli.s3 import s3_access
from atoll.errors import ConfigError, GroupBroken
from atoll.island import trainer
from atoll.island.participant import Participant
from atoll.island.ranks import parallel
from atoll.island.run import Run
from atoll.island.sharded.run import ShardedRun
from atoll.launch import joining, placement

RANK_FIGURES = {
    *("gather_seconds", "compute_seconds", "reduce_seconds", "step_seconds"),
    *("rank_bytes_sent", "rank_bytes_received", "rolled_back_steps", "late_steps"),
}
BROKEN = 2  # as every error that is told in one sentence
STOPPED = 130  # what shells report for a command ended by a signal from the keyboard


def join(options: JoinOptions) -> None:
    """Trains until the run is over."""
    if placement.local_rank() is None:  # torchrun ends its ranks itself
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    open_files.raise_limit()
    # Before the coordinator hears of this island: a mistake in the user's code is not its matter.
    model = None if options.model is None else factory.build(options.model)
    kind = parallel.check(options.parallel)
    device = device_of(options.device)
    state_home = os.environ.get("XDG_STATE_HOME")
    run = joining.join(
        options.url,
        token=required_token(options.token),
        fingerprint=options.fingerprint,
        insecure=options.insecure,
        worker_id=options.worker_id,
        state=options.state,
        home=Path(state_home) / "atoll" if state_home else joining.DEFAULT_HOME,
        group_timeout=options.group_timeout,
        listen=options.listen,
        advertise=options.advertise,
        bucket=options.bucket,
        s3=s3_access(),
    )
    _heed_signals(run)
    try:
        torch_threads.use(run.manifest.inner.threads)
        if run.group.is_leader and not options.as_json:
            output.say(f"island {run.worker_id!r} joins run {run.manifest.name!r}")
        trainer.train(run, location=options.data, device=device, model=model, kind=kind)
        if run.group.is_leader:
            _tell(run, as_json=options.as_json)
    except KeyboardInterrupt:
        # The others need not wait for the heartbeat timeout; the checkpoint stays for a return.
        run.leave_now()
        if run.group.is_leader and not options.as_json:
            output.say(f"island {run.worker_id!r} left; the same command brings it back")
        raise typer.Exit(_ended(run, STOPPED)) from None
    except GroupBroken as error:
        if placement.local_rank() is None:
            raise
        output.complain(error)
        _ended(run, BROKEN)
    finally:
        run.release()
    _ended(run, os.EX_OK)


def _ended(run: Participant, code: int) -> int:
    """Lets go of everything and, under torchrun, ends this process without what Python does then.

    Threads of the collectives wind down meanwhile. Once that aborted a follower that had finished
    (torch 2.13, "terminate called without an active exception"), and torchrun takes such a rank for
    a failed one; one that is broken would be waited for until gloo's deadline.
    """
    run.release()
    if placement.local_rank() is not None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _heed_signals(run: Participant) -> None:
    if isinstance(run, ShardedRun):
        # A step that one rank leaves is lost for all: it is made and saved first.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: run.interrupt())
        return
    if run.group.size == 1:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # of one rank under torchrun too
        return
    # Ranks end together, between two steps; one that stopped inside a step would leave the others
    # in it until their deadline.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: run.group.interrupt())


def device_of(name: str) -> torch.device:
    """The device that `name` asks for; `auto` takes an accelerator if there is one."""
    if name != "auto":
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as exc:  # the latter: torch without that device
            reason = str(exc).split("\n")[0]
            raise ConfigError(
                f"--device {name!r} is not a device of this machine ({reason}); use auto or cpu"
            ) from exc
        return device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = placement.local_rank()
    return torch.device("cuda" if local_rank is None else f"cuda:{local_rank}")


def _tell(run: Run | ShardedRun, *, as_json: bool) -> None:
    telemetry = run.telemetry()
    about: dict[str, object]
    if isinstance(run, ShardedRun):
        about = {"version": run.version, "step": telemetry.step, "steps": run.steps}
        about |= telemetry.model_dump(include=RANK_FIGURES)
        ended = f"ended at step {telemetry.step}, checkpoint {run.version}"
    else:
        about = {"version": run.version, "digest": run.digest, "stale_rounds": run.stale_rounds}
        if run.buckets is not None:
            about |= run.buckets.told()
        ended = f"ended at version {run.version}, published weights {run.digest}"
    summary = {
        "worker_id": run.worker_id,
        **about,
        **telemetry.model_dump(
            include={"tokens", "tokens_per_second", "bytes_sent", "bytes_received"}
        ),
    }
    if as_json:
        output.print_json(summary)
    else:
        output.say(
            f"{ended}; sent {output.size(telemetry.bytes_sent)}, "
            f"received {output.size(telemetry.bytes_received)}"
        )
