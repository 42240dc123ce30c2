"""What a manifest was built into, file by file, for tests that read the parts of a bundle."""

load("//rules:providers.bzl", "AotBundleInfo")

def _parts_impl(ctx):
    info = ctx.attr.bundle[AotBundleInfo]
    files = [info.bundle]
    for export in info.exports.to_list():
        files += [export.exported, export.spec, export.description] + ([export.lowered] if export.lowered else [])
    for executable in info.executables.to_list():
        files += [executable.executable, executable.description, executable.module, executable.spec]
    return [DefaultInfo(files = depset(files), runfiles = ctx.runfiles(files))]

parts = rule(
    implementation = _parts_impl,
    doc = "The bundle, its exported artifacts and its executables, with their descriptions and specs.",
    attrs = {"bundle": attr.label(doc = "The bundle.", mandatory = True, providers = [AotBundleInfo])},
)
