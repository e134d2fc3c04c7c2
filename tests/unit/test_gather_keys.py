"""Signing keys: what is refused of a public key, and how a secret one is kept."""

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.errors import ConfigError
from atoll.gather.keys import PublicKey, SecretKey

# The curve, written anew from RFC 8032: an independent way to the points that must be refused.
P = 2**255 - 19
D = -121665 * pow(121666, P - 2, P) % P
ROOT_OF_MINUS_1 = pow(2, (P - 1) // 4, P)
Point = tuple[int, int]
NEUTRAL: Point = (0, 1)


def added(a: Point, b: Point) -> Point:
    (x1, y1), (x2, y2) = a, b
    product = D * x1 * x2 * y1 * y2 % P
    x = (x1 * y2 + x2 * y1) * pow(1 + product, P - 2, P) % P
    y = (y1 * y2 + x1 * x2) * pow(1 - product, P - 2, P) % P
    return x, y


def times_8(a: Point) -> Point:
    for _ in range(3):
        a = added(a, a)
    return a


def x_of(y: int) -> int | None:
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    root = pow(square, (P + 3) // 8, P)
    for x in (root, root * ROOT_OF_MINUS_1 % P):
        if x * x % P == square:
            return x
    return None


def of_small_order() -> list[Point]:
    """The eight points that 8 times makes neutral: multiples of one of order 8."""
    # 8·(l·A) = neutral for every point A, with l the order of the large subgroup.
    order = 2**252 + 27742317777372353535851937790883648493
    for y in range(2, 100):
        x = x_of(y)
        if x is None:
            continue
        point: Point = NEUTRAL
        for bit in bin(order)[2:]:
            point = added(point, point)
            point = added(point, (x, y)) if bit == "1" else point
        multiples = [NEUTRAL]
        while (following := added(multiples[-1], point)) != NEUTRAL:
            multiples.append(following)
        if len(multiples) == 8:
            return multiples
    raise AssertionError("no point of order 8 among the first")


def encoded(y: int, sign: int) -> bytes:
    return (y | sign << 255).to_bytes(32, "little")


def small_encodings() -> list[bytes]:
    """The eight canonical ones, and every other 32 bytes that decode to one of the points."""
    canonical = [encoded(y, x & 1) for x, y in of_small_order()]
    other_signs = [encoded(y, 1) for x, y in of_small_order() if x == 0]  # -0 spelled out
    beyond = [encoded(y + P, sign) for y in (0, 1) for sign in (0, 1)]  # y + p fits 255 bits
    return [*canonical, *other_signs, *beyond]


SMALL = small_encodings()


def test_there_are_eight_points_of_small_order_and_six_more_spellings() -> None:
    assert {times_8(point) for point in of_small_order()} == {NEUTRAL}
    assert (len(set(SMALL[:8])), len(set(SMALL))) == (8, 14)


@pytest.mark.parametrize("data", SMALL, ids=bytes.hex)
def test_key_of_small_order_is_refused_in_every_spelling(data: bytes) -> None:
    with pytest.raises(ConfigError, match="small order"):
        PublicKey.parse(data.hex())


def test_neutral_key_would_take_one_signature_for_any_message() -> None:
    """Why they are refused: the library that verifies does not."""
    neutral = Ed25519PublicKey.from_public_bytes(encoded(1, 0))

    neutral.verify(encoded(1, 0) + bytes(32), b"whatever")


@pytest.mark.parametrize("y", [P + 3, P + 18], ids=["p+3", "p+18"])
@pytest.mark.parametrize("sign", [0, 1])
def test_key_in_a_second_spelling_is_refused(y: int, sign: int) -> None:
    with pytest.raises(ConfigError, match="shortest spelling"):
        PublicKey.parse(encoded(y, sign).hex())


def test_key_that_is_no_point_is_refused() -> None:
    y = next(y for y in range(2, 100) if x_of(y) is None)

    with pytest.raises(ConfigError, match="no point"):
        PublicKey.parse(encoded(y, 0).hex())


@pytest.mark.parametrize(
    "text", ["", "ab", "AB" * 32, "ab" * 31 + "zz", "ab" * 33, "ab" * 32 + "\n", " " + "ab" * 32]
)
def test_key_that_is_not_64_hex_digits_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="64 lower-case hex digits"):
        PublicKey.parse(text)


@pytest.mark.parametrize("seed", range(20))
def test_key_that_was_made_is_read_back(seed: int) -> None:
    """The control: the rules refuse no key that anybody makes."""
    public = SecretKey(bytes([seed]) * 32).public

    assert PublicKey.parse(public.hex) == public


def test_signature_is_that_of_rfc_8032() -> None:
    """Section 7.1, test 2."""
    key = SecretKey(
        bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    )

    assert key.public.hex == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert key.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


def test_signature_holds_for_its_message_and_key_alone() -> None:
    key, other = SecretKey(bytes(32)), SecretKey(bytes([1]) * 32)
    signature = key.sign(b"a")

    assert key.public.verifies(signature, b"a")
    assert not key.public.verifies(signature, b"b")
    assert not other.public.verifies(signature, b"a")
    assert not key.public.verifies(signature[:-1], b"a")
    assert not key.public.verifies(signature[:-1] + b"\xff", b"a")


def test_key_is_kept_for_its_owner_alone_and_loaded_again(tmp_path: Path) -> None:
    key = SecretKey.make()

    key.save(tmp_path / "key")

    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert SecretKey.load(tmp_path / "key") == key
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_key_that_is_kept_is_never_replaced(tmp_path: Path) -> None:
    kept = SecretKey.make()
    kept.save(tmp_path / "key")

    with pytest.raises(ConfigError, match="only copy"):
        SecretKey.make().save(tmp_path / "key")

    assert SecretKey.load(tmp_path / "key") == kept
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    SecretKey.make().save(tmp_path / "key")
    (tmp_path / "key").chmod(mode)

    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        SecretKey.load(tmp_path / "key")


@pytest.mark.parametrize("text", ["", "ab", "zz" * 32, "ab" * 33, "ab" * 32 + "\n\n"])
def test_file_that_is_no_key_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(text)

    with pytest.raises(ConfigError, match="no signing key") as raised:
        SecretKey.load(path)

    assert not text.strip() or text.strip() not in str(raised.value)


def test_key_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keygen"):
        SecretKey.load(tmp_path / "absent")


def test_secret_key_is_not_shown() -> None:
    key = SecretKey(bytes(range(32)))

    assert repr(key) == "SecretKey()"


def test_keys_that_are_made_differ() -> None:
    assert SecretKey.make() != SecretKey.make()
