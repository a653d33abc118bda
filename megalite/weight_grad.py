"""`WeightGradStore`: weight-gradient work put off by one backward.

A linear layer's backward has two products: dX = dY W, which the layer before waits for, and dW = dY^T X, which nobody
waits for until the optimizer step. While a store is open, the layer's backward computes only dX and puts the other
product here; `run` does it later. Zero-bubble pipelines (arXiv:2401.10241) fill their idle time with it.

The open store is a plain module variable, the one piece of module state of the library: autograd runs CUDA nodes on
threads of its own, where a thread-local or a ContextVar would not be seen. Only backward functions look at it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Starts whatever the product needs from other ranks and returns the function that finishes it.
Start = Callable[[], Callable[[], Tensor]]


class WeightGradStore:
    """A queue of (parameter, product). Closed, layers return dW at once; open, they put the product here.

    `run()` computes what is queued and hands each parameter's sum to autograd once, as
    `torch.autograd.backward(parameter, dW)`, so that the same post-accumulate hooks fire as without a store. The next
    product's gather travels under the present product.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[nn.Parameter, Start, list[tuple[Tensor, int]]]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, parameter: nn.Parameter, start: Start, *, reads: Iterable[Tensor] = ()) -> None:
        """Puts one product off. reads: the tensors that it will read; `run` refuses if one has been overwritten."""
        self._queue.append((parameter, start, [(tensor, tensor._version) for tensor in reads]))

    @torch.no_grad()
    def run(self) -> None:
        """Computes everything put so far, in that order; a parameter put several times arrives once, summed.

        Raises RuntimeError if a tensor that a product reads was written to since: autograd cannot see that any more.
        """
        remaining = Counter(id(parameter) for parameter, *_ in self._queue)
        sums: dict[int, Tensor] = {}
        following = self._begin_next()
        while following is not None:
            (parameter, finish), following = following, self._begin_next()
            key = id(parameter)
            # Nothing else may hold the product, so that its memory serves the next one once it has arrived.
            sums[key] = sums[key] + finish() if key in sums else finish()
            remaining[key] -= 1
            if remaining[key] == 0:
                torch.autograd.backward([parameter], [sums.pop(key)])

    def _begin_next(self) -> tuple[nn.Parameter, Callable[[], Tensor]] | None:
        if not self._queue:
            return None
        parameter, start, reads = self._queue.popleft()
        if any(tensor._version != version for tensor, version in reads):
            raise RuntimeError(
                f"what the weight gradient of a {tuple(parameter.shape)} parameter reads was modified in place "
                "between backward and run()"
            )
        return parameter, start()

    @contextmanager
    def open(self) -> Iterator[WeightGradStore]:
        """Backward passes within the `with` put their weight products here; an exception in it empties the store.

        Stores do not nest.
        """
        global _open
        if _open is not None:
            raise RuntimeError("a WeightGradStore is open already: stores do not nest")
        _open = self
        try:
            yield self
        except BaseException:
            self._queue.clear()  # of a backward that has not ended: a later run() must not add it to another's
            raise
        finally:
            _open = None


_open: WeightGradStore | None = None


def open_store(weight: Tensor) -> WeightGradStore | None:
    """The store that takes this weight's product, or None. For backward functions only: forward must not depend on it.

    A weight that is computed from others (a parametrisation) is never put off: its gradient has further to go.
    """
    return _open if weight.is_leaf else None
