"""What a process frees stays its own, so that the next step need not ask the system for memory."""

import ctypes
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""numbers of glibc's mallopt(3)"""
KEPT = 1 << 30
"""bytes of freed memory at the heap's end that are kept"""
LARGEST = 32 << 20
"""bytes up to which memory is taken from the heap, the most that glibc allows"""


def keep_memory() -> None:
    """Let glibc keep what this process frees; does nothing with other C libraries.

    By default it hands the memory of a large tensor back to the system, which hands out pages anew,
    and zeroes them, at every step.
    """
    with suppress(AttributeError, OSError, TypeError):  # no such library, or it has no mallopt
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, KEPT)
        library.mallopt(MMAP_THRESHOLD, LARGEST)
