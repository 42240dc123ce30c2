"""A program that signs a bundle. No action has a key, and no build fetches the packages that sign (compiler/signing.lock)."""

load("//rules:providers.bzl", "AotProvenanceInfo", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:launcher.bzl", "shell_quote", "stagec_program")

# The bundle's file is opened by its path in the runfiles; the user's paths are relative to where the user is.
_BODY = """cd "${BUILD_WORKING_DIRECTORY:-.}"
exec {stagec} sign --statement "$workspace"/%s --output %s "$@" "$workspace"/%s
"""

def _aot_signing_impl(ctx):
    info = ctx.attr.provenance[AotProvenanceInfo]
    signing = ctx.attr._signing[PythonEnvironmentInfo]
    output = info.bundle.basename + ".dsse.json"
    words = (shell_quote(info.statement.short_path), shell_quote(output), shell_quote(info.bundle.short_path))
    return stagec_program(ctx, _BODY % words, [info.bundle, info.statement], [signing])

aot_signing = rule(
    implementation = _aot_signing_impl,
    doc = "`bazel run <manifest>.sign -- --key KEY.pem` signs the bundle's statement, and writes it to " +
          "`<manifest>.aot.dsse.json` in your folder, or to the file that `--output` names. If the file exists, it adds " +
          "one signature. No action sees a key. `aot_manifest` declares it.",
    executable = True,
    attrs = {
        "provenance": attr.label(doc = "The bundle's provenance.", mandatory = True, providers = [AotProvenanceInfo]),
        # Fetched when such a target is analysed: the macro tags it "manual".
        "_signing": attr.label(default = Label("@stagec_signing//:environment")),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
