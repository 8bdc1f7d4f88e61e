"""Bugs planted in the product's own code, to test the tests."""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def planted(function: Callable[..., Any] | property, old: str, new: str) -> Iterator[None]:
    """While inside, the function runs with one piece of its source replaced.

    The code of the function object itself is swapped, so that it does not matter under which names
    it was imported. The source is dedented first: what `old` and `new` span has the indentation
    that it would have at the top of a module.

    Args:
        function: a function or method without closure, or a property.
        old: what to replace; must occur exactly once in the source.
        new: what to put in its place.

    Raises:
        ValueError: `old` is not there once, or the function has a closure. A planted bug that does
            not fit the code any more is no test.
    """
    changed: Any = function.fget if isinstance(function, property) else function
    source = textwrap.dedent(inspect.getsource(changed))
    if source.count(old) != 1:
        raise ValueError(f"{changed.__qualname__} has {source.count(old)} of {old!r}, expected one")
    if changed.__closure__:
        raise ValueError(f"{changed.__qualname__} has a closure, which other code would lose")
    made: dict[str, Any] = {}
    name = f"<planted in {changed.__qualname__}>"
    exec(compile(source.replace(old, new), name, "exec"), changed.__globals__, made)
    code = made[changed.__name__]
    code = inspect.unwrap(code.fget if isinstance(code, property) else code)
    before, changed.__code__ = changed.__code__, code.__code__
    try:
        yield
    finally:
        changed.__code__ = before
