"""Copy a bundle from a registry to a folder, with its weights and with what is said about it."""

from __future__ import annotations

from pathlib import Path

from stagec.cli.files import Answer, Options
from stagec.cli.options import value


def registry_options(timeout: int) -> dict[str, object]:
    """Return how to speak with a registry. timeout: the default, in seconds."""
    what = "give up when the registry has sent and taken less than 64 KiB in so long (default: %(default)s)"
    return {
        "[--plain-http]": "the registry has no TLS, as one on this machine",
        "[--timeout SECONDS]": value(what, timeout, float),
    }


OPTIONS = {
    "image": "what to copy: registry/repository:tag, or ...@sha256:... by its digest",
    "folder": "where to write its files",
    **registry_options(timeout=60),
}


def run(options: Options) -> Answer:
    from stagec_registry.client import Reference, Registry

    pulled = Registry(options.plain_http, options.timeout).pull(Reference.read(options.image), Path(options.folder))
    lines = [f"{digest[:12]}  {options.folder}/{path}" for path, digest in pulled.files.items()]
    lines += [f"removed       {options.folder}/{path}: it is about another bundle" for path in pulled.removed]
    lines += [f"left out      sha256 {digest[:12]}: {' '.join(why.split())}" for digest, why in pulled.left_out.items()]
    if pulled.missing:
        why = "the registry has none about this image; skopeo copy leaves them behind, skopeo sync takes them"
        lines.append(f"missing       {', '.join(pulled.missing)}: {why}")
    return Answer({"image": options.image, **pulled._asdict()}, "\n".join([*lines, ""]))
