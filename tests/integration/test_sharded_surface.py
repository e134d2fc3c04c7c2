"""What a script and `atoll join` may say in a sharded run; everything else is refused by name."""

import socket
from typing import Any, cast

import pytest
import torch

from atoll.clock import SystemClock
from atoll.collectives.base import Key
from atoll.errors import ConfigError, StaleContribution
from atoll.island.ranks.group import SOLO
from atoll.island.sharded.grpc_host import GrpcHost
from atoll.island.sharded.shield import Shield
from atoll.launch import joining
from tests.sharded_worlds import World


class Two:
    """A torchrun group of two."""

    size = 2


def manifest(tmp_path, **changes):
    return World(tmp_path, wanted=1, **changes).manifest


def test_torchrun_is_refused_where_ranks_are_processes(tmp_path):
    group: Any = Two()

    with pytest.raises(ConfigError, match=r"torchrun with 2 processes.*transport='grpc'"):
        joining.check_place(manifest(tmp_path), group, is_rank=True, listen=None, advertise=None)


def test_process_by_itself_is_refused_where_a_torchrun_launch_is_the_group(tmp_path):
    sharded = manifest(tmp_path, **{"sharded.transport": "torch_dist"})

    with pytest.raises(ConfigError, match=r"transport='torch_dist'.*torchrun.*'grpc'"):
        joining.check_place(sharded, SOLO, is_rank=True, listen=None, advertise=None)
    group: Any = Two()  # the control
    joining.check_place(sharded, group, is_rank=True, listen=None, advertise=None)


def test_processes_of_a_machine_that_are_given_one_address_have_ports_of_their_own():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1] + 1
    given = {"listen": f"127.0.0.1:{free - 1}", "advertise": "example.org:7"}
    host = GrpcHost(**given, secure=False, clock=SystemClock(), number=1)
    try:
        assert host.endpoint.port == 8
    finally:
        host.close()


@pytest.mark.parametrize("name", ["listen", "advertise"])
def test_address_is_refused_where_islands_only_dial_out(tmp_path, name):
    given = {"listen": None, "advertise": None, name: "127.0.0.1:1"}

    with pytest.raises(ConfigError, match=f"--{name} '127.0.0.1:1'"):
        joining.check_place(manifest(tmp_path), SOLO, is_rank=False, **given)


@pytest.mark.parametrize("listen", ["nothing:at-all", ":1", "host:70000", "::1:5"])
def test_address_that_is_none_is_refused_by_the_option(listen):
    with pytest.raises(ConfigError, match="--listen"):
        GrpcHost(listen=listen, advertise=None, secure=False, clock=SystemClock())


@pytest.mark.parametrize(
    ("listen", "advertise", "told"),
    [
        ("127.0.0.1:0", None, ("127.0.0.1", 0)),
        ("0.0.0.0:0", None, (None, 0)),
        ("127.0.0.1:0", "example.org:7", ("example.org", 7)),
        ("127.0.0.1:0", "example.org", ("example.org", 0)),
    ],
)
def test_rank_tells_where_it_is_reached(listen, advertise, told):
    host = GrpcHost(listen=listen, advertise=advertise, secure=False, clock=SystemClock())
    try:
        address, port = told
        assert host.endpoint.ip_address == address
        assert host.endpoint.port == port if port else host.endpoint.port > 0
        assert host.endpoint.certificate == ""
    finally:
        host.close()


def test_rank_with_tls_shows_a_certificate_of_its_own():
    hosts = [
        GrpcHost(listen="127.0.0.1:0", advertise=None, secure=True, clock=SystemClock())
        for _ in range(2)
    ]
    shown = [host.endpoint.certificate for host in hosts]
    for host in hosts:
        host.close()

    assert all("BEGIN CERTIFICATE" in pem for pem in shown)
    assert shown[0] != shown[1]


class Broken:
    """Collectives of a group that is over."""

    rank, size = 0, 2

    def __init__(self):
        self.calls = 0

    def all_gather(self, *_, **__):
        self.calls += 1
        return self

    reduce_scatter = all_reduce = all_gather

    def wait(self):
        raise ConfigError("over")


def test_script_computes_on_with_zeros_until_somebody_asks():
    inner: Any = Broken()
    shield, key = Shield(inner), Key(1, 1, "gather")
    out = torch.ones(3)

    shield.all_gather(key, torch.ones(2), out).wait()
    shield.reduce_scatter(key, torch.ones(3), out).wait()

    assert torch.equal(out, torch.zeros(3))
    assert inner.calls == 1  # what comes after the first error is not begun at all
    with pytest.raises(ConfigError, match="over"):
        shield.check()
    with pytest.raises(ConfigError, match="over"):
        shield.all_reduce(key, out)


class Stale(Broken):
    """Collectives that refuse before anything is begun."""

    def all_gather(self, *_, **__):
        raise StaleContribution("step 3 is over")


def test_script_whose_step_is_over_computes_on_and_the_next_step_is_gathered():
    shield: Any = Shield(cast(Any, Stale()))
    out = torch.ones(3)

    shield.all_gather(Key(1, 3, "gather"), torch.ones(2), out).wait()

    assert torch.equal(out, torch.zeros(3))
    with pytest.raises(StaleContribution, match="step 3 is over"):
        shield.check()
    shield.forget()
    shield.check()
