"""What qattn raises. Every message names the tensor or option, the value and the rule."""


class QattnError(Exception):
    """Base of all errors of qattn. A call that raises one has written to no output."""


class InvalidArgument(QattnError, ValueError):
    """The call itself is wrong: shape, stride, dtype, option, or contents of an index tensor."""


class Unsupported(QattnError, NotImplementedError):
    """The call is right, but this device or build cannot do it (a RuntimeError, too)."""


class OutOfMemory(QattnError, MemoryError):
    """An allocation failed."""


class InternalError(QattnError, RuntimeError):
    """A defect of qattn."""
