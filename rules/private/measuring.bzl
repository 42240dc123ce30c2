"""A test of a bundle's size, and a program that measures how fast it is on this machine."""

load("//rules:providers.bzl", "AotBundleInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:launcher.bzl", "shell_quote", "stagec_program")

_BUNDLE = attr.label(doc = "The bundle.", mandatory = True, providers = [AotBundleInfo])

def _launcher(ctx, body):
    """A program that runs a command on the bundle: `{stagec}` and `{bundle}` in `body` stand for both."""
    info = ctx.attr.bundle[AotBundleInfo]
    body = body.replace("{bundle}", "\"$workspace\"/" + shell_quote(info.bundle.short_path))
    return stagec_program(ctx, body, [info.bundle] + info.weights)

def _aot_size_test_impl(ctx):
    return _launcher(ctx, "exec {stagec} inspect {bundle} --sizes --most %s \"$@\"\n" % ctx.attr.most)

aot_size_test = rule(
    implementation = _aot_size_test_impl,
    doc = "Fails if the bundle's file is larger than it may be, and shows what takes the space. `aot_manifest` declares it " +
          "where the manifest has `bundle_size`.",
    test = True,
    attrs = {
        "bundle": _BUNDLE,
        # A 32-bit int of Starlark's attributes would end at 2 GiB.
        "most": attr.string(doc = "How many bytes the file may have.", mandatory = True),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)

def _aot_latency_impl(ctx):
    return _launcher(ctx, "cd \"${BUILD_WORKING_DIRECTORY:-.}\"\nexec {stagec} bench {bundle} \"$@\"\n")

aot_latency = rule(
    implementation = _aot_latency_impl,
    doc = "`bazel run <manifest>.latency` measures on this machine how long the bundle takes to load, the first call of " +
          "each function, and calls from several threads: `stagec bench`. `-- FUNCTION --json` are its options. " +
          "`aot_manifest` declares it.",
    executable = True,
    attrs = {"bundle": _BUNDLE},
    toolchains = [str(TOOLCHAIN_TYPE)],
)
