"""Weights in and out as safetensors files: start a run from one, export a run to one."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atoll import files as filesystem
from atoll.errors import ConfigError, LayoutMismatch, StoreError
from atoll.layout import Layout


def read(path: Path, layout: Layout) -> Tensor:
    """The flat fp32 buffer of a safetensors file whose names and shapes are `layout`'s."""
    flat = layout.zeros()
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            wanted = {t.name for t in layout.tensors}
            for name in sorted(names ^ wanted):
                raise LayoutMismatch(
                    f"{str(path)!r} {'lacks' if name in wanted else 'has an unknown'} tensor "
                    f"{name!r}; the file must hold exactly the model's parameters"
                )
            for name, view in layout.views(flat).items():
                tensor = file.get_tensor(name)
                if tensor.shape != view.shape:
                    raise LayoutMismatch(
                        f"{str(path)!r} holds {name!r} with shape {tuple(tensor.shape)} where the "
                        f"model has {tuple(view.shape)}"
                    )
                view.copy_(tensor.to(torch.float32))
                if not bool(torch.isfinite(view).all()):
                    raise ConfigError(
                        f"{str(path)!r} holds NaN or infinity in tensor {name!r}; a run cannot "
                        f"start from it"
                    )
    except (OSError, SafetensorError) as exc:
        raise ConfigError(f"cannot read weights from {str(path)!r}: {exc}") from exc
    return flat


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


def check_target(path: Path, *, option: str = "") -> None:
    """ConfigError unless a file can be made at `path`, as far as can be known before."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option}{str(path)!r} lies in {str(path.parent)!r}, which is not a directory; "
            f"make it first"
        )
    if path.is_dir():
        raise ConfigError(f"{option}{str(path)!r} is a directory; name a file in it")
