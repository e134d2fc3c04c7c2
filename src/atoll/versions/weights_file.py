"""Weights in and out as safetensors files: start a run from one, export a run to one."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atoll import files as filesystem
from atoll.errors import ConfigError, LayoutMismatch, StoreError
from atoll.layout import ELEMENT_BYTES, Layout


def read(path: Path, layout: Layout) -> Tensor:
    """The flat fp32 buffer of a safetensors file whose names and shapes are `layout`'s."""
    flat = layout.zeros()
    views = layout.views(flat)
    for name, tensor in each(path, layout):
        views[name].copy_(tensor)
    return flat


def each(path: Path, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Name and fp32 value of each tensor of such a file, in the order of `layout`, one by one."""
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            wanted = {t.name for t in layout.tensors}
            for name in sorted(names ^ wanted):
                raise LayoutMismatch(
                    f"{str(path)!r} {'lacks' if name in wanted else 'has an unknown'} tensor "
                    f"{name!r}; the file must hold exactly the model's parameters"
                )
            for spec in layout.tensors:
                tensor = file.get_tensor(spec.name)
                if tuple(tensor.shape) != spec.shape:
                    raise LayoutMismatch(
                        f"{str(path)!r} holds {spec.name!r} with shape {tuple(tensor.shape)} where "
                        f"the model has {spec.shape}"
                    )
                value = tensor.to(torch.float32)
                if not bool(torch.isfinite(value).all()):
                    raise ConfigError(
                        f"{str(path)!r} holds NaN or infinity in tensor {spec.name!r}; a run "
                        f"cannot start from it"
                    )
                yield spec.name, value
    except (OSError, SafetensorError) as exc:
        raise ConfigError(f"cannot read weights from {str(path)!r}: {exc}") from exc


def tensors(path: Path) -> list[list[object]]:
    """`[name, dtype, [shape]]` of a safetensors file, by name; as a run holds them, in fp32."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return [
                [name, "float32", list(file.get_slice(name).get_shape())]
                for name in sorted(file.keys())
            ]
    except (OSError, SafetensorError) as exc:
        raise ConfigError(f"cannot read the names of tensors from {str(path)!r}: {exc}") from exc


def write(path: Path, flat: Tensor, layout: Layout, *, metadata: dict[str, str]) -> None:
    """Writes `flat` as a safetensors file, whole or not at all."""
    check_target(path)
    part = filesystem.part_of(path)
    try:
        save_file(layout.views(flat), str(part), metadata=metadata)
        filesystem.put_in_place(part, path)
    except (OSError, SafetensorError) as exc:
        raise StoreError(f"cannot write weights to {str(path)!r}: {exc}") from exc
    finally:
        part.unlink(missing_ok=True)


def write_pieces(
    path: Path, pieces: Iterable[memoryview], layout: Layout, *, metadata: dict[str, str]
) -> None:
    """Writes weights that come by in layout order, as little-endian fp32, in pieces of any size.

    Whole or not at all; holds one piece. The format is safetensors': the length of a table, the
    table, the bytes.
    """
    check_target(path)
    table: dict[str, object] = {"__metadata__": metadata}
    for spec in layout.tensors:
        span = [spec.span.start * ELEMENT_BYTES, spec.span.stop * ELEMENT_BYTES]
        table[spec.name] = {"dtype": "F32", "shape": list(spec.shape), "data_offsets": span}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes begin at a multiple of 8
    part, written = filesystem.part_of(path), 0
    try:
        with part.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for piece in pieces:
                file.write(piece)
                written += len(piece)
        if written != layout.nbytes:
            raise StoreError(f"the weights have {written} bytes; the layout has {layout.nbytes}")
        filesystem.put_in_place(part, path)
    except OSError as exc:
        raise StoreError(f"cannot write weights to {str(path)!r}: {exc}") from exc
    finally:
        part.unlink(missing_ok=True)


def check_target(path: Path, *, option: str = "") -> None:
    """ConfigError unless a file can be made at `path`, as far as can be known before."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option}{str(path)!r} lies in {str(path.parent)!r}, which is not a directory; "
            f"make it first"
        )
    if path.is_dir():
        raise ConfigError(f"{option}{str(path)!r} is a directory; name a file in it")
