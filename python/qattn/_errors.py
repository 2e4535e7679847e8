"""What qattn raises. Every message names the tensor or option, the value and the rule."""


_MOST_SHOWN = 80  #: characters of a value in a message


def shown(value: object) -> str:
    """A value as a message has it: of an array its type and shape, of anything long its beginning.

    A tensor in the place of a number is a common mistake, and all of its elements say nothing.
    """
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and len(shape) > 0:
        kind = type(value)
        return f"a {kind.__module__.split('.')[0]}.{kind.__name__} of shape {tuple(shape)}"
    if isinstance(value, (list, tuple)) and any(getattr(x, "shape", ()) for x in value):
        return f"a {type(value).__name__} of {len(value)}, one of them an array"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


class QattnError(Exception):
    """Base of all errors of qattn. A call that raises one has written to no output."""


class InvalidArgument(QattnError, ValueError, RuntimeError):
    """The call itself is wrong: shape, stride, dtype, option, or contents of an index tensor.

    A RuntimeError, too, since torch's own attention refuses by one and callers fall back on it.
    """


class Unsupported(QattnError, NotImplementedError):
    """The call is right, but this device or build cannot do it (a RuntimeError, too)."""


class OutOfMemory(QattnError, MemoryError):
    """An allocation failed."""


class InternalError(QattnError, RuntimeError):
    """A defect of qattn."""
