"""The coordinator's certificate: who makes it, who gives it, and which addresses need one."""

import datetime
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.cli import serve as command
from atoll.cli.options import ServeOptions
from atoll.errors import ConfigError
from atoll.wire import certificate
from atoll.wire.certificate import Certificate
from tests.commanded import options_in

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def options(tmp_path: Path) -> ServeOptions:
    return options_in(tmp_path)


def test_own_certificate_has_an_elliptic_key_that_only_its_owner_reads(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        made = certificate.own(tmp_path, host="0.0.0.0", now=NOW)
    finally:
        os.umask(umask)

    key = serialization.load_pem_private_key(made.key_pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_own_certificate_is_kept_over_restarts(tmp_path: Path) -> None:
    first = certificate.own(tmp_path, host="0.0.0.0", now=NOW).fingerprint

    second = certificate.own(tmp_path, host="0.0.0.0", now=NOW + datetime.timedelta(days=9))

    assert second.fingerprint == first


def test_own_certificate_is_made_again_when_a_crash_left_only_its_key(tmp_path: Path) -> None:
    first = certificate.own(tmp_path, host="0.0.0.0", now=NOW).fingerprint
    (tmp_path / "certificate.pem").rename(tmp_path / "certificate.pem.part")

    second = certificate.own(tmp_path, host="0.0.0.0", now=NOW)

    assert second.fingerprint != first
    assert certificate.given(second.certificate_path, second.key_path) == second


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_certificate(options: ServeOptions, tmp_path: Path, host: str) -> None:
    assert command.certificate_for(replace(options, host=host), tmp_path) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org", "::ffff:127.0.0.1"])
def test_other_addresses_get_a_certificate_unless_plain_text_is_asked_for(
    options: ServeOptions, tmp_path: Path, host: str
) -> None:
    secured = command.certificate_for(replace(options, host=host), tmp_path)
    plain = command.certificate_for(replace(options, host=host, insecure=True), tmp_path)

    assert isinstance(secured, Certificate)
    assert plain is None


@pytest.mark.parametrize("given", ["cert", "key"])
def test_one_of_the_two_files_alone_is_refused(
    options: ServeOptions, tmp_path: Path, given: str
) -> None:
    changes: dict[str, Any] = {given: tmp_path / "x"}

    with pytest.raises(ConfigError, match="--cert and --key go together"):
        command.certificate_for(replace(options, **changes), tmp_path)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one = certificate.own(tmp_path / "a", host="h", now=NOW)
    other = certificate.own(tmp_path / "b", host="h", now=NOW)

    with pytest.raises(ConfigError, match="belong together"):
        certificate.given(one.certificate_path, other.key_path)


def test_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    made = certificate.own(tmp_path, host="h", now=NOW)
    key = serialization.load_pem_private_key(made.key_pem, password=None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )

    with pytest.raises(ConfigError, match="without a password"):
        certificate.given(made.certificate_path, locked)
