"""Translate XLA's errors for a caller: typed, with a code, and XLA's own message."""

from __future__ import annotations

from stagec.core.messages.refusal import RunError


def code(error: Exception, otherwise: str) -> str:
    """Return "memory" if XLA reports that the memory of a device or of the machine is full; else `otherwise`."""
    return "memory" if "RESOURCE_EXHAUSTED" in str(error).partition("\n")[0] else otherwise


def of_call(error: Exception, what: str) -> RunError:
    """Return the caller's error for one that XLA raised while it ran `what`, such as the name of a function."""
    return error if isinstance(error, RunError) else RunError(code(error, "execution"), f"{what}: {error}")
