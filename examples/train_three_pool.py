"""Trains the three-pool decomposition and says what its gates are worth on held-out rows.

    python -m examples.train_three_pool                            # ranks are threads
    python -m examples.train_three_pool --ranks one                # one process, the reference
    torchrun --nproc-per-node 10 -m examples.train_three_pool      # ranks are processes, on gloo

`--sizes ci=3,layers=2x1,ppgd=6` moves it to other sizes: 3 + 2 x 1 + 6 ranks.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll import torch_threads
from atoll.cli.gradcheck import parse_sizes
from atoll.collectives.torch_dist import TorchRanks, gloo_group
from atoll.errors import AtollError
from atoll.pools import Engine, Topology, World, made
from atoll.pools.reference import Reference
from examples.decomposition import SITES, CausalImportance, Components
from examples.reconstruction import held_out_rows, reconstruct
from examples.three_pool import top

RATES = {"importance": 2.5e-3, "components": 2e-2}  # of AdamW; found by trial, in float64
HELD_OUT_ROWS = 48
ENDS = 10  # steps that are compared at both ends

Losses = Mapping[str, float]  # of each term, with its coefficient
Norms = Mapping[str, float]  # of each term's gradient, where the canary crossed
Tell = Callable[[int, Losses, Norms], None]


@dataclass(frozen=True)
class Trained:
    """The losses of every step, each before it, and all parameters after the last.

    By name, such as `importance.first` or `components[SITE].V`.
    """

    losses: list[Losses]
    weights: Mapping[str, Tensor]


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW for some of the parameters, by name; a rank has those that it owns."""
    groups = [
        {"params": [one], "lr": RATES[name.replace("[", ".").split(".")[0]]}
        for name, one in parameters
    ]
    return torch.optim.AdamW(groups)


def silent(step: int, losses: Losses, norms: Norms) -> None:
    """Tells nobody."""


def in_one(top: Topology, *, steps: int, tell: Tell = silent) -> Trained:
    """Everything in this process: each function once on all rows, and plain autograd."""
    reference = Reference(top, made.initial(top))
    coeffs = {term.name: term.coeff for term in top.of_kind("term")}
    stepping = optimizer(reference.trained().items())
    found: list[Losses] = []
    for step in range(steps):
        terms = reference.step(step)
        losses = {name: coeffs[name] * term.loss() for name, term in terms.items()}
        stepping.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        stepping.step()
        found.append({name: loss.item() for name, loss in losses.items()})
        tell(step, found[-1], {})
    return Trained(found, made.weights(reference.modules))


def on_threads(top: Topology, *, steps: int, canary_every: int, tell: Tell = silent) -> Trained:
    """On ranks that are threads of this process."""
    world = World(top)
    ranks = world.on_threads(
        lambda engine: on_rank(world, engine, steps=steps, tell=tell), canary_every=canary_every
    )
    return ranks[0]


def on_processes(top: Topology, *, steps: int, canary_every: int, tell: Tell = silent) -> Trained:
    """On ranks that torchrun has started; the same on each of them."""
    dist.init_process_group("gloo")
    group = TorchRanks(gloo_group())
    world = World.over(top, group)  # with the weights that rank 0 makes
    engine = world.engine(group, canary_every=canary_every)
    trained = on_rank(world, engine, steps=steps, tell=tell)
    group.close()  # after an error the process ends instead: gloo takes nothing back
    dist.destroy_process_group()
    return trained


def on_rank(world: World, engine: Engine, *, steps: int, tell: Tell) -> Trained:
    """One rank's part: what it owns it steps, by gradients that are already whole."""
    owned = engine.owned()
    stepping = optimizer(owned.items()) if owned else None
    found: list[Losses] = []
    for step in range(steps):
        told = engine.step(step)
        if stepping is not None:
            stepping.step()
        found.append(told.losses)
        if engine.seat.rank == 0:
            tell(step, told.losses, told.norms)
    return Trained(found, world.trained(engine))


