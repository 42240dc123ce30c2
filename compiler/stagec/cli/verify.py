"""Check a bundle, and that it was signed: status 0; 3 where it is whole and no signature was checked."""

from __future__ import annotations

from stagec.cli.files import Answer, Options
from stagec.cli.options import WEIGHTS, only_with, value
from stagec.core.messages.errors import Problem, StagecError

OPTIONS = {
    "bundle": "the bundle (.aot), or the layer (.tar) that aot_programs built",
    "[--key KEY]...": "a public key that is trusted, Ed25519 or ECDSA in PEM: with one, the bundle must be signed",
    "[--signature FILE]...": "an envelope, or a signature of Model Signing, as for statements of several builders "
    "(default: BUNDLE.dsse.json, BUNDLE.2.dsse.json and so on)",
    "[--base-key FILE]...": "a public key: with some, one of them must have signed the bundle as it was before stagec "
    "add-jaxlib added to it",
    "[--serves jaxlib==VERSION]...": "a jaxlib of your fleet: status 1 where the bundle has no executables of it",
    "[--function NAME]...": "with --serves, a function that must be served, as inspect names it (default: all)",
    "[--target NAME]...": "with --serves, a target that must be served (default: all)",
    "[--measured]": "with --serves, what an older jaxlib made counts too, where it was measured to have the same bits "
    "(policy='measured' of stagec.load)",
    "[--threshold T]": value("how many of the keys must have signed (default: 1)", 1, int),
    **WEIGHTS,
    "[--require-signature]": "refuse to run without --key: for scripts, whose list of keys could be empty",
}


def run(options: Options) -> Answer:
    from stagec.trust import attestation, fleet, verification

    if not options.key:
        for option, given in {
            "--require-signature": options.require_signature,
            "--signature": bool(options.signature),
            "--base-key": bool(options.base_key),
            "--threshold": options.threshold != 1,
        }.items():
            if given:
                write = "say which keys are trusted: --key PUBLIC.pem"
                raise StagecError(Problem("", option, "no key is given", write))
    if (options.function or options.target) and not options.serves:
        what = "these are the functions and targets that must be served, and no jaxlib is given"
        raise StagecError(Problem("", "--function, --target", what, "write --serves jaxlib==0.12.0"))
    only_with("--serves", options.serves, options, "measured")
    if options.bundle.endswith(attestation.LAYER):
        only_with("a bundle", False, options, "serves", "base_key", "weights")
    report = verification.verify(
        options.bundle,
        options.key,
        options.threshold,
        options.signature,
        options.weights,
        options.base_key,
        [fleet.release(requirement, "--serves") for requirement in options.serves],
        options.function,
        options.target,
        options.measured,
    )
    return Answer(report, verification.as_text(report), verification.status(report))
