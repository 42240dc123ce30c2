"""A bundle that was released, with executables of one more jaxlib."""

load("//rules:providers.bzl", "AotProvenanceInfo", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")

def _link(ctx, file, folder):
    """A file of weights in a folder that has these alone, under its name in the bundle."""
    above = ctx.file.bundle.short_path.rpartition("/")[0]
    start = above + "/" if above else ""
    if not file.short_path.startswith(start):
        fail("%s: weights: %s is not below the folder of the bundle" % (ctx.label, file.short_path))
    link = ctx.actions.declare_file("%s/%s" % (folder, file.short_path[len(start):]))
    ctx.actions.symlink(output = link, target_file = file)
    return link

def _aot_bundle_addition_impl(ctx):
    name = ctx.label.name
    bundle = ctx.actions.declare_file(name + ".aot")
    statement = ctx.actions.declare_file(name + ".intoto.json")
    sbom = ctx.actions.declare_file(name + ".sbom.json")
    plugin = ctx.attr.plugin[PythonEnvironmentInfo] if ctx.attr.plugin else None
    packages = [ctx.attr.environment[PythonEnvironmentInfo].packages] + ([plugin.packages] if plugin else [])
    arguments = ctx.actions.args()
    arguments.add(ctx.file.bundle, format = "./%s")
    arguments.add("--output", bundle)
    arguments.add("--statement", statement)
    arguments.add("--sbom", sbom)
    arguments.add_all(ctx.attr.targets, before_each = "--target")
    arguments.add_all(packages, before_each = "--packages")
    weights = []
    if ctx.files.weights and not ctx.attr.reuse:
        fail("%s: weights are for reuse = True; compiling reads none" % ctx.label)
    if ctx.attr.reuse:
        folder = name + ".weights"
        weights = [_link(ctx, file, folder) for file in ctx.files.weights]
        arguments.add("--reuse")
        arguments.add("--weights", "%s/%s" % (bundle.dirname, folder))
    compiler_action(
        ctx,
        mnemonic = "StagecAddJaxlib",
        progress_message = "Adding executables to %s" % ctx.file.bundle.basename,
        command = "add-jaxlib",
        arguments = arguments,
        inputs = depset([ctx.file.bundle] + packages + weights),
        outputs = [bundle, statement, sbom],
        plugin = plugin,
        examined = "here",  # the bundle says whether it takes such a row
        worker = False,
        environment = ctx.attr.environment,
    )
    return [
        DefaultInfo(files = depset([bundle]), runfiles = ctx.runfiles([bundle])),
        OutputGroupInfo(provenance = depset([statement, sbom])),
        AotProvenanceInfo(bundle = bundle, statement = statement, sbom = sbom),
    ]

aot_bundle_addition = rule(
    implementation = _aot_bundle_addition_impl,
    doc = "Adds executables of another jaxlib to a bundle that was released, from the exported artifacts inside: " +
          "`<name>.aot`. Its output group `provenance` is `<name>.intoto.json` and `<name>.sbom.json`, which `aot_signing` " +
          "signs. docs/fleet.md says how. What was in the bundle stays as it was, and so does its signature; the action " +
          "does not look at that: run `stagec verify` before.",
    attrs = {
        "bundle": attr.label(doc = "The bundle.", mandatory = True, allow_single_file = [".aot"]),
        "environment": attr.label(
            doc = "The Python environment with the other jaxlib, with numpy and flatbuffers. It needs no JAX.",
            mandatory = True,
            providers = [PythonEnvironmentInfo],
            cfg = "exec",
        ),
        "plugin": attr.label(
            doc = "The Python environment with the compiler of the targets' platform for that jaxlib; none for cpu.",
            providers = [PythonEnvironmentInfo],
            cfg = "exec",
        ),
        "reuse": attr.bool(
            doc = "Whether to take an executable of an older jaxlib that gives the right results with this one, in place of " +
                  "compiling another. The action calls each of them once, so it fails on a machine that cannot run the targets.",
        ),
        "targets": attr.string_list(
            doc = "Targets of the bundle to compile for, by their names in it; default: all that it has executables for.",
        ),
        "weights": attr.label_list(
            doc = "With `reuse`: the files of weights that lie beside the bundle, in its folder or below it.",
            allow_files = True,
        ),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
