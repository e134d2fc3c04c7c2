"""What every transport's ranks do in the tests of `torch_dist`, and a process that does it on gloo.

Results are safetensors in a folder: `{size}-{rank}` for the cases, `{what}-{rank}` for refusals.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from atoll.codecs.bf16.codec import Bf16
from atoll.codecs.int8.codec import Int8
from atoll.collectives import schedule
from atoll.collectives.base import Collectives
from atoll.collectives.codecs import WireCodec
from atoll.collectives.torch_dist import TorchRanks, gloo_group
from atoll.errors import AtollError, GroupBroken, MissingRanks
from atoll.layout import GROUP_ELEMENTS
from tests.rank_groups import DTYPES, key, values
from tests.ranks import divides

SIZES = (1, 2, 3, 4, 5)
LENGTHS = (0, 1, 3, 1_003, 3 * GROUP_ELEMENTS + 7)
CHUNK_BYTES = 64 << 10
SWAPPED = (0, 1, 1_003, 70_001)  # bytes, times 0 to 3 for each pair of ranks
INT8 = WireCodec(Int8(rounding="stochastic"), seed=7)
CODECS = {"plain": None, "int8": INT8, "int8 nearest": WireCodec(Int8()), "bf16": WireCodec(Bf16())}


def cases(ranks: Collectives) -> dict[str, Tensor]:
    """Every collective, codec, dtype and length; the same on every transport."""
    found: dict[str, Tensor] = {}
    for unit, length in enumerate(LENGTHS):
        span = schedule.cut(length, ranks.size)[ranks.rank]
        for micro, (name, codec) in enumerate(CODECS.items()):
            about = {"unit": unit, "micro": micro}
            out, whole = torch.full((len(span),), -7.0), torch.full((length,), -7.0)
            shard = span.of(values(0, length)).clone()
            own, summed = values(ranks.rank, length), values(ranks.rank, length)
            ranks.reduce_scatter(key(1, **about), own, out, codec=codec).wait()
            ranks.all_gather(key(2, **about), shard, whole, codec=codec).wait()
            ranks.all_reduce(key(3, **about), summed, codec=codec).wait()
            found |= {f"reduced {name} {length}": out, f"gathered {name} {length}": whole}
            found |= {f"all-reduced {name} {length}": summed, f"shard {name} {length}": shard}
    return found | _dtypes(ranks) | _others(ranks)


def _dtypes(ranks: Collectives) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for unit, dtype in enumerate(DTYPES):
        own = values(ranks.rank, 1_003, dtype)
        out = schedule.cut(1_003, ranks.size)[ranks.rank].of(own)  # in place
        ranks.reduce_scatter(key(4, unit=unit), own, out).wait()
        found[f"reduced {dtype}"] = out.clone()
        ranks.all_gather(key(5, unit=unit), out, own).wait()
        found[f"gathered {dtype}"] = own
    return found


def _others(ranks: Collectives) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    residual = torch.zeros(1_003, dtype=torch.bfloat16)
    out = torch.zeros(len(schedule.cut(1_003, ranks.size)[ranks.rank]))
    for step in (6, 7):
        own = values(ranks.rank, 1_003)
        ranks.reduce_scatter(key(step), own, out, codec=INT8, residual=residual).wait()
    found["residual"], found["with residual"] = residual, out
    begun = [values(ranks.rank, 500 + k) for k in range(3)]
    handles = [ranks.all_reduce(key(8, unit=k), one) for k, one in enumerate(begun)]
    for handle in reversed(handles):
        handle.wait()
    found |= {f"begun together {k}": one for k, one in enumerate(begun)}
    for source in range(ranks.size):
        own = values(ranks.rank, 40_003)
        ranks.broadcast(key(9, unit=source), own, source=source).wait()
        found[f"broadcast {source}"] = own
    ranks.barrier(key(10)).wait()
    for unit, base in enumerate(SWAPPED):
        sent = [swapped(ranks.rank, to, base) for to in range(ranks.size)]
        sizes = [len(swapped(sender, ranks.rank, base)) for sender in range(ranks.size)]
        came = ranks.exchange(key(11, unit=unit), sent, sizes)
        found |= {f"exchanged {base} {sender}": one for sender, one in enumerate(came)}
        data = swapped(ranks.rank, 0, base).numpy().tobytes()
        said = ranks.all_gather_bytes(key(12, unit=unit), data, limit=1 << 20)
        joined = torch.tensor(list(b"|".join(said)), dtype=torch.uint8)
        found[f"said {base}"] = joined
    return found


def swapped(sender: int, to: int, base: int) -> Tensor:
    """The bytes that one rank has for another: of another length for each pair, some without."""
    length = base * ((3 * sender + 5 * to) % 4)
    return (torch.arange(length) * 7 + 31 * sender + 3 * to).to(torch.uint8)


def process(rank: int, home: str) -> None:
    """One of five processes: in each group that it is a rank of, all cases."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{home}/gloo", rank=rank, world_size=5)
    for size in SIZES:
        group = gloo_group(range(size))
        if rank < size:
            ranks = TorchRanks(group, chunk_bytes=CHUNK_BYTES)
            save_file(cases(ranks), Path(home) / f"{size}-{rank}")
            if size > 1:
                save_file(divides.collected(ranks), Path(home) / f"divided-{size}-{rank}")
                save_file(divides.sent(ranks), Path(home) / f"sent-{size}-{rank}")
            ranks.close()
    native = TorchRanks(gloo_group(), native_sum=True)
    total, part = values(rank, 1_003), torch.zeros(len(schedule.cut(1_003, 5)[rank]))
    native.all_reduce(key(1), total).wait()
    native.reduce_scatter(key(2), values(rank, 1_003), part).wait()
    native.close()
    save_file({"all": total, "part": part}, Path(home) / f"native-{rank}")
    _refusals(rank, Path(home))
    _refused_in_parts(rank, Path(home))
    dist.barrier()
    dist.destroy_process_group()


