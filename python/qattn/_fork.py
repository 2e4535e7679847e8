"""Locks that a child of os.fork() finds free, and what they guard whole.

A child has only the thread that forked: a lock that another one held would stay taken for ever, and
a cache that it was appending to would stay half changed. So os.fork() waits for the calls that hold
one, and holds all of them while it forks.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

# Reentrant ones: a signal's handler may fork inside a call, or inside another fork.
_forking = threading.RLock()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_held: list[list[Any]] = []


def new_lock() -> Any:
    """A reentrant lock that no other thread holds while a process forks."""
    lock = threading.RLock()
    with _forking:
        _locks.add(lock)
    return lock


def _hold() -> None:
    _forking.acquire()
    held: list[Any] = []
    _held.append(held)
    for lock in list(_locks):
        lock.acquire()
        held.append(lock)


def _release() -> None:
    for lock in _held.pop():
        lock.release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
