"""All mutants of a plan, in one order on every rank."""

from atoll.pools.gradcheck.mutants import edges, legacy, lost, reductions, returns, terms
from atoll.pools.gradcheck.mutants.base import Mutant
from atoll.pools.plan import Plan


def of(plan: Plan) -> list[Mutant]:
    """A few rules for each kind of arrow, then several objects at once."""
    kinds = (reductions, returns, terms, edges, lost, legacy)
    return [mutant for kind in kinds for mutant in kind.mutants(plan)]


def named(plan: Plan, name: str) -> Plan:
    """The plan of one mutant, by its name."""
    (mutant,) = [one for one in of(plan) if one.name == name]
    return mutant.change(plan)