def _refusals(rank: int, home: Path) -> None:
    """What ends a group: ranks at different exchanges, an abort, one that does not come."""
    apart = TorchRanks(gloo_group())
    told = _told(lambda: apart.barrier(key(1 + (rank == 2))).wait())
    apart.close()
    late = TorchRanks(gloo_group(timeout_seconds=1.0), timeout_seconds=1.0)
    if rank != 3:
        told += _told(lambda: late.all_reduce(key(1), values(rank, 1_003)).wait())
    dist.barrier()  # before the one that never came closes its connections
    gone = TorchRanks(gloo_group(timeout_seconds=2.0), timeout_seconds=2.0)
    if rank == 0:  # waits for the others, who do not come
        begun = gone.barrier(key(1))
        gone.abort(GroupBroken("rank 1 left"))
        told += _told(begun.wait)
        told += _told(lambda: gone.barrier(key(2)).wait())
    gone.close()
    late.close()
    talk = TorchRanks(gloo_group())
    data = b"x" * (11 if rank == 3 else 10)
    said = _told(lambda: talk.all_gather_bytes(key(1), data, limit=10))
    talk.close()
    (home / f"said-{rank}").write_text(said[0])
    (home / f"told-{rank}").write_text("\n".join(told))


def _refused_in_parts(rank: int, home: Path) -> None:
    """A sub-group's member that does not come, sends that nobody expects or none, and an end."""
    told: list[str] = []
    late = TorchRanks(gloo_group(), timeout_seconds=1.0)
    [part] = late.subgroups([[3, 4, 1]])
    if part is not None and rank != 4:
        handle = part.all_reduce(key(1), values(rank, 1_003))
        told += _told(handle.wait)
    dist.barrier()  # before the one that never came closes its connections
    pairs = TorchRanks(gloo_group(), timeout_seconds=1.0).subgroups([[1, 0], [0, 1], [2, 3]])
    out = torch.full((40,), 7.0)
    if rank == 0 and pairs[0] is not None:
        told += _told(pairs[0].send(key(1), values(3, 40), to=0).wait)
    if rank == 1 and pairs[1] is not None:  # where it does not come
        told += _told(pairs[1].receive(key(1), out, source=0).wait)
    if rank == 3 and pairs[2] is not None:  # nobody sends
        told += _told(pairs[2].receive(key(1), out, source=0).wait)
    told += [str(out.unique().tolist())]
    dist.barrier()
    [wrong] = TorchRanks(gloo_group(), timeout_seconds=1.0).subgroups([[4, 2]])
    if rank == 4 and wrong is not None:
        told += _told(wrong.send(key(1), values(3, 41), to=1).wait)
    if rank == 2 and wrong is not None:
        told += _told(wrong.receive(key(1), out, source=0).wait)
        told += [str(out.unique().tolist())]
    ended = TorchRanks(gloo_group())
    [left] = ended.subgroups([[0, 1, 2, 3, 4]])
    ended.close()
    told += _told(left.barrier(key(1)).wait) if left is not None else []
    late.close()
    dist.barrier()
    (home / f"parts-{rank}").write_text("\n".join(told))


def _told(work: Callable[[], object]) -> list[str]:
    try:
        work()
    except AtollError as error:
        named = list(error.ranks) if isinstance(error, MissingRanks) else ""
        return [f"{error.code} {named} {error}".replace("\n", " ")]
    return ["done"]
