"""A watch over one rank: it finds that a collective hangs, asks the other ranks, and ends the job on all of them.

1. `guard` looks a few times a second whether this rank has been in one wait longer than cluster.timeout_seconds.
2. A thread of this rank's looks at the job's board at a low rate. An alarm here is claimed there; whoever reads it
   answers with its own step, collectives and place, and leaves its stacks in out_dir/hang/rank<N>.txt.
3. The rank that claimed gathers the answers for some seconds and prints one report. Then all end, by force where the
   main thread is in a call that never returns. A rank that does not answer is killed by those on its machine.

The board is asked from that thread alone, since the store's keeper may be stopped itself and a call then never returns:
`guard` sees this, and the rank ends without having asked anybody.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from json import dumps, loads
from pathlib import Path

from megalite.comm.observe import observe
from megalite.train import report
from megalite.train.failure import HANG_CODE, LOST_CODE, Board, BoardGone, Card, Ending, write_error_file
from megalite.train.guard import UNWIND_SECONDS, Guard
from megalite.train.progress import Progress, State, Waiting, describe

LOOK_SECONDS = 1.0
"""From one look at the board to the next; less where the timeout is so short that it would count."""
ANSWER_SECONDS = 3.0
"""How long answers are waited for beyond a look; also how long a call to the store may take."""
HUNG_SECONDS = 1.0
"""How long a rank may take to unwind after a hang."""


class Watch:
    """Watches this rank while it is open.

    folder: for stacks. record: this rank's flight record. error_file: where torchrun looks for what to show. ending:
    what this rank was told to end by, None while the job goes on.
    """

    def __init__(
        self,
        board: Board,
        progress: Progress,
        guard: Guard,
        *,
        timeout_seconds: float,
        folder: Path,
        record: Callable[[], str] = str,
        error_file: str | None = None,
    ) -> None:
        self.board, self.progress, self.guard = board, progress, guard
        self.timeout_seconds, self.folder, self.record, self.error_file = timeout_seconds, folder, record, error_file
        self.look_seconds = min(LOOK_SECONDS, timeout_seconds / 10)
        self.ending: Ending | None = None
        self._alarm: Waiting | None = None
        self._asking_since: float | None = None
        self._first_card: dict[int, Card] = {}
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        self._stack.enter_context(observe(self.progress))
        self.guard.on_tick.append(self._look)
        self.guard.on_exit.append(self._leave)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(ANSWER_SECONDS)
        self.guard.on_tick.remove(self._look)
        self.guard.on_exit.remove(self._leave)
        self._stack.close()

    def ask(self) -> tuple[dict[int, State], dict[int, str]]:
        """What the other ranks answer once an ending that asks for it is on the board, and of those that do not answer
        within some seconds what the system knows of their processes. This rank answers too."""
        self.board.write("state", self.progress.state(self.board.rank).dumps())
        end = time.monotonic() + ANSWER_SECONDS + self.look_seconds
        while True:
            answers = self.board.read("state", seconds=self.look_seconds)
            silent = [rank for rank in range(self.board.size) if rank not in answers]
            cards = self._cards(silent)
            known = {rank: cards[rank].state() if rank in cards else "" for rank in silent}
            if time.monotonic() > end or set(known.values()) <= {"gone"}:  # who is gone will not answer
                return {rank: State.loads(text) for rank, text in answers.items()}, known

    def _look(self) -> None:
        """On the guard's thread: nothing here may block."""
        waiting = self.progress.longest_wait()
        now = time.monotonic()
        if waiting is not None and now - waiting.since > self.timeout_seconds and not self.guard.unwinding:
            if self._alarm is None:
                self._alarm = waiting
                self._wake.set()
            since = self._asking_since
            if since is not None and now - since > ANSWER_SECONDS and self.ending is None:
                self._end_alone(waiting, "does not answer")

    def _run(self) -> None:
        try:
            self.board.write("card", dumps(asdict(Card.mine())))
            while not self._closed:
                self._asking_since = time.monotonic()
                ending = self.board.ending()
                if ending is None and self._alarm is not None:
                    ending = self._raise_alarm(self._alarm)
                elif ending is None and self.guard.stopped_by is not None:
                    ending = self._pass_on(self.guard.stopped_by)
                self._asking_since = None
                if ending is not None:
                    return self._follow(ending)
                if not self._first_card:
                    self._first_card = self._cards([0])
                self._wake.wait(self.look_seconds)
                if self._alarm is not None:
                    self._wake.clear()
        except BoardGone:
            if not self._closed and not self.guard.unwinding:
                self._end_alone(self.progress.longest_wait(), "is gone")

    def _raise_alarm(self, waiting: Waiting) -> Ending | None:
        line = f"rank {self.board.rank} waited in {waiting.operation} for more than {self.timeout_seconds:g} s"
        mine = Ending("hung", HANG_CODE, self.board.rank, line)
        if not self.board.claim(mine):
            return self.board.ending()
        self._asking_since = None
        states, silent = self.ask()
        text = report.hang(
            waiting,
            states,
            silent,
            rank=self.board.rank,
            size=self.board.size,
            seconds=time.monotonic() - waiting.since,
            timeout_seconds=self.timeout_seconds,
            folder=str(self.folder),
        )
        print(text, file=sys.stderr, flush=True)
        write_error_file(self.error_file, text)
        self.board.tell(mine, silent)
        return mine

    def _pass_on(self, signum: int) -> Ending | None:
        """The main thread has had a look's time to say it itself, and may be blocked."""
        time.sleep(self.look_seconds)
        name = signal.Signals(signum).name
        mine = Ending("stopped", 128 + signum, self.board.rank, f"{name} {self.progress.when}")
        if self.board.claim(mine):
            print(f"rank {mine.rank} was stopped by {mine.line}", file=sys.stderr, flush=True)
            self.board.tell(mine)
        return self.board.ending()

    def _follow(self, ending: Ending) -> None:
        """The job has ended: answer if that is asked, then see to it that this process ends too."""
        answers = ending.kind in ("hung", "lost")
        if answers:
            self.guard.end_within(3 * ANSWER_SECONDS + self.look_seconds + UNWIND_SECONDS, ending.code)
            self.board.write("state", self.progress.state(self.board.rank).dumps())
            self._leave_stacks()
            final, silent = self.board.told(2 * ANSWER_SECONDS + self.look_seconds)
            self._kill(self._cards(silent))
            ending = final or ending
        self._end(ending)

    def _end(self, ending: Ending) -> None:
        """Unwind if the main thread can, and end by force if not: in a hang it is most likely in a call into C."""
        self.ending = ending
        if ending.rank != self.board.rank:
            write_error_file(self.error_file, f"stopped, since {ending.line}", consequence=True)
        self.guard.end_within(HUNG_SECONDS if ending.kind == "hung" else UNWIND_SECONDS, ending.code)
        self.guard.interrupt()

    def _kill(self, cards: dict[int, Card]) -> None:
        """Ranks on this machine that do not answer: a launcher's signal would not reach a stopped one."""
        for card in cards.values():
            if card.state() in ("stopped", "running"):
                with contextlib.suppress(OSError):
                    os.kill(card.pid, signal.SIGKILL)

    def _end_alone(self, waiting: Waiting | None, how: str) -> None:
        """The store's keeper is stopped or gone, so nobody can be asked."""
        rank, seconds = self.board.rank, 0.0 if waiting is None else time.monotonic() - waiting.since
        doing = f"waits in {describe(waiting)} for {seconds:.1f} s" if waiting else "works"
        line = f"rank {rank} {doing} {self.progress.when}, and the store of this job {how}: "
        line += "rank 0 or the launcher, whichever keeps it, was stopped or killed"
        print(line, file=sys.stderr, flush=True)
        self._leave_stacks()
        self._kill({rank: card for rank, card in self._first_card.items() if card.state() == "stopped"})
        hung = seconds > self.timeout_seconds
        self._end(Ending("hung", HANG_CODE, rank, line) if hung else Ending("lost", LOST_CODE, rank, line))

    def _leave_stacks(self) -> None:
        """Every thread's stack and the flight record of the collectives, into this rank's file."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        text = self.progress.state(self.board.rank).dumps() + "\n"
        for ident, frame in sys._current_frames().items():
            text += f"\nthread {names.get(ident, ident)}, newest call last:\n{''.join(traceback.format_stack(frame))}"
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"rank{self.board.rank}.txt").write_text(f"{text}\nflight record:\n{self.record()}\n")

    def _leave(self) -> None:
        self.board.leave(2.0)

    def _cards(self, ranks: list[int]) -> dict[int, Card]:
        """Of those of `ranks` that have come so far as to write one."""
        return {rank: Card(**loads(text)) for rank, text in self.board.read("card", ranks=ranks).items()}
