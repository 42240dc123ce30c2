"""A program that serves a bundle."""

load("//rules:providers.bzl", "AotBundleInfo", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:extensions.bzl", "extension_attr", "extension_of")
load("//rules/private:launcher.bzl", "shell_quote", "stagec_program")

# The user's paths are relative to where the user is.
_BODY = """cd "${BUILD_WORKING_DIRECTORY:-.}"
exec {stagec} serve "$@" "$workspace"/%s
"""

def _aot_server_impl(ctx):
    info = ctx.attr.bundle[AotBundleInfo]
    serving = ctx.attr._serving[PythonEnvironmentInfo]
    extensions = [extension_of(target) for target in (ctx.attr._serve, ctx.attr._grpc)]
    body = _BODY % shell_quote(info.bundle.short_path)
    return stagec_program(ctx, body, [info.bundle] + info.weights, [serving], extensions = extensions)

aot_server = rule(
    implementation = _aot_server_impl,
    doc = "`bazel run <manifest>.serve` serves the bundle on this machine, over the Open Inference Protocol v2. " +
          "`-- --port 9000 --grpc-port 9001` are options of `stagec serve`. docs/serving.md says more. `aot_manifest` declares it.",
    executable = True,
    attrs = {
        "bundle": attr.label(doc = "The bundle.", mandatory = True, providers = [AotBundleInfo]),
        "_grpc": extension_attr("grpc"),
        "_serve": extension_attr("serve"),
        # Fetched when such a target is analysed: the macro tags it "manual".
        "_serving": attr.label(default = Label("@stagec_serving//:environment")),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
