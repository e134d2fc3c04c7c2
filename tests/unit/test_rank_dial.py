"""How connections between ranks are set."""

from atoll.collectives.grpc import dial


def test_server_bears_the_pings_that_its_peers_send_while_nothing_travels():
    """gRPC's own bound is five minutes, and who pings more often is sent away."""
    told = dict(dial.options())

    least = told["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert least < told["grpc.keepalive_time_ms"]
