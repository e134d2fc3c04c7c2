"""The three-pool example's functions: sums over rows that add up however the rows are divided."""

import hashlib
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from examples import decomposition, frozen_target
from examples.decomposition import SITES, C, CausalImportance, Components, T, V
from examples.frozen_target import FEATURES, Rows

N = 12
SLICES = [
    (slice(0, 12),),
    (slice(0, 5), slice(5, 12)),
    tuple(slice(r, r + 3) for r in (0, 3, 6, 9)),
]
DIGEST = "28667930a3573036222f92cb23553cfb8561d4b208f557ad780452cf39652259"
TERMS = ["stoch", "minimal", "adversary"]


@pytest.fixture(autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def uniform(name: str, *shape: int) -> Tensor:
    return torch.from_numpy(frozen_target.table(name, *shape) + 0.5).to(torch.get_default_dtype())


def some_rows() -> Rows:
    keep = torch.arange(T) < 1 + (torch.arange(N)[:, None] ** 2) % T
    return (uniform("tokens", N, T) * V).long(), keep


class Loss:
    """Parameters, rows and noise, and one term's sum over a slice of the rows."""

    def __init__(self) -> None:
        self.importance = CausalImportance(SITES)
        self.components = {site: Components(site) for site in SITES}
        self.rows = some_rows()
        self.noise = uniform("noise", N, len(SITES), T, C + 1)
        self.state = decomposition.first_sources(uniform("sources", N, len(SITES), T, C + 1))

    def stoch(self, at: slice, rows: Rows, gates: dict[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for place, site in enumerate(SITES):
            mask = decomposition.mixed(gates[site], self.noise[at, place])
            logits = decomposition.masked(rows, {site: (self.components[site], mask)})
            total = total + decomposition.kl(decomposition.target(rows), logits, rows)
        return total

    def minimal(self, at: slice, rows: Rows, gates: dict[str, Tensor]) -> Tensor:
        weights = uniform("weights", len(SITES), C)
        return (decomposition.upper(gates, rows) * weights).sum()

    def adversary(self, at: slice, rows: Rows, gates: dict[str, Tensor]) -> Tensor:
        state = decomposition.ascend(self.state[at], self.components, gates, rows)
        mask = decomposition.masks(gates, state)
        pairs = {site: (self.components[site], mask[site]) for site in SITES}
        logits = decomposition.masked(rows, pairs)
        return decomposition.kl(decomposition.target(rows), logits, rows)

    def cut(self, at: slice) -> tuple[Rows, dict[str, Tensor]]:
        rows = (self.rows[0][at], self.rows[1][at])
        return rows, self.importance(decomposition.inputs(rows))

    def grads(self, term: str, slices: tuple[slice, ...]) -> dict[str, Tensor]:
        """Of the term's sum over the slices, each computed by itself, by every parameter."""
        modules = torch.nn.ModuleDict({"importance": self.importance})
        modules.update({site.replace(".", "/"): one for site, one in self.components.items()})
        function: Callable[..., Tensor] = getattr(self, term)
        for at in slices:
            function(at, *self.cut(at)).backward()
        return {
            name: torch.zeros_like(one) if one.grad is None else one.grad
            for name, one in modules.named_parameters()
        }


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(
        float((found[name] - one).norm() / one.norm())
        for name, one in wanted.items()
        if one.norm() > 0
    )


@pytest.mark.parametrize("slices", SLICES, ids=len)
@pytest.mark.parametrize("term", TERMS)
def test_gradients_of_slices_of_rows_add_up_to_those_of_all_rows(term, slices):
    whole = Loss().grads(term, (slice(0, N),))

    found = Loss().grads(term, slices)

    assert worst(found, whole) < 1e-12


@pytest.mark.parametrize("term", TERMS)
def test_gradients_miss_the_whole_when_a_slice_of_rows_is_left_out(term):
    """The control: the comparison sees one row of twelve."""
    whole = Loss().grads(term, (slice(0, N),))

    found = Loss().grads(term, (slice(0, N - 1),))

    assert worst(found, whole) > 1e-3


@pytest.mark.parametrize("term", ["stoch", "adversary"])
def test_every_parameter_is_reached(term):
    found = Loss().grads(term, (slice(0, N),))

    assert [name for name, one in found.items() if one.norm() < 1e-3] == []


def test_importance_of_use_reaches_the_gates_alone():
    found = Loss().grads("minimal", (slice(0, N),))

    assert {name.split(".")[0] for name, one in found.items() if one.norm() > 0} == {"importance"}


def climbed_apart(loss: Loss) -> float:
    """How far the adversary's states differ between all rows at once and two slices."""
    parts = [
        decomposition.ascend(loss.state[at], loss.components, gates, rows)
        for at in (slice(0, 5), slice(5, N))
        for rows, gates in [loss.cut(at)]
    ]
    rows, gates = loss.cut(slice(0, N))
    whole = decomposition.ascend(loss.state, loss.components, gates, rows)
    return float((torch.cat(parts) - whole)[:, 0].abs().max())


def test_adversary_climbs_the_same_on_any_slice_of_rows():
    assert climbed_apart(Loss()) < 1e-12


def test_adversary_climbs_otherwise_when_it_steps_on_a_mean(monkeypatch):
    """The control: Adam's epsilon sees what the gradient was divided by."""
    summed = decomposition.kl
    monkeypatch.setattr(
        decomposition, "kl", lambda *given: summed(*given) / decomposition.positions(given[2])
    )

    assert climbed_apart(Loss()) > 1e-6


def test_adversary_makes_every_row_worse_within_its_bounds():
    loss = Loss()
    rows, gates = loss.cut(slice(0, N))

    def apart(state: Tensor) -> Tensor:
        mask = decomposition.masks(gates, state)
        pairs = {site: (loss.components[site], mask[site]) for site in SITES}
        logits, wanted = decomposition.masked(rows, pairs), decomposition.target(rows)
        each = [(tokens[None], keep[None]) for tokens, keep in zip(*rows, strict=True)]
        return torch.stack(
            [decomposition.kl(wanted[r, None], logits[r, None], one) for r, one in enumerate(each)]
        )

    state = decomposition.ascend(loss.state, loss.components, gates, rows)

    assert bool((apart(state) > apart(loss.state)).all())
    assert float(state[:, 0].min()) >= 0
    assert float(state[:, 0].max()) <= 1
    assert not state.requires_grad


def test_positions_that_do_not_count_change_nothing():
    loss = Loss()
    tokens, keep = loss.rows
    whole = loss.grads("adversary", (slice(0, N),))
    other = Loss()
    other.rows = (torch.where(keep, tokens, (tokens + 5) % V), keep)

    found = other.grads("adversary", (slice(0, N),))

    assert not torch.equal(other.rows[0], tokens)
    assert worst(found, whole) < 1e-12


def test_components_with_what_they_lack_are_the_target():
    loss = Loss()
    rows, _ = loss.cut(slice(0, N))
    ones = torch.ones(N, T, C + 1)

    logits = decomposition.masked(rows, {site: (loss.components[site], ones) for site in SITES})

    torch.testing.assert_close(logits.log_softmax(-1), decomposition.target(rows))


def test_gates_are_cut_and_leak_at_one_end_each():
    gate = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True)

    (low,) = torch.autograd.grad(decomposition.lower(gate).sum(), gate)

    assert decomposition.lower(gate).tolist() == [0.0, 0.5, 1.0]
    assert low.tolist() == [decomposition.LEAK, 1.0, 0.0]


def test_use_draws_open_gates_down_and_leaves_closed_ones():
    rows = (torch.zeros(1, T, dtype=torch.long), torch.arange(T)[None] < 1)
    gates = {site: torch.full((1, T, C), 0.5) for site in SITES}
    gates[SITES[0]] = torch.tensor([-1.0, 0.5, 2.0, *[0.5] * (C - 3)]).repeat(1, T, 1)
    gates[SITES[0]].requires_grad_()

    (found,) = torch.autograd.grad(
        decomposition.upper(gates, rows).sum(), gates[SITES[0]], retain_graph=True
    )

    assert found[0, 0, 0] == 0
    assert found[0, 0, 1] > 10 * found[0, 0, 2] > 0
    assert not found[0, 1:].any()  # positions that do not count


@pytest.mark.parametrize("site", SITES)
def test_target_is_the_same_numbers_in_both_dtypes_whatever_the_seed(site):
    wide = frozen_target.weight(site)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(7)

    narrow = frozen_target.weight(site)

    assert narrow.dtype == torch.float32
    assert torch.equal(narrow.double(), wide)


def test_target_is_the_same_bits_everywhere():
    """By numpy's guarantee on raw words; other bits would be another target."""
    sites = b"".join(frozen_target.weight(site).float().numpy().tobytes() for site in SITES)

    assert (frozen_target.table("head", 3) * 2**24).tolist() == [3581304, 6424727, 3349000]
    assert hashlib.sha256(sites).hexdigest() == DIGEST


@pytest.mark.parametrize("site", SITES)
def test_site_is_a_sum_of_as_many_parts_as_there_are_features(site):
    assert int(torch.linalg.matrix_rank(frozen_target.weight(site))) == FEATURES


def test_runs_on_two_threads_keep_apart_what_stands_in_their_sites():
    """Both are held in the middle of a forward pass, between two sites that they replace."""
    rows = some_rows()
    between = threading.Barrier(2, timeout=30)
    found: dict[float, Tensor] = {}

    def replaced(factor: float, *, wait: bool) -> Tensor:
        def first(x: Tensor) -> Tensor:
            if wait:
                between.wait()
            return factor * (x @ frozen_target.weight(SITES[0]))

        def last(x: Tensor) -> Tensor:
            return factor * (x @ frozen_target.weight(SITES[-1]))

        return frozen_target.run(rows, {SITES[0]: first, SITES[-1]: last})

    def on_thread(factor: float) -> None:
        found[factor] = replaced(factor, wait=True)

    threads = [threading.Thread(target=on_thread, args=(factor,)) for factor in (0.25, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert torch.equal(found[0.25], replaced(0.25, wait=False))
    assert torch.equal(found[3.0], replaced(3.0, wait=False))
    assert not torch.equal(found[0.25], found[3.0])


def test_run_that_fails_leaves_the_target_as_it_was():
    rows = some_rows()
    before = decomposition.target(rows)

    def broken(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        frozen_target.run(rows, {SITES[2]: broken})

    assert torch.equal(decomposition.target(rows), before)
