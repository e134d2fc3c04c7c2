"""Coverage-guided fuzzing of everything that decodes bytes from elsewhere.

By hand, until stopped:  python tests/fuzz/fuzz_frame.py
Bounded:                 python tests/fuzz/fuzz_frame.py -runs=20000 -seed=1

Every input goes one of five ways: as raw bytes of a frame, as a header text in a frame whose sizes
and checksum are right, as a value in one field of a good header, as the payload of each codec, and
as the payload of topk, whose bytes have rules. Only the typed errors may come out.
"""

import hashlib
import json
import sys

import atheris
import torch

with atheris.instrument_imports(include=["atoll.wire", "atoll.codecs.topk"]):
    from atoll.codecs.topk.codec import TopK
    from atoll.wire import frame, header, schema

from atoll.codecs.base import Codec
from atoll.codecs.bf16.codec import Bf16
from atoll.codecs.fp32.codec import Fp32
from atoll.codecs.int4.codec import Int4
from atoll.codecs.int8.codec import Int8
from atoll.codecs.sign.codec import Sign
from atoll.errors import FrameError, LayoutMismatch, VersionMismatch
from atoll.layout import Layout
from atoll.rows import RowRange

LAYOUT = Layout.of([("embed", (4, 3), "float32"), ("norm", (3,), "float32")])
CODECS: list[Codec] = [
    Fp32(),
    Bf16(),
    Int8(block=16),
    Int4(block=16),
    Sign(block=16),
]
SPARSE = TopK()
SPARSE_ELEMENTS = (1, 100, 300, 4096, 4396)
REFUSALS = (FrameError, LayoutMismatch, VersionMismatch)
HEADER = header.Told(
    kind="contribution",
    run_id="run-1",
    manifest_sha256="a" * 64,
    round=1,
    worker_id="island-0",
    incarnation=1,
    base_digest="b" * 64,
    weight=1,
    rows=1,
    tokens=1,
    loss_sum=1.5,
    ranges=(RowRange("d" * 16, 0, 1),),
).header(LAYOUT, CODECS[0])
PLAIN = json.loads(HEADER.to_json())
NAMES = sorted(PLAIN)
refused = 0
taken = 0


def framed(text: bytes, payload: bytes) -> bytes:
    """A frame around `text` whose sizes and checksum are right."""
    before = b"ATOL\x01\x00\x00\x00" + len(text).to_bytes(4, "little") + text + payload
    return before + hashlib.sha256(before).digest()


def read(data: bytes, *, cut: int) -> None:
    """Feeds `data` in two chunks; counts what becomes of it."""
    global refused, taken
    size = 0

    def sink(piece: memoryview) -> None:
        nonlocal size
        size += piece.nbytes

    reader = frame.FrameReader(sink)
    try:
        reader.feed(data[:cut])
        reader.feed(data[cut:])
        reader.finish()
        assert reader.header is not None
        frame.expect(reader.header, layout=LAYOUT, codec=CODECS[0], kind="contribution")
    except REFUSALS:
        refused += 1
    else:
        taken += 1
        assert size == CODECS[0].encoded_bytes(LAYOUT.size), size


def header_text(text: bytes) -> None:
    """A text is refused, or it is the one spelling of a header."""
    try:
        found = header.FrameHeader.from_json(text)
    except REFUSALS:
        return
    assert found.to_json() == text, text


def payload(data: bytes) -> None:
    """Any bytes of the right size decode, without bits behind the last value; others do not."""
    for codec in CODECS:
        for elements in (1, 15, len(data) // 2, len(data), 2 * len(data)):
            right = len(data) == codec.encoded_bytes(elements)
            stray = right and has_stray(codec, data, elements)
            try:
                codec.decode(torch.tensor(list(data), dtype=torch.uint8), elements)
            except REFUSALS:
                assert stray or not right, (codec, elements)
            else:
                assert right and not stray, (codec, elements)


def has_stray(codec: Codec, data: bytes, elements: int) -> bool:
    """Whether bits behind the last value are set."""
    used = elements * {"int4": 4, "sign": 1}.get(codec.name, 8) % 8
    return bool(used) and data[-1] >> used != 0


def sparse(data: bytes, elements: int) -> None:
    """A good payload with the bits of `data` flipped: refused, or each place is named once."""
    global refused, taken
    given = SPARSE.encode(torch.arange(elements) % 97 - 48.0, noise=None, first_group=0)
    flips = data[: given.numel()].ljust(given.numel(), b"\0")
    given ^= torch.tensor(list(flips), dtype=torch.uint8)
    out = torch.full((elements,), 5.0)
    try:
        values = SPARSE.decode(given, elements, out=out)
    except REFUSALS:
        refused += 1
        assert bool((out == 5.0).all()), elements  # refused before anything was written
        return
    taken += 1
    assert values.shape == (elements,)
    kept = sum(-(-part // 64) for part in sizes(elements))
    found = int(torch.count_nonzero(values))  # a magnitude may be 0, a place may not come twice
    assert found <= kept, (found, kept)
    smallest = [chunk[-2] for chunk in given.split(82)]
    assert found == kept or 0 in smallest, (found, kept)


def sizes(elements: int) -> list[int]:
    """Of the chunks."""
    return [min(4096, elements - start) for start in range(0, elements, 4096)]


def test_one_input(data: bytes) -> None:
    """One execution."""
    source = atheris.FuzzedDataProvider(data)
    way = source.ConsumeIntInRange(0, 4)
    cut = source.ConsumeIntInRange(0, 600)
    name = NAMES[source.ConsumeIntInRange(0, len(NAMES) - 1)]
    rest = source.ConsumeBytes(source.remaining_bytes())
    if way == 0:
        read(rest, cut=cut)
    elif way == 1:
        header_text(rest)
        read(framed(rest, bytes(60)), cut=cut)
    elif way == 2:
        try:
            value = json.loads(rest)
        except (ValueError, RecursionError):
            value = rest.decode("latin-1")
        text = json.dumps(PLAIN | {name: value}, sort_keys=True, separators=(",", ":")).encode()
        header_text(text)
        read(framed(text, bytes(60)), cut=cut)
    elif way == 3:
        payload(rest)
        read(framed(HEADER.to_json(), rest), cut=cut)
    else:
        sparse(rest, SPARSE_ELEMENTS[cut % len(SPARSE_ELEMENTS)])


def check_harness() -> None:
    """A harness whose good frame is refused, or whose damaged one is taken, would find nothing."""
    good = framed(HEADER.to_json(), bytes(60))
    read(good, cut=7)
    read(good[:-1] + b"x", cut=7)
    assert (taken, refused) == (1, 1), (taken, refused)
    for elements in SPARSE_ELEMENTS:
        sparse(b"", elements)
        sparse(b"\xff" * 200, elements)
    assert (taken, refused) == (1 + 5, 1 + 5), (taken, refused)
    assert schema.MAX_INT == 2**63 - 1


def main() -> None:
    """Runs until libFuzzer stops; a finding ends the process with a nonzero status."""
    check_harness()
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
