"""Which of several engines a request goes to: one that knows its beginning, unless it has clearly more to do than another.

Each front end has a router of its own. It remembers what it sent where, as fingerprints of prompts page by page, and guesses the load of
an engine from the last heartbeat and from what it has open there itself. A wrong guess costs time, never a wrong answer. Knows no
sockets. Next: `replicas`, which asks here and sends.

The rule: engines whose caches should hold more of the prompt come first, among equals the less loaded one. Passed over is an engine
  - that is full while another could start the request at once: a hit saves part of a prefill, a queue costs whole answers;
  - that has MAX_EXTRA_SHARE of its seats more sequences than the least loaded one. Otherwise a beginning that all requests share, such as a
    system prompt, would keep one engine busy and the others idle; passed over once, the next engine knows it too, and load decides.
Where nothing is known and loads are equal, the first page itself names the engine, so that all front ends begin alike without asking.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from jaxserve.core.request import Request
from jaxserve.engine.stats import EngineStats

MAX_FINGERPRINTS = 2**16
"""Pages of prompts that are remembered, the ones used last; about 15 MB, and a million tokens with pages of 16."""
MAX_EXTRA_SHARE = 1 / 8
MIN_EXTRA = 2
"""Sequences that an engine may have more than the least loaded one where an eighth of its seats is less: few are no load at all."""
SHORT_OF_PAGES = 0.5
"""Sequences that wait beside free seats wait for pages when more than this share is in use; else they have only just come."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do, in sequences; `kv_use` is the share of its pages in use, `num_seats` how many can run at once."""

    num_waiting: int = 0
    num_running: int = 0
    kv_use: float = 0.0
    num_seats: int = 1

    @classmethod
    def estimate(cls, stats: EngineStats, num_seats: int, *, num_own_then: int, num_own: int) -> Load:
        """The load now, from the last heartbeat.

        Args:
            stats: What the heartbeat said; it covers all front ends.
            num_seats: Sequences that the engine can run at once.
            num_own_then: Sequences that this front end had open there when it came.
            num_own: Those that it has open now.
        """
        kv_use = stats.num_used_pages / max(1, stats.num_pages - 1)  # the null page is never used
        if stats.num_waiting and kv_use > SHORT_OF_PAGES:
            num_seats = min(num_seats, stats.num_running)
        num_open = max(0, stats.num_running + stats.num_waiting - num_own_then) + num_own
        num_running = min(num_open, num_seats)
        return cls(num_open - num_running, num_running, kv_use, num_seats)

    @property
    def is_full(self) -> bool:
        """Whether one more sequence would wait."""
        return self.num_running >= self.num_seats

    @property
    def rank(self) -> tuple[int, int, float]:
        """Orders engines, the least loaded first."""
        return self.num_waiting, self.num_running, self.kv_use

    def is_clearly_above(self, least: Load) -> bool:
        """Whether a prefix hit here is not worth it beside an engine with the load `least`."""
        num_extra = self.num_waiting + self.num_running - least.num_waiting - least.num_running
        return (self.is_full and not least.is_full) or num_extra > max(MIN_EXTRA, self.num_seats * MAX_EXTRA_SHARE)


def fingerprints(request: Request, page_size: int) -> list[int]:
    """One number for each full page of the prompt, which stands for all tokens up to its end and for what keeps caches apart.

    That of the first page is the same in all processes; the others come from Python's own hash, which is fast. An accidental equality only
    misleads.
    """
    data = array("I", request.prompt_token_ids).tobytes()
    page_bytes = len(data) // len(request.prompt_token_ids) * page_size
    if len(data) < page_bytes:
        return []
    salt = b"" if request.cache_salt is None else b"salt:" + request.cache_salt.encode("utf-8", "surrogatepass")
    chain = [int.from_bytes(sha256(data[:page_bytes] + salt).digest()[:8])]
    for end in range(2 * page_bytes, len(data) + 1, page_bytes):
        chain.append(hash((chain[-1], data[end - page_bytes : end])))
    return chain


class Router:
    """Chooses engines, by their numbers below `num_engines`, and remembers the choices."""

    def __init__(self, num_engines: int, max_fingerprints: int = MAX_FINGERPRINTS) -> None:
        self._num_engines = num_engines
        self._max_fingerprints = max_fingerprints
        self._known: OrderedDict[int, int] = OrderedDict()
        """Fingerprint to the engines it was sent to, a bit for each; the one used last at the end."""
        self._turn = 0
        self._last_turns: dict[int, int] = {}

    def __len__(self) -> int:
        """Fingerprints that are remembered."""
        return len(self._known)

    def choose(self, chain: Sequence[int], loads: Mapping[int, Load]) -> int:
        """The engine for a prompt with these fingerprints, which then counts as sent there.

        Args:
            chain: From `fingerprints`.
            loads: Of the engines that may be chosen; at least one. Equals take turns where there is no full page.
        """
        num_known = self._num_known(chain, loads)
        turns = {engine: (engine - chain[0]) % self._num_engines if chain else self._last_turns.get(engine, 0) for engine in loads}
        order = sorted(loads, key=lambda engine: (-num_known[engine], *loads[engine].rank, turns[engine]))
        least = min(loads.values(), key=lambda load: load.rank)
        chosen = next(engine for engine in order if not loads[engine].is_clearly_above(least))
        self._turn += 1
        self._last_turns[chosen] = self._turn
        self.remember(chain, chosen)
        return chosen

    def remember(self, chain: Sequence[int], engine: int) -> None:
        """A prompt with these fingerprints was sent to the engine."""
        # From the end: of a chain that is dropped page by page the beginning is still of use.
        for key in reversed(chain):
            self._known[key] = self._known.get(key, 0) | 1 << engine
            self._known.move_to_end(key)
        while len(self._known) > self._max_fingerprints:
            self._known.popitem(last=False)

    def forget(self, engine: int) -> None:
        """The engine's cache is empty: it was started anew, or told to forget."""
        others = ~(1 << engine)
        self._known = OrderedDict((key, rest) for key, engines in self._known.items() if (rest := engines & others))

    def _num_known(self, chain: Sequence[int], loads: Mapping[int, Load]) -> dict[int, int]:
        """For each engine how many pages of the chain, from its beginning, were sent to it."""
        num_known = dict.fromkeys(loads, 0)
        left = sum(1 << engine for engine in loads)
        for i, key in enumerate(chain):
            still = left & self._known.get(key, 0)
            if still != left:
                num_known |= {engine: i for engine in loads if (left & ~still) >> engine & 1}
            if not still:
                return num_known
            left = still
        return num_known | {engine: len(chain) for engine in loads if left >> engine & 1}
