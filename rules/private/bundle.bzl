"""All artifacts of a manifest, in one file."""

load("//rules:providers.bzl", "AotBundleInfo", "AotExecutableInfo", "AotExportInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")

# What is written for a reader, of exports and of executables; see aot_export and aot_executable.
_TEXTS = ["debug", "description", "hlo_after", "hlo_before", "jaxpr", "stablehlo"]

def _gathered(targets, group):
    """One output group of all targets that have it."""
    groups = [target[OutputGroupInfo] for target in targets]
    return depset(transitive = [getattr(one, group) for one in groups if hasattr(one, group)])

def _aot_bundle_impl(ctx):
    name = ctx.label.name
    exports = [target[AotExportInfo] for target in ctx.attr.exports]
    executables = [target[AotExecutableInfo] for target in ctx.attr.executables]
    bundle = ctx.actions.declare_file(name + ".aot")
    profile = ctx.actions.declare_file(name + ".profile.json")

    arguments = ctx.actions.args()
    arguments.add("--name", name)
    arguments.add("--version", ctx.attr.version)
    arguments.add("--output", bundle)
    arguments.add("--profile", profile)
    inputs = []
    for export in exports:
        files = [export.exported, export.spec, export.description]
        arguments.add("--export", "=".join([export.name] + [file.path for file in files]))
        inputs += files
    for executable in executables:
        files = [executable.executable, executable.description, executable.module]
        arguments.add("--executable", "=".join([executable.name] + [file.path for file in files]))
        inputs += files
    compiler_action(
        ctx,
        mnemonic = "StagecBundle",
        progress_message = "Bundling %s" % name,
        command = "bundle",
        arguments = arguments,
        inputs = depset(inputs),
        outputs = [bundle, profile],
    )
    return [
        DefaultInfo(files = depset([bundle]), runfiles = ctx.runfiles([bundle])),
        OutputGroupInfo(
            profile = depset([profile] + [one.profile for one in exports + executables]),
            **{group: _gathered(ctx.attr.exports + ctx.attr.executables, group) for group in _TEXTS}
        ),
        AotBundleInfo(
            name = name,
            version = ctx.attr.version,
            bundle = bundle,
            exports = depset(exports),
            executables = depset(executables),
        ),
    ]

aot_bundle = rule(
    implementation = _aot_bundle_impl,
    doc = "Packs exported functions and executables into `<name>.aot`. The macro of a manifest declares it. It has the " +
          "output groups of all of them. `profile` has `<name>.profile.json` besides, the seconds that bundling took.",
    attrs = {
        "version": attr.string(doc = "The manifest's version.", mandatory = True),
        "exports": attr.label_list(doc = "The exported functions.", providers = [AotExportInfo]),
        "executables": attr.label_list(doc = "The executables.", providers = [AotExecutableInfo]),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
