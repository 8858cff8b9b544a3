"""The list of the ranks that wait in a call, by which a timeout can name those that do not.

Gloo's timeout names no rank: in a collective each rank waits for its neighbour, which may itself be
waiting. A rank that has waited for a while therefore writes its number into the group's store. If
its wait fails later, it looks up who else waits in the same call: the others did not come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from datetime import timedelta

import torch.distributed as dist

#: Seconds after which a rank that waits says so, or an eighth of the group's timeout.
NOTICE = 1.0


class WaitingRanks:
    """The ranks of a group that wait in this rank's current call."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """`store`: of the group. `timeout`: of its transfers."""
        self._store, self._rank, self._size = store, rank, size
        self._notice = min(NOTICE, timeout.total_seconds() / 8)
        self._call = 0

    def next_call(self) -> None:
        """The ranks' calls are numbered: each begins with one exchange between all of them."""
        self._call += 1

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective of some ranks of the group.

        Raises:
            RuntimeError: it failed; if that took a while, with the ranks that do not wait.
        """
        try:
            work.wait(timedelta(seconds=self._notice))
            return
        except RuntimeError:
            if work.is_completed():  # by now, or it failed at once, and Gloo says why
                work.wait()
                return
        entry = _Entry(self._store, f"waiting in call {self._call}", self._rank)
        try:
            work.wait()
        except RuntimeError as error:
            # Ranks that began to wait last have not yet said so.
            raise RuntimeError(
                f"{error}; {self._missing(entry.others(2 * self._notice))}"
            ) from error
        entry.remove()

    def _missing(self, waiting: Collection[int] | None) -> str:
        if waiting is None:
            return "the group's store, which knows the ranks that wait, does not answer"
        missing = [rank for rank in range(self._size) if rank not in waiting]
        if not missing:
            return "all ranks of the group wait: the network between them may have failed"
        several = "s" if len(missing) > 1 else ""
        return f"missing in this call: rank{several} {ranges(missing)} of the group"


class _Entry:
    """This rank's entry in the list, made by a thread: a store out of reach may never answer."""

    #: Seconds that the store may take to answer.
    TIMEOUT = 2.0

    def __init__(self, store: dist.Store, key: str, rank: int) -> None:
        self._store, self._key, self._rank = store, key, rank
        self._failed = False
        self._after = 0.0
        self._ended, self._answered = threading.Event(), threading.Event()
        self._found: set[int] | None = None
        threading.Thread(target=self._run, name="megabatch waiting", daemon=True).start()

    def others(self, after: float) -> set[int] | None:
        """All ranks with an entry after so many seconds; None if the store does not answer."""
        self._failed, self._after = True, after
        self._ended.set()
        self._answered.wait(after + self.TIMEOUT)
        return self._found

    def remove(self) -> None:
        """The wait is over on all ranks."""
        self._ended.set()

    def _run(self) -> None:
        try:
            store = self._store.clone()  # a connection of its own
            store.append(self._key, f"{self._rank} ")  # type: ignore[attr-defined]
            self._ended.wait()
            if self._failed:
                time.sleep(self._after)
                self._found = {int(rank) for rank in store.get(self._key).split()}
            else:
                store.delete_key(self._key)
        except (RuntimeError, AttributeError):  # out of reach, or of a kind that cannot append
            pass
        self._answered.set()


def ranges(ranks: Collection[int]) -> str:
    """Ranks as a text: 0, 2 to 5, 7."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(
        f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts
    )
