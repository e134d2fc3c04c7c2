"""What a run's windows are gathered by, put together from its file; changed by nobody."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll import canonical
from atoll.errors import ConfigError
from atoll.gather import consume, plan
from atoll.gather.budget import Budget
from atoll.gather.errand import Pace
from atoll.gather.keys import PublicKey
from atoll.gather.peers import PeerList
from atoll.gather.rebuild import Trust
from atoll.gather.supports import CODEC
from atoll.gather.validate import Expected
from atoll.layout import Layout, Span
from atoll.optim.base import MAX_NORM, OuterOptimizer


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a run's windows are gathered by; the same on all ranks, which compare its hash."""

    run_id: str
    manifest_sha256: str
    layout: Layout
    peers: PeerList
    optimizer: OuterOptimizer
    seconds: float  # for fetching, with reserves
    memory_bytes: int
    weights: Mapping[str, int] = field(default_factory=dict)  # by uid; 1 for the others
    scores: Mapping[str, float] = field(default_factory=dict)  # for the numbers of a window only
    reserve_share: float = 0.3
    norm_bound: float = MAX_NORM
    former: Mapping[str, PublicKey] = field(default_factory=dict)  # once peers: in old artifacts
    pace: Pace = field(default_factory=Pace)
    settings: consume.Settings = field(default_factory=consume.Settings)

    def __post_init__(self) -> None:
        if self.optimizer.slots:
            raise ConfigError(
                f"outer optimizer {self.optimizer.name!r} keeps state, which no artifact carries; "
                f"a gather takes sgd"
            )

    def budget(self, ranks: int) -> Budget:
        """The shares of a rank's memory."""
        peers = len(self.peers.all)
        return Budget.of(
            self.memory_bytes, peers=peers, ranks=ranks, layout=self.layout, codec=CODEC
        )

    def owners(self, ranks: int) -> list[Span]:
        """The part of the model that each rank holds."""
        return plan.owners(self.layout, ranks, self.budget(ranks).tile_bytes)

    def expected(self, uid: str, window: int, base_digest: str) -> Expected:
        """What a window asks of a peer's object."""
        return Expected(
            run_id=self.run_id,
            manifest_sha256=self.manifest_sha256,
            uid=uid,
            window=window,
            base_digest=base_digest,
            layout=self.layout,
            codec=CODEC,
            norm_bound=self.norm_bound,
        )

    @property
    def trust(self) -> Trust:
        """What an artifact is held to, whoever recorded it."""
        keys = {peer.uid: peer.key for peer in self.peers.all}
        return Trust(keys={**self.former, **keys}, weights=self.weights, norm_bound=self.norm_bound)

    def hash(self) -> str:
        """Equal exactly where all that decides a window is."""
        lists = (self.peers.primaries, self.peers.reserves)
        told = (self.optimizer, self.seconds, self.memory_bytes, self.reserve_share)
        return canonical.sha256(
            {
                "layout": self.layout.digest,
                "manifest": [self.run_id, self.manifest_sha256],
                "peers": [[[p.uid, p.key.hex, p.bucket, p.prefix] for p in some] for some in lists],
                "settings": [repr(one) for one in (*told, self.norm_bound, self.settings)],
                "weights": dict(self.weights),
            }
        )
