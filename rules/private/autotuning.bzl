"""A program that times kernels on the devices of this machine."""

load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:current_inputs.bzl", "CURRENT_INPUTS", "current_inputs_program")
load("//rules/private:extensions.bzl", "extension_attr", "extension_of")
load("//rules/private:launcher.bzl", "refused_elsewhere")

def _aot_autotuning_impl(ctx):
    root = "\"${BUILD_WORKSPACE_DIRECTORY:-.}\""
    return current_inputs_program(
        ctx,
        "{stagec} autotune --root %s \"$@\" {inputs}" % root,
        refused_elsewhere(ctx, "the results"),
        [extension_of(ctx.attr._extension)],
    )

aot_autotuning = rule(
    implementation = _aot_autotuning_impl,
    doc = "`bazel run <manifest>.autotune`, on a machine with the NVIDIA devices of a manifest's targets, times kernels " +
          "on them and writes the files of results that the targets name into the source tree. The macro of a " +
          "manifest declares it where a target names such a file.",
    executable = True,
    attrs = dict(CURRENT_INPUTS, _extension = extension_attr("insight")),
    toolchains = [str(TOOLCHAIN_TYPE)],
)
