"""Lists of peers: nobody stands in them twice, and nobody names a server."""

import pytest

from atoll.errors import ConfigError
from atoll.gather.keys import SecretKey
from atoll.gather.peers import Peer, PeerList


def peer(uid: str, number: int, *, bucket: str = "main", prefix: str = "peers/x") -> Peer:
    return Peer(uid, SecretKey(bytes([number]) * 32).public, bucket, prefix)


def test_list_keeps_its_order_with_reserves_last() -> None:
    peers = PeerList((peer("9", 1), peer("10", 2)), (peer("a", 3),))

    assert [one.uid for one in peers.all] == ["9", "10", "a"]


@pytest.mark.parametrize(
    ("primaries", "reserves"),
    [((("a", 1), ("a", 2)), ()), ((("a", 1),), (("a", 2),)), ((), (("a", 1), ("a", 2)))],
)
def test_uid_listed_twice_is_refused_by_name(primaries, reserves) -> None:
    with pytest.raises(ConfigError, match="uid 'a' is listed twice"):
        PeerList(tuple(peer(*one) for one in primaries), tuple(peer(*one) for one in reserves))


@pytest.mark.parametrize(
    ("primaries", "reserves"),
    [((("a", 1), ("b", 1)), ()), ((("a", 1),), (("b", 1),)), ((), (("a", 1), ("b", 1)))],
)
def test_key_listed_twice_is_refused_by_both_names(primaries, reserves) -> None:
    with pytest.raises(ConfigError, match=r"is listed for 'a' and 'b'"):
        PeerList(tuple(peer(*one) for one in primaries), tuple(peer(*one) for one in reserves))


@pytest.mark.parametrize("uid", ["", "a/b", "..", "a" * 65])
def test_uid_that_is_no_worker_id_is_refused(uid: str) -> None:
    with pytest.raises(ConfigError, match="worker_id="):
        peer(uid, 1)


@pytest.mark.parametrize("bucket", ["", "http://evil", "s3://pond", "a/b", "127.0.0.1:80"])
def test_bucket_that_names_a_server_is_refused(bucket: str) -> None:
    with pytest.raises(ConfigError, match="one of the run's buckets"):
        peer("a", 1, bucket=bucket)


@pytest.mark.parametrize("prefix", ["", "/", "a/", "/a", "a/../b", "..", "a//b", "a?b", "p" * 513])
def test_prefix_that_leads_elsewhere_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix="):
        peer("a", 1, prefix=prefix)


def table(**changes: object) -> dict[str, object]:
    known = peer("a", 1)
    told = {"uid": "a", "key": known.key.hex, "bucket": "main", "prefix": "peers/x"}
    return {**told, **changes}


def test_lists_are_read_from_tables() -> None:
    other = table(uid="b", key=peer("b", 2).key.hex)

    assert PeerList.parse([table()], [other]) == PeerList((peer("a", 1),), (peer("b", 2),))


@pytest.mark.parametrize("changed", [{"url": "http://evil"}, {"uid": 3}, {"key": None}])
def test_table_with_other_keys_or_values_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must have uid, key, bucket, prefix"):
        Peer.parse(table(**changed))


def test_table_with_a_key_of_small_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="small order"):
        Peer.parse(table(key="01" + "00" * 31))
