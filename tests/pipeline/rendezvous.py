"""Ranks as threads of which one runs at a time, and lanes on which nothing moves before both ends have met.

The hardest network that a pipeline may meet: a send is over only when its receive is posted, messages bear no name, and
whose turn it is comes from a seed. When nobody can go on, all ranks end with `Stuck`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from random import Random
from typing import Any

import torch
from torch import Tensor

from megalite.comm import Pending


class Stuck(RuntimeError):
    """All ranks wait for one another."""


class Rendezvous:
    """Gives `start_send` and `start_receive` of lanes, which may be anything that can be hashed."""

    def __init__(self, ranks: int, *, seed: int) -> None:
        self._random, self._awake = Random(seed), [threading.Event() for _ in range(ranks)]
        self._waiting: dict[int, Callable[[], bool]] = {rank: lambda: True for rank in range(ranks)}
        self._rank, self._is_stuck = threading.local(), False
        self._sent: dict[Hashable, list[Tensor]] = defaultdict(list)
        self._posted: dict[Hashable, list[Tensor]] = defaultdict(list)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What work(rank) returns, of each rank. Raises what the first of them raised."""
        results: list[Any] = [None] * len(self._awake)
        raised: list[BaseException] = []

        def life(rank: int) -> None:
            self._rank.number = rank
            self._sleep(rank)
            try:
                results[rank] = work(rank)
            except BaseException as error:
                raised.append(error)
            self._wake_one()

        threads = [threading.Thread(target=life, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        self._wake_one()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]
        return results

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Lets others run, at least until something holds."""
        rank = self._rank.number
        self._waiting[rank] = until
        self._wake_one()
        self._sleep(rank)
        if self._is_stuck:
            raise Stuck(f"rank {rank}")

    def _sleep(self, rank: int) -> None:
        self._awake[rank].wait()
        self._awake[rank].clear()

    def _wake_one(self) -> None:
        ready = [rank for rank, until in self._waiting.items() if until()]
        self._is_stuck = self._is_stuck or (bool(self._waiting) and not ready)
        chosen = list(self._waiting) if self._is_stuck else ready and [self._random.choice(ready)]
        for rank in chosen:
            del self._waiting[rank]
            self._awake[rank].set()

    def start_send(self, x: Tensor, lane: Hashable) -> Pending[None]:
        number = len(self._sent[lane])
        self._sent[lane].append(x)
        self._meet(lane, number)
        return Sending(lambda: len(self._posted[lane]) > number, self)

    def start_receive(self, into: Tensor, lane: Hashable) -> Pending[Tensor]:
        number = len(self._posted[lane])
        self._posted[lane].append(into)
        self._meet(lane, number)

        def finish() -> Tensor:
            self.pause(lambda: len(self._sent[lane]) > number)
            return into

        return Pending(finish)

    @torch.no_grad()
    def _meet(self, lane: Hashable, number: int) -> None:
        if min(len(self._sent[lane]), len(self._posted[lane])) > number:
            x, into = self._sent[lane][number], self._posted[lane][number]
            assert (x.dtype, x.shape) == (into.dtype, into.shape), f"{lane}: {x} into {into}"
            into.copy_(x)


class Sending(Pending[None]):
    """is_met: whether its receive is posted."""

    def __init__(self, is_met: Callable[[], bool], network: Rendezvous) -> None:
        super().__init__(lambda: network.pause(is_met))
        self.is_met = is_met
