"""A program that serves a bundle."""

load("//rules:providers.bzl", "AotBundleInfo", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:extensions.bzl", "extension_attr", "extension_of")
load("//rules/private:launcher.bzl", "environment_files", "shell_quote", "write_stagec_launcher")

# The user's paths are relative to where the user is.
_BODY = """cd "${BUILD_WORKING_DIRECTORY:-.}"
exec {stagec} serve "$@" "$workspace"/%s
"""

def _aot_server_impl(ctx):
    stagec = ctx.toolchains[TOOLCHAIN_TYPE].stagec
    info = ctx.attr.bundle[AotBundleInfo]
    serving = ctx.attr._serving[PythonEnvironmentInfo]
    extensions = [extension_of(target) for target in (ctx.attr._serve, ctx.attr._grpc)]
    script = write_stagec_launcher(ctx, stagec, _BODY % shell_quote(info.bundle.short_path), [serving], extensions = extensions)
    return [DefaultInfo(
        executable = script,
        files = depset([script]),
        runfiles = ctx.runfiles(
            files = [info.bundle] + info.weights + environment_files([serving]),
            transitive_files = depset(transitive = [stagec.inputs] + [extension.sources for extension in extensions]),
        ),
    )]

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