def modules(weights: Mapping[str, Tensor]) -> tuple[CausalImportance, dict[str, Components]]:
    """The trained modules."""

    def filled(module: nn.Module, prefix: str) -> None:
        module.load_state_dict({name: weights[f"{prefix}.{name}"] for name in module.state_dict()})

    importance, components = CausalImportance(SITES), {site: Components(site) for site in SITES}
    filled(importance, "importance")
    for site, module in components.items():
        filled(module, f"components[{site}]")
    return importance, components


def ends(losses: list[Losses]) -> dict[str, dict[str, float]]:
    """Each term's mean loss over the first and the last steps."""

    def mean(term: str, some: list[Losses]) -> float:
        return sum(step[term] for step in some) / len(some)

    return {
        term: {"first": mean(term, losses[:ENDS]), "last": mean(term, losses[-ENDS:])}
        for term in losses[0]
    }


def progress(step: int, losses: Losses, norms: Norms) -> None:
    """A line now and then, and one for each canary."""

    def shown(numbers: Mapping[str, float]) -> str:
        return "  ".join(f"{name} {number:.4f}" for name, number in numbers.items())

    if norms:
        print(f"step {step + 1}: all rows arrived; norms {shown(norms)}", file=sys.stderr)
    if step % ENDS == ENDS - 1:
        print(f"step {step + 1}: {shown(losses)}", file=sys.stderr)


def tell(found: dict[str, Any]) -> None:
    """A table for people."""
    print(f"{found['steps']} steps at {found['sizes']}, ranks: {found['ranks']}")
    for term, loss in found["losses"].items():
        print(f"{term:10} {loss['first']:8.4f} -> {loss['last']:.4f}")
    held = found["held_out"]
    print(f"held-out divergence by the gates {held['own']:.3f}, all open {held['open']:.3f}")
    mean, best = sum(held["permuted"]) / len(held["permuted"]), min(held["permuted"])
    print(f"  permuted {mean:.3f} (best of {len(held['permuted'])}: {best:.3f})")
    print(f"mean gate {held['mean_gate']:.3f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", choices=["local", "one"], help="threads, or one process")
    parser.add_argument("--sizes", default="", help="like ci=3,layers=2x1,ppgd=6")
    parser.add_argument("--canary-every", type=int, default=25, help="steps; 0: never")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.ranks and dist.is_torchelastic_launched():
        parser.error("torchrun's processes are the ranks; leave --ranks out")
    return given


def train(top: Topology, ranks: str, given: argparse.Namespace) -> Trained:
    """The one place that knows where the steps are made."""
    torch_threads.use(1)  # these tensors are small, and ranks are threads already
    if ranks == "one":
        return in_one(top, steps=given.steps, tell=progress)
    on_ranks = on_processes if ranks == "torchrun" else on_threads
    return on_ranks(top, steps=given.steps, canary_every=given.canary_every, tell=progress)


def main() -> None:
    given = arguments()
    torch.set_default_dtype(torch.float64)
    ranks = "torchrun" if dist.is_torchelastic_launched() else given.ranks or "local"
    try:
        sized = top.sized(**parse_sizes(given.sizes)) if given.sizes else top
        trained = train(sized, ranks, given)
    except AtollError as error:
        sys.exit(str(error))
    if os.environ.get("RANK", "0") != "0":
        return  # the first of torchrun's processes speaks for all
    held_out = reconstruct(*modules(trained.weights), rows=held_out_rows(HELD_OUT_ROWS))
    found = {
        "steps": given.steps,
        "ranks": ranks,
        "sizes": sized.size,
        "losses": ends(trained.losses),
        "every_step": trained.losses,
        "held_out": asdict(held_out),
    }
    if given.json:
        print(json.dumps(found))
    else:
        tell(found)


if __name__ == "__main__":
    main()
