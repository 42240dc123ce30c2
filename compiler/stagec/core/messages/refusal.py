"""Why a bundle or a call is refused: typed exceptions with a stable code."""

from __future__ import annotations


class Refusal(Exception):
    """Base of the loader's errors. `code` is stable across versions, the message is for people."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code

    def __reduce__(self) -> tuple[type[Refusal], tuple[str, str]]:
        """Copy it and pickle it with its code: it crosses processes."""
        return type(self), (self.code, str(self))


class LoadError(Refusal):
    """A bundle, or an executable in it, cannot be loaded, or this process cannot join others.

    Codes: "not-found", "not-a-bundle", "format", "digest", "no-target", "target", "platform", "device-kind",
    "device-count", "architecture", "cpu-feature", "jaxlib-version", "plugin-version", "custom-call", "policy",
    "expired", "shape", "memory", "executable", "compile", "signature", "key", "cryptography", "weights", "distributed".
    docs/troubleshooting.md says what to do about each.
    """


class CallError(Refusal):
    """A call cannot run, because its arguments do not fit.

    Codes: "static", "structure", "dtype", "shape", "deleted", "client", "traced", "transformation", "closed",
    "addressable".
    docs/troubleshooting.md says what to do about each.
    """


class RunError(Refusal, RuntimeError):
    """XLA failed: in a call whose arguments fit, or when it copied an array to a device or from it.

    Codes: "memory" (there is not enough), "execution" (anything else; the message is XLA's).
    docs/troubleshooting.md says what to do about each.
    """
